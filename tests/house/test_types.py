"""Types as a user's editor sees them: pyright checks `assert_type` in `make types`, the tests run the same lines."""

from __future__ import annotations

from typing import assert_type

import pytest
import torch
from torch import nn

import fp8engine as fe


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
