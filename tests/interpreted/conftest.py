"""Kernels in Triton's interpreter: TRITON_INTERPRET=1 python -m pytest tests/interpreted

A process of their own, because Triton decides at the decoration of a kernel whether it is interpreted.  Nothing runs
before the interpreter has proved itself on every FP8 code and every 16-bit value.
"""

import mmap
import os
import sys
from collections.abc import Callable

import faithful
import pytest
import torch
from support import UNIT

MAP_NORESERVE = 0x4000  # of Linux, where Triton runs; mmap names it from Python 3.13 on
GUARD = 1 << 18  # bytes after a result: more rows than a tile has beyond a matrix of 512 16-bit columns


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run on an interpreter that is off, or wrong."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("tests/interpreted needs TRITON_INTERPRET=1 in the environment")
    if early := [name for name in sys.modules if name.startswith("fp8engine.kernels.")]:
        raise pytest.UsageError(f"imported before the interpreter was put right: {', '.join(early)}")
    faithful.install()
    if wrong := faithful.wrong():
        raise pytest.UsageError(f"the patched interpreter still casts wrongly: {', '.join(wrong)}")


def pytest_itemcollected(item: pytest.Item) -> None:
    """NumPy remarks on 448 / 1e-44, Inf * 0 and the like, which a GPU computes in silence."""
    item.add_marker(pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"))


@pytest.fixture(autouse=True)
def unwritten(monkeypatch):
    """Let every result start as NaN, or as a large integer, and have a guard behind it: what nobody writes shows."""
    made = []
    plain = torch.empty

    def empty(*size, dtype=None, device=None, **options):
        y = plain(*size, dtype=dtype, device=device, **options)
        if y.is_meta or type(y) is not torch.Tensor:  # while a graph is traced
            return y
        fill = 0xFF if y.is_floating_point() else 0x5A  # a NaN in every format
        buffer = torch.full((y.nbytes + GUARD,), fill, dtype=torch.uint8, device=y.device)
        made.append((buffer[-GUARD:], fill))
        return buffer[:-GUARD].view(y.dtype).view(y.shape)

    monkeypatch.setattr(torch, "empty", empty)
    yield
    assert all((guard == fill).all() for guard, fill in made), "written beyond the end of a result"


@pytest.fixture(scope="session")
def assert_within_bound() -> Callable[..., None]:
    """found [M, N] against the float64 product of the dequantised a [M, K] and b [N, K], and a bias.

    With u = 2^-24, FP32's largest relative rounding error, y the exact result and S = sum_k |a| |b|:

        sums            (K + 1) u S: a product of two FP8, BF16 or FP16 values is exact in FP32, each addition rounds,
                        and so does adding to the accumulator
        scales, bias    3 u (S + |bias|): two factors and one addition
        output          2^-8 of what is rounded in BF16, 2^-11 in FP16 and half of its smallest subnormal
    """

    def check(found: torch.Tensor, a_MK: torch.Tensor, b_NK: torch.Tensor, bias_N=None, what: object = "") -> None:
        y_MN, sums_MN = a_MK @ b_NK.t(), a_MK.abs() @ b_NK.abs().t()
        bias = torch.zeros((), dtype=torch.float64) if bias_N is None else bias_N.double()
        y_MN = y_MN + bias
        bound = 2.0**-24 * ((a_MK.shape[1] + 1) * sums_MN + 3 * (sums_MN + bias.abs()))
        if found.dtype != torch.float32:
            bound = bound + UNIT[found.dtype] * (y_MN.abs() + bound)
            bound += 2.0**-25 if found.dtype == torch.float16 else 0.0
        assert found.shape == y_MN.shape
        error = (found.double() - y_MN).abs()
        worst = error - bound
        assert (error <= bound).all(), f"{what}: {(~(worst <= 0)).sum()} of {error.numel()} beyond the bound"

    return check


@pytest.fixture
def few_programs(monkeypatch):
    """Two programs of a producer (norm, activation), with several tiles each."""
    from fp8engine.kernels import produce  # not before `pytest_configure`

    monkeypatch.setattr(produce, "processors", lambda where: 2)
    monkeypatch.setattr(produce, "RESIDENT_WARPS", 1)


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Names of the launchers that ran."""
    from fp8engine.ops import triton_backend  # not before `pytest_configure`

    seen, real = [], triton_backend._launch

    def spy(first: torch.Tensor, kernel: tuple[str, ...], *given):
        seen.append(kernel[-1])
        return real(first, kernel, *given)

    monkeypatch.setattr(triton_backend, "_launch", spy)
    return seen


@pytest.fixture
def far():
    """Matrices of BF16 in 8 GiB of addresses, of which only what is written takes memory."""
    memory = mmap.mmap(-1, 1 << 33, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)  # freed with its last view
    return lambda m, k, strides, first=0: torch.frombuffer(memory, dtype=torch.bfloat16)[first:].as_strided(
        (m, k), strides
    )
