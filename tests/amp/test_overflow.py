"""fe.amp.find_overflow names the guilty layer and op in planted cases, and nothing on healthy runs."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overflow_cases import CASES, Case, Part, in_fp16, make, step
from scaled_run import scaled_step
from torch import nn
from torch.nn import functional as F

from fp8engine.amp.overflow import find_overflow

# Every case under every wrapping takes a minute; these few cover each kind of finding.
FEW = {"exp", "linear, only -Inf", "exp in the model's forward", "weight is Inf", "sqrt'(0)", "weight gradient"}
LATE = (pytest.mark.slow, pytest.mark.few(24))


def hooks_of(model: nn.Module) -> int:
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    on_parameters = [p._post_accumulate_grad_hooks for p in model.parameters()]
    return on_modules + sum(len(hooks or {}) for hooks in on_parameters)


def check(case: Case, under: str, mode: str) -> None:
    model, net = make(case, under)
    with find_overflow(model, mode=mode) as watch:
        step(model, case)
        at_once: Any = watch.first()
        step(model, case)
    found: Any = watch.first()
    assert (found.layer, found.operand, found.step) == (case.layer, case.operand, 0), str(found)
    assert found.op in (case.ops or (None,)), str(found)
    assert not torch.isfinite(torch.tensor(found.output_amax))
    if under != "compile" or mode == "ops":  # of a compiled graph, the pass after the finding sees the parts
        assert at_once.layer == case.layer, str(at_once)
    assert hooks_of(net) == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_guilty_layer_and_op_are_named(case: Case, mode: str):
    check(case, "nothing", mode)


@pytest.mark.parametrize("under", ["reentrant", "checkpoint", "compile"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case.name in FEW else LATE) for case in CASES], ids=str
)
def test_inside_checkpointed_and_compiled_models(case: Case, under: str):
    for mode in ("ops", "counters"):
        check(case, under, mode)


MASKS: dict[str, Callable] = {  # of scores, what is banned (a mask), and -Inf where it is (a buffer)
    "fill": lambda scores, banned, _: scores.masked_fill(banned, -torch.inf),
    "where": lambda scores, banned, _: torch.where(banned, torch.tensor(-torch.inf, dtype=scores.dtype), scores),
    "log": lambda scores, banned, _: scores + (~banned).to(scores.dtype).log(),
    "log in FP32": lambda scores, banned, _: scores + (~banned).float().log(),
    "lowest": lambda scores, banned, _: scores + banned * torch.finfo(scores.dtype).min,  # in FP16 some sums are -Inf
    "buffer": lambda scores, _, added: scores + added,
}
MASKED = [*MASKS, "fill in a module", "log in a module", "sdpa"]
TIME = 12
BANNED = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)


class Attention(nn.Module):
    """Causal, its -Inf written the way `how` says; x: (batch, TIME, width)."""

    added: torch.Tensor

    def __init__(self, how: str, width: int = 32):
        super().__init__()
        self.qkv, self.out, self.how = nn.Linear(width, 3 * width), nn.Linear(width, width), how
        self.register_buffer("added", torch.zeros(TIME, TIME).masked_fill(BANNED, -torch.inf))
        self.mask = Part(MASKS.get(how.removesuffix(" in a module")))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.how == "sdpa":
            return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=self.added))
        mask = self.mask if self.how.endswith("module") else self.mask.function
        return self.out(mask(q @ k.mT / 8, BANNED, self.added).softmax(-1).to(v.dtype) @ v)


def residual(*parts: nn.Module) -> nn.Module:
    inner = nn.Sequential(*parts)
    return Part(lambda x: x + inner(x), inner=inner)


class Residual(nn.Sequential):
    """x plus what its parts make of it."""

    def forward(self, x):
        return x + super().forward(x)


def causal(how: str) -> nn.Module:
    """A decoder of two layers; embedding with padding."""
    attention = lambda: residual(nn.LayerNorm(32), Attention(how))  # noqa: E731
    mlp = lambda: residual(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())  # noqa: E731
    return nn.Sequential(nn.Embedding(50, 32, padding_idx=0), attention(), mlp(), attention(), mlp(), nn.Linear(32, 50))


def tagger() -> nn.Module:
    """An LSTM cell called once a token (oneDNN's whole LSTM has no FP16 on most CPUs): one module, many calls."""
    embed, cell, head = nn.Embedding(50, 16), nn.LSTMCell(16, 16), nn.Linear(16, 50)

    def forward(ids):
        states: list[Any] = [None]
        for token in embed(ids).unbind(1):
            states.append(cell(token, states[-1]))
        return head(torch.stack([hidden for hidden, _ in states[1:]], 1))

    return Part(forward, embed=embed, cell=cell, head=head)


def vit() -> nn.Module:
    """torch's own encoder over patches; its attention is one fused op."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask
    masked = Part(lambda tokens: encoder(tokens, mask=mask(tokens.shape[1])), encoder=encoder)
    patches = nn.Conv2d(1, 32, 4, stride=4)
    return nn.Sequential(patches, Part(lambda x: x.flatten(2).mT), masked, Part(lambda x: x.mean(1)), nn.Linear(32, 10))


def nearest(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each row's nearest other row; its distance to itself is set to Inf, and is returned."""
    distances = torch.cdist(x.float(), x.float()).fill_diagonal_(0).clone().fill_diagonal_(torch.inf)
    return {"index": distances.argmin(-1), "distance": distances.min(-1).values - distances.min(-1).values}


def odd() -> nn.Module:
    """Integer and dict outputs, +Inf put in on purpose, log(0) that `where` throws away."""
    fc, near = nn.Linear(64, 10), Part(nearest)

    def forward(x):
        found = near(x.flatten(1))
        safe = torch.where(found["distance"] > 0, found["distance"].detach().log(), torch.zeros(()))
        return fc(x.flatten(1)) + safe[:, None] + found["index"][:, None] * 0

    return Part(forward, fc=fc, near=near)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.1),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def image() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))


def text() -> tuple[torch.Tensor, torch.Tensor]:
    ids, labels = torch.randint(0, 50, (4, TIME)), torch.randint(0, 50, (4, TIME))
    ids[:, 9:] = 0
    labels[:, 9:] = -100
    return ids, labels


HEALTHY: dict[str, tuple[Callable, Callable]] = {
    "cnn": (cnn, image),
    "vit": (vit, image),
    "odd": (odd, image),
    "lstm": (tagger, text),
    **{f"causal, {how}": (functools.partial(causal, how), text) for how in MASKED},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_names_nothing(name: str, mode: str):
    build, data = HEALTHY[name]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)  # small enough for these losses not to overflow at once
    with find_overflow(model, scaler, mode=mode) as watch:
        for _ in range(4):
            x, labels = data()
            with in_fp16():
                output = model(x).float()
            loss = F.cross_entropy(output.flatten(0, -2), labels.flatten(), ignore_index=-100)
            scaled_step(scaler, optimizer, loss)
    assert watch.first() is None, str(watch.first())
    assert "no NaN and no Inf" in str(watch.report())
    assert watch.scales == [(0, 256.0)]
    assert torch.isfinite(loss)
    assert hooks_of(model) == 0
