"""Bugs that others had in kernels for Hopper, planted in ours: the emulated card names each, or the result is wrong.

In machine code: the PTX of a matmul of three stages is edited.  In a source: a copy of a kernel's file is edited; of
these benchmarks/mutants/ has more, each with the test that finds it.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from casts import cast_of
from contracts import slot_of
from edited_kernels import edited_kernel
from emulator.card import emulated
from emulator.faults import Deadlock, Fault, OutOfBounds, Race
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

from benchmarks.checks.operands import differs, exact, in_blocks, integers
from fp8engine.kernels import tile as sound_tile
from fp8engine.kernels.matmul import matmul_fp8
from fp8engine.kernels.matmul_gluon import matmul_gluon
from fp8engine.kernels.quantize_groups import quantize_groups
from fp8engine.kernels.tuning import Config
from fp8engine.numerics.formats import E4M3
from fp8engine.ops.reference import Epilogue

CPU = torch.device("cpu")
M, N = 150, 136
M4 = 152  # TMA reads scales of rows where 4 divides their number
SMALL = Config(64, 64, 64, group_m=2, warps=4, stages=3)  # nine tiles for four programs
WIDE = Config(128, 128, 128, group_m=2, warps=8, stages=3, parts=2, kernel="gluon")
K = {SMALL: 640, WIDE: 1408}  # ten and eleven blocks: more than stages, and three left over where four go together


class Bug(NamedTuple):
    """old, new: of the text, old a pattern in machine code.  fault, words: what the emulated card says."""

    what: str
    old: str
    new: str
    fault: type[Fault]
    words: str


# In Gluon's matmul too, and not in their source: from 3.7 on Triton puts this fence itself where a source has none.
FENCE = Bug("no fence before a TMA store", r"fence\.proxy\.async\.shared::cta;", "", Race, "read by TMA.*fence")
MACHINE_CODE = [
    FENCE,
    Bug(
        "no barrier before a TMA store",
        r"(fence\.proxy\.async\.shared::cta;\s+(?:// end inline asm\s+)?)bar\.sync \t0;",
        r"\1",
        Fault,
        "read by TMA|nobody wrote",  # whichever warp is late: TMA reads what is old, or what is not there
    ),
    Bug(
        "staging is written while TMA reads it",
        r"cp\.async\.bulk\.wait_group\.read \t0;",
        "",
        Race,
        "write is not ordered after the last asynchronous read",
    ),
    Bug(
        "the phase of a round is never turned",
        r"xor\.b32 \t(%r\d+), \1, %r\d+;",
        r"mov.b32 \1, \1;",
        Fault,
        "mbarrier|read by TMA or wgmma",
    ),
    Bug(
        "half of a slot's bytes are expected",
        r"(expect_tx\S+ _, \[%r\d+\]), 8192",
        r"\1, 4096",
        Race,
        "read by TMA or wgmma",
    ),
    Bug("twice a slot's bytes are expected", r"(expect_tx\S+ _, \[%r\d+\]), 8192", r"\1, 16384", Deadlock, "mbarrier"),
    Bug(
        "an mbarrier counts an arrival that nobody makes",
        r"(mbarrier\.init\S+ \[%r\d+\]), 1;",
        r"\1, 2;",
        Deadlock,
        "mbarrier",
    ),
    Bug(
        "a slot is read before it is full",
        r"mbarrier\.try_wait\.parity[^;]*;\s+@!complete bra\.uni waitLoop;",
        "",
        Race,
        "read by TMA or wgmma",
    ),
    Bug(
        "a slot is filled while a product reads it",
        r"wgmma\.wait_group\.sync\.aligned 1",
        "wgmma.wait_group.sync.aligned 2",
        Race,
        "write by TMA",
    ),
    Bug(
        "sums are used before they are done",
        r"wgmma\.wait_group\.sync\.aligned 0",
        "wgmma.wait_group.sync.aligned 1",
        Fault,
        "before the wgmma",
    ),
]
GLUON = [  # in kernels/matmul_gluon.py
    Bug(
        "the program ends while TMA reads its memory",
        "tma.store_wait(0)  # shared memory",
        "# shared memory",
        Fault,
        "no thread had waited for its last TMA store",
    ),
    Bug(
        "a slot is given back before its last product is done",
        "done_MN = warpgroup_mma_wait(0, deps=(sums_MN,))\n    mbarrier.arrive(empty.index(slot), count=1)\n",
        "mbarrier.arrive(empty.index(slot), count=1)\n    done_MN = warpgroup_mma_wait(0, deps=(sums_MN,))\n",
        Race,
        "write by TMA",
    ),
]


def product(matmul: Callable, config: Config, promoted: bool = False, by_row: tuple[bool, bool] = (True, True)) -> bool:
    """Whether a matmul of small integers, whose sums are exact in any order, is right to the bit.

    by_row: whether a, and b, have a scale a row, or one.
    """
    a, b = (integers(CPU, rows, K[config], E4M3, each) for rows, each in zip((M, N), by_row, strict=True))
    found = matmul(a, b, Epilogue(), promoted, config)
    return differs(found, exact(a, b, None).bfloat16()) is None


@contextlib.contextmanager
def machine_code(folder: Path, old: str, new: str | Callable[[re.Match[str]], str], seed: int | None) -> Iterator[None]:
    """The emulated card with every kernel's PTX edited, and a folder for what is compiled: no other test sees it."""

    def edited(self, ptx: str, *rest) -> bytes:
        found, times = re.subn(old, new, ptx)
        assert times, f"not in the PTX: {old}"
        return found.encode()

    with emulated(seed=seed), knobs.cache.scope(), mock.patch.object(CUDABackend, "make_cubin", edited):
        knobs.cache.dir = str(folder)
        yield


def test_a_last_program_that_acquires_nothing_is_named(tmp_path: Path, schedule: int):
    """It counts its call where the others read how many there were, which their order alone makes right."""
    x, how = torch.randn(300, 256), cast_of(E4M3.dtype, 1, 128, True)
    relaxed = r"(atom\.global\.gpu\.)acq_rel(\.add\.u32)", r"\1relaxed\2"
    unordered = r"this write by CTA \d+ is not ordered after the last read"
    with machine_code(tmp_path, *relaxed, schedule), pytest.raises(Race, match=unordered):
        quantize_groups(x, how, slot_of(), False)


@pytest.mark.parametrize("bug", MACHINE_CODE, ids=lambda bug: bug.what)
def test_a_bug_in_machine_code_is_named(bug: Bug, tmp_path: Path, schedule: int):
    with machine_code(tmp_path, bug.old, bug.new, schedule), pytest.raises(bug.fault, match=bug.words):
        product(matmul_fp8, SMALL)


def test_a_swapped_swizzle_multiplies_other_elements(tmp_path: Path, schedule: int):
    # Bits 62 and 63 of a wgmma descriptor: 2 is a swizzle of 64 bytes, as the box has it, 3 of 32 (PTX ISA, wgmma).
    descriptor = r"-(92233718994158223\d\d)"
    for added, right in ((0, True), (1 << 62, False)):
        folder = tmp_path / str(added)
        with machine_code(folder, descriptor, lambda found, added=added: str(added - int(found[1])), schedule):
            assert product(matmul_fp8, SMALL) == right


def scaled_product(matmul: Callable, way: str, by_row: tuple[bool, bool] = (True, True)) -> bool:
    """Whether a promoted ("none") or scaled product of two consumers is right to the bit.  by_row: of "none" alone."""
    if way == "none":
        return product(lambda a, b, end, promoted, config: matmul(a, b, end, config), WIDE, by_row=by_row)
    a, b = (in_blocks(CPU, rows, K[WIDE], 1 if rows == M4 or way == "ring" else 128) for rows in (M4, N))
    if way == "ring":
        a, b = (x._replace(scale=x.scale.t().contiguous().t()) for x in (a, b))
    return differs(matmul(a, b, Epilogue(), WIDE), exact(a, b, None).bfloat16()) is None


def test_no_fence_in_the_machine_code_of_the_ring_is_named(tmp_path: Path, schedule: int):
    with machine_code(tmp_path, FENCE.old, FENCE.new, schedule), pytest.raises(FENCE.fault, match=FENCE.words):
        scaled_product(matmul_gluon, "ring")


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.parametrize("bug", GLUON, ids=lambda bug: bug.what)
def test_a_bug_in_the_matmul_of_two_consumers_is_named(bug: Bug, tmp_path: Path, schedule: int):
    module = edited_kernel(tmp_path, "matmul_gluon", bug.old, bug.new)
    with emulated(seed=schedule), pytest.raises(bug.fault, match=bug.words):
        scaled_product(module.matmul_gluon, "ring")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["none", "loaded", "ring"])
def test_without_a_bug_the_matmul_of_two_consumers_is_right(way: str, schedule: int):
    with emulated(seed=schedule):
        assert scaled_product(matmul_gluon, way)


@pytest.mark.parametrize("by_row", [(True, False), (False, True)], ids=str)
def test_without_a_bug_one_scale_goes_with_one_a_row(by_row: tuple[bool, bool], schedule: int):
    with emulated(seed=schedule):
        assert scaled_product(matmul_gluon, "none", by_row)


class Beyond:
    """A tensor as a launch takes it, whose address is that of an element `before` its first."""

    def __init__(self, tensor: torch.Tensor, before: int):
        self.tensor, self.before, self.dtype = tensor, before, tensor.dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() - self.before * self.tensor.itemsize

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()


def copied(tile: ModuleType, seed: int) -> bool:
    """Whether a tile of a matrix with rows at 2^31 and beyond is copied, by a kernel that uses that module."""

    @triton.jit
    def kernel(x, y, row, M, N, SIZE: tl.constexpr):
        tile.store_tile(y, tile.load_tile(x, row, 0, M, N, (N, 1), SIZE, SIZE, "pointer"), row, 0, M, N, False)

    size, row, columns = 4, 1 << 11, 1 << 20
    x, y = torch.randn(size, columns), torch.zeros(size, columns)
    with emulated(seed=seed):
        kernel[(1,)](Beyond(x, row * columns), Beyond(y, row * columns), row, row + size, columns, SIZE=16)  # pyright: ignore[reportArgumentType]
    return torch.equal(y[:, :16], x[:, :16]) and not y[:, 16:].any()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.cast(row, tl.int64) * strides[0]", "row * strides[0]"),
        ("tl.cast(row, tl.int64) * N + column\n        tl.store", "row * N + column\n        tl.store"),
        ("(down < ROWS - row)", "(down <= ROWS - row)"),
        ("value, mask=(down < M - row)", "value, mask=(down <= M - row)"),
    ],
)
def test_an_offset_that_overflows_and_a_mask_beyond_the_last_row_leave_their_allocation(old, new, tmp_path, schedule):
    assert copied(sound_tile, schedule)
    with pytest.raises(OutOfBounds, match="beyond its allocation"):
        copied(edited_kernel(tmp_path, "tile", old, new), schedule)
