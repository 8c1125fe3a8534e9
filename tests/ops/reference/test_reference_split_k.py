"""The order in which parts of a sum over K are added, and what ends the sum."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8engine.ops.reference import Epilogue, add_parts, finish

FLOATS = st.floats(-1e6, 1e6, width=32)


@given(st.lists(FLOATS, min_size=1, max_size=9))
def test_parts_are_added_from_the_first_to_the_last_in_fp32(values):
    wanted = torch.zeros(())
    for value in values:
        wanted = wanted + torch.tensor(value)
    found = add_parts(torch.tensor(values)[:, None, None], (None, None), Epilogue(out=torch.float32))
    assert found.item() == wanted.item()


def test_scales_meet_the_whole_sum_and_the_epilogue_what_they_make_of_it():
    part_SMN, bias_N = torch.randn(3, 4, 5), torch.randn(5)
    scale_a, scale_b = torch.rand(4, 1), torch.rand(5, 1)
    end = Epilogue(bias_N, torch.bfloat16, "gelu")
    sums_MN = part_SMN[0] + part_SMN[1] + part_SMN[2]
    found = add_parts(part_SMN, (scale_a, scale_b), end)
    assert torch.equal(found, finish(sums_MN * (scale_a * scale_b.t()), end))
    error = (found.double() - torch.nn.functional.gelu(
        part_SMN.double().sum(0) * scale_a.double() * scale_b.double().t() + bias_N.double()
    )).abs()  # fmt: skip
    assert error.max() < 2.0**-7 * found.double().abs().max()  # one rounding to BF16, and a few to FP32


def test_one_part_is_the_sum():
    part_SMN = torch.randn(1, 3, 2)
    assert torch.equal(add_parts(part_SMN, (None, None), Epilogue(out=torch.float32)), part_SMN[0])
