"""Every pair of what a layer can be and have: either both, and it computes, or the one sentence of the table."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chains import storing
from support import converted
from torch import nn
from transformers.pytorch_utils import Conv1D

import fp8engine as fe
from fp8engine.autograd.features import CONV1D, EXCLUDED, EXPERTS, FROZEN, RANKS, SMOOTH, STORED, SUMS
from fp8engine.nn.linear import float8_modules

PLAIN = "an nn.Linear"
K = 32


def model_of(kind: str, recipe: Any) -> nn.Module:
    """A converted model whose one layer is of that kind."""
    torch.manual_seed(0)
    if kind == EXPERTS:
        return nn.Sequential(fe.GroupedLinear(1, K, K, recipe=recipe))
    model = nn.Sequential(Conv1D(K, K) if kind == CONV1D else nn.Linear(K, K)).requires_grad_(kind != FROZEN)
    return converted(model, recipe, frozen="fp8" if kind == FROZEN else None)


def divided(style: Any) -> Callable[[nn.Module], None]:
    """Raises what a plan of that style would, on two ranks."""

    def put(model: Any) -> None:
        if problem := style.problem(model[0], 2):
            raise fe.errors.ParallelError(problem)

    return put


PUT = {
    SMOOTH: lambda model: fe.smooth(model, "0"),
    RANKS: divided(fe.distributed.Colwise()),
    SUMS: divided(fe.distributed.Rowwise()),
}


def excluded(*names: str) -> list[tuple[str, str]]:
    """The rules and the remedies that the table has for pairs of these; sums are of a division over ranks."""
    names = (*names, RANKS) if SUMS in names else names
    return [EXCLUDED[pair] for pair in itertools.permutations(names, 2) if pair in EXCLUDED]


def put_together(kind: str, features: tuple[str, ...], recipe: Any) -> Any:
    model = model_of(kind, recipe)
    for feature in PUT.keys() & set(features):
        PUT[feature](model)
    return model


KINDS = (PLAIN, FROZEN, EXPERTS, CONV1D)
FEATURES = ((), (SMOOTH,), (RANKS,), (SUMS,), (STORED,), (SMOOTH, STORED), (RANKS, STORED), (SUMS, STORED))


@pytest.mark.parametrize("features", FEATURES, ids=", ".join)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_has_both_or_one_sentence_says_why_not(kind: str, features: tuple[str, ...]):
    recipe: Any = storing() if STORED in features else "current"
    if rows := excluded(kind, *features):
        with pytest.raises(fe.errors.Fp8EngineError) as raised:
            put_together(kind, features, recipe)
        assert any(f"beside it: {rule}; {remedy}" in str(raised.value) for rule, remedy in rows)
        return
    model = put_together(kind, features, recipe)
    layer: Any = float8_modules(model)[0]
    x = torch.randn(5, K, requires_grad=True)
    for _ in range(2):  # the second step's result has a scale to be stored under
        y = layer(x, [5]) if kind == EXPERTS else model(x)
        values = y.dequantize() if STORED in features and not isinstance(y, torch.Tensor) else y
        values.float().sum().backward()
    assert isinstance(y, fe.Float8Tensor) == (STORED in features)
    assert layer.numerics.smooth == (SMOOTH in features)
    weight = layer.weight.detach().float() if kind != FROZEN else layer.dequantize().float()
    plain = x.detach() @ (weight if kind == CONV1D else weight[0].t() if kind == EXPERTS else weight.t())
    plain = plain if layer.bias is None else plain + layer.bias.detach()
    found = y.dequantize() if isinstance(y, fe.Float8Tensor) else y
    # Two casts to E4M3 and, stored, a third: each rounds by 2^-4 at most, and the least noise is 28 dB a cast.
    assert (found - plain).norm() < 0.1 * plain.norm()


@pytest.mark.parametrize("excluding", [EXPERTS, SUMS])
def test_auto_does_not_store_what_cannot_be_stored(excluding: str):
    model = model_of(EXPERTS if excluding == EXPERTS else PLAIN, "auto")
    numerics = float8_modules(model)[0].numerics
    readers = {numerics.name: ["matmul"]}
    numerics.state.controller.follow(readers)
    assert numerics.candidate == (excluding != EXPERTS)
    if excluding == SUMS:
        feature: Any = SimpleNamespace(names=(RANKS, SUMS))
        numerics.switch(feature)
        numerics.state.controller.follow(readers)
    assert not numerics.candidate
    assert f"cannot have {STORED}" in numerics.state.controller.outputs.why(numerics)
