"""Tensors that the reference keeps: those of a step that is only planned, which are fake, are not kept."""

import torch

from fp8engine._torch import FakeTensor, FakeTensorMode
from fp8engine.ops.reference import rounding
from fp8engine.ops.reference.attention import attention_cast, rotation_of


def test_tables_of_codes_and_rotations_are_real_after_a_step_was_planned():
    for cached in (rounding._pair_table, rotation_of):
        cached.cache_clear()
    for plan in (True, False):
        with FakeTensorMode(allow_non_fake_inputs=True) if plan else torch.no_grad():
            codes = [torch.ones(shape).to(torch.float8_e4m3fn) for shape in ((3, 999), (4, 1000))]
            values = [rounding.decode(each, torch.float32) for each in codes]
            rotated, _ = attention_cast(torch.ones(1, 1, 3, 64), rotated=True)
        assert [isinstance(x, FakeTensor) for x in (*values, rotated)] == [plan] * 3
    assert all(torch.equal(x, torch.ones_like(x)) for x in values)
