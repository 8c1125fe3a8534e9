"""torch's scaled matmul against float64 products of the dequantised operands, and what it is handed.

u = 2^-24 is FP32's rounding, u16 the 16-bit result's (2^-8 BF16, 2^-11 FP16; 0 for FP32).  S = sum_k |a b| of the
dequantised operands, y their exact product:

    sums, scales      (K + 3) u S: products of FP8 values are exact in FP32; K additions and 3 factors round
    result            u16 |y|: torch leaves the product in `out`, and in BF16 whatever `out` is where scales are by row
    bias              once more u16 |y + bias|, after it was added in the wider of the two dtypes
    FP16              2^-24 for each of the two: half its smallest subnormal
"""

import pytest
import torch
from casts import E4M3, E5M2
from casts import ROUNDING as U

from fp8engine.errors import BackendError
from fp8engine.ops import device, reference, scaled_mm
from fp8engine.ops.reference import Operand
from tests.helpers.casts import cast_of

SHAPES = [(1, 1, 1), (3, 17, 5), (16, 16, 16), (33, 50, 257), (130, 131, 129), (5, 16, 31), (16, 15, 16)]
NOTHING = [(0, 8, 4), (3, 0, 4), (3, 8, 0), (0, 0, 0)]
TAKES_ROWS = device.cpu_scales_rows.__wrapped__  # asks torch each time
TENSOR, ROW, BLOCK = (-1, -1), (1, -1), (1, 16)
GROUPS = {
    "tensor x tensor": (TENSOR, TENSOR),
    "row x row": (ROW, ROW),
    "row x tensor": (ROW, TENSOR),
    "tensor x row": (TENSOR, ROW),
}


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
def test_the_product_of_any_shape(shape, groups: str, out: torch.dtype):
    """Gradients are in E5M2, on either side; a bias may have another dtype."""
    a, b = operands(shape, GROUPS[groups])
    for bias_N in (None, torch.randn(shape[2]), torch.randn(shape[2]).bfloat16()):
        check(scaled_mm.matmul(a, b, bias_N, out), a, b, bias_N, out)
    for dtypes, fast in (((E5M2, E4M3), True), ((E4M3, E5M2), False)):
        a, b = operands(shape, GROUPS[groups], dtypes)
        check(scaled_mm.matmul(a, b, fast=fast), a, b)


@pytest.mark.parametrize("groups", ["tensor x tensor", "row x row"])
def test_operands_in_any_layout_give_the_same_bits(groups: str):
    a, b = operands((32, 48, 64), GROUPS[groups])
    wanted = scaled_mm.matmul(a, b)
    transposed = [o._replace(data=o.data.t().contiguous().t()) for o in (a, b)]
    strided = [o._replace(data=torch.stack([o.data.view(torch.uint8)] * 2, -1)[..., 0].view(E4M3)) for o in (a, b)]
    for first, second in (transposed, strided, (transposed[0], b), (a, strided[1])):
        assert not (first.data.is_contiguous() and second.data.is_contiguous())
        assert torch.equal(scaled_mm.matmul(first, second), wanted)
    columns = [operand(x, (-1, 1)) for x in (torch.randn(48, 32), torch.randn(48, 64))]  # as wgrad reads them
    check(scaled_mm.matmul(columns[0].t(), columns[1].t()), columns[0].t(), columns[1].t())


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_is_handed_what_a_card_takes(shape, groups: str, monkeypatch: pytest.MonkeyPatch):
    """Hopper reads K-major operands, K and N multiples of 16, row scales [M, 1] and [1, N] contiguous in FP32."""
    seen = []
    real = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **rest: seen.append((a, b, rest)) or real(a, b, **rest))
    m, k, n = shape
    first, second = operands(shape, GROUPS[groups])
    first = first._replace(data=first.data.t().contiguous().t())
    scaled_mm.matmul(first, second, out=torch.float32, fast=True)
    ((a_MK, b_KN, rest),) = seen
    wide, high = -(-k // 16) * 16, -(-n // 16) * 16
    assert (a_MK.shape, a_MK.stride()) == ((m, wide), (wide, 1))
    assert (b_KN.shape, b_KN.stride()) == ((wide, high), (1, wide))
    assert a_MK[:, k:].float().abs().sum() == b_KN[k:].float().abs().sum() == b_KN[:, n:].float().abs().sum() == 0
    assert torch.equal(a_MK[:, :k].float(), first.data.float())
    assert rest["use_fast_accum"] is True
    by_row = groups != "tensor x tensor"
    assert rest["out_dtype"] == (torch.bfloat16 if by_row else torch.float32)
    for name, shape_of_rows in (("scale_a", (m, 1)), ("scale_b", (1, high))):
        scale = rest[name]
        assert scale.dtype == torch.float32
        assert scale.shape == (shape_of_rows if by_row else ())
        assert scale.is_contiguous()
    if by_row:
        assert torch.equal(rest["scale_b"][0, n:], torch.ones(high - n))  # of padding: 0 by NaN would be NaN


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float):
    a, b = operands((5, 33, 7))
    a = a._replace(data=a.data.float().index_put((torch.tensor(2), torch.tensor(32)), torch.tensor(bad)).to(E5M2))
    assert scaled_mm.matmul(a, b).isfinite().all(1).tolist() == [True, True, False, True, True]


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
