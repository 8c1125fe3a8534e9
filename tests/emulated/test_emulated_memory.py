"""The kernels bound by memory from their PTX: casts, norms, activations, the update of scales, sums, against the twins.

Casts and the update of scales are equal bit for bit.  Norms and activations sum in another order and take exp from the
card's unit: benchmarks/checks/casts.py derives how far apart they may be.  Shapes have more tiles than there are
programs, and edges inside of tiles.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.checks import casts
from benchmarks.checks.operands import differs
from fp8engine.ops import reference
from fp8engine.ops.reference import Norm
from tests.helpers.casts import cast_of

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
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


@pytest.mark.few(8)
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
