"""FP8 matmuls on random data, from their PTX: the bits of an H100, by mmaemu, a model of recorded results.

Small integers, which the other files multiply, have the same sum in any accumulator: they do not see a "promoted"
kernel that never promotes.  Here every product has its own exponent, so that each cut of the accumulator shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mmaemu.api import accumulate

from fp8engine.kernels.matmul import matmul_fp8
from fp8engine.kernels.matmul_gluon import matmul_gluon
from fp8engine.kernels.matmul_grouped import grouped_rows
from fp8engine.kernels.tuning import Config
from fp8engine.numerics.formats import E4M3, E5M2, Format
from fp8engine.ops.reference import Epilogue, Operand
from fp8engine.ops.reference.grouped import bounds_of

PLAIN = Config(64, 64, 128, warps=4, descriptors=True)
GLUON = Config(128, 128, 128, group_m=2, warps=8, stages=3, parts=2, kernel="gluon")
SIZES = 144, 144, 656  # M, N and K: five blocks of 128 and one of 16
SPLITS: Any = 1  # mmaemu splits K where cuBLAS would; ours are not split.  (Its annotation knows "auto" alone.)
DATA: dict[str, tuple[Callable[..., torch.Tensor], Format]] = {
    "normal": (lambda *shape: torch.randn(shape) * 30, E4M3),
    "positive": (lambda *shape: torch.rand(shape) * 400, E4M3),
    "E5M2": (lambda *shape: torch.randn(shape) * 30, E5M2),
}
KERNELS = {
    "fast": lambda a, b, end: matmul_fp8(a, b, end, False, PLAIN),
    "promoted": lambda a, b, end: matmul_fp8(a, b, end, True, PLAIN),
    "promoted, of an expert": lambda a, b, end: grouped_rows(
        a, b, bounds_of(torch.tensor([SIZES[0]])), Epilogue(None, end.out), True, PLAIN
    ),
    "promoted in Gluon": lambda a, b, end: matmul_gluon(a, b, end, GLUON),
}


def operands(data: str) -> tuple[Operand, Operand]:
    """E4M3 or E5M2 by E4M3, under scales of 1."""
    (make, format), (m, n, k), one = DATA[data], SIZES, torch.ones(())
    return Operand(make(m, k).to(format.dtype), one), Operand(make(n, k).to(E4M3.dtype), one)


@pytest.mark.few(5)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_gives_the_bits_of_an_h100(kernel: str, data: str, card):
    card(90)
    a, b = operands(data)
    found = KERNELS[kernel](a, b, Epilogue(None, torch.float32))
    wanted = accumulate(a.data, b.data, use_fast_accum=kernel == "fast", profile="hopper", splitk=SPLITS)
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
