"""Judgement of a kernel by its machine code: what no kernel may have, and what is a loss against a committed baseline.

A kernel fails on a spill, on more shared memory than a program may have, on Tensor Core instructions that wait for each
other or are not there, and on a loss against what the committed baseline says it was: a longer loop, a lower ceiling,
fewer programs on a multiprocessor, narrower loads.  No GPU is needed, and none of it is a measurement: it says that
nothing is known to stand in a kernel's way, not how fast it is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.machine_code import offline, sass
from benchmarks.machine_code.launches import Case

LONGER_LOOP = 1.1  # times the baseline's: what a change of Triton's scheduling may cost before it counts as a loss


@dataclass(frozen=True)
class Card:
    """Limits of a multiprocessor, and multiply-adds per clock in FP8 and in 16 bits (dense, FP32 sums).

    shared: bytes of a multiprocessor.  per_program: the most one program may have.
    Source: CUDA C programming guide, technical specifications per compute capability; NVIDIA's H100, Ada and A100
    architecture papers for the rates; for the B200 its 4.5 PFLOP/s over 148 multiprocessors at 1.85 GHz.
    """

    shared: int
    per_program: int
    warps: int
    fp8_rate: int
    rate_16_bits: int
    registers: int = 65536
    programs: int = 32


ADA = Card(shared=102400, per_program=101376, warps=48, fp8_rate=1024, rate_16_bits=512, programs=24)
CARDS = {
    120: ADA,  # the same numbers
    100: Card(shared=233472, per_program=232448, warps=64, fp8_rate=8192, rate_16_bits=4096),
    90: Card(shared=233472, per_program=232448, warps=64, fp8_rate=4096, rate_16_bits=2048),
    89: ADA,
    80: Card(shared=167936, per_program=166912, warps=64, fp8_rate=0, rate_16_bits=1024),
}
ADDS_PARTS = "_add_parts_kernel"  # what a split matmul launches beside itself: bound by memory
RESERVED = 1024  # bytes of shared memory that the system takes of every program


@dataclass(frozen=True)
class Row:
    """One kernel's machine code; shared and spills in bytes, cycles and bytes per clock of one pass of the loop.

    ceiling: per cent of the Tensor Core's rate that the loop allows (sass.py); 0 where it has no such instruction.
    """

    name: str
    registers: int
    spills: int
    shared: int
    programs: int
    loop: int
    products: int
    shape: str
    tensor_cycles: float
    issue_cycles: float
    ceiling: int
    bytes_per_clock: float
    accesses: tuple[str, ...]
    notes: tuple[str, ...]
    serialized: bool
    architecture: int
    fp8: bool
    matmul: bool = True
    wide: bool = False


def launched(case: Case) -> dict[str, offline.Launch]:
    """The kernels that the case starts, by the names of their rows."""
    with offline.caught(case.architecture) as launches:
        case.launch()
    if len(launches) == 1:
        return {case.name: launches[0]}
    return {f"{case.name}: {place} {launch.name}": launch for place, launch in enumerate(launches, 1)}


def compile_case(case: Case) -> list[Row]:
    """The case compiled: a row for each kernel that it starts."""
    return [_row(case, launch, name) for name, launch in launched(case).items()]


def _row(case: Case, launch: offline.Launch, name: str) -> Row:
    made, card = launch.compile(), CARDS[case.architecture]
    config = None if launch.name == ADDS_PARTS else case.config
    loop = sass.main_loop(made.sass)
    cycles = bytes_per_clock = 0.0
    warps = config.warps if config else 0  # those that multiply: a loading warp has a loop of its own
    if config is not None:
        rate = card.fp8_rate if case.fp8 else card.rate_16_bits
        cycles = loop.multiply_adds(warps) / rate
        bytes_per_clock = (1 / config.block_m + 1 / config.block_n) * rate * (1 if case.fp8 else 2)
    return Row(
        name=name,
        registers=made.registers,
        spills=made.spills,
        shared=made.shared,
        programs=programs(made, card),
        loop=loop.length,
        products=loop.products,
        shape="/".join(loop.shapes),
        tensor_cycles=cycles,
        issue_cycles=loop.length * warps / 4,
        ceiling=round(100 * loop.ceiling(cycles, warps)) if cycles else 0,
        bytes_per_clock=bytes_per_clock,
        accesses=sass.accesses(made.ptx),
        notes=made.notes,
        serialized=made.serialized,
        architecture=case.architecture,
        fp8=case.fp8,
        matmul=config is not None,
        wide=launch.name in case.wide,
    )


def programs(made: offline.Compiled, card: Card) -> int:
    """How many programs fit on a multiprocessor: by registers (256 a warp at a time), shared memory and warps.

    >>> made = offline.Compiled("", "", shared=100_000, warps=8, registers=128, spills=0, notes=())
    >>> programs(made, CARDS[90])
    2
    """
    per_warp = -(-made.registers * 32 // 256) * 256
    by_registers = card.registers // (per_warp * made.warps)
    by_shared = card.shared // (made.shared + RESERVED)
    return min(by_registers, by_shared, card.warps // made.warps, card.programs)


def failures(row: Row) -> list[str]:
    """Faults that no kernel may have."""
    card = CARDS[row.architecture]
    found = []
    if row.spills:
        found.append(spilled(row.spills))
    if row.shared > card.per_program:
        found.append(f"{row.shared} bytes of shared memory; a program may have {card.per_program}")
    if row.serialized:
        found.append(f"Tensor Core instructions wait for each other ({', '.join(row.notes)})")
    if not row.matmul:
        narrow = [way for way in ("ld", "st") if row.wide and not any(_is(access, way) for access in row.accesses)]
        return found + [f"no {way}.global.v4: the tensor moves in narrower pieces" for way in narrow]
    wanted = {90: "{}GMMA", 100: "UTC{}MMA"}.get(row.architecture, "{}MMA").format("Q" if row.fp8 else "H")
    if not row.shape.startswith(wanted):
        found.append(f"no {wanted} in the main loop ({row.shape or 'no Tensor Core instruction at all'})")
    return found


def spilled(size: int) -> str:
    """The words for a spill of so many bytes."""
    return f"{size} bytes spilled"


def losses(row: Row, before: dict[str, Any]) -> list[str]:
    """Where the kernel is worse than the committed baseline says it was."""
    found = []
    if row.programs < before["programs"]:
        found.append(f"{row.programs} programs a multiprocessor, were {before['programs']}")
    if row.loop > LONGER_LOOP * before["loop"]:
        found.append(f"main loop of {row.loop} instructions, was {before['loop']}")
    if row.ceiling < before["ceiling"]:
        found.append(f"at most {row.ceiling} % of the Tensor Core's rate, was {before['ceiling']} %")
    if row.shape != before["shape"]:
        found.append(f"{row.shape or 'no Tensor Core instruction'}, was {before['shape']}")
    if gone := [access for access in before["accesses"] if _wide(access) and access not in row.accesses]:
        found.append(f"no more {', '.join(gone)}")
    return found


def baseline_of(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """The part of each row that a baseline keeps."""
    kept = ("registers", "spills", "shared", "programs", "loop", "products", "shape", "ceiling", "accesses")
    return {row.name: {field: asdict(row)[field] for field in kept} for row in rows}


def _is(access: str, way: str) -> bool:
    return access.startswith(f"{way}.global") and _wide(access)


def _wide(access: str) -> bool:
    return ".v4" in access or ".v8" in access or access.startswith("cp.async")
