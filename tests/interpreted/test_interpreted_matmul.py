"""Every matmul against float64 products of what its operands stand for (the bound: conftest.py).

Bit for bit the twin where sums are exact: test_interpreted_epilogue.py.

fp8, promoted    FP8 codes, a scale per tensor or row of either operand; sums of the Tensor Core's own, or promoted
block            FP8 codes, scales along K
fp16             BF16 or FP16, either operand contiguous along K or along its rows
"""

import itertools

import faithful
import pytest
import torch
from casts import E4M3, E5M2, cast_of
from hypothesis import given, settings
from hypothesis import strategies as st
from real_operands import real
from triton.runtime import interpreter

from fp8engine.kernels import launch
from fp8engine.kernels import matmul as module
from fp8engine.kernels.matmul import matmul_fp8, matmul_fp16
from fp8engine.kernels.tuning import Config, table
from fp8engine.ops.reference import Epilogue, Operand, quantize

TENSOR, ROW, ALONG_K, ALONG_ROWS = (-1, -1), (1, -1), "along K", "along rows"
# How one operand may be given: rows and columns of a scale's group, or along what its 16-bit numbers lie.
SIDES = {
    "fp8": (TENSOR, ROW),
    "promoted": (TENSOR, ROW),
    "block": ((1, 128), (128, 128)),
    "fp16": (ALONG_K, ALONG_ROWS),
}
PAIRS = {kind: list(itertools.product(sides, repeat=2)) for kind, sides in SIDES.items()}
MATMULS = {"matmul_fp8": "fp8", "matmul_fp8_promoted": "promoted", "matmul_block": "block", "matmul_fp16": "fp16"}
COMMITTED = {
    (kind, config._replace(ratio=None))
    for operation, kind in MATMULS.items()
    for rows in table()[operation].values()
    for config in rows.values()
    if config.kernel == "triton"
}
POINTERS = Config(64, 64, 128, group_m=2, descriptors=False)
DESCRIPTORS = Config(64, 64, 128, group_m=2, parts=2)
FORMATS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (torch.bfloat16,) * 2, (torch.float16,) * 2]
OUTPUTS = [torch.bfloat16, torch.float16, torch.float32]
FP32 = Epilogue(None, torch.float32)
of_each = pytest.mark.parametrize("kind", SIDES)


def laid(x_MK: torch.Tensor, side) -> torch.Tensor:
    """The same numbers, along their rows where the side says so."""
    return x_MK.t().contiguous().t() if side == ALONG_ROWS else x_MK


def operand(x_MK: torch.Tensor, side, dtype: torch.dtype | None = None) -> Operand:
    """x as one side of a matmul; 16-bit numbers under a scale of one."""
    if side in SIDES["fp16"]:
        return Operand(laid(x_MK.to(dtype or torch.bfloat16), side), torch.ones(()))
    return Operand(*quantize(x_MK, cast_of(dtype or E4M3, *side)), *side)


def random(side, m: int, k: int, dtype: torch.dtype | None = None) -> Operand:
    """Values whose size changes from row to row and from one 16 of K to the next, so that every scale differs."""
    x_MK = torch.randn(m, k) * torch.exp2(torch.randint(-2, 3, (m, 1)))
    x_MK *= torch.exp2(torch.randint(-2, 3, (-(-k // 16),))).repeat_interleave(16)[:k]
    return operand(x_MK, side, dtype)


def integers(side, m: int, k: int) -> Operand:
    """Small integers under scales of 1/8 to 8: their products sum exactly, in any order."""
    x = torch.randint(-8, 9, (m, k))
    if side in SIDES["fp16"]:
        return operand(x, side)
    shape = cast_of(E4M3, *side).scale_shape(m, k)
    return Operand(x.to(E4M3), torch.exp2(torch.randint(-3, 4, shape) * 1.0), *side)


def multiply(kind: str, a: Operand, b: Operand, end: Epilogue = FP32, config: Config | None = None) -> torch.Tensor:
    """The kernel's product."""
    if kind == "fp16":
        return matmul_fp16(a.data, b.data, end, config)
    return matmul_fp8(a, b, end, kind == "promoted", config)


@pytest.mark.few(20)
@pytest.mark.parametrize(("kind", "config"), sorted(COMMITTED), ids=str)
def test_every_committed_configuration(kind, config, assert_within_bound):
    # Two tiles down, two across, three along K, the last of each ragged; rows of the result aligned, and not.
    m, k = config.block_m + (75 if kind == "block" else 22), 2 * config.block_k + 16
    pairs = {"block": PAIRS[kind], "fp16": 2 * [(ALONG_K, ALONG_K)]}.get(kind, 2 * [(TENSOR, ROW)])
    for i, (first, second) in enumerate(pairs):
        n, out = config.block_n + (8, 3)[i % 2], (torch.bfloat16, torch.float32)[i % 2]
        dtype = (torch.bfloat16, torch.float16)[i] if kind == "fp16" else E4M3
        a, b, bias_N = random(first, m, k, dtype), random(second, n, k, dtype), torch.randn(n)
        y_MN = multiply(kind, a, b, Epilogue(bias_N, out), config)
        assert y_MN.dtype == out
        assert_within_bound(y_MN, real(a), real(b), bias_N, out)


@pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=str)
@pytest.mark.parametrize(
    ("kind", "formats"),
    [(kind, formats) for kind in SIDES for formats in FORMATS if (formats[0].itemsize == 2) == (kind == "fp16")],
    ids=str,
)
def test_formats_and_sides(kind, formats, config, assert_within_bound):
    for (first, second), out in zip(PAIRS[kind], itertools.cycle(OUTPUTS)):
        a, b = random(first, 140, 144, formats[0]), random(second, 72, 144, formats[1])
        y_MN = multiply(kind, a, b, Epilogue(None, out), config)
        assert_within_bound(y_MN, real(a), real(b), None, (first, second, out))


@of_each
@settings(max_examples=20)
@given(m=st.integers(0, 150), n=st.integers(0, 150), k=st.integers(0, 300), place=st.integers(0, 11))
def test_any_shape_under_the_configuration_that_is_picked(assert_within_bound, kind, m, n, k, place):
    (first, second), out = PAIRS[kind][place % 4], OUTPUTS[place % 3]
    if not k:  # a row of nothing has no scale
        first, second = (TENSOR if side == ROW else side for side in (first, second))
    a, b, bias_N = random(first, m, k), random(second, n, k), torch.randn(n)
    assert_within_bound(multiply(kind, a, b, Epilogue(bias_N, out)), real(a), real(b), bias_N)


@of_each
@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 5), (3, 0, 5), (3, 5, 0), (0, 0, 0), (1, 1, 1), (1, 128, 127)])
def test_empty_and_single(m, n, k, kind, assert_within_bound):
    bias_N = torch.randn(n)
    for first, second in PAIRS[kind]:
        if ROW not in (first, second) or k:
            a, b = random(first, m, k), random(second, n, k)
            y_MN = multiply(kind, a, b, Epilogue(bias_N, torch.float32))
            assert_within_bound(y_MN, real(a), real(b), bias_N)
            assert k or torch.equal(y_MN, bias_N.expand(m, n))


def views(m: int, k: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """An m x k matrix as parts of something larger.  The first three a descriptor describes."""
    x = torch.randn(2 * m + 2, 3 * k + 16).to(dtype)
    return {
        "aligned slice": x[1 : m + 1, 16 : 16 + k],
        "every other row": x[: 2 * m : 2, :k],
        "aligned slice, turned": torch.randn(k, m + 16).to(dtype)[:, 8 : m + 8].t(),
        "unaligned slice": x[1 : m + 1, 3 : 3 + k],
        "one row for all": x[:1, :k].expand(m, k),
        "windows": x.view(-1)[: m + k].as_strided((m, k), (1, 1)),
        "strided both ways": x[: 2 * m : 2, : 3 * k : 3],
        "strided both ways, turned": torch.randn(2 * k, 2 * m).to(dtype)[::2, ::2].t(),
        "one column for all": x[:m, :1].expand(m, k),
        "one number for all": x[:1, :1].expand(m, k),
    }


VIEWS = [*views(4, 4, torch.bfloat16)]
CODES = [VIEWS[0], VIEWS[1], *VIEWS[3:6]]  # contiguous along K


@pytest.mark.parametrize(
    ("kind", "view"), [*itertools.product(("fp8", "block"), CODES), *(("fp16", view) for view in VIEWS)]
)
def test_views_of_any_strides(kind, view, assert_within_bound):
    m, n, k = 72, 88, 160  # rows of 496 and 992 bytes, of which 16 is a factor
    a, b = random(SIDES[kind][0], m, k), random(SIDES[kind][1], n, k)
    described, strides = view in VIEWS[:3], None
    for pair in (
        (a._replace(data=views(m, k, a.data.dtype)[view]), b),
        (a, b._replace(data=views(n, k, b.data.dtype)[view])),
    ):
        strides = [launch.load_of(x.data) if kind == "fp16" else launch.describable(x.data) for x in pair]
        assert (launch.POINTER not in strides and False not in strides) == described
        for config in (None, DESCRIPTORS) if kind == "fp16" else (None,):  # one by descriptor beside one that cannot be
            assert_within_bound(multiply(kind, *pair, FP32, config), real(pair[0]), real(pair[1]), None, config)
    assert view != "aligned slice, turned" or launch.TRANSPOSED in strides


@of_each
def test_what_is_not_finite_reaches_its_row_and_its_column_and_no_other(kind):
    dtypes = [torch.bfloat16] * 4 if kind == "fp16" else [E4M3, E5M2, E5M2, E5M2]
    bads = [float("nan"), float("nan"), float("inf"), float("-inf")]
    for dtype, bad, (first, second) in zip(dtypes, bads, PAIRS[kind], strict=True):
        a, b = (operand(torch.rand(m, 144) + 0.5, side) for m, side in ((72, first), (88, second)))
        wide = a.data.float()
        wide[65, 130] = bad
        a = a._replace(data=laid(wide.to(dtype), first))
        for config, out in ((POINTERS, torch.float16), (DESCRIPTORS, torch.bfloat16)):
            others = torch.arange(72) != 65
            for y_MN in (
                multiply(kind, a, b, Epilogue(None, out), config),
                multiply(kind, b, a, Epilogue(None, out), config).t(),
            ):
                assert (y_MN[65] == bad).all() or (y_MN[65].isnan().all() and bad != bad)
                assert y_MN[others].isfinite().all()


@pytest.mark.parametrize("processors", [1, 3, 4, 100])
@of_each
def test_any_number_of_programs_covers_every_tile(kind, processors, monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda where: processors)
    a, b = integers(SIDES[kind][0], 170, 32), integers(SIDES[kind][1], 150, 32)
    config = Config(32, 32, 128 if kind == "block" else 32, group_m=4, descriptors=False)  # 6 x 5 tiles
    assert launch.persistent_grid(170, 150, config, a.data.device) == (min(processors, 30),)
    assert torch.equal(multiply(kind, a, b, FP32, config).double(), real(a) @ real(b).t())


@pytest.mark.parametrize(("first", "second"), PAIRS["fp8"], ids=str)
def test_a_scale_near_the_end_of_fp32_makes_no_finite_result_infinite(first, second, assert_within_bound):
    """The scale is near 2^120 / 448, sums reach 2^17 * K: one times the other passes 2^128, the result does not."""
    large, small = torch.randn(70, 80).clamp(-4, 4) * 2.0**118, torch.randn(72, 80) * 2.0**-10
    for one, other in ((large, small), (small, large)):
        a, b = operand(one, first), operand(other, second)
        for config in (POINTERS, DESCRIPTORS):
            assert_within_bound(multiply("fp8", a, b, FP32, config), real(a), real(b))


@pytest.mark.parametrize("card", [89, 90, 120])
@pytest.mark.parametrize("kind", ["fp8", "promoted"])
def test_promotion_starts_the_tensor_core_s_sum_anew_for_each_block_of_k(kind, card, monkeypatch):
    # The interpreter's dot sums in FP32 either way: what tells the two apart is the accumulator that it is given, and
    # where it is mma.sync that multiplies the limit that keeps Triton from taking the sum so far for it.
    monkeypatch.setattr(module, "cuda_capability_geq", lambda major, minor: card >= 10 * major + minor)
    started, limits = [], []

    def dot(self, a, b, d, precision, limit):
        started.append(bool((d.data == 0).all()))
        limits.append(limit)
        return faithful.dot(self, a, b, d, precision, limit)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    one = Operand(torch.ones(64, 3 * POINTERS.block_k).to(E4M3), torch.ones(()))
    assert (multiply(kind, one, one, FP32, POINTERS) == 3 * POINTERS.block_k).all()
    assert started == ([True] * 3 if kind == "promoted" else [True, False, False])
    assert set(limits) == ({POINTERS.block_k} if kind == "promoted" and card != 90 else {0})


@pytest.mark.parametrize(("first", "second"), PAIRS["block"], ids=str)
def test_a_tile_that_crosses_blocks_of_scales_reads_each_row_s_own(first, second, assert_within_bound):
    a, b = random(first, 300, 144), random(second, 280, 144)
    y_MN = multiply("block", a, b, FP32, Config(256, 256, 128, descriptors=False))
    assert_within_bound(y_MN, real(a), real(b))


@pytest.mark.parametrize("cols", [32, 64])
def test_groups_of_k_of_another_width(cols, assert_within_bound):
    for rows_a, rows_b in ((1, cols), (cols, 1), (2 * cols, 2 * cols)):
        a, b = random((rows_a, cols), 70, 80), random((rows_b, cols), 40, 80)
        assert_within_bound(multiply("block", a, b, FP32, POINTERS), real(a), real(b))


@pytest.mark.parametrize(("first", "second"), PAIRS["block"], ids=str)
def test_scales_of_any_strides(first, second, assert_within_bound):
    a, b = random(first, 140, 272), random(second, 150, 272)
    turned = a._replace(scale=a.scale.t().contiguous().t())
    wide = torch.full((b.scale.shape[0] * 2, b.scale.shape[1] + 5), float("nan"))
    wide[::2, 2:-3] = b.scale
    assert_within_bound(multiply("block", turned, b._replace(scale=wide[::2, 2:-3])), real(a), real(b))
