"""Handwritten digits of scikit-learn, and two small models for them: an AlexNet-style CNN and a ViT.

1797 images of 8 x 8 pixels, from 0 to 16; they come inside scikit-learn's wheel, so nothing is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from fp8engine.errors import BackendError

TRAINED_ON = 1280  # 40 batches of 32; the other 517 are for testing: one of them is 0.19 points
CLASSES = 10


@dataclass(frozen=True)
class Digits:
    """images (n, 1, 8, 8) in -1 to 1, labels (n,)."""

    images: torch.Tensor
    labels: torch.Tensor

    def batches(self, size: int, seed: int, part: slice = slice(None)) -> list[Digits]:
        """An epoch, shuffled by `seed`.  part: of each batch, slice(rank, None, ranks) for one of several processes.

        >>> [len(each.labels) for each in Digits(torch.ones(5, 1, 8, 8), torch.arange(5)).batches(4, seed=0)]
        [4, 1]
        """
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed)).to(self.labels.device)
        return [Digits(self.images[one[part]], self.labels[one[part]]) for one in order.split(size)]


def load(device: torch.device | str = "cpu") -> tuple[Digits, Digits]:
    """(to train on, to test on), the same split each time.  Raises BackendError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits  # optional
    except ImportError:
        raise BackendError("the digits come with scikit-learn: pip install 'fp8engine[examples]'") from None
    pixels, answers = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 8 - 1
    labels = torch.from_numpy(answers).long()
    # the file is ordered by writer
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].to(device), labels[order].to(device)
    return Digits(images[:TRAINED_ON], labels[:TRAINED_ON]), Digits(images[TRAINED_ON:], labels[TRAINED_ON:])


class Cnn(nn.Module):
    """AlexNet in small: convolutions and pooling, then fully connected layers with dropout.

    >>> Cnn()(torch.ones(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, width: int = 8):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.1), nn.Linear(8 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, CLASSES)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images: (batch, 1, 8, 8) -> logits."""
        return self.classifier(self.features(images))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, patches, width)."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class Vit(nn.Module):
    """A vision transformer over four patches of 4 x 4 pixels.

    >>> Vit()(torch.ones(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, width: int = 32, depth: int = 2, heads: int = 2, patch: int = 4):
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.place = nn.Parameter(torch.randn((8 // patch) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images: (batch, 1, 8, 8) -> logits."""
        x = self.patches(images).flatten(2).mT + self.place
        return self.head(self.norm(self.blocks(x).mean(1)))


MODELS = {"cnn": Cnn, "vit": Vit}


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of digits read rightly; dropout is off meanwhile."""
    was = model.training
    model.eval()
    right = model(digits.images).argmax(-1) == digits.labels
    model.train(was)
    return right.float().mean().item()
