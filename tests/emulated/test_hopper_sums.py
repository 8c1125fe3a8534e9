"""FP8 matmuls on random data, from their PTX: the bits of an H100, by mmaemu, a model of recorded results.

Small integers, which the other files multiply, have the same sum in any accumulator: they do not see a "promoted"
kernel that never promotes.  Here every product has its own exponent, so that each cut of the accumulator shows.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from emulator import accumulator
from mmaemu.api import accumulate
from mmaemu.model.chain import dot

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


# The accumulator by itself.
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
PRESETS = {89: "ada", 90: "hopper"}
NUMBERS = {
    "normal": lambda shape: torch.randn(shape) * 30,
    "positive": lambda shape: torch.rand(shape) * 400,
    "subnormal": lambda shape: torch.randn(shape) * 2.0**-8,
    "many octaves": lambda shape: torch.randn(shape) * torch.randint(-14, 8, shape).float().exp2(),
    "mostly zero": lambda shape: torch.randn(shape) * (torch.rand(shape) < 0.1),
}


@pytest.mark.parametrize("architecture", PRESETS)
@pytest.mark.parametrize("data", NUMBERS)
@pytest.mark.parametrize("kinds", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_sums_are_those_of_the_recorded_cards(architecture: int, data: str, kinds: tuple[str, str]):
    a, b = (NUMBERS[data]((rows, 96)).to(DTYPES[kind]) for rows, kind in zip((24, 40), kinds, strict=True))
    for c in (torch.zeros(24, 40), torch.randn(24, 40) * 1e3, torch.randn(24, 40) * 1e-20):
        # Pairs of rows: mmaemu's `dot` takes vectors.
        wanted = dot(
            a[:, None].expand(24, 40, 96), b[None].expand(24, 40, 96), c.double(), preset=PRESETS[architecture]
        )
        found = accumulator.add(a.float().numpy(), b.float().numpy(), c.numpy(), kinds, architecture)
        assert np.array_equal(found.view(np.int32), wanted.float().numpy().view(np.int32))


@pytest.mark.parametrize("architecture", PRESETS)
def test_nan_and_inf_are_ieees(architecture: int):
    a = np.array([[np.nan, 1], [np.inf, 1], [1, 2], [np.inf, -np.inf]], ml_dtypes.float8_e5m2).astype(np.float32)
    b = np.ones((1, 2), np.float32)
    found = accumulator.add(a, b, np.zeros((4, 1), np.float32), ("e5m2", "e4m3"), architecture)
    assert np.array_equal(found[:, 0], [np.nan, np.inf, 3, np.nan], equal_nan=True)
