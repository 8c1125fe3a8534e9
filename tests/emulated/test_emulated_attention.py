"""Attention in FP8 from its PTX, against its twin: casts and forward bit for bit."""

from __future__ import annotations

import pytest
import torch

from benchmarks.checks.operands import differs
from fp8engine.kernels.attention import attention
from fp8engine.kernels.attention_backward import attention_backward
from fp8engine.kernels.attention_cast import attention_cast
from fp8engine.ops.reference import attention as twin
from fp8engine.ops.reference.attention import Form
from fp8engine.ops.reference.attention_backward import attention_backward as backward

# heads, heads of keys, queries, keys, head dim, form
SHAPES = {
    "one block": (1, 1, 64, 64, 64, Form(0.125)),
    "causal, grouped": (4, 2, 130, 130, 64, Form(0.125, True)),
    "window, keys before": (2, 1, 70, 200, 96, Form(0.1, True, 50, 130)),
    "more queries, not rotated": (1, 1, 100, 3, 128, Form(0.09, rotated=False)),
    "some see nothing": (1, 1, 130, 66, 128, Form(0.09, True, 0, -64)),
}


def inputs(shape: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Form]:
    """Queries, keys and values [2, heads, rows, D], as projections leave them; normal, with a few outliers."""
    heads, of_keys, t, s, d, form = SHAPES[shape]
    torch.manual_seed(len(shape))

    def of(count: int, rows: int) -> torch.Tensor:
        x = torch.randn(2, rows, count, d)
        x[torch.rand(x.shape) < 0.001] *= 20
        return x.to(dtype).transpose(1, 2)

    return of(heads, t), of(of_keys, s), of(of_keys, s), form


def cast(x: torch.Tensor, rotated: bool, transposed: bool = False):
    """The kernel's cast of x."""
    width = twin.width_of(x.shape[-1])
    rotation = twin.rotation_of(width, twin.halved(x[:0]).dtype, x.device) if rotated else None
    return attention_cast(x, rotation, width, transposed)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "not finite"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rotated", [False, True], ids=["as it is", "rotated"])
@pytest.mark.parametrize("head_dim", twin.HEAD_DIMS)
def test_a_cast_is_its_twin_bit_for_bit(head_dim: int, rotated: bool, dtype: torch.dtype, bad: bool, card):
    x = (torch.randn(2, 70, 2, head_dim) * torch.exp2(torch.randint(-9, 10, (2, 70, 2, 1)))).to(dtype).transpose(1, 2)
    if bad:
        x[0, 0, 3, 5], x[1, 1, 69, 0] = float("nan"), float("inf")
    card()
    wanted, scale = twin.attention_cast(x, rotated)
    for transposed in (False, True):
        found, found_scale = cast(x, rotated, transposed)
        codes = (found.mT if transposed else found).contiguous()
        assert differs(codes.view(torch.uint8), wanted.view(torch.uint8)) is None
        assert differs(found_scale, scale) is None


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [90, 89])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_is_its_twin_bit_for_bit(shape: str, architecture: int, card):
    q, k, v, form = inputs(shape, torch.bfloat16)
    d = q.shape[-1]
    card(architecture)
    found = attention(
        cast(q, form.rotated), cast(k, form.rotated), cast(v, False, True),
        form, twin.factor_of(form, d), (q.shape[2], k.shape[2], d), q.dtype,
    )  # fmt: skip
    assert differs(found, twin.attention(q, k, v, form)) is None


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, form: Form):
    """(dq, dk, dv) of the kernels."""
    rows = cast(do, form.rotated), cast(v, form.rotated)
    return attention_backward(do, q, k, *rows, form, form.scale * twin.LOG2_E)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [90, 89])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_of_sums_that_are_exact_is_its_twin_bit_for_bit(shape: str, architecture: int, card):
    """Small integers, and a softmax in base 2: every p is a power of two, and sums are exact in any order."""
    q, k, v, form = inputs(shape, torch.bfloat16)
    do = torch.randn(q.mT.shape).bfloat16().mT.contiguous()
    q, k, v, do = ((x.float() * 0.6).round().clamp(-2, 2).bfloat16() for x in (q, k, v, do))
    q[..., 8:] = 0  # scores of -32 to 32, so that p spans few enough octaves
    form = form._replace(scale=0.25 / twin.LOG2_E)
    card(architecture)
    for name, ours, twins in zip("qkv", gradients(q, k, v, do, form), backward(do, q, k, v, form), strict=True):
        assert differs(ours, twins) is None, name
