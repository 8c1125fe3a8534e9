"""The kernels bound by memory from their PTX: casts, norms, activations, the update of scales, sums, against the twins.

Casts and the update of scales are equal bit for bit.  Norms and activations sum in another order and take exp from the
card's unit: benchmarks/checks/casts.py derives how far apart they may be.  Shapes have more tiles than there are
programs, and edges inside of tiles.
"""

import mmap

import pytest
import torch
from casts import E4M3, E5M2, cast_of

from benchmarks.checks import casts
from benchmarks.checks.operands import differs
from fp8engine.kernels.act_quantize import act_quantize, act_quantize_backward
from fp8engine.kernels.attention_backward import attention_backward
from fp8engine.kernels.attention_cast import attention_cast
from fp8engine.kernels.norm_quantize import norm_quantize, norm_quantize_backward
from fp8engine.kernels.scale_update import scale_update as update_scales
from fp8engine.ops import reference
from fp8engine.ops.reference import Norm, RowStatistics, Store
from fp8engine.ops.reference.attention import Form

CPU = torch.device("cpu")
SHAPE = (300, 257)  # 19 tiles of a flat cast, on 16 programs; odd rows, which no vector access fits
GROUPS = ((-1, -1, False), (-1, -1, True), (1, -1, False), (-1, 1, False), (1, 128, False), (128, 128, False))
NORMS = {"rms": Norm("rms"), "layer": Norm("layer", zero_centered=True)}


def spread(shape: tuple[int, int], dtype: torch.dtype, bad: bool) -> torch.Tensor:
    """Normal numbers over 20 octaves; bad: some of them infinite, and one NaN."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-9, 10, shape))
    if bad:
        x.view(-1)[:: x.numel() // 3] = float("inf")
        x[-1, -1] = float("nan")
    return x.to(dtype)


@pytest.mark.few(5)
@pytest.mark.slow
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "not finite"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a_cast_is_its_twin_bit_for_bit(group: tuple[int, int, bool], dtype: torch.dtype, bad: bool, card, whole: bool):
    rows, cols, delayed = group
    x = spread(SHAPE if dtype != torch.float16 else (256, 256), dtype, bad)
    card()
    for format in (E4M3, E5M2) if whole else (E5M2 if bad or delayed else E4M3,):
        how = cast_of(format, rows, cols, format == E4M3, delayed)
        for predicted in (2.0**-6, 2.0**6) if delayed else (0.0,):  # too small, so that the cast is done again; right
            pair = (casts.cast_results(CPU, name, x, how, predicted) for name in ("triton", "reference"))
            for name, ours, twins in zip(casts.CAST, *pair, strict=True):
                assert differs(ours, twins) is None, name


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
def test_a_product_is_rounded_to_fp32_before_it_is_rounded_to_fp8(format: torch.dtype, card):
    how = cast_of(format, -1, -1, False, False)
    x = casts.near_ties(torch.randn(64, 64), how)
    s = how.format.max / x.abs().max()
    product = x * s
    code = product.to(how.dtype).float()
    is_tie = (product != code) & ((other := 2 * product - code) == other.to(how.dtype).float())
    moved = product.double() != x.double() * s.double()
    assert (is_tie & moved).sum() > 200, "few products are rounded onto a tie"
    card()
    assert casts.compare_casts(CPU, x, how) is None


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize("store", [*casts.STORES, "backward"])
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_is_its_twin(kind: str, store: str, card, whole: bool):
    norm, shape = NORMS[kind], (150, 200)  # 8 rows a tile: 19 tiles
    card()
    for dtype in (torch.bfloat16, torch.float32) if whole else (torch.bfloat16,):
        x, dy = (torch.randn(shape).to(dtype) for _ in range(2))
        weight = torch.randn(shape[1]).to(dtype)
        bias = torch.randn(shape[1]).to(dtype) if kind == "layer" else None
        rows = reference.norm_quantize(x, weight, bias, norm)[3]

        def run(of, to, x=x, dy=dy, weight=weight, bias=bias, rows=rows):
            if store != "backward":
                return of.norm_quantize(x, weight, bias, norm, to)
            return of.norm_quantize_backward(dy, x, weight, rows, norm)

        assert casts.compared(CPU, run, *casts.STORES.get(store, (None, False))) is None


# How a result is stored does not depend on the function: `make emulated` tries every pair.
STORED = [
    pytest.param(kind, store, marks=[] if kind in ("gelu", "swiglu") or store == "16 bits" else pytest.mark.whole)
    for kind in casts.ACTIVATIONS
    for store in casts.STORES
]


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("kind", "store"), STORED)
def test_an_activation_is_its_twin(kind: str, store: str, direction: str, card):
    n = 256
    x, dy = torch.randn(70, 2 * n if casts.ACTIVATIONS[kind].gated else n).bfloat16(), torch.randn(70, n).bfloat16()
    card()

    def run(of, to):
        return of.act_quantize(x, kind, to) if direction == "forward" else of.act_quantize_backward(dy, x, kind, to)

    assert casts.compared(CPU, run, *casts.STORES[store]) is None


@pytest.mark.parametrize("architecture", [80, 89, 90])
def test_the_update_of_scales_is_its_twin_bit_for_bit(architecture: int, card):
    card(architecture)
    assert casts.scale_update(CPU) is None
    # A window of two tiles of 64 steps: each has a barrier between what it reads and what it writes.
    ours, twins = ([torch.ones(70, 40), torch.full((2, 40), 3.0), torch.full((3, 40), 70.0)] for _ in "ab")
    update_scales(*ours)
    reference.scale_update(*twins)
    assert differs(torch.cat(ours), torch.cat(twins)) is None


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 7), (300, 257)], ids=str)
def test_sums_of_columns_stay_within_their_bound(shape: tuple[int, int], card):
    card()
    assert casts.column_sums(CPU, shape) is None


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["swiglu", "clamped_swiglu"])
def test_a_gate_and_an_up_that_are_two_matrices(kind: str, card):
    gate, up, dy = torch.randn(70, 132).bfloat16()[:, :130], torch.randn(130, 70).bfloat16().t(), torch.randn(70, 130)
    card()
    how = casts.STORES["per tensor, transposed"]
    assert casts.compared(CPU, lambda of, to: of.act_quantize(gate, kind, to, up), *how) is None
    backward = lambda of, to: of.act_quantize_backward(dy.bfloat16(), gate, kind, to, up)  # noqa: E731
    assert casts.compared(CPU, backward, None, False) is None


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ada_casts_as_the_twin(dtype: torch.dtype, format: torch.dtype, card):
    x = spread((70, 130), dtype, bad=True)
    card(89)
    for rows, cols, _ in GROUPS[::2]:
        how = cast_of(format, rows, cols)
        pair = (casts.cast_results(CPU, name, x, how, 0.0) for name in ("triton", "reference"))
        for name, ours, twins in zip(casts.CAST, *pair, strict=True):
            assert differs(ours, twins) is None, name


# Matrices of more than 2^31 elements, few of them used: no offset has 32 bits.
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
def test_a_norm_far_apart(strides: tuple[int, int], card):
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
def test_an_activation_far_apart(strides: tuple[int, int], card):
    x, dy, up = (torch.randn(3, 3).bfloat16() for _ in range(3))
    card()
    assert same(act_quantize(far(x, *strides), "silu", Store()), act_quantize(x, "silu", Store()))
    found = act_quantize_backward(far(dy, *strides), far(x, *strides), "swiglu", Store(), far(up, *strides))
    assert same(found, act_quantize_backward(dy, x, "swiglu", Store(), up))


@pytest.mark.slow
def test_rows_of_attention_far_apart(card):
    """Of five blocks of 64; a stride of 2^23 is the most that `launch.addressable` admits."""
    x = torch.randn(1, 1, 260, 64).bfloat16()
    card()
    assert same(attention_cast(far(x, 64, 64, 1 << 23, 1), None, 64), attention_cast(x, None, 64))


@pytest.mark.slow
@pytest.mark.parametrize("name", "qko")
def test_batches_of_attention_far_apart(name: str, card):
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
