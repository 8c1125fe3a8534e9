"""How an emulated matmul ends, against NumPy in float64 and the cast oracle; how parts of a sum over K are added."""

import numpy as np
import pytest
import torch
from activations import PLAIN
from casts import FP8, MAX
from hypothesis import given
from hypothesis import strategies as st

from fp8engine.ops.reference import KINDS, Epilogue, add_parts, finish, saturating_cast

FORMULAS = {"none": lambda x: x, **PLAIN}


@pytest.mark.parametrize("kind", KINDS)
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


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=9))
def test_parts_are_added_from_the_first_to_the_last_in_fp32(values):
    wanted = torch.zeros(())
    for value in values:
        wanted = wanted + torch.tensor(value)
    found = add_parts(torch.tensor(values)[:, None, None], (None, None), Epilogue(out=torch.float32))
    assert found.item() == wanted.item()


def test_scales_meet_the_whole_sum_and_the_epilogue_what_they_make_of_it():
    part_SMN, end = torch.randn(3, 4, 5), Epilogue(torch.randn(5), torch.bfloat16, "gelu")
    scale_a, scale_b = torch.rand(4, 1), torch.rand(5, 1)
    sums_MN = part_SMN[0] + part_SMN[1] + part_SMN[2]
    found = add_parts(part_SMN, (scale_a, scale_b), end)
    assert torch.equal(found, finish(sums_MN * (scale_a * scale_b.t()), end))
    one = add_parts(part_SMN, (scale_a, scale_b[0, 0]), end)
    assert torch.equal(one, finish(sums_MN * (scale_a * scale_b[0, 0]), end))
