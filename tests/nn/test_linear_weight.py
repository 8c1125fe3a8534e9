"""cache_weights: how long the FP8 copies of a weight live, what they cost, and that they change no number."""

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from support import FP8_RECIPES, converted, numerics_of, same
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
    y.backward(torch.randn(6, 32))
    assert x.grad is not None
    return [y.detach(), x.grad]


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
            for _ in range(3):
                step(layer)
            assert of_weight(casts) == want
            casts.clear()
            optimizer.step()


def test_a_habit_is_given_up_when_versions_are_read_once_again(casts):
    layer = layer_with("auto")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with fe.backend("cublas"):
        for calls, left in ((2, 2 * BYTES), (1, 2 * BYTES), (1, 0)):
            for _ in range(calls):
                step(layer)
            assert kept(layer)[0] == left
            optimizer.step()


@pytest.mark.parametrize("backend", ["cublas", "reference"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_it_changes_no_number(recipe: str, backend: str):
    if backend == "cublas" and recipe == "blockwise":
        backend = "reference"  # torch's scaled matmul takes no blocks on a CPU
    results = []
    for cache in ("auto", True, False):
        layer = layer_with(cache, recipe)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        found = []
        with fe.backend(backend):
            for seed in range(3):
                optimizer.zero_grad()
                found += step(layer, seed)
                found += [p.grad.clone() for p in layer.parameters() if p.grad is not None]
                optimizer.step()
        results.append(found)
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_between_forward_and_backward_one_orientation_waits_and_none_after():
    layer, x = layer_with("auto"), torch.randn(6, 48, requires_grad=True)
    with fe.backend("cublas"):
        y = layer(x)
        assert codes_alive() == 1, "the transpose, for dgrad"
        loss = y.sum()
        loss.backward()
        assert codes_alive() == 0, "though the loss is still there"
    assert kept(layer) == (0, "")


def test_never_means_never():
    layer, x = layer_with(False), torch.randn(6, 48, requires_grad=True)
    with fe.backend("cublas"):
        y = layer(x)
        assert codes_alive() == 0
        y.sum().backward()
        with torch.no_grad():
            layer(x)
    assert codes_alive() == 0
    assert kept(layer) == (0, "")


def test_why_a_weight_is_kept_and_what_it_costs():
    asked, frozen, called = layer_with(True), layer_with("auto").requires_grad_(False), layer_with("auto")
    with fe.backend("cublas"):
        step(asked)
        step(frozen)
        with torch.no_grad():
            called(torch.randn(6, 48))
        assert (kept(asked), kept(frozen), kept(called)) == (
            (2 * BYTES, "asked"),
            (2 * BYTES, "frozen"),
            (BYTES, "inference"),
        )
        step(called)
    assert kept(called) == (0, ""), "a backward came after all"
    model = converted(nn.Sequential(nn.Linear(48, 32)), replace(resolve("current"), cache_weights=True))
    with fe.backend("cublas"):
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
        copies = layer(x)
        copies.sum().backward()
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


def test_a_layer_called_twice_in_a_step_shares_the_transpose_and_starts_no_habit():
    layer, x = layer_with("auto"), torch.randn(6, 48, requires_grad=True)
    with fe.backend("cublas"):
        (layer(x) + layer(x + 1)).sum().backward()
    assert kept(layer) == (0, "")


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
