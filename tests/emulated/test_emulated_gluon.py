"""The Gluon matmul with two consumers, from its PTX: bit for bit what plain Triton's kernels are required to give.

    none      promoted, scales per tensor and row: twin kernels/matmul.py
    loaded    1x128 by 128x128 (forward, dgrad), ring: 1x128 by 1x128 (wgrad): the same

The order of sums is checked with scales that are no powers of two, against FP32 arithmetic on the host: the Tensor
Core's sum of 128 products of small integers is exact; each is multiplied and added in the order of K, rounded once.
Six tiles, ragged, on the four programs of the emulated card, which runs warps in the order of a seed and delays copies.
"""

import pytest
import torch

from benchmarks.checks.operands import counts, differs, exact, in_blocks, integers, uneven
from fp8engine.kernels.matmul import matmul_fp8
from fp8engine.kernels.matmul_gluon import matmul_gluon, unsupported
from fp8engine.kernels.tuning import Config
from fp8engine.numerics.formats import E4M3, E5M2
from fp8engine.ops import reference
from fp8engine.ops.reference import Epilogue, Operand

CPU = torch.device("cpu")
TILE = Config(128, 128, 128, group_m=2, warps=8, stages=3, parts=2, kernel="gluon")
WAYS = ("none", "loaded", "ring")
M, N = 260, 144  # 3 x 2 tiles, the last ones of 4 rows and 16 columns
K = 784  # four products that go together, two single ones, and 16 of K: more than three stages, and a ragged end


def operands(way: str, m: int = M, n: int = N, k: int = K) -> tuple[Operand, Operand]:
    if way == "none":
        return integers(CPU, m, k, E5M2, by_row=True), integers(CPU, n, k, E4M3, by_row=False)
    a, b = in_blocks(CPU, m, k, 1), in_blocks(CPU, n, k, 1 if way == "ring" else 128)
    along_rows = [x._replace(scale=x.scale.t().contiguous().t()) for x in (a, b)]
    return (along_rows[0], along_rows[1]) if way == "ring" else (a, b)


def fused(a: Operand, b: Operand) -> torch.Tensor:
    """sum_g fma(sum, scale_a * scale_b, acc) in the order of K.  FP64 holds it before it is rounded to FP32."""
    acc = torch.zeros(a.data.shape[0], b.data.shape[0])
    for group in range(a.scale.shape[1]):
        along = slice(128 * group, 128 * group + 128)
        sums = a.data[:, along].float() @ b.data[:, along].float().t()
        down = b.scale[:, group].repeat_interleave(b.rows)[: b.data.shape[0]]
        factor = a.scale[:, group, None] * down[None, :]
        acc = (sums.double() * factor.double() + acc.double()).float()
    return acc


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [144, 1424])  # no four products together; two times four and four single ones
def test_a_product_is_exact(way: str, k: int, card):
    card(90)
    a, b = operands(way, k=k)
    bias_N = torch.randint(-3, 4, (N,)).bfloat16()
    assert unsupported(a, b, Epilogue(bias_N), TILE) is None
    found = matmul_gluon(a, b, Epilogue(bias_N), TILE)
    assert differs(found, exact(a, b, bias_N).bfloat16()) is None


@pytest.mark.parametrize("way", ["loaded", "ring"])
def test_scaled_sums_are_added_in_the_order_of_k(way: str, card):
    card(90)
    a, b = map(uneven, operands(way, k=1024))  # and none left over
    found = matmul_gluon(a, b, Epilogue(None, torch.float32), TILE)
    assert differs(found, fused(a, b)) is None


ENDS = {
    "FP8, relu, amax and counts": (E4M3.dtype, "relu", True),
    "E5M2, silu": (E5M2.dtype, "silu", False),
    "FP32, counts": (torch.float32, "none", True),
    "FP16, gelu_tanh": (torch.float16, "gelu_tanh", False),
}
# `make test` runs each epilogue with one kind of scales.
CASES = [
    pytest.param(way, end, marks=() if place % len(WAYS) == WAYS.index(way) else pytest.mark.whole)
    for way in WAYS
    for place, end in enumerate(ENDS)
]


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("way", "end"), CASES)
def test_every_epilogue_is_the_twins(way: str, end: str, card):
    card(90)
    out, activation, statistics = ENDS[end]
    a, b = operands(way)
    bias_N, scale = torch.randint(-3, 4, (N,)).float(), torch.tensor(0.125) if out.itemsize == 1 else None
    ours, twins = (
        Epilogue(bias_N, out, activation, scale, *((torch.full((1,), -1.0), counts(CPU)) if statistics else ()))
        for _ in "ab"
    )
    found, wanted = matmul_gluon(a, b, ours, TILE), reference.finish(exact(a, b, None), twins)
    if activation in ("none", "relu"):
        assert differs(found.float(), wanted.float()) is None
    else:  # another exp and tanh: a unit in the last place of the result's format, or of FP32 beneath it
        step = {E5M2.dtype: 2.0**-2, torch.float16: 2.0**-10}[out]
        torch.testing.assert_close(found.float(), wanted.float(), rtol=step, atol=step * 2.0**-6)
    for name, mine, theirs in zip(("amax", "counts"), ours[4:6], twins[4:6], strict=True):
        assert differs(mine, theirs) is None, name


def test_nan_in_a_row_stays_in_it(card):
    card(90)
    a, b = operands("ring", 132, 64, 256)
    a.data.view(torch.uint8)[70, 5] = 0x7F  # NaN, in a row of the second consumer
    counted = counts(CPU)
    y = matmul_gluon(a, b, Epilogue(counts=counted, amax=torch.zeros(1)), TILE)
    assert y.isnan().nonzero()[:, 0].unique().tolist() == [70]
    assert counted.tolist() == [0, 64]


def test_odd_sizes_go_to_the_plain_kernel(card):
    there = card(90)
    a, b = operands("loaded", 20, 133, 256)
    assert differs(matmul_fp8(a, b, Epilogue(None, torch.float32), config=TILE), exact(a, b, None)) is None
    a, b = operands("none", 20, 133, 256)
    assert differs(matmul_fp8(a, b, Epilogue(), True, TILE), exact(a, b, None).bfloat16()) is None
    assert {done.kernel for done in there.done} == {"_matmul_kernel"}
