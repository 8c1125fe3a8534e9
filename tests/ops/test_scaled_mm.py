"""torch's scaled matmul against float64 products of the dequantised operands, and against its own rules for CUDA.

u = 2^-24 is FP32's rounding, u16 the 16-bit result's (2^-8 BF16, 2^-11 FP16; 0 for FP32).  S = sum_k |a b| of the
dequantised operands, y their exact product:

    sums, scales      (K + 3) u S: products of FP8 values are exact in FP32; K additions and 3 factors round
    result            u16 |y|: torch leaves the product in `out`, and in BF16 whatever `out` is where scales are by row
    bias              once more u16 |y + bias|, after it was added in the wider of the two dtypes
    FP16              2^-24 for each of the two: half its smallest subnormal

The rules are torch's own: the meta function of `_scaled_mm`, which reads shapes, strides and dtypes of CUDA tensors
that hold nothing.  `make test-oldest` runs the same tests with the rules of the oldest torch.
"""

import functools
import itertools

import pytest
import torch
from casts import E4M3, E5M2, cast_of
from casts import ROUNDING as U
from contracts import Given
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8engine as fe
from fp8engine.errors import BackendError
from fp8engine.ops import casts, device, reference, scaled_mm
from fp8engine.ops.reference import Operand

SHAPES = [(1, 1, 1), (3, 17, 5), (16, 16, 16), (33, 50, 257), (130, 131, 129), (5, 16, 31), (16, 15, 16)]
NOTHING = [(0, 8, 4), (3, 0, 4), (3, 8, 0), (0, 0, 0)]
SCALED_MM = torch._scaled_mm
TAKES_ROWS = device.cpu_scales_rows.__wrapped__  # asks torch each time
HAS_ROWS = TAKES_ROWS()
TENSOR, ROW, BLOCK = (-1, -1), (1, -1), (1, 16)
LINES, SQUARES = (1, 128), (128, 128)
GROUPS = {
    "tensor x tensor": (TENSOR, TENSOR),
    "row x row": (ROW, ROW),
    "row x tensor": (ROW, TENSOR),
    "tensor x row": (TENSOR, ROW),
}


@functools.cache
def asked(tensors: tuple, bias: tuple | None, out_dtype: torch.dtype, fast: bool) -> tuple[int, ...]:
    """The result's shape, or torch's error, for CUDA tensors of these (shape, strides, dtype)."""
    with FakeTensorMode():
        put = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda")  # noqa: E731
        there, bias_N = [put(*tensor) for tensor in tensors], None if bias is None else put(*bias)
        return tuple(SCALED_MM(*there, bias=bias_N, out_dtype=out_dtype, use_fast_accum=fast).shape)


class Card:
    """Stands for torch._scaled_mm: asks CUDA's rules first, then computes on the CPU."""

    def __init__(self):
        self.calls: list[bool] = []  # whether each was to sum fast
        self.biases: list[torch.Tensor | None] = []

    def __call__(self, a, b, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False):
        self.calls.append(use_fast_accum)
        self.biases.append(bias)
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
        if in_blocks:
            y_MN = (real(a, scale_a) @ real(b.t(), scale_b.t()).t()).to(out_dtype)
        elif bias is None and (scale_a.dim() == 0 or HAS_ROWS):
            y_MN = SCALED_MM(a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
        else:
            y_MN = a.float() @ b.float() * scale_a * scale_b
            y_MN = (y_MN if bias is None else y_MN + bias.float()).to(out_dtype)
        assert y_MN.shape == shape
        return y_MN


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
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A card of these rules, with scales in blocks, in the place of torch's scaled matmul."""
    found = Card()
    monkeypatch.setattr(torch, "_scaled_mm", found)
    monkeypatch.setattr(device, "cpu_scales_rows", lambda: True)
    monkeypatch.setattr(scaled_mm, "no_blocks", lambda where: None)
    return found


def operand(x_MK: torch.Tensor, group=TENSOR, dtype=E4M3) -> Operand:
    return Operand(*reference.quantize(x_MK, cast_of(dtype, *group)), *group)


def operands(shape, groups=(TENSOR, TENSOR), dtypes=(E4M3, E4M3)) -> tuple[Operand, Operand]:
    """Rows of very different size, so that a scale taken for another row's shows; products fit into FP16."""
    m, k, n = shape
    spread_M, spread_N = (torch.exp2(torch.randint(-4, 5, (size, 1))) for size in (m, n))
    return (
        operand(torch.randn(m, k) * spread_M, groups[0], dtypes[0]),
        operand(torch.randn(n, k) * spread_N, groups[1], dtypes[1]),
    )


def check(found: torch.Tensor, a: Operand, b: Operand, bias_N=None, out=torch.bfloat16) -> None:
    a_MK, b_NK = a.data.double() * a.scale, b.data.double() * b.scale
    y_MN, sums_MN = a_MK @ b_NK.t(), a_MK.abs() @ b_NK.abs().t()
    rounded = torch.bfloat16 if a.scale.dim() == 2 or b.scale.dim() == 2 else out
    bound = (a_MK.shape[1] + 3) * 2.0**-24 * sums_MN + U[rounded] * y_MN.abs()
    wanted = y_MN if bias_N is None else y_MN + bias_N.double()
    bound = 1.01 * (bound + U[out] * wanted.abs()) + (2.0**-23 if out == torch.float16 else 0)  # 1.01: of each other
    assert (found.dtype, found.shape, found.is_contiguous()) == (out, wanted.shape, True)
    error = (found.double() - wanted).abs()
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"


@pytest.mark.parametrize("out", U, ids=str)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("shape", [*SHAPES, *NOTHING], ids=str)
def test_the_product_of_any_shape_dtype_and_layout(shape, groups: str, out: torch.dtype, card: Card):
    """Gradients are in E5M2, on either side; a bias may have another dtype, and lie in every second place."""
    n = shape[2]
    biases = (None, torch.randn(n), torch.randn(n).to(out), torch.randn(2 * n).bfloat16()[::2])
    for dtypes, fast in (((E4M3, E4M3), False), ((E5M2, E4M3), True), ((E4M3, E5M2), False)):
        a, b = operands(shape, GROUPS[groups], dtypes)
        wanted = scaled_mm.matmul(a, b, None, out, fast)
        assert card.calls[-1:] == ([fast] if 0 not in shape else [])
        for bias_N in biases:
            check(scaled_mm.matmul(a, b, bias_N, out, fast), a, b, bias_N, out)
        for layout in ("columns", "strided") if 0 not in shape else ():
            laid_out = Given(1, 1, layout=layout).laid_out
            turned = [each._replace(data=laid_out(each.data)) for each in (a, b)]
            for first, second in ((turned[0], b), (a, turned[1]), turned):
                assert torch.equal(scaled_mm.matmul(first, second, None, out, fast), wanted)
    columns = [operand(torch.randn(shape[1], size), (-1, 1)) for size in (shape[0], n)]  # as wgrad reads them
    check(scaled_mm.matmul(columns[0].t(), columns[1].t()), columns[0].t(), columns[1].t())


@pytest.mark.parametrize(
    ("groups", "n", "out", "inside"),
    [
        ("tensor x tensor", 16, torch.bfloat16, True),
        ("row x row", 16, torch.bfloat16, True),
        ("tensor x tensor", 16, torch.float32, False),  # an FP32 result
        ("tensor x tensor", 21, torch.bfloat16, False),  # a padded N
    ],
)
def test_a_card_rounds_a_bias_of_fp32_that_torch_adds_and_keeps_the_digits_of_one_that_it_does_not(
    groups: str, n: int, out: torch.dtype, inside: bool, card: Card, monkeypatch: pytest.MonkeyPatch
):
    """Sums of small integers are exact: there is one rounding, that of the result, or two where torch adds no bias."""
    monkeypatch.setattr(device, "has_fp8", lambda where: True)
    a, b = (Operand(torch.randint(-8, 9, (rows, 32)).to(E4M3), torch.tensor(0.5)) for rows in (5, n))
    if groups == "row x row":
        a, b = (x._replace(scale=torch.ones(len(x.data), 1), rows=1) for x in (a, b))
    bias_N, sums = torch.randn(n), (a.data.double() * a.scale) @ (b.data.double() * b.scale).t()
    wanted = (sums + bias_N.to(out).double()).to(out) if inside else (sums.to(out) + bias_N).to(out)
    assert torch.equal(scaled_mm.matmul(a, b, bias_N, out), wanted)
    assert [bias is None or bias.dtype for bias in card.biases] == [out if inside else True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float):
    a, b = operands((5, 33, 7))
    a = a._replace(data=a.data.float().index_put((torch.tensor(2), torch.tensor(32)), torch.tensor(bad)).to(E5M2))
    assert scaled_mm.matmul(a, b).isfinite().all(1).tolist() == [True, True, False, True, True]


@pytest.fixture
def transposes_of_kernels(monkeypatch: pytest.MonkeyPatch):
    """Transposes lie as Triton's cast_transpose leaves them: allocated as [K, M], so that [1, M] has strides (M, 1)."""
    real = casts._cast_transpose

    def laid_out(*arguments, slot):
        data, scale, turned, *rest = real(*arguments, slot=slot)
        fresh = torch.empty(turned.shape, dtype=torch.uint8).copy_(turned.view(torch.uint8)).view(turned.dtype)
        return data, scale, fresh, *rest

    monkeypatch.setattr(casts, "_cast_transpose", laid_out)


PAIRS = ((LINES, SQUARES), (SQUARES, LINES), (LINES, LINES))


def blocked(rows: int, k: int, kind: tuple[int, int], turned: bool) -> Operand:
    """Codes 0, 1, -1 under powers of two: sums of them are exact.  turned: scales as the transpose of a cast's."""
    if kind == TENSOR:
        return operand(torch.randn(rows, k))
    groups = -(-rows // kind[0]), -(-k // kind[1])
    scale = torch.exp2(torch.randint(-2, 3, groups[::-1] if turned else groups).float())
    data = torch.randint(-1, 2, (rows, k)).float().to(E4M3)
    return Operand(data, scale.t() if turned else scale, *kind, True)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_card_refuses_no_blocks_and_they_are_multiplied(card: Card, pair):
    shapes = itertools.product((1, 16, 130), (1, 33, 256), (1, 100, 128, 200, 512, 700))
    for (m, n, k), turned, out in itertools.product(shapes, (False, True), U):
        a, b = blocked(m, k, pair[0], turned), blocked(n, k, pair[1], turned)
        y = scaled_mm.matmul(a, b, None, out)
        wanted = reference.matmul_fp8(a, b, None, torch.float32, exact=True).to(out)
        assert (y.shape, y.dtype, y.is_contiguous()) == ((m, n), out, True)
        assert torch.equal(y, wanted), (m, n, k, turned, out)
    assert len(card.calls) == 3 * 3 * 6 * 2 * len(U)


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "rowwise_gw_hp", "blockwise"])
@pytest.mark.parametrize("needs", [True, False], ids=["the input needs a gradient", "the input needs none"])
def test_a_card_refuses_no_step_of_a_layer(card: Card, transposes_of_kernels, recipe: str, needs: bool):
    """Among them the head with one output: its dy^T is a single row."""
    sizes = [*itertools.product((1, 16, 17, 32), (1, 16, 48), (1, 2, 48))]
    for m, k, n in [*sizes, (130, 200, 96)]:
        torch.manual_seed(m + k + n)
        layer = fe.Linear(k, n, recipe=recipe)
        x, dy = torch.randn(m, k, requires_grad=needs), torch.randn(m, n)
        found = []
        card.calls.clear()
        for backend in ("cublas", "reference"):
            layer.zero_grad()
            x.grad = None
            with fe.backend(backend):
                y = layer(x)
                y.backward(dy)
            assert fe.inspect(layer).layers[0]["backend"] == backend
            found.append([y.detach(), layer.weight.grad, layer.bias.grad, *([x.grad] if needs else [])])
        summed = {"forward": True, "dgrad": True, "wgrad": False}  # which promotes
        in_fp8 = [
            name for name in summed if layer.numerics.recipe.operands(name)[0].is_fp8 and (needs or name != "dgrad")
        ]
        assert card.calls == [summed[name] and recipe != "blockwise" for name in in_fp8]
        for ours, its in zip(*found, strict=True):
            # The same codes and scales: apart is the rounding of the result to BF16 (2^-8), of 16-bit operands as of
            # sums of up to 200 terms, against the largest of them.
            assert (ours - its).abs().max() <= 2.0**-6 * its.abs().max()


REFUSED = {
    "E5M2 by E5M2": (TENSOR, TENSOR, E5M2, E5M2, "do not multiply E5M2 by E5M2"),
    "blocks of the first": (BLOCK, TENSOR, E4M3, E4M3, "along K"),
    "blocks of the second": (ROW, (16, 16), E4M3, E4M3, "along K"),
    "a scale per element of K": (TENSOR, (-1, 1), E4M3, E4M3, "along K"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_card_refuses_a_cpu_refuses(case: str):
    first, second, dtype_a, dtype_b, words = REFUSED[case]
    a, b = operand(torch.randn(32, 32), first, dtype_a), operand(torch.randn(32, 32), second, dtype_b)
    assert words in str(scaled_mm.unsupported(a, b))
    with pytest.raises(BackendError, match=rf"'cublas' cannot multiply these: .*{words}.*fe.backend\('reference'\)"):
        scaled_mm.matmul(a, b)


@pytest.mark.parametrize("pair", [(SQUARES, SQUARES), ((1, 64), (1, 64)), (LINES, TENSOR)], ids=str)
def test_other_blocks_are_refused(card: Card, pair):
    a, b = (blocked(16, 128, kind, False) for kind in pair)
    assert "1x128 by 128x128" in (scaled_mm.unsupported(a, b) or "")
    with pytest.raises(BackendError, match="cannot multiply these"):
        scaled_mm.matmul(a, b)


def test_where_it_is_not(monkeypatch: pytest.MonkeyPatch):
    a, b = operands((16, 16, 16))
    assert scaled_mm.unsupported(a, b) is None
    assert "not FP8 codes" in str(scaled_mm.unsupported(a._replace(data=a.data.bfloat16()), a))
    meta = a._replace(data=a.data.to("meta"))
    assert scaled_mm.unsupported(meta, meta) == "no scaled matmul on meta"
    card = a._replace(data=type("OnCard", (), {"device": torch.device("cuda")})())
    monkeypatch.setattr(device, "capability", lambda where: (8, 0))
    monkeypatch.setattr(device, "name", lambda where: "A100")
    assert scaled_mm.unsupported(card, card) == "A100 has no FP8 Tensor Cores; sm_89 or later has"
    monkeypatch.delattr(torch, "_scaled_mm")
    with pytest.raises(BackendError, match="this torch has no scaled matmul"):
        scaled_mm.matmul(a, b)


@pytest.mark.parametrize("takes", [True, False])
def test_row_scales_on_a_cpu_where_torch_has_none(takes: bool, monkeypatch: pytest.MonkeyPatch):
    """As torch 2.11, whose own words are "INTERNAL ASSERT FAILED ... report a bug"."""

    def fails(a, b, scale_a, scale_b, out_dtype):
        if not takes:
            raise RuntimeError("INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch, "_scaled_mm", fails)
    monkeypatch.setattr(device, "cpu_scales_rows", TAKES_ROWS)
    assert device.cpu_scales_rows() is takes
    a, b = operands((16, 16, 16), GROUPS["row x tensor"])
    for first, second in ((a, b), (b, a)):
        reason = scaled_mm.unsupported(first, second)
        assert reason == (None if takes else f"torch {torch.__version__} has no row scales on a CPU")
    assert scaled_mm.unsupported(b, b) is None


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
