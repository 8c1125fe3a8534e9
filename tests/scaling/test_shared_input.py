"""The cast that q, k and v share: made once a forward, never read by another thread or forward, or of other data.

A refill is a write that moves no version counter: through NumPy, through `.data`, by a collective.
"""

import sys
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from support import EXACT_SCALES, FP8_RECIPES, converted, state_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.scaling import shared_input

WIDTH = 48
MADE: Any = ()  # stands for an operand


class Attention(nn.Module):
    """Three layers that read one tensor; `between` runs after the first."""

    def __init__(self, between=lambda x: None):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 16) for _ in range(3))
        self.between = between

    def forward(self, x):
        q = self.q(x)
        self.between(x)
        return torch.cat([q, self.k(x), self.v(x)], -1)


class Twice(nn.Module):
    """One of two siblings runs twice on one tensor, which is refilled in between."""

    def __init__(self, between):
        super().__init__()
        self.layer, self.other, self.between = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16), between

    def forward(self, x):
        first = self.layer(x)
        self.between(x)
        return torch.cat([first, self.layer(x)], -1)


@pytest.fixture
def no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card, where no value is read."""
    monkeypatch.setattr(shared_input, "fingerprint", lambda x: [])


def by_numpy(x: torch.Tensor) -> None:
    x.detach().numpy()[:] *= -2


def by_data(x: torch.Tensor) -> None:
    x.data.mul_(-2)


def apart(model: Any, x: torch.Tensor) -> torch.Tensor:
    """q, k and v of three tensors, so that nothing can be shared."""
    return torch.cat([layer(x.clone()) for layer in (model.q, model.k, model.v)], -1)


@pytest.mark.parametrize("refill", [by_numpy, by_data], ids=lambda f: f.__name__)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_refilled_buffer_is_read_again(recipe: str, grad: bool, refill, no_samples):
    model, x = converted(Attention(), recipe), torch.randn(6, WIDTH)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            assert torch.equal(model(x), apart(model, x))
            refill(x)


@pytest.mark.parametrize("refill", [by_numpy, by_data], ids=lambda f: f.__name__)
@pytest.mark.parametrize("recipe", [name for name in FP8_RECIPES if name != "delayed"])
def test_a_buffer_refilled_between_two_siblings_is_read_again_on_a_cpu(recipe: str, refill):
    model, x = converted(Attention(between=refill), recipe), torch.randn(6, WIDTH)
    twin, before = converted(Attention(), recipe), x.clone()
    twin.load_state_dict(model.state_dict())
    found = model(x)
    assert torch.equal(found[:, :16], twin(before)[:, :16])
    assert torch.equal(found[:, 16:], twin(x)[:, 16:])


@pytest.mark.parametrize("recipe", [name for name in FP8_RECIPES if name != "delayed"])
def test_a_layer_that_runs_twice_reads_twice(recipe: str, no_samples):
    model, x = converted(Twice(by_numpy), recipe), torch.randn(6, WIDTH)
    model(x).sum().backward()  # trained once, so that a second step is a step
    model.zero_grad()
    before = x.clone()
    y = model(x)
    assert torch.equal(y, torch.cat([model.layer(before), model.layer(x)], -1))
    y.sum().backward()
    found = model.layer.weight.grad.clone()
    model.zero_grad()
    (model.layer(before).sum() + model.layer(x).sum()).backward()
    assert torch.equal(found, model.layer.weight.grad)


def test_siblings_share_one_cast_and_nothing_outlives_the_forward(casts):
    model, x = converted(Attention()), torch.randn(6, WIDTH)
    for step in (1, 2):
        model(x)
        assert casts.count(("quantize", (6, WIDTH))) == step
        assert state_of(model).shared.entry is None
    assert torch.equal(model.q(x), model.q(x))
    assert casts.count(("quantize", (6, WIDTH))) == 4, "outside of a forward of the root each layer casts for itself"


@pytest.mark.parametrize("exact", EXACT_SCALES)
def test_siblings_share_no_cast_whose_scales_are_rounded_otherwise(exact: fe.Recipe, casts):
    x, named = torch.randn(6, WIDTH), exact.name.removesuffix("_exact")
    model = converted(Attention(), named, overrides={"q": exact, "v": exact})
    with torch.no_grad():
        found = model(x)
        assert casts.count(("quantize", (6, WIDTH))) == 2, "one cast of x for q and v, one for k"
        assert torch.equal(found, torch.cat([model.q(x), model.k(x), model.v(x)], -1))
        model.k.numerics.adopt(exact)
        assert not torch.equal(model(x)[:, 16:32], found[:, 16:32])


def test_nothing_outlives_a_forward_that_fails():
    def fail(x):
        raise ValueError("no")

    model = converted(Attention(between=fail))
    with pytest.raises(ValueError, match="no"):
        model(torch.randn(6, WIDTH))
    shared = state_of(model).shared
    assert (shared.entry, shared.active) == (None, False)


def test_operands_are_freed_with_their_tensor():
    shared = shared_input.SharedInput()
    shared.active, shared.entry = True, None
    x = torch.randn(6, WIDTH)
    kept = shared.operands(x, 0, "attn")
    kept["cast"] = MADE
    assert shared.operands(x, 1, "attn") is kept
    del x
    assert kept == {}


def test_another_thread_shares_nothing():
    shared, x, found = shared_input.SharedInput(), torch.randn(6, WIDTH), []

    def serve() -> None:
        shared.active, shared.entry = True, None
        found.append(shared.operands(x, 1, "attn"))

    shared.active, shared.entry = True, None
    mine = shared.operands(x, 0, "attn")
    mine["cast"] = MADE
    worker = threading.Thread(target=serve)
    worker.start()
    worker.join()
    assert found == [{}]
    assert shared.operands(x, 2, "attn") is mine


@pytest.mark.parametrize("change", ["parent", "version", "capture"])
def test_what_a_sibling_does_not_read(change: str, monkeypatch: pytest.MonkeyPatch):
    shared, x = shared_input.SharedInput(), torch.randn(6, WIDTH)
    shared.active, shared.entry = True, None
    shared.operands(x, 0, "attn")["cast"] = MADE
    if change == "version":
        x.add_(0)
    if change == "capture":
        monkeypatch.setattr(shared_input, "capturing", lambda where: True)
    assert shared.operands(x, 1, "mlp" if change == "parent" else "attn") == {}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_a_checkpoint_recomputes_shares_again(reentrant: bool, casts):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.attention = nn.Linear(WIDTH, WIDTH), Attention()

        def forward(self, x):
            return checkpoint(self.attention, self.first(x).tanh(), use_reentrant=reentrant)

    model = converted(Model())
    model(torch.randn(5, WIDTH)).sum().backward()
    # first's input; the block's, once in forward and once in its recompute; nothing else has five rows of 48 but dx.
    assert casts.count(("quantize", (5, WIDTH))) == 1 + 2 + 1


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_threads_do_not_mix_their_requests(recipe: str):
    """2,000 forwards in 4 threads on one model; before, 1 to 3 in 6,000 were another thread's."""
    assert mixed(recipe, calls=2000) == 0


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_threads_do_not_mix_20_000_requests(recipe: str):
    assert mixed(recipe, calls=20000) == 0


def mixed(recipe: str, calls: int, threads: int = 4) -> int:
    """How many of `calls` forwards, in several threads, gave another result than the same forward alone."""
    model = converted(Attention(), recipe).eval()
    inputs = [torch.randn(4, WIDTH) * 2.0**i for i in range(threads)]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
    wrong = Counter()

    def serve(i: int) -> None:
        with torch.no_grad():
            for _ in range(calls // threads):
                wrong[i] += not torch.equal(model(inputs[i]), wanted[i])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [threading.Thread(target=serve, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(before)
    return sum(wrong.values())


def test_a_forward_under_another_backend_in_another_thread_changes_nothing():
    model, x = converted(Attention()).eval(), torch.randn(16, WIDTH)
    with torch.no_grad():
        wanted = {name: backend_of(model, x, name) for name in ("cublas", "reference")}
        found = []

        def serve(name: str) -> None:
            with torch.no_grad():
                found.extend((name, backend_of(model, x, name)) for _ in range(300))

        workers = [threading.Thread(target=serve, args=(name,)) for name in wanted]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert len(found) == 600
    assert all(torch.equal(y, wanted[name]) for name, y in found)


def backend_of(model: nn.Module, x: torch.Tensor, name: str) -> torch.Tensor:
    with fe.backend(name):
        return model(x)
