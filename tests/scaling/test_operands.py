"""The cast that q, k and v share, which travels with their input as `x.fp8`: made once a forward, and never read by
another thread or forward, or of other data.

A refill is a write that moves no version counter: through NumPy, through `.data`, by a collective.
"""

import copy
import io
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from support import EXACT_SCALES, FP8_RECIPES, converted, state_of
from threads import mixed
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.scaling import operands
from fp8engine.scaling.operands import Operands, RootForward

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


class Again(Attention):
    """The first of the siblings runs twice on one tensor, which is refilled in between."""

    def forward(self, x):
        first = self.q(x)
        self.between(x)
        return torch.cat([first, self.q(x)], -1)


@pytest.fixture
def no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card, where no value is read."""
    monkeypatch.setattr(operands, "fingerprint", lambda x, whole=True: [])


def attached(x: Any) -> Any:
    """What a tensor has as `fp8`; nothing counts as empty."""
    return vars(x).get("fp8", {})


REFILLS: dict[str, Callable[[torch.Tensor], object]] = {
    "numpy": lambda x: x.detach().numpy().__imul__(-2),
    "data": lambda x: x.data.mul_(-2),
    "in place": lambda x: x[0].fill_(7.0),
}


def apart(model: Any, x: torch.Tensor) -> torch.Tensor:
    """q, k and v of three tensors, so that nothing can be shared."""
    return torch.cat([layer(x.clone()) for layer in (model.q, model.k, model.v)], -1)


@pytest.mark.parametrize("refill", ["numpy", "data"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_refilled_buffer_is_read_again(recipe: str, grad: bool, refill: str, no_samples):
    model, x = converted(Attention(), recipe), torch.randn(6, WIDTH)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            assert torch.equal(model(x), apart(model, x))
            REFILLS[refill](x)


@pytest.mark.parametrize("refill", REFILLS)
@pytest.mark.parametrize("recipe", [name for name in FP8_RECIPES if name != "delayed"])
def test_a_buffer_refilled_between_two_siblings_is_read_again_on_a_cpu(recipe: str, refill: str):
    model, x = converted(Attention(between=REFILLS[refill]), recipe), torch.randn(6, WIDTH)
    twin, before = converted(Attention(), recipe), x.clone()
    twin.load_state_dict(model.state_dict())
    found = model(x)
    assert torch.equal(found[:, :16], twin(before)[:, :16])
    assert torch.equal(found[:, 16:], twin(x)[:, 16:])


@pytest.mark.parametrize("recipe", [name for name in FP8_RECIPES if name != "delayed"])
def test_a_layer_that_runs_twice_reads_twice(recipe: str, no_samples):
    model, x = converted(Again(REFILLS["numpy"]), recipe), torch.randn(6, WIDTH)
    model(x).sum().backward()  # trained once, so that a second step is a step
    model.zero_grad()
    before = x.clone()
    y = model(x)
    assert torch.equal(y, torch.cat([model.q(before), model.q(x)], -1))
    y.sum().backward()
    found = model.q.weight.grad.clone()
    model.zero_grad()
    (model.q(before).sum() + model.q(x).sum()).backward()
    assert torch.equal(found, model.q.weight.grad)


def test_siblings_share_one_cast_and_nothing_outlives_the_forward(casts):
    model, x = converted(Attention(between=lambda x: seen.append(len(x.fp8)))), torch.randn(6, WIDTH)
    seen: list[int] = []
    for step in (1, 2):
        model(x)
        assert casts.count(("quantize", (6, WIDTH))) == step
        assert seen == [1] * step
        assert attached(x) == {}, "a user's batch keeps no codes"
    assert torch.equal(model.q(x), model.q(x))
    assert casts.count(("quantize", (6, WIDTH))) == 4, "outside of a forward of the root each layer casts for itself"


def test_siblings_count_an_empty_batch_alike():
    """As each of them does where it casts alone: a cast of nothing is not counted."""
    model = converted(Attention(), "delayed")
    model(torch.ones(0, WIDTH, requires_grad=True)).sum().backward()
    assert not state_of(model).counts_CS[:, ::4].any()  # of inputs


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
        assert len(x.fp8) == 1
        raise ValueError("no")

    model, x = converted(Attention(between=fail)), torch.randn(6, WIDTH)
    with pytest.raises(ValueError, match="no"):
        model(x)
    assert attached(x) == {}
    assert state_of(model).forward.number is None


@pytest.fixture
def begun() -> tuple[RootForward, torch.Tensor, Operands]:
    """A root's forward, a tensor that a layer of "attn" has cast in it, and its operands."""
    forward, x = RootForward(), torch.randn(6, WIDTH)
    forward.begin()
    mine = forward.operands(x, 0, "attn")
    mine["cast"] = MADE
    return forward, x, mine


def test_only_the_tensor_holds_its_operands():
    """So they are freed with it: 100 forwards of a server keep the codes of none."""
    forward, x, made = RootForward(), torch.randn(6, WIDTH), cast("Any", torch.zeros(1))
    forward.begin()
    forward.operands(x, 0, "attn")["cast"] = (made, MADE)
    freed = weakref.ref(made)
    del made
    assert freed() is not None
    del x
    assert freed() is None


@pytest.mark.parametrize("make", [torch.detach, torch.clone, lambda x: x.view(-1), lambda x: x + 0, copy.deepcopy])
def test_another_tensor_has_none(make, begun):
    forward, x, _ = begun
    assert not isinstance(attached(make(x)), Operands)
    assert forward.operands(make(x), 1, "attn") == {}


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_saved_tensor_takes_none_along(weights_only: bool, begun):
    (forward, x, mine), file = begun, io.BytesIO()
    mine["large"] = cast("Any", (torch.zeros(100_000), MADE))
    torch.save(x, file)
    assert file.tell() < 10_000
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    assert torch.equal(loaded, x)
    assert attached(loaded) == forward.operands(loaded, 1, "attn") == {}


def test_another_thread_shares_nothing(begun):
    (forward, x, mine), found = begun, []

    def serve() -> None:
        forward.begin()
        found.append(forward.operands(x, 1, "attn"))

    worker = threading.Thread(target=serve)
    worker.start()
    worker.join()
    assert found == [{}]
    assert found[0] is not mine
    assert mine == {"cast": MADE}, "what this thread's layers hold is not emptied by the other one"


@pytest.mark.parametrize("change", ["parent", "version", "capture", "forward"])
def test_what_a_sibling_does_not_read(change: str, begun, monkeypatch: pytest.MonkeyPatch):
    forward, x, _ = begun
    if change == "version":
        x.add_(0)
    if change == "capture":
        monkeypatch.setattr(operands, "capturing", lambda where: True)
    if change == "forward":
        forward.number = object()  # begun by other code than `begin`, which empties what it finds
    assert forward.operands(x, 1, "mlp" if change == "parent" else "attn") == {}


def test_two_tensors_that_are_read_in_turns_are_cast_once_each(casts):
    """q and k of two inputs, as cross attention reads them: an operand stays with its tensor."""

    class Crossed(Attention):
        def forward(self, x, y):
            return self.q(x) + self.k(y) + self.v(x)

    model, x, y = converted(Crossed()), torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    found = model(x, y)
    assert casts.count(("quantize", (6, WIDTH))) == 2
    assert torch.equal(found, model.q(x) + model.k(y) + model.v(x))


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
    model = converted(Attention(), recipe).eval()
    assert mixed(model, [torch.randn(4, WIDTH) * 2.0**i for i in range(4)], calls=500) == 0
