"""`mxfp8` by its name: emulated and said so once, refused under strict, reported cast by cast."""

import warnings
from typing import Any

import pytest
from support import Net, train
from torch import nn

import fp8engine as fe
from fp8engine.errors import EmulationWarning, StrictError


def test_it_is_said_once_that_it_is_emulated_and_strict_refuses():
    model: Any = Net()
    with pytest.raises(StrictError, match=r"has no FP8 Tensor Cores .*; 6 layers would be emulated, 'blocks.0.up' the"):
        fe.convert(model, "mxfp8", strict=True)
    assert type(model.blocks[0].up) is nn.Linear
    with pytest.warns(EmulationWarning, match="no FP8 Tensor Cores.*: 6 layers compute with FP8 values") as told:
        fe.convert(model, "mxfp8")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model)
    for row in fe.inspect(model).layers:
        assert (row["recipe"], row["emulated"], row["fp8_share"]) == ("mxfp8", True, 1.0)
        assert {row[role]["cast"] for role in ("input", "weight", "grad_output")} == {str(fe.mxfp8().input)}
