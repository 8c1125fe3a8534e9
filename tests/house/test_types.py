"""Types as a user's editor sees them: pyright and mypy check `assert_type` in `make types`; the tests run the lines."""

from __future__ import annotations

from types import UnionType
from typing import assert_type, get_args, get_origin, get_type_hints, is_typeddict

import pytest
import torch
from torch import nn

import fp8engine as fe
from fp8engine.numerics.names import KnownRecipe
from fp8engine.numerics.recipe import RECIPES
from fp8engine.report.facts import InputSlot, Layer, Slot, Totals


class Mine(nn.Module):
    """A model with something that no nn.Module has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def answer(self) -> int:
        return 42

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
def test_a_model_stays_of_its_own_type() -> None:
    model = Mine()
    converted = fe.convert(model, "current")
    assert_type(converted, Mine)
    assert_type(converted.answer(), int)
    assert_type(fe.smooth(converted, "layer"), Mine)
    assert_type(fe.revert(converted), Mine)
    assert converted is model
    assert isinstance(converted, Mine)
    assert converted.answer() == 42


def test_a_decorated_model_stays_of_its_own_type() -> None:
    model = Mine()
    alone = fe.amp.decorate(Mine(), level="O1", dtype=torch.bfloat16)
    assert_type(alone, Mine)
    decorated, optimizer = fe.amp.decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2")
    assert_type(decorated, Mine)
    assert decorated.answer() == alone.answer() == 42
    assert isinstance(optimizer, torch.optim.Optimizer)


@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
def test_rows_and_sums_of_a_report_have_the_keys_and_types_that_are_declared() -> None:
    model = fe.convert(Mine(), "current")
    model(torch.randn(4, 32)).sum().backward()
    report = fe.inspect(model)
    assert_type(report.totals["fp8_flops_share"], float)
    assert_type(report.layers[0]["name"], str)
    (layer,) = report.layers
    assert_type(layer["grad_output"]["amax"], float | None)
    assert_type(layer["output"]["consumers"], list[str])
    assert layer["output"].keys() == {"cast", "format", "consumers", "reason"}, "16 bits: nothing was counted"
    slots = [(layer["input"], InputSlot), (layer["weight"], Slot), (layer["grad_output"], Slot)]
    for found, declared in [(report.totals, Totals), (layer, Layer), *slots]:
        hints = get_type_hints(declared)
        assert found.keys() == hints.keys()
        for key, value in found.items():
            kinds = get_args(hints[key]) if isinstance(hints[key], UnionType) else (hints[key],)
            plain = tuple(dict if is_typeddict(kind) else get_origin(kind) or kind for kind in kinds)
            assert isinstance(value, plain), key


def test_an_editor_proposes_every_recipe() -> None:
    assert get_args(KnownRecipe) == RECIPES
