"""Three models that FP16 breaks: found, named, pinned to FP32, and trained to the end.

    python examples/debug_overflow.py        under a minute on a CPU

linear attention    keys and values are summed over the sequence; the sums leave FP16's range (65504): NaN at once
camera matrices     focal lengths over 1000 times distances over 50: a projected point is Inf before its division
pre-norm ViT        a norm written by hand; forward is fine, but the gradient of its variance, which grows as
                    var^-1.5, overflows: steps are skipped while the loss scale falls.  It is no search for the
                    scale, which would end: the gradient overflows again at scales that have been fine

Each is trained for some steps under a watch, which names the layer and the op; `pin` then runs that layer in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import fp8engine as fe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRAINED = 100  # steps, with the layer pinned


class SumOverTime(nn.Module):
    """phi(q) (sum_t phi(k_t) v_t) / phi(q) (sum_t phi(k_t)): attention without a softmax, linear in the length."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q, k, v: (batch, time, width)."""
        q, k = q.relu() + 1, k.relu() + 1
        return (q @ (k.mT @ v)) / (q @ k.sum(1).unsqueeze(-1))


class LinearAttention(nn.Module):
    """Which of four tokens is the most frequent?  Tokens are embedded far from zero, as large models do embed them."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.embed = nn.Embedding(4, width)
        nn.init.normal_(self.embed.weight, std=16.0)
        self.qkv, self.attend, self.head = nn.Linear(width, 3 * width), SumOverTime(), nn.Linear(width, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (batch, time) -> logits."""
        mixed = self.attend(*self.qkv(self.embed(tokens)).chunk(3, -1))
        return self.head(F.layer_norm(mixed.mean(1), mixed.shape[-1:]))


class Project(nn.Module):
    """Pixels of points: (u, v) = K X, divided by the distance."""

    def forward(self, cameras: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        """cameras: (batch, 3, 3); points: (batch, 3, n); returns shares of the image's width."""
        pixels = cameras @ points
        return (pixels[:, :2] / pixels[:, 2:]).flatten(1) / 1280


class Cameras(nn.Module):
    """Regress how far away a square of known size stands from its corners and the focal length."""

    def __init__(self):
        super().__init__()
        self.project = Project()
        self.head = nn.Sequential(nn.Linear(9, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, cameras: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        """Returns (batch, 1)."""
        return self.head(torch.cat([self.project(cameras, points), cameras[:, 0, :1] / 1000], 1))


class HandNorm(nn.Module):
    """LayerNorm as many a paper's code writes it; in FP16 the gradient of `variance` is beyond 65504."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., width)."""
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred / (variance + 1e-6).sqrt()


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.qkv, self.out = HandNorm(), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.after, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, patches, width)."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.mlp(self.after(x))


class Vit(nn.Module):
    """Which quarter of a dim 8 x 8 image is the brightest?"""

    def __init__(self, width: int = 32):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2, bias=False)
        self.place = nn.Parameter(torch.randn(16, width) * 1e-2)
        self.block, self.head = Block(width), nn.Linear(width, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images: (batch, 1, 8, 8) -> logits."""
        patches = self.patches(images).flatten(2).mT
        return self.head(self.block(patches + self.place.to(patches.dtype)).mean(1))


def counted_tokens() -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Sequences of 256 tokens, and the one drawn most often."""
    answer = torch.randint(0, 4, (16,))
    tokens = torch.randint(0, 4, (16, 256))
    return (torch.where(torch.rand(16, 256) < 0.5, answer[:, None], tokens),), answer


def squares() -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Cameras with focal lengths of 1000 to 2000 pixels; squares 40 wide at 60 to 120; the distance, in hundreds."""
    distance, focal = torch.rand(64) * 60 + 60, torch.rand(64) * 1000 + 1000
    cameras = torch.zeros(64, 3, 3)
    cameras[:, 0, 0], cameras[:, 1, 1], cameras[:, 2, 2] = focal, focal, 1.0
    cameras[:, 0, 2], cameras[:, 1, 2] = 640.0, 360.0
    corners = torch.tensor([[-20.0, 20, 20, -20], [-20, -20, 20, 20]]).expand(64, 2, 4)
    points = torch.cat([corners, distance[:, None, None].expand(64, 1, 4)], 1)
    return (cameras, points), distance[:, None] / 100


def dim_images() -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Images with values up to 0.02, one quarter twice as bright as the others."""
    answer = torch.randint(0, 4, (64,))
    images = torch.rand(64, 1, 8, 8) * 0.01
    for image, quarter in zip(images, answer.tolist(), strict=True):
        top, left = 4 * (quarter // 2), 4 * (quarter % 2)
        image[0, top : top + 4, left : left + 4] += 0.01
    return (images,), answer


@dataclass(frozen=True)
class Story:
    """A model, its data, its loss, and how many steps show who is guilty: a gradient must overflow more than once."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[tuple[torch.Tensor, ...], torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    watched: int = 3


STORIES = (
    Story("linear attention", LinearAttention, counted_tokens, F.cross_entropy),
    Story("camera matrices", Cameras, squares, F.mse_loss),
    Story("pre-norm ViT", Vit, dim_images, F.cross_entropy, watched=24),
)


@dataclass(frozen=True)
class Outcome:
    """before, after: losses of the steps watched and of those trained with the layer pinned.  skipped: of `after`."""

    finding: fe.amp.Finding | None
    pinned: list[str]
    before: list[float]
    after: list[float]
    skipped: int


def train(story: Story, model: nn.Module, scaler: fe.amp.GradScaler, steps: int) -> tuple[list[float], int]:
    """FP16 autocast, AdamW and a loss scaler: (losses, how many steps the scaler skipped)."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses, skipped = [], 0
    for _ in range(steps):
        inputs, target = story.data()
        with fe.amp.autocast(DEVICE, torch.float16):
            output = model(*(x.to(DEVICE) for x in inputs))
        loss = story.loss(output.float(), target.to(DEVICE))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, skipped


def debug(story: Story) -> Outcome:
    """Watch the story's model break, pin the guilty layer, train it to the end."""
    torch.manual_seed(0)
    model = story.model().to(DEVICE)
    scaler = fe.amp.GradScaler(DEVICE)
    print(f"\n{story.name}")
    with fe.amp.find_overflow(model, scaler) as watch:
        before, skipped = train(story, model, scaler, story.watched)
    print(
        f"  broken: loss {shown(before)}, {skipped} of {story.watched} steps skipped, loss scale {scaler.get_scale():g}"
    )
    print(f"  found:  {watch.first()}")
    pinned = watch.pin(1)
    print(f"  pinned: {', '.join(pinned)}")
    after, skipped = train(story, model, fe.amp.GradScaler(DEVICE), TRAINED)
    print(f"  cured:  loss {shown(after)}, {skipped} of {TRAINED} steps skipped")
    return Outcome(watch.first(), pinned, before, after, skipped)


def shown(losses: list[float]) -> str:
    """First and last, the last as a mean over the last tenth."""
    tail = losses[-max(1, len(losses) // 10) :]
    return f"{losses[0]:.3f} -> {math.fsum(tail) / len(tail):.3f}"


if __name__ == "__main__":
    for told in STORIES:
        debug(told)
