"""fe.amp.find_overflow names the guilty layer and op in planted cases, and nothing on healthy runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from overflow_cases import CASES, Case, make, step
from torch import nn
from torch.nn import functional as F

from fp8engine.amp.overflow import find_overflow

UNDER = ("nothing", "reentrant", "checkpoint", "compile")
NAMES = [case.name for case in CASES]
# Every case under every wrapping in both modes takes a minute; these few cover each kind of finding.
FEW = {"exp", "linear, only -Inf", "exp in the model's forward", "weight is Inf", "sqrt'(0)", "weight gradient"}


def hooks_of(model: nn.Module) -> int:
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    on_parameters = [p._post_accumulate_grad_hooks for p in model.parameters()]
    return on_modules + sum(len(hooks or {}) for hooks in on_parameters)


def check(case: Case, under: str, mode: str) -> None:
    model, net = make(case, under)
    with find_overflow(model, mode=mode) as watch:
        step(model, case)
        at_once = watch.first()
        step(model, case)
    found = watch.first()
    assert at_once is not None
    assert found is not None
    assert (found.layer, found.operand, found.step) == (case.layer, case.operand, 0), str(found)
    assert found.op in (case.ops or (None,)), str(found)
    assert not torch.isfinite(torch.tensor(found.output_amax))
    if under != "compile" or mode == "ops":  # of a compiled graph, the pass after the finding sees the parts
        assert at_once.layer == case.layer, str(at_once)
    assert hooks_of(net) == 0


def test_there_are_enough_cases():
    assert len(CASES) >= 20
    assert len(set(NAMES)) == len(CASES)


@pytest.mark.parametrize("mode", ["counters", "ops"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_guilty_layer_and_op_are_named(case: Case, mode: str):
    check(case, "nothing", mode)


@pytest.mark.parametrize("under", UNDER[1:])
@pytest.mark.parametrize("case", [case for case in CASES if case.name in FEW], ids=str)
def test_inside_checkpointed_and_compiled_models(case: Case, under: str):
    check(case, under, "counters")


@pytest.mark.few(24)
@pytest.mark.slow
@pytest.mark.parametrize("under", UNDER[1:])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_case_inside_checkpointed_and_compiled_models(case: Case, under: str):
    for mode in ("ops", "counters"):
        check(case, under, mode)


class Attention(nn.Module):
    """Causal, its -inf written the way `how` says; x: (batch, time, width)."""

    banned: torch.Tensor
    added: torch.Tensor

    def __init__(self, how: str, width: int = 32):
        super().__init__()
        self.qkv, self.out, self.how = nn.Linear(width, 3 * width), nn.Linear(width, width), how
        mask = torch.ones(64, 64, dtype=torch.bool).triu(1)
        self.register_buffer("banned", mask)
        self.register_buffer("added", torch.zeros(64, 64).masked_fill(mask, -torch.inf))
        self.mask = Mask(how)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores, banned = q @ k.mT / 8, self.banned[: x.shape[1], : x.shape[1]]
        if self.how == "sdpa":
            return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=self.added[: len(banned), : len(banned)]))
        if self.how.endswith("module"):
            scores = self.mask(scores, banned)
        elif self.how == "fill":
            scores = scores.masked_fill(banned, -torch.inf)
        elif self.how == "where":
            scores = torch.where(banned, torch.tensor(-torch.inf, dtype=scores.dtype), scores)
        elif self.how == "log":
            scores = scores + (~banned).float().log()
        elif self.how == "lowest":
            scores = scores + banned * torch.finfo(scores.dtype).min  # in FP16 some sums round to -Inf
        else:
            scores = scores + self.added[: len(banned), : len(banned)]
        return self.out(scores.softmax(-1).to(v.dtype) @ v)


class Mask(nn.Module):
    """Returns scores with -Inf in them: the output of a module, and no overflow."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how

    def forward(self, scores, banned):
        if self.how == "log module":
            return scores + (~banned).to(scores.dtype).log()
        return scores.masked_fill(banned, float("-inf"))


class Causal(nn.Module):
    """A decoder of two layers; embedding with padding."""

    def __init__(self, how: str):
        super().__init__()
        self.embed = nn.Embedding(50, 32, padding_idx=0)
        self.blocks: Any = nn.ModuleList(
            [nn.ModuleList([nn.LayerNorm(32), Attention(how), nn.LayerNorm(32), nn.Linear(32, 32)]) for _ in range(2)]
        )
        self.head = nn.Linear(32, 50)

    def forward(self, ids):
        x = self.embed(ids)
        for norm, attention, after, mlp in self.blocks:
            x = x + attention(norm(x))
            x = x + F.gelu(mlp(after(x)))
        return self.head(x)


class Tagger(nn.Module):
    """An LSTM cell called once a token (oneDNN's whole LSTM has no FP16 on most CPUs): one module, many calls."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(50, 16), nn.LSTMCell(16, 16), nn.Linear(16, 50)

    def forward(self, ids):
        state, outputs = None, []
        for token in self.embed(ids).unbind(1):
            state = self.cell(token, state)
            outputs.append(state[0])
        return self.head(torch.stack(outputs, 1))


class Vit(nn.Module):
    """torch's own encoder over patches; its attention is one fused op."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 4, stride=4)
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).mT
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(tokens, mask=mask).mean(1))


class Odd(nn.Module):
    """Integer and dict outputs, +Inf put in on purpose, log(0) that `where` throws away."""

    def __init__(self):
        super().__init__()
        self.fc, self.nearest = nn.Linear(64, 10), Nearest()

    def forward(self, x):
        found = self.nearest(x.flatten(1))
        safe = torch.where(found["distance"] > 0, found["distance"].detach().log(), torch.zeros(()))
        return self.fc(x.flatten(1)) + safe[:, None] + found["index"][:, None] * 0


class Nearest(nn.Module):
    """Each row's nearest other row; its distance to itself is set to Inf, and is returned."""

    def forward(self, x):
        distances = torch.cdist(x.float(), x.float()).fill_diagonal_(0)
        distances = distances.clone().fill_diagonal_(torch.inf)
        return {"index": distances.argmin(-1), "distance": distances.min(-1).values - distances.min(-1).values}


def image() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))


def text() -> tuple[torch.Tensor, torch.Tensor]:
    ids, labels = torch.randint(0, 50, (4, 12)), torch.randint(0, 50, (4, 12))
    ids[:, 9:] = 0
    labels[:, 9:] = -100
    return ids, labels


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.1),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


HEALTHY: dict[str, tuple[Callable, Callable]] = {
    "cnn": (cnn, image),
    "vit": (Vit, image),
    "odd": (Odd, image),
    "lstm": (Tagger, text),
} | {
    f"causal, {how}": (lambda how=how: Causal(how), text)
    for how in ("sdpa", "module", "log module", "fill", "where", "log", "lowest", "buffer")
}


@pytest.mark.parametrize("mode", ["counters", "ops"])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_names_nothing(name: str, mode: str):
    build, data = HEALTHY[name]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)  # small enough for these losses not to overflow at once
    before = None
    with find_overflow(model, scaler, mode=mode) as watch:
        for _ in range(4):
            x, labels = data()
            with torch.autocast("cpu", torch.float16):
                output = model(x).float()
            loss = F.cross_entropy(output.flatten(0, -2), labels.flatten(), ignore_index=-100)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            before = before or loss.item()
    assert watch.first() is None, str(watch.first())
    assert "no NaN and no Inf" in str(watch.report())
    assert watch.scales == [(0, 256.0)]
    assert torch.isfinite(loss)
    assert hooks_of(model) == 0
