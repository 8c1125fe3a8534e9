"""Matrices of more than 2^31 elements on the emulated card, few of them used: no offset has 32 bits."""

from __future__ import annotations

import mmap

import pytest
import torch

from fp8engine.kernels.act_quantize import act_quantize, act_quantize_backward
from fp8engine.kernels.attention_backward import attention_backward
from fp8engine.kernels.attention_cast import attention_cast
from fp8engine.kernels.norm_quantize import norm_quantize, norm_quantize_backward
from fp8engine.ops.reference import Norm, Store
from fp8engine.ops.reference.attention import Form
from fp8engine.ops.reference.norm_quantize import RowStatistics

MAP_NORESERVE = 0x4000  # of Linux; mmap names it from Python 3.13 on
LAYOUTS = [(1 << 30, 1), (1, 1 << 30)]  # of a matrix of 3 x 3: the last row, or the last column, begins at 2^31

FORM = Form(0.125, rotated=False)


def far(x: torch.Tensor, *strides: int) -> torch.Tensor:
    """x, of BF16, in memory of its own in which it has these strides; what lies between takes no memory."""
    size = 1 + sum((length - 1) * stride for length, stride in zip(x.shape, strides, strict=True))
    assert size > 1 << 31
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = torch.frombuffer(mmap.mmap(-1, x.itemsize * size, flags), dtype=x.dtype)
    return memory.as_strided(x.shape, strides).copy_(x)


def same(found: tuple, wanted: tuple) -> bool:
    """Whether results, of which some may be None, are equal to the bit."""
    pairs = zip(found, wanted, strict=True)
    return all(ours is near or torch.equal(ours, near) for ours, near in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("strides", LAYOUTS, ids=["rows", "columns"])
def test_a_norm(strides: tuple[int, int], card):
    x, dy, weight = torch.randn(3, 3).bfloat16(), torch.randn(3, 3).bfloat16(), torch.randn(3).bfloat16()
    rows, norm = RowStatistics(torch.ones(3), torch.zeros(3)), Norm("layer")
    card()
    far_weight = far(weight.view(1, 3), 4, 1 << 30)[0]
    found = norm_quantize(far(x, *strides), far_weight, far_weight, norm, Store())
    assert same(found[:1], norm_quantize(x, weight, weight, norm, Store())[:1])
    found = norm_quantize_backward(far(dy, *strides), far(x, *strides), far_weight, rows, norm)
    assert same(found, norm_quantize_backward(dy, x, weight, rows, norm))


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.parametrize("strides", LAYOUTS, ids=["rows", "columns"])
def test_an_activation(strides: tuple[int, int], card):
    x, dy, up = (torch.randn(3, 3).bfloat16() for _ in range(3))
    card()
    assert same(act_quantize(far(x, *strides), "silu", Store()), act_quantize(x, "silu", Store()))
    found = act_quantize_backward(far(dy, *strides), far(x, *strides), "swiglu", Store(), far(up, *strides))
    assert same(found, act_quantize_backward(dy, x, "swiglu", Store(), up))


@pytest.mark.slow
def test_rows_of_attention(card):
    """Of five blocks of 64; a stride of 2^23 is the most that `launch.addressable` admits."""
    x = torch.randn(1, 1, 260, 64).bfloat16()
    card()
    assert same(attention_cast(far(x, 64, 64, 1 << 23, 1), None, 64), attention_cast(x, None, 64))


@pytest.mark.slow
@pytest.mark.parametrize("name", "qko")
def test_batches_of_attention(name: str, card):
    near = {each: torch.randn(3, 1, 8, 64).bfloat16() for each in "qkvo"}
    card()
    given = near | {name: far(near[name], 1 << 30, 64, 64, 1)}
    found, wanted = (
        attention_backward(
            x["o"], x["q"], x["k"], attention_cast(x["o"], None, 64), attention_cast(x["v"], None, 64), FORM, 0.18
        )
        for x in (given, near)
    )
    assert same(found, wanted)
