"""The order in which parts of a sum over K are added, and what ends the sum."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8engine.ops.reference import Epilogue, add_parts, finish


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
