"""Judgement of a kernel by its machine code: what no kernel may have, and what is a loss against a committed baseline.

A kernel fails on a spill, on more shared memory than a program may have, on Tensor Core instructions that wait for each
other or are not there, and on a loss against what the committed baseline says it was: a longer loop, a lower ceiling,
more instructions for the same bytes, fewer bytes on their way, fewer programs on a multiprocessor, narrower loads.  No
GPU is needed, and none of it is a measurement: ceilings.py makes of it what a kernel can reach at best.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.machine_code import offline, sass, traffic
from benchmarks.machine_code.launches import Case
from fp8engine.kernels.launch import PRETEND_PROCESSORS

LONGER_LOOP = 1.1  # times the baseline's: what a change of Triton's scheduling may cost before it counts as a loss
SCHEDULERS = 4  # of a multiprocessor, an instruction a clock each
SPECIAL = 16  # exponentials, reciprocals and the like a clock and multiprocessor


@dataclass(frozen=True)
class Card:
    """Limits of a multiprocessor, and multiply-adds per clock in FP8 and in 16 bits (dense, FP32 sums).

    shared: bytes of a multiprocessor.  per_program: the most one program may have.
    Source: CUDA C programming guide, technical specifications per compute capability (and SPECIAL: throughput of native
    arithmetic instructions, the same for 8.0 to 12.0); NVIDIA's H100, Ada and A100 architecture papers for the rates;
    for the B200 its 4.5 PFLOP/s over 148 multiprocessors at 1.85 GHz.
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
# Products of a pass of attention's loops, of ROWS x ROWS x D each: in FP8, in 16 bits.
ATTENTION = {"_attention_kernel": (2, 0), "_by_queries_kernel": (1, 3), "_by_keys_kernel": (1, 3)}
CARE = "CARE"  # a kernel's constant: 0 leaves out what it does where something was not finite (quantize_groups.py)
ADDS_PARTS = "_add_parts_kernel"  # what a split matmul launches beside itself: bound by memory
RESERVED = 1024  # bytes of shared memory that the system takes of every program


@dataclass(frozen=True)
class Row:
    """One kernel's machine code; shared and spills in bytes, cycles and bytes per clock of one pass of one program.

    The pass is one of the main loop, and in a kernel without Tensor Core instructions the one that traffic.py finds.
    ceiling: per cent of the Tensor Core's rate that the loop allows one program (sass.py); 0 without such instructions.
    tensor_cycles: of the products that the result needs.  busy_cycles: of the busiest unit: the Tensor Core, with what
    it multiplies in vain (padding, what both warpgroups of a program multiply), the issue slots, the exponentials.
    bytes_per_clock: what its tiles ask of L2 at the Tensor Core's full rate; without its instructions what one issue
    slot a clock and scheduler can move at most.
    resident: programs that a multiprocessor has, of those that are launched.  in_flight: bytes that all of these load
    into registers and have on their way together.
    apart: pairs of FP8 codes that ptxas gets wrong (sass.taken_apart).
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
    busy_cycles: float = 0.0
    resident: int = 1
    in_flight: int = 0
    apart: int = 0


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
    warps = config.warps if config else made.warps  # those that multiply: a loading warp has a loop of its own
    cycles = multiplied = loop.tensor_cycles(warps, card.fp8_rate, card.rate_16_bits)
    if launch.name in ATTENTION:
        cycles = _of_attention(launch, card)
    usual = launch.with_constant(CARE, 0).compile() if CARE in launch.by_name else made
    moved = traffic.of_launch(launch, usual)
    issued = (loop.length if loop.products else moved.instructions) * warps / SCHEDULERS
    if config is not None:
        rate, item = (card.fp8_rate, 1) if case.fp8 else (card.rate_16_bits, 2)
        bytes_per_clock = (1 / config.block_m + 1 / config.block_n) * rate * item
    elif cycles:
        bytes_per_clock = loop.loaded * 32 * warps / cycles
    else:
        bytes_per_clock = (moved.loaded + moved.stored) * 32 * warps / issued
    fit = programs(made, card)
    resident = min(fit, max(1, launch.programs // PRETEND_PROCESSORS))
    allowed = 0.0
    if cycles:
        allowed = loop.ceiling(multiplied, warps) * cycles / multiplied
    return Row(
        name=name,
        registers=made.registers,
        spills=made.spills,
        shared=made.shared,
        programs=fit,
        loop=loop.length,
        products=loop.products,
        shape="/".join(loop.shapes),
        tensor_cycles=cycles,
        issue_cycles=issued,
        ceiling=round(100 * allowed),
        bytes_per_clock=bytes_per_clock,
        accesses=sass.accesses(made.ptx),
        notes=made.notes,
        serialized=made.serialized,
        architecture=case.architecture,
        fp8=case.fp8,
        matmul=config is not None,
        wide=launch.name in case.wide,
        busy_cycles=max(multiplied, issued, loop.kinds["MUFU"] * 32 * warps / SPECIAL),
        resident=resident,
        in_flight=moved.in_flight * 32 * made.warps * resident,
        apart=sass.taken_apart(made.ptx),
    )


def _of_attention(launch: offline.Launch, card: Card) -> float:
    """Clocks of the products of a pass that the result needs."""
    given = launch.by_name
    in_fp8, in_16_bits = ATTENTION[launch.name]
    return given["ROWS"] ** 2 * given["D"] * (in_fp8 / card.fp8_rate + in_16_bits / card.rate_16_bits)


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
    if row.apart:
        found.append(
            f"{row.apart} pairs of FP8 codes are stored in words and taken apart as well; ptxas gets them wrong"
        )
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
    if "in_flight" in before and not before["tensor_cycles"]:
        found += _less_traffic(row, before)
    if row.shape != before["shape"]:
        found.append(f"{row.shape or 'no Tensor Core instruction'}, was {before['shape']}")
    if gone := [access for access in before["accesses"] if _wide(access) and access not in row.accesses]:
        found.append(f"no more {', '.join(gone)}")
    return found


def _less_traffic(row: Row, before: dict[str, Any]) -> list[str]:
    """Losses of a kernel that is limited by memory."""
    found = []
    if row.in_flight < before["in_flight"]:
        found.append(f"{row.in_flight} bytes on their way to a multiprocessor, were {before['in_flight']}")
    if row.bytes_per_clock * LONGER_LOOP < before["bytes_per_clock"]:
        found.append(f"issues {row.bytes_per_clock:.1f} bytes a clock at most, were {before['bytes_per_clock']:.1f}")
    return found


KEPT = (
    "registers",
    "spills",
    "shared",
    "programs",
    "loop",
    "products",
    "shape",
    "ceiling",
    "accesses",
    "resident",
    "in_flight",
    "tensor_cycles",
    "issue_cycles",
    "busy_cycles",
    "bytes_per_clock",
)


def baseline_of(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """The part of each row that a baseline keeps."""
    return {row.name: {field: _short(asdict(row)[field]) for field in KEPT} for row in rows}


def _short(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value


def _is(access: str, way: str) -> bool:
    return access.startswith(f"{way}.global") and _wide(access)


def _wide(access: str) -> bool:
    return ".v4" in access or ".v8" in access or access.startswith("cp.async")
