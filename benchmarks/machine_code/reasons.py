"""Reasons why one Triton of the range may give worse machine code than another, or spill; without one it is a fault.

A reason holds for the rows whose names its pattern matches, in the versions it names, down to a limit: what gets worse
than that is a fault again.  `versions.py` says which reasons nothing needs any more.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from benchmarks.machine_code import baselines


class Reason(NamedTuple):
    """versions, rows: what it holds for; rows is a pattern of fnmatch.  what: "spills", "ceiling" or "programs".

    limit: the most bytes spilled, the least per cent of the Tensor Core's rate, or the fewest programs.
    """

    versions: tuple[str, ...]
    rows: str
    what: str
    limit: int
    why: str

    def covers(self, version: str, row: str, what: str, value: int) -> bool:
        """Whether it is a reason for that value."""
        if version not in self.versions or what != self.what or not fnmatchcase(row, self.rows):
            return False
        return value <= self.limit if what == "spills" else value >= self.limit


ONCE = "a few words, stored before the main loop and read after it, as the SASS shows; the loop's ceiling is not lower"
FEW = "ptxas takes a few bytes of spills for one program more on a multiprocessor; the kernel is limited by memory"
FULL = "128 registers are all that each of 512 threads may have; the kernel is limited by memory"
CAPPED = "80 registers are what each of its threads is given (quantize_groups.Tile); the kernel is limited by memory"
COMPILER = (
    "what this Triton's compiler makes of the same source; no change of the source was sought, no card has measured it"
)
BY_MEMORY = "limited by memory: fewer programs of more registers have loads in flight too; no card has measured it"
NEW = ("3.7.1", "3.8.0", "3.9.0")
REASONS: tuple[Reason, ...] = (
    Reason(("3.9.0",), "matmul_fp8_promoted tensor sm_90 128x128x128 * gluon gelu+amax", "spills", 16, ONCE),
    Reason(("3.8.0", "3.9.0"), "matmul_block 1x128 1x128 sm_90 128x128x128 * gluon gelu+amax", "spills", 16, ONCE),
    Reason(
        ("3.9.0",),
        "matmul_block 1x128 128x128 sm_90 128x128x128 * gluon gelu+amax",
        "spills",
        208,
        "stored and read in the main loop, whose ceiling stays 91 %; eight pieces of the epilogue instead of two spill "
        "nothing, but wait for TMA eight times a tile, and write FP8 rows of 16 bytes with every Triton",
    ),
    Reason(("3.9.0",), "matmul_fp16 across K sm_90 64x128x64 g8 w4 s4 p1 tma * gelu+amax", "spills", 28, ONCE),
    Reason(("3.6.0",), "matmul_block 1x128 1x128 sm_89 128x64x128 * odd N gelu+amax", "spills", 72, COMPILER),
    Reason(("3.6.0",), "matmul_fp16 across K sm_89 64x64x32 * s3 * fp32", "spills", 24, COMPILER),
    Reason(("3.6.0",), "act backward glu predicted sm_90: 1 *", "spills", 8, COMPILER),
    Reason(("3.6.0",), "norm rms 4096 row sm_90", "spills", 8, COMPILER),
    Reason(("3.8.0",), "norm layer 16384 current sm_90: 1 *", "spills", 32, COMPILER),
    Reason(("3.8.0",), "cast_transpose 1x128 sums sm_89: 1 *", "spills", 344, COMPILER),
    Reason(("3.9.0",), "cast_transpose 128x128*sm_90*", "spills", 44, FULL),
    Reason(("3.9.0",), "cast_transpose tensor predicted odd sums sm_90: 1 *", "spills", 96, COMPILER),
    Reason(("3.6.0",), "quantize_experts 128x128 bfloat16 sm_89", "spills", 8, FEW),
    Reason(("3.9.0",), "quantize_experts 128x128 bfloat16 sm_90", "spills", 8, FEW),
    Reason(("3.9.0",), "quantize tensor predicted bfloat16 sm_90: 1 *", "spills", 8, FEW),
    Reason(("3.9.0",), "quantize 128x128 odd sm_90", "spills", 96, CAPPED),
    Reason(("3.9.0",), "matmul_fp8* tensor sm_90 * ptr k/16 odd K gelu+amax", "spills", 8, COMPILER),
    Reason(baselines.RANGE, "matmul_fp8_promoted * sm_90 64x64x128 *", "ceiling", 54, COMPILER),
    Reason(("3.8.0", "3.9.0"), "matmul_block 1x128 128x128 sm_90 64x128x128 *", "ceiling", 60, COMPILER),
    Reason(("3.6.0", "3.8.0"), "matmul_block 1x128 1x128 sm_90 128x128x128 * tma *", "ceiling", 40, COMPILER),
    Reason(("3.8.0",), "matmul_block 1x128 1x128 sm_90 64x128x128 * tma *", "ceiling", 53, COMPILER),
    Reason(NEW, "grouped sums matmul_block sm_90 128x128x128 *", "ceiling", 44, COMPILER),
    Reason(("3.8.0",), "grouped sums matmul_block sm_90 128x128x128 * gluon", "spills", 16, COMPILER),
    Reason(("3.9.0",), "grouped rows matmul_block sm_90 128x128x128 * gluon", "spills", 152, COMPILER),
    Reason(("3.9.0",), "grouped rows matmul_fp8 sm_90 128x256x128 * odd N", "spills", 8, COMPILER),
    Reason(NEW, "matmul_fp16 across K * ptr *", "ceiling", 69, COMPILER),
    Reason(NEW, "matmul_fp8 * ptr * odd K *", "ceiling", 18, COMPILER),
    Reason(baselines.RANGE, "matmul_fp16 across K * ptr * odd K gelu+amax", "programs", 1, COMPILER),
    Reason(baselines.RANGE, "cast_transpose * odd sums *_column_sums_kernel", "programs", 5, BY_MEMORY),
    Reason(("3.8.0", "3.9.0"), "attention 128 full sm_90", "ceiling", 29, COMPILER),
    Reason(baselines.RANGE, "cast_transpose *", "programs", 1, BY_MEMORY),
    Reason(baselines.RANGE, "quantize *", "programs", 1, BY_MEMORY),
    Reason(baselines.RANGE, "quantize_experts *", "programs", 1, BY_MEMORY),
    Reason(baselines.RANGE, "act *", "programs", 1, BY_MEMORY),
    Reason(baselines.RANGE, "norm *", "programs", 1, BY_MEMORY),
)


def of(version: str, row: str, what: str, value: int) -> Reason | None:
    """The reason for that value, if one is written down."""
    return next((reason for reason in REASONS if reason.covers(version, row, what, value)), None)


def of_spill(version: str, row: str, size: int) -> Reason | None:
    """The reason for a spill of so many bytes; None where nothing spills too."""
    return of(version, row, "spills", size) if size else None
