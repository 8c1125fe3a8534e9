"""How long FP8 copies of a weight and of an input live, what they cost, and that they change no number."""

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from support import FP8_RECIPES, converted, numerics_of, same, state_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.numerics.recipe import resolve

BYTES = 32 * 48


def of_weight(casts: list[tuple[str, tuple[int, ...]]]) -> list[str]:
    """The operations of the casts of a weight, [32, 48]."""
    return [operation for operation, shape in casts if shape == (32, 48)]


def layer_with(cache: bool | str, recipe: str = "current") -> fe.Linear:
    torch.manual_seed(3)
    return fe.Linear(48, 32, recipe=replace(resolve(recipe), cache_weights=cache))


def step(layer: nn.Module, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(6, 48, requires_grad=True)
    y = layer(x)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.randn(6, 32))]


def kept(layer: nn.Module) -> tuple[int, str]:
    """Bytes that stay between calls, as the report has them, and why."""
    (row,) = fe.inspect(layer).layers
    return row["kept_bytes"], row["kept_why"]


def codes_alive() -> int:
    """FP8 tensors of the weight's shape, either orientation, that anybody holds."""
    gc.collect()
    tensors = (o for o in gc.get_objects() if type(o) is torch.Tensor)
    return sum(t.dtype == torch.float8_e4m3fn and t.shape in ((32, 48), (48, 32)) for t in tensors)


# Casts of three microbatches of one version, then of three of the next.
@pytest.mark.parametrize(
    ("cache", "first", "second"),
    [
        (True, ["cast_transpose"], ["cast_transpose"]),
        ("auto", ["cast_transpose"] * 2, ["cast_transpose"]),
        (False, ["quantize", "cast_transpose"] * 3, ["quantize", "cast_transpose"] * 3),
    ],
    ids=str,
)
def test_how_often_a_weight_is_cast(cache, first: list[str], second: list[str], casts):
    layer = layer_with(cache)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with fe.backend("cublas"):
        for want in (first, second):
            optimizer.zero_grad()
            for _ in range(3):
                layer(torch.randn(6, 48, requires_grad=True)).sum().backward()
            assert of_weight(casts) == want
            casts.clear()
            optimizer.step()


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_weight_is_cast_once_a_version(recipe: str, casts):
    layer = fe.Linear(48, 32, recipe=recipe)
    # Once for the forward, and once more for dgrad where that reads it along the other dimension or in another group.
    forward, dgrad = resolve(recipe).weight, resolve(recipe).operands("dgrad")[1]
    once = 1 if forward == dgrad else 2
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for i in range(3):
        for _ in range(4):  # microbatches
            layer(torch.randn(6, 48, requires_grad=True)).sum().backward()
        # The second microbatch of all casts once more: it shows that versions are read again; then they stay.  Under a
        # predicted scale each microbatch casts, because its scale is another.
        made = 4 * (i + 1) if resolve(recipe).delayed else i + 2
        assert casts.count(("quantize", (32, 48))) == once * made
        assert int(fe.scaling_state(layer)["weight"].calls) == made
        optimizer.step()


def test_a_habit_is_given_up_when_versions_are_read_once_again():
    layer = layer_with("auto")
    with fe.backend("cublas"):
        for calls, left in ((2, 2 * BYTES), (1, 2 * BYTES), (1, 0)):
            for _ in range(calls):
                step(layer)
            assert kept(layer)[0] == left
            with torch.no_grad():
                layer.weight.mul_(0.9)


@pytest.mark.parametrize("backend", ["cublas", "reference"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_it_changes_no_number(recipe: str, backend: str):
    if backend == "cublas" and recipe == "blockwise":
        backend = "reference"  # torch's scaled matmul takes no blocks on a CPU
    results = []
    for cache in ("auto", True, False):
        layer, found = layer_with(cache, recipe), []
        with fe.backend(backend), torch.no_grad():
            for seed in range(3):
                with torch.enable_grad():
                    found += step(layer, seed)
                for p, grad in zip(layer.parameters(), found[-2:], strict=True):
                    p -= 0.1 * grad
        results.append(found)
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_between_forward_and_backward_one_orientation_waits_and_none_after():
    for cache, waits in (("auto", 1), (False, 0)):
        layer, x = layer_with(cache), torch.randn(6, 48, requires_grad=True)
        with fe.backend("cublas"):
            y = layer(x)
            assert codes_alive() == waits, "the transpose, for dgrad"
            loss = y.sum()
            loss.backward()
            assert codes_alive() == 0, "though the loss is still there"
            assert kept(layer) == (0, "")
    with torch.no_grad(), fe.backend("cublas"):
        layer(x)
    assert kept(layer) == (0, ""), "never means never"


def test_why_a_weight_is_kept_and_what_it_costs():
    asked, frozen, called = layer_with(True), layer_with("auto").requires_grad_(False), layer_with("auto")
    with fe.backend("cublas"):
        step(asked)
        step(frozen)
        with torch.no_grad():
            called(torch.randn(6, 48))
        assert (kept(asked), kept(frozen)) == ((2 * BYTES, "asked"), (2 * BYTES, "frozen"))
        assert kept(called) == (BYTES, "inference")
        step(called)
        assert kept(called) == (0, ""), "a backward came after all"
        model = converted(nn.Sequential(nn.Linear(48, 32)), replace(resolve("current"), cache_weights=True))
        step(model)
    assert "quantised weights kept between calls take 0.0 MiB (asked)" in fe.inspect(model).table()


@pytest.mark.parametrize(("backend", "cast"), [("cublas", "cast_transpose"), ("reference", "quantize")])
def test_a_frozen_weight_is_cast_once_in_all(backend: str, cast: str, casts):
    layer = layer_with("auto").requires_grad_(False)
    with fe.backend(backend):
        for seed in range(3):
            step(layer, seed)
        with torch.no_grad():
            layer(torch.randn(6, 48))
    assert of_weight(casts) == [cast]


@pytest.mark.parametrize("written", [False, True])
def test_a_frozen_weights_copy_has_the_scale_that_is_predicted(written: bool):
    """What a layer computes does not depend on which copies there are: a resumed run has none."""
    layer = fe.Linear(48, 32, recipe=fe.delayed(history=3, margin=4)).requires_grad_(False)
    with torch.no_grad():
        layer.weight[0] *= 2e-4  # under a scale 2^4 smaller, some of these are subnormal codes
    for seed in range(8):
        if written and seed == 2:
            layer.weight.data.mul_(1.5)
        torch.manual_seed(seed)
        x = torch.randn(6, 48, requires_grad=True)
        layer(x).sum().backward()
        again = copy.deepcopy(layer)
        again.forget_copies()
        with torch.no_grad():
            assert torch.equal(layer(x), again(x)), f"after step {seed}"
    assert kept(layer)[1] == "frozen"


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_reads_what_waits_anyway_and_keeps_nothing(reentrant: bool, casts):
    layer, x = layer_with("auto"), torch.randn(6, 48, requires_grad=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with fe.backend("cublas"):
        for _ in range(3):
            checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
            assert kept(layer) == (0, "")
            optimizer.step()
        assert len(of_weight(casts)) <= 6, "one pass for a forward, one at most for its recompute"
        (layer(x) + layer(x + 1)).sum().backward()
    assert kept(layer) == (0, ""), "called twice in a step, it shares the transpose and starts no habit"


def test_the_copies_of_an_old_version_are_freed():
    layer = layer_with(True)
    with fe.backend("cublas"):
        step(layer)
        old = weakref.ref(numerics_of(layer).weight.kept)
        with torch.no_grad():
            layer.weight.mul_(2)
        step(layer)
    gc.collect()
    assert old() is None
    assert kept(layer)[0] == 2 * BYTES


@pytest.mark.parametrize("value", ["always", "Auto", None, 2])
def test_another_word_is_refused(value):
    with pytest.raises(fe.errors.UnknownName, match="cache_weights"):
        replace(fe.current(), cache_weights=value)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_the_same_tensor_in_the_next_step_enters_that_steps_history(recipe: str):
    """As of a benchmark, or a full-batch training; an evaluation on it does not hide the training step."""
    model, x = converted(nn.Sequential(nn.Linear(48, 16)), recipe), torch.randn(6, 48)
    with torch.no_grad():
        model(x)
    for i in range(1, 4):
        model(x).sum().backward()
        slot = fe.scaling_state(model)["0.input"]
        assert (int(slot.calls), slot.amax) == (1 + i, x.abs().max())
        assert state_of(model).live_2S[0, 0] == x.abs().max(), "recorded, though the operand was there already"
        if recipe == "delayed":
            assert slot.history[: i - 1].tolist() == [slot.amax.item()] * (i - 1)
