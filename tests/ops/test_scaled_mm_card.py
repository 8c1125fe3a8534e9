"""Every call of torch's scaled matmul, held against the rules that this torch has for CUDA.

The rules are torch's own: the meta function of `_scaled_mm`, which reads shapes, strides and dtypes of CUDA tensors
that hold nothing.  `make test-oldest` runs the same tests with the rules of the oldest torch.
"""

import functools
import itertools

import pytest
import torch
from casts import E4M3, E5M2
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8engine as fe
from fp8engine.ops import casts, device, scaled_mm
from fp8engine.ops.reference import Operand

SIZES = (1, 16, 33)
DTYPES = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
OUTS = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = ("K-major", "transposed", "strided")
SCALED_MM = torch._scaled_mm


@functools.cache
def asked(tensors: tuple, out_dtype: torch.dtype, fast: bool) -> tuple[int, ...]:
    """The result's shape, or torch's error, for CUDA tensors of these (shape, strides, dtype)."""
    with FakeTensorMode():
        there = [torch.empty_strided(*tensor[:2], dtype=tensor[2], device="cuda") for tensor in tensors]
        return tuple(SCALED_MM(*there, out_dtype=out_dtype, use_fast_accum=fast).shape)


class Card:
    """Stands for torch._scaled_mm: asks CUDA's rules first, then computes on the CPU, or leaves zeros."""

    def __init__(self, computes: bool):
        self.computes, self.calls = computes, 0

    def __call__(self, a, b, scale_a, scale_b, out_dtype=None, use_fast_accum=False):
        self.calls += 1
        tensors = tuple((tuple(x.shape), x.stride(), x.dtype) for x in (a, b, scale_a, scale_b))
        shape = asked(tensors, out_dtype, use_fast_accum)
        # Two rules of cuBLASLt and CUTLASS that the meta function does not know.
        assert E4M3 in (a.dtype, b.dtype)
        assert scale_a.dim() == 0 or out_dtype == torch.bfloat16
        if not self.computes:
            return torch.zeros(shape, dtype=out_dtype)
        return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that puts a card of these rules in the place of torch's scaled matmul."""

    def put(computes: bool) -> Card:
        card = Card(computes)
        monkeypatch.setattr(torch, "_scaled_mm", card)
        monkeypatch.setattr(device, "cpu_scales_rows", lambda: True)
        return card

    return put


def codes(rows: int, k: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    if layout == "K-major":
        return torch.zeros(rows, k, dtype=torch.uint8).view(dtype)
    if layout == "transposed":
        return torch.zeros(k, rows, dtype=torch.uint8).view(dtype).t()
    return torch.zeros(rows, k, 2, dtype=torch.uint8).select(2, 0).view(dtype)


def scale(rows: int, by_row: bool, turned: bool) -> torch.Tensor:
    """turned: [rows, 1] as the transpose of what a cast down columns leaves."""
    if not by_row:
        return torch.ones(())
    return torch.ones(1, rows).t() if turned else torch.ones(rows, 1)


def test_a_card_refuses_no_call(on_card):
    card, refused = on_card(computes=False), []
    for (m, n, k), dtypes, rows_a, rows_b in itertools.product(
        itertools.product(SIZES, repeat=3), DTYPES, (False, True), (False, True)
    ):
        for out, layout in itertools.product(OUTS, LAYOUTS):
            turned = layout == "transposed"
            a = Operand(codes(m, k, dtypes[0], layout), scale(m, rows_a, turned), 1 if rows_a else -1)
            b = Operand(codes(n, k, dtypes[1], layout), scale(n, rows_b, turned), 1 if rows_b else -1)
            try:
                y = scaled_mm.matmul(a, b, None, out)
                assert (y.shape, y.dtype, y.is_contiguous()) == ((m, n), out, True)
            except (RuntimeError, AssertionError) as why:
                refused.append((m, n, k, dtypes, rows_a, rows_b, out, layout, str(why)))
    assert card.calls == len(SIZES) ** 3 * len(DTYPES) * 4 * len(OUTS) * len(LAYOUTS)
    assert not refused, f"{len(refused)} refused, the first: {refused[0]}"


@pytest.fixture
def transposes_of_kernels(monkeypatch: pytest.MonkeyPatch):
    """Transposes lie as Triton's cast_transpose leaves them: allocated as [K, M], so that [1, M] has strides (M, 1)."""
    real = casts._cast_transpose

    def laid_out(*arguments):
        data, scale, turned, *rest = real(*arguments)
        fresh = torch.empty(turned.shape, dtype=torch.uint8).copy_(turned.view(torch.uint8)).view(turned.dtype)
        return data, scale, fresh, *rest

    monkeypatch.setattr(casts, "_cast_transpose", laid_out)


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "rowwise_gw_hp"])
@pytest.mark.parametrize("needs", [True, False], ids=["the input needs a gradient", "the input needs none"])
def test_a_card_refuses_no_step_of_a_layer(on_card, transposes_of_kernels, recipe: str, needs: bool):
    """Among them the head with one output: its dy^T is a single row."""
    card = on_card(computes=True)
    for m, k, n in itertools.product((1, 16, 17, 32), (1, 16, 48), (1, 2, 48)):
        torch.manual_seed(m + k + n)
        layer = fe.Linear(k, n, recipe=recipe)
        x, dy = torch.randn(m, k, requires_grad=needs), torch.randn(m, n)
        found = []
        for backend in ("cublas", "reference"):
            layer.zero_grad()
            x.grad = None
            with fe.backend(backend):
                layer(x).backward(dy)
            found.append([layer.weight.grad, layer.bias.grad, *([x.grad] if needs else [])])
        for ours, its in zip(*found, strict=True):
            # The same codes and scales: apart is the rounding of the result to BF16 (2^-8), of 16-bit operands as of
            # sums of up to 48 terms, against the largest of them.
            assert (ours - its).abs().max() <= 2.0**-6 * its.abs().max()
    assert card.calls >= 36  # forward at least, under rowwise_gw_hp
