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
from fp8engine.ops import casts, device, matmul, reference, scaled_mm, triton_backend
from fp8engine.ops.reference import Operand

SIZES = (1, 16, 33)
DTYPES = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
OUTS = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = ("K-major", "transposed", "strided")
SCALED_MM = torch._scaled_mm


@functools.cache
def asked(tensors: tuple, bias: tuple | None, out_dtype: torch.dtype, fast: bool) -> tuple[int, ...]:
    """The result's shape, or torch's error, for CUDA tensors of these (shape, strides, dtype)."""
    with FakeTensorMode():
        put = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda")  # noqa: E731
        there, bias_N = [put(*tensor) for tensor in tensors], None if bias is None else put(*bias)
        return tuple(SCALED_MM(*there, bias=bias_N, out_dtype=out_dtype, use_fast_accum=fast).shape)


class Card:
    """Stands for torch._scaled_mm: asks CUDA's rules first, then computes on the CPU, or leaves zeros."""

    def __init__(self, computes: bool):
        self.computes, self.calls = computes, 0

    def __call__(self, a, b, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False):
        self.calls += 1
        described = [(tuple(x.shape), x.stride(), x.dtype) for x in (a, b, scale_a, scale_b)]
        about_bias = None if bias is None else (tuple(bias.shape), bias.stride(), bias.dtype)
        shape = asked(tuple(described), about_bias, out_dtype, use_fast_accum)
        if bias is not None:  # Blas.cpp, _scaled_mm_out_cuda: no bias of an FP32 result, and one of the result's dtype
            assert bias.dtype == out_dtype != torch.float32
            assert bias.is_contiguous()
            assert bias.numel() == b.shape[1]
        # Rules of cuBLASLt, CUTLASS and torch's own C++ that the meta function does not know.
        assert E4M3 in (a.dtype, b.dtype)
        in_blocks = scale_a.dim() == 2 and scale_a.shape[1] > 1
        if in_blocks:
            assert not use_fast_accum
            assert kind_of(a, scale_a) != SQUARES or kind_of(b.t(), scale_b.t()) != SQUARES
        assert scale_a.dim() == 0 or in_blocks or out_dtype == torch.bfloat16
        if not self.computes:
            return torch.zeros(shape, dtype=out_dtype)
        if in_blocks:
            return (real(a, scale_a) @ real(b.t(), scale_b.t()).t()).to(out_dtype)
        y_MN = a.float() @ b.float() * scale_a * scale_b
        return (y_MN if bias is None else y_MN + bias.float()).to(out_dtype)


LINES, SQUARES = (1, 128), (128, 128)


def kind_of(codes_RK: torch.Tensor, scale: torch.Tensor) -> tuple[int, int]:
    """Which blocks torch takes the scale for: ScaledBlas.cpp, is_blockwise_1x128_scaling and _128x128_scaling.

    Of the latter there are two readings of the stride in torch's history, ceil(K / 128) and that rounded up to a
    multiple of 4 (cuBLASLt: 16 bytes): here both have to hold.
    """
    (rows, k), groups = codes_RK.shape, -(-codes_RK.shape[1] // 128)
    assert scale.dtype == torch.float32
    if tuple(scale.shape) == (rows, groups):
        assert scale.stride() == (1, rows), f"1x128: strides {scale.stride()}"
        assert rows % 4 == 0, "the stride is no multiple of 16 bytes"
        return LINES
    assert tuple(scale.shape) == (-(-rows // 128), groups), f"{list(scale.shape)} for {rows}x{k}"
    assert scale.stride(1) == 1
    assert scale.shape[0] == 1 or scale.stride(0) == groups
    assert groups % 4 == 0, "the stride is no multiple of 16 bytes"
    return SQUARES


def real(codes_RK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, k = codes_RK.shape
    every = scale.repeat_interleave(kind_of(codes_RK, scale)[0], 0)[:rows].repeat_interleave(128, 1)[:, :k]
    return codes_RK.float() * every


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
            bias_N = torch.ones(2 * n, dtype=torch.bfloat16)[::2] if layout == "strided" else torch.ones(n, dtype=out)
            try:
                y = scaled_mm.matmul(a, b, bias_N, out)
                assert (y.shape, y.dtype, y.is_contiguous()) == ((m, n), out, True)
            except (RuntimeError, AssertionError) as why:
                refused.append((m, n, k, dtypes, rows_a, rows_b, out, layout, str(why)))
    assert card.calls == len(SIZES) ** 3 * len(DTYPES) * 4 * len(OUTS) * len(LAYOUTS)
    assert not refused, f"{len(refused)} refused, the first: {refused[0]}"


@pytest.fixture
def transposes_of_kernels(monkeypatch: pytest.MonkeyPatch):
    """Transposes lie as Triton's cast_transpose leaves them: allocated as [K, M], so that [1, M] has strides (M, 1)."""
    real = casts._cast_transpose

    def laid_out(*arguments, slot):
        data, scale, turned, *rest = real(*arguments, slot=slot)
        fresh = torch.empty(turned.shape, dtype=torch.uint8).copy_(turned.view(torch.uint8)).view(turned.dtype)
        return data, scale, fresh, *rest

    monkeypatch.setattr(casts, "_cast_transpose", laid_out)


@pytest.fixture
def with_blocks(on_card, monkeypatch: pytest.MonkeyPatch):
    """on_card, of a card that has scales in blocks."""
    monkeypatch.setattr(scaled_mm, "no_blocks", lambda where: None)
    return on_card


PAIRS = ((LINES, SQUARES), (SQUARES, LINES), (LINES, LINES))


def blocked(rows: int, k: int, kind: tuple[int, int], turned: bool) -> Operand:
    """Codes 0, 1, -1 under powers of two: sums of them are exact.  turned: scales as the transpose of a cast's."""
    groups = -(-rows // kind[0]), -(-k // kind[1])
    scale = torch.exp2(torch.randint(-2, 3, groups[::-1] if turned else groups).float())
    data = torch.randint(-1, 2, (rows, k)).float().to(E4M3)
    return Operand(data, scale.t() if turned else scale, *kind, True)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_card_refuses_no_blocks_and_they_are_multiplied(with_blocks, pair):
    card = with_blocks(computes=True)
    shapes = itertools.product((1, 16, 130), (1, 33, 256), (1, 100, 128, 200, 512, 700))
    for (m, n, k), turned, out in itertools.product(shapes, (False, True), OUTS):
        a, b = blocked(m, k, pair[0], turned), blocked(n, k, pair[1], turned)
        y = scaled_mm.matmul(a, b, None, out)
        wanted = reference.matmul_fp8(a, b, None, torch.float32, exact=True).to(out)
        assert (y.shape, y.dtype, y.is_contiguous()) == ((m, n), out, True)
        assert torch.equal(y, wanted), (m, n, k, turned, out)
    assert card.calls == 3 * 3 * 6 * 2 * len(OUTS)


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "rowwise_gw_hp", "blockwise"])
@pytest.mark.parametrize("needs", [True, False], ids=["the input needs a gradient", "the input needs none"])
def test_a_card_refuses_no_step_of_a_layer(with_blocks, transposes_of_kernels, recipe: str, needs: bool):
    """Among them the head with one output: its dy^T is a single row."""
    card, sizes = with_blocks(computes=True), [*itertools.product((1, 16, 17, 32), (1, 16, 48), (1, 2, 48))]
    for m, k, n in [*sizes, (130, 200, 96)]:
        torch.manual_seed(m + k + n)
        layer = fe.Linear(k, n, recipe=recipe)
        x, dy = torch.randn(m, k, requires_grad=needs), torch.randn(m, n)
        found = []
        for backend in ("cublas", "reference"):
            layer.zero_grad()
            x.grad = None
            with fe.backend(backend):
                y = layer(x)
                y.backward(dy)
            found.append([y.detach(), layer.weight.grad, layer.bias.grad, *([x.grad] if needs else [])])
        for ours, its in zip(*found, strict=True):
            # The same codes and scales: apart is the rounding of the result to BF16 (2^-8), of 16-bit operands as of
            # sums of up to 200 terms, against the largest of them.
            assert (ours - its).abs().max() <= 2.0**-6 * its.abs().max()
    assert card.calls >= len(sizes) + 1  # forward at least, under rowwise_gw_hp


@pytest.mark.parametrize("pair", [(SQUARES, SQUARES), ((1, 64), (1, 64)), (LINES, (-1, -1))], ids=str)
def test_other_blocks_are_refused(with_blocks, pair):
    a, b = blocked(16, 128, pair[0], False), blocked(16, 128, pair[1] if pair[1] != (-1, -1) else LINES, False)
    if pair[1] == (-1, -1):
        b = Operand(b.data, torch.ones(()))
    assert "1x128 by 128x128" in (scaled_mm.unsupported(a, b) or "")
    with pytest.raises(fe.errors.BackendError, match="cannot multiply these"):
        scaled_mm.matmul(a, b)


def test_blocks_are_for_hopper_and_cuda_12_9(monkeypatch: pytest.MonkeyPatch):
    card = torch.device("cuda", 0)
    monkeypatch.setattr(device, "name", lambda where: "pretended card")
    for capability, version, found in (
        ((9, 0), "13.0", None),
        ((9, 0), "12.9", None),
        ((9, 0), "12.8", "need CUDA 12.9"),
        ((10, 0), "13.0", "sm_90 alone"),
        ((8, 9), "13.0", "sm_90 alone"),
    ):
        monkeypatch.setattr(device, "capability", lambda where, capability=capability: capability)
        monkeypatch.setattr(torch.version, "cuda", version)
        why = scaled_mm.no_blocks(card)
        assert why is None if found is None else found in (why or "")


@pytest.mark.parametrize(
    ("usable", "torch_can", "ratio", "chosen"),
    [
        (True, True, 0.0, "triton"),  # nobody measured it
        (True, True, 1.1, "triton"),
        (True, True, 0.9, "cublas"),
        (True, False, 0.9, "triton"),
        (False, True, 0.0, "cublas"),
        (False, False, 0.0, "reference"),
    ],
)
def test_which_backend_multiplies_blocks(monkeypatch: pytest.MonkeyPatch, usable, torch_can, ratio, chosen):
    monkeypatch.setattr(device, "has_fp8", lambda where: True)
    monkeypatch.setattr(device, "capability", lambda where: (9, 0))
    monkeypatch.setattr(triton_backend, "usable", lambda: usable)
    monkeypatch.setattr(triton_backend, "measured", lambda *asked: ratio)
    monkeypatch.setattr(scaled_mm, "no_blocks", lambda where: None if torch_can else "no")
    assert matmul.choose(torch.device("cuda", 0), True, (8192, 4096), kind="block") == chosen
    if usable:  # of other blocks than those of 128, which have no kind, nothing was measured
        assert matmul.choose(torch.device("cuda", 0), True, (8192, 4096), kind=None) == "triton"
