"""The patched interpreter through the language itself: the casts and dots that a kernel writes, as a kernel does."""

import faithful
import pytest
import torch
import triton
import triton.language as tl
from casts import E4M3, E5M2
from triton.runtime import interpreter


@triton.jit
def _cast(x, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@triton.jit
def _dot(a, b, c, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    tl.store(y + at, tl.dot(tl.load(a + at), tl.load(b + at).T, tl.load(c + at)))


@triton.jit
def _raise(x, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.atomic_max(x + i, i, mask=i >= 0)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    size = triton.next_power_of_2(x.numel())
    padded = torch.zeros(size, dtype=x.dtype)
    padded[: x.numel()] = x
    y = torch.zeros(size, dtype=dtype)
    _cast[(1,)](padded, y, SIZE=size)
    return y[: x.numel()]


def test_fp32_is_rounded_to_the_nearest_bf16():
    x = faithful.points_of_bf16()
    found = cast(x, torch.bfloat16)
    assert torch.equal(found.view(torch.int16), faithful.nearest_bf16(x).view(torch.int16))
    assert cast(torch.tensor([float("nan")]), torch.bfloat16).isnan().all()


@pytest.mark.parametrize(
    "pair", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (torch.bfloat16,) * 2, (torch.float16,) * 2]
)
def test_dot_multiplies_values_and_sums_in_fp32(pair):
    size = 32
    a, b = (torch.randn(size, size).to(dtype) for dtype in pair)
    c, y = torch.randn(size, size), torch.zeros(size, size)
    _dot[(1,)](a, b, c, y, SIZE=size)
    wanted = a.double() @ b.double().t() + c
    # Exact products; `size` sums, c among them, each rounding by 2^-24 of what it adds up to at most.
    bound = (size + 1) * 2.0**-24 * (a.double().abs() @ b.double().abs().t() + c.abs())
    assert ((y - wanted).abs() <= bound).all()


def test_the_self_test_notices_an_interpreter_that_was_left_alone(monkeypatch):
    assert faithful.wrong() == []
    monkeypatch.setattr(interpreter, "_convert_float", faithful._triton_convert)
    assert len(faithful.wrong()) >= 5


@pytest.mark.parametrize("short", ["read", "written"])
def test_memory_beside_a_tensor_is_neither_read_nor_written(short):
    x, y = torch.zeros(15 if short == "read" else 16), torch.zeros(15 if short == "written" else 16)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="no tensor of its launch holds"):
        _cast[(1,)](x, y, SIZE=16)


def test_an_atomic_beside_a_tensor_is_an_error_too():
    with pytest.raises(triton.runtime.errors.InterpreterError, match="no tensor of its launch holds"):
        _raise[(1,)](torch.zeros(15, dtype=torch.int32), SIZE=16)
