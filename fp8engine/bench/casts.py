"""How fast tensors are cast: bytes that have to move, over the time it takes, beside the machine's measured copy.

    rate = (reads * bytes of x + writes) * elements / seconds          of copy = rate / (2 * bytes copied / seconds)

`reads` and `writes` are the fewest that the cast can do with: current scaling reads a tensor twice (its amax first),
predicted scales and scales of a row or block once; each orientation stored is a byte an element.
A result that is not the reference's bit for bit has no rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8engine.bench import roofline
from fp8engine.bench.run import machine
from fp8engine.bench.timing import Clock, clock, measure
from fp8engine.errors import ShapeError
from fp8engine.numerics.formats import E4M3
from fp8engine.ops import device
from fp8engine.ops.backends import backend
from fp8engine.ops.casts import cast_transpose, quantize
from fp8engine.ops.reference import How, Operand, Slot
from fp8engine.ops.reference.operand import COUNTERS

SETS = 2
SHAPES = {"cuda": ((8192, 4096), (8192, 14336), (16384, 1024)), "cpu": ((1024, 1024), (2048, 4096))}
PER_TENSOR, PER_ROW = How(E4M3.dtype, -1, -1), How(E4M3.dtype, 1, -1, True)
BLOCKS, SQUARES = How(E4M3.dtype, 1, 128, True), How(E4M3.dtype, 128, 128, True)
# Target of DESIGN section 9 on a Hopper card, share of copy bandwidth.
TARGETS = {"row": 0.95, "tensor, transposed too": 0.92}


@dataclass(frozen=True)
class Way:
    """One cast.  both: with the transpose.  predicted: under a scale known beforehand (delayed scaling)."""

    how: How
    reads: int
    writes: int
    both: bool = False
    predicted: bool = False

    def bytes(self, x: torch.Tensor) -> int:
        """Fewest bytes that move."""
        return x.numel() * (self.reads * x.element_size() + self.writes)

    def run(self, x: torch.Tensor, slot: Slot | None) -> list[Operand]:
        """The operands made of x."""
        how = self.how._replace(delayed=self.predicted)
        return list(cast_transpose(x, how, slot)) if self.both else [quantize(x, how, slot)]


WAYS = {
    "tensor": Way(PER_TENSOR, 2, 1),
    "tensor, predicted": Way(PER_TENSOR, 1, 1, predicted=True),
    "row": Way(PER_ROW, 1, 1),
    "1x128": Way(BLOCKS, 1, 1),
    "128x128": Way(SQUARES, 1, 1),
    "tensor, transposed too": Way(PER_TENSOR, 2, 2, both=True),
    "tensor, predicted, transposed too": Way(PER_TENSOR, 1, 2, both=True, predicted=True),
    "row, transposed too": Way(PER_ROW, 1, 2, both=True),
    "1x128, transposed too": Way(BLOCKS, 1, 2, both=True),
}


def casts(
    shapes: Sequence[tuple[int, int]],
    where: torch.device,
    ticks: Clock | None = None,
    limits: roofline.Limits | None = None,
    turns: int | None = None,
) -> dict[str, Any]:
    """Check and time every cast of BF16 matrices M x K: {"machine", "what", "limits", "rows"}, plain values."""
    ticks = clock(where) if ticks is None else ticks
    turns = (30 if where.type == "cuda" else 7) if turns is None else turns
    with torch.no_grad():
        limits = roofline.limits(where, ticks) if limits is None else limits
        rows = [row for shape in shapes for row in compare(shape, where, ticks, turns, limits)]
    emulated = not device.has_fp8(where)
    what = "casts as plain torch operations on this device" if emulated else "casts on this card"
    return {"machine": machine(where), "what": what, "limits": {"copy_gb_per_s": limits.bytes / 1e9}, "rows": rows}


def compare(
    shape: tuple[int, int], where: torch.device, ticks: Clock, turns: int, limits: roofline.Limits
) -> list[dict[str, Any]]:
    """One shape's rows: those whose result is right are timed."""
    m, k = shape
    generator = torch.Generator(where).manual_seed(0)
    sets = [torch.randn(m, k, generator=generator, device=where, dtype=torch.bfloat16) for _ in range(SETS)]
    rows = {name: _checked(name, way, sets[0]) for name, way in WAYS.items()}
    slots = {name: _slot(way, sets[0]) for name, way in WAYS.items()}
    calls: dict[str, Callable[[int], object]] = {
        name: lambda turn, name=name: WAYS[name].run(sets[turn % SETS], slots[name])
        for name, row in rows.items()
        if row["correct"]
    }
    for name, timing in (measure(calls, ticks, turns) if calls else {}).items():
        rate = WAYS[name].bytes(sets[0]) / timing.median
        rows[name] |= {
            "seconds": timing.median,
            "spread": timing.spread,
            "gb_per_s": rate / 1e9,
            "of_copy": rate / limits.bytes,
            "target": TARGETS.get(name) if where.type == "cuda" else None,
        }
    return list(rows.values())


def _checked(name: str, way: Way, x: torch.Tensor) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "shape": list(x.shape), "correct": None}
    try:
        found = way.run(x, _slot(way, x))
        with backend("reference"):
            wanted = way.run(x, _slot(way, x))
    except Exception as error:  # any: a kernel that this card, driver or compiler does not take
        return row | {"why": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    row["correct"] = all(_equal(one, other) for one, other in zip(found, wanted, strict=True))
    return row if row["correct"] else row | {"why": "not the reference's codes and scales: no time, no rate"}


def _equal(one: Operand, other: Operand) -> bool:
    codes = torch.equal(one.data.contiguous().view(torch.uint8), other.data.contiguous().view(torch.uint8))
    return codes and torch.equal(one.scale, other.scale)


def _slot(way: Way, x: torch.Tensor) -> Slot | None:
    """A slot that knows a scale under which nothing of random normal data saturates, or none."""
    if not way.predicted:
        return None
    live = torch.tensor([[-1.0], [E4M3.max / 16]], device=x.device)
    return Slot(live, torch.zeros(len(COUNTERS), 1, dtype=torch.int64, device=x.device), 0)


def parse(text: str) -> list[tuple[int, int]]:
    """Shapes written as M,K joined by semicolons.  Raises ShapeError.

    >>> parse("64,128;3,5")
    [(64, 128), (3, 5)]
    """
    shapes = []
    for word in filter(None, (word.strip() for word in text.split(";"))):
        sizes = [part.strip() for part in word.split(",")]
        if len(sizes) != 2 or not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
            raise ShapeError(f"shape {word!r} is not M,K, two whole numbers from 1 on")
        shapes.append((int(sizes[0]), int(sizes[1])))
    if not shapes:
        raise ShapeError(f"no shapes in {text!r}; want M,K joined by semicolons")
    return shapes


def line(row: dict[str, Any]) -> str:
    """A row as plain text."""
    name = f"{row['name']:34s} {'x'.join(map(str, row['shape'])):12s}"
    if not row["correct"]:
        return f"{name} {'cannot run' if row['correct'] is None else 'WRONG'}: {row['why']}"
    target = "" if row["target"] is None else f"   target {row['target']:.0%}"
    rate = f"{row['gb_per_s']:9.1f} GB/s {row['of_copy']:6.1%} of copy"
    return f"{name} {1e3 * row['seconds']:9.3f} ms {row['spread']:5.0%} {rate}{target}"
