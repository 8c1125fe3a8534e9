"""How an emulated matmul ends, against NumPy in float64 and the cast oracle."""

import numpy as np
import pytest
import torch
from activations import PLAIN
from casts import FP8, MAX

from fp8engine.ops.reference import KINDS, Epilogue, finish, saturating_cast

FORMULAS = {"none": lambda x: x, **PLAIN}


def test_the_kinds():
    assert set(KINDS) == set(FORMULAS)


@pytest.mark.parametrize("kind", FORMULAS)
def test_bias_activation_and_one_rounding(kind: str):
    y_MN, bias_N = torch.randn(50, 30) * 4, torch.randn(30).bfloat16()
    before = y_MN.clone()
    wanted = FORMULAS[kind](y_MN.double() + bias_N.double())
    found = finish(y_MN, Epilogue(bias_N, torch.float32, kind))
    # The sum is rounded once, a formula's few factors as often: 8 ulp of the larger of result and argument.
    size = wanted.abs() + y_MN.abs() + bias_N.abs()
    assert ((found - wanted).abs() <= 8 * 2.0**-24 * size).all()
    for out in (torch.bfloat16, torch.float16):
        assert torch.equal(finish(y_MN, Epilogue(bias_N, out, kind)), found.to(out))
    assert torch.equal(y_MN, before), "the caller's own"


@pytest.mark.parametrize("dtype", FP8)
def test_an_fp8_result_is_cast_under_the_given_scale(dtype):
    y_MN = torch.randn(64, 33) * torch.exp2(torch.randint(-10, 20, (64, 33)))
    y_MN[3, 4], y_MN[5, 6], y_MN[7, 8] = np.nan, np.inf, -np.inf
    amax, counts = torch.tensor([3.0]), torch.tensor([5, 1])
    found = finish(y_MN, Epilogue(None, dtype, "none", torch.tensor(0.25), amax, counts))
    wanted = saturating_cast(y_MN * 4, y_MN, dtype)
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    finite = y_MN[torch.isfinite(y_MN)].abs()
    assert amax.item() == finite.max().item()
    assert counts.tolist() == [5 + int((finite * 4 > MAX[dtype]).sum()), 1 + 3]


def test_an_amax_only_rises_counts_add_up_and_each_is_taken_without_the_other():
    amax, counts = torch.tensor([100.0]), torch.zeros(2, dtype=torch.int64)
    end = Epilogue(None, torch.float16, amax=amax, counts=counts)
    for rows, largest, counted in (
        ([[1.0, -2.0]], 100.0, [0, 0]),
        ([[70000.0, -1e30]], 1e30, [2, 0]),  # both become Inf in FP16: overflow is counted where it arises
        ([[70000.0, np.nan]], 1e30, [3, 1]),
        ([[], []], 1e30, [3, 1]),
    ):
        finish(torch.tensor(rows), end)
        assert (amax.item(), counts.tolist()) == (pytest.approx(largest), counted)
    finish(torch.tensor([[8e35, np.inf]]), end._replace(amax=None, out=torch.float32))
    assert (amax.item(), counts.tolist()) == (pytest.approx(1e30), [3, 2])
    finish(torch.tensor([[8e35, np.inf]]), end._replace(counts=None))
    assert (amax.item(), counts.tolist()) == (pytest.approx(8e35), [3, 2])
