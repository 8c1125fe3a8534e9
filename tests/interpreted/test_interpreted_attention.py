"""Attention in FP8 through the interpreter: casts bit for bit their twin, forward and backward near it.

The interpreter sums a product in another order than the twin (u = 2^-24 a term), so a score differs by 2^-17 and a
weight may be rounded to its neighbour, 2^-4 of itself away: a rare one, less than one in 2^9 of them.  Of the output's
norm that is 2^-4 2^-4.5, halved where 64 keys and more add independently.  In 16 bits the neighbour is 2^-8 away.
"""

import pytest
import torch
from attention_kernels import cast, forward, gradients

from fp8engine.ops.reference.attention import Form
from fp8engine.ops.reference.attention import attention as twin
from fp8engine.ops.reference.attention import attention_cast as twin_cast
from fp8engine.ops.reference.attention_backward import attention_backward as backward_twin

# heads, heads of keys, queries, keys, head dim, form
SHAPES = {
    "causal, grouped": (2, 1, 130, 130, 64, Form(0.125, True)),
    "window, keys before": (1, 1, 70, 200, 96, Form(0.1, True, 50, 130)),
    "full, not rotated": (1, 1, 100, 67, 128, Form(0.09, rotated=False)),
    "some see nothing": (1, 1, 130, 66, 64, Form(0.125, True, 0, -64)),
    "two heads of keys": (4, 2, 70, 70, 64, Form(0.125, True)),
}


def inputs(name: str, dtype: torch.dtype = torch.bfloat16):
    heads, of_keys, t, s, d, form = SHAPES[name]
    generator = torch.Generator().manual_seed(len(name))
    shapes = (t, heads), (s, of_keys), (s, of_keys), (t, heads)
    parts = [torch.randn(2, rows, count, d, generator=generator).to(dtype).transpose(1, 2) for rows, count in shapes]
    return *parts, form


def near(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    found, wanted = found.float(), wanted.float()
    assert found.shape == wanted.shape
    assert (found - wanted).norm() <= bound * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_a_cast_is_its_twin_bit_for_bit(name: str, dtype: torch.dtype):
    x = inputs(name, dtype)[0]
    x[0, 0, 3, 5], x[1, 0, 64, 0] = float("nan"), float("-inf")
    for transposed in (False, True):
        codes, scale = cast(x, False, transposed)
        wanted, wanted_scale = twin_cast(x, False)
        codes = (codes.mT if transposed else codes).contiguous()
        assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(scale, wanted_scale)


@pytest.mark.parametrize("name", SHAPES)
def test_forward_is_near_its_twin(name: str):
    q, k, v, _, form = inputs(name)
    near(forward(q, k, v, form), twin(q, k, v, form), 2.0**-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_backward_is_near_its_twin(name: str, dtype: torch.dtype):
    q, k, v, do, form = inputs(name, dtype)
    for ours, twins in zip(gradients(q, k, v, do, form), backward_twin(do, q, k, v, form), strict=True):
        assert ours.dtype == dtype
        near(ours, twins, 2.0**-11)


def test_a_key_that_is_not_finite_reaches_the_queries_that_see_it():
    q, k, v, do, form = inputs("causal, grouped")
    k[0, 0, 70, 3] = float("nan")
    o, wanted = forward(q, k, v, form), twin(q, k, v, form)
    assert torch.equal(o.isnan(), wanted.isnan())
    for ours, twins in zip(gradients(q, k, v, do, form), backward_twin(do, q, k, v, form), strict=True):
        assert torch.equal(ours.isnan(), twins.isnan())


def test_what_is_tiny_is_masked_all_the_same():
    """Scores times a factor of 2^-150: a factor of 0 would make no number of the -Inf of a masked score."""
    q, k, v, _, form = inputs("causal, grouped")
    q, k = q * 2.0**-70, k * 2.0**-80
    near(forward(q, k, v, form), twin(q, k, v, form), 2.0**-9)


def test_what_fp16_cannot_hold_is_finite_in_bf16():
    q, k, v, do, form = inputs("causal, grouped")
    q, k, v, do = q * 2.0**-20, k * 2.0**20, v * 2.0**17, do * 2.0**17
    near(forward(q, k, v, form), twin(q, k, v, form), 2.0**-9)
    for ours, twins in zip(gradients(q, k, v, do, form), backward_twin(do, q, k, v, form), strict=True):
        near(ours, twins, 2.0**-11)
