"""Benchmark of every cast: the bytes that it has to move, over the time it takes, beside the machine's measured copy.

    rate = (reads * bytes of x + writes) * elements / seconds          of copy = rate / (2 * bytes copied / seconds)

`reads` and `writes` are the fewest that the cast can do with: current scaling reads a tensor twice (its amax first),
predicted scales and scales of a row or block once; each orientation stored is a byte an element.
A result is right if it is the reference's bit for bit.  Every cast enters its amax and its counters, as a layer's does.

    python -m benchmarks.casts [--shapes M,K;M,K]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.common import WHERE, parser, save, show
from fp8engine.bench import cases, harness
from fp8engine.bench.harness import Limits, Row, Timer
from fp8engine.errors import ShapeError
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import E4M3
from fp8engine.ops import device
from fp8engine.ops.backends import backend
from fp8engine.ops.casts import cast_transpose, quantize
from fp8engine.ops.reference import Operand, Slot
from fp8engine.ops.reference.operand import COUNTERS

SETS = 2
SHAPES = {"cuda": ((8192, 4096), (8192, 14336), (16384, 1024)), "cpu": ((1024, 1024), (2048, 4096))}
PER_TENSOR, PER_ROW = Cast.parse("e4m3"), Cast.parse("e4m3 1x-1 p2")
BLOCKS, SQUARES = Cast.parse("e4m3 1x128 p2"), Cast.parse("e4m3 128x128 p2")
# Target of DESIGN section 9 on a Hopper card, share of copy bandwidth.
TARGETS = {"row": 0.95, "tensor, transposed too": 0.92}


@dataclass(frozen=True)
class Way:
    """One cast.  both: with the transpose.  predicted: under a scale known beforehand (delayed scaling).

    summed: with the sums of x's columns, a bias's gradient, which are not compared here.
    """

    cast: Cast
    reads: int
    writes: int
    both: bool = False
    predicted: bool = False
    summed: bool = False

    def bytes(self, x: torch.Tensor) -> int:
        """Fewest bytes that move."""
        return x.numel() * (self.reads * x.element_size() + self.writes)

    def run(self, x: torch.Tensor, slot: Slot | None) -> list[Operand]:
        """The operands made of x."""
        cast = replace(self.cast, scaling="delayed") if self.predicted else self.cast
        if self.summed:
            return list(cast_transpose(x, cast, slot, True)[:2])
        return list(cast_transpose(x, cast, slot)) if self.both else [quantize(x, cast, slot)]


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
    "tensor, transposed and summed": Way(PER_TENSOR, 2, 2, both=True, summed=True),
    "row, transposed and summed": Way(PER_ROW, 1, 2, both=True, summed=True),
    "1x128, transposed and summed": Way(BLOCKS, 1, 2, both=True, summed=True),
}


def casts(
    shapes: Sequence[tuple[int, int]],
    where: torch.device,
    timer: Timer | None = None,
    limits: Limits | None = None,
) -> dict[str, Any]:
    """Check and time every cast of BF16 matrices M x K: {"machine", "what", "limits", "rows"}, plain values."""
    timer = timer or Timer.of(where, 30, 7)
    with torch.no_grad():
        limits = harness.limits(where, timer.clock) if limits is None else limits
        rows = [row for shape in shapes for row in compare(shape, where, timer, limits)]
    what = "casts on this card" if device.has_fp8(where) else "casts as plain torch operations on this device"
    rates = {"copy_gb_per_s": limits.bytes / 1e9}
    return {"machine": harness.machine(where), "what": what, "limits": rates, "rows": rows}


def compare(shape: tuple[int, int], where: torch.device, timer: Timer, limits: Limits) -> list[Row]:
    """One shape's rows."""
    generator = torch.Generator(where).manual_seed(0)
    sets = [torch.randn(*shape, generator=generator, device=where, dtype=torch.bfloat16) for _ in range(SETS)]
    first = sets[0]

    def check(row: Row, way: Way) -> harness.Call:
        found = way.run(first, _slot(way, first))
        with backend("reference"):
            wanted = way.run(first, _slot(way, first))
        row["correct"] = all(_equal(one, other) for one, other in zip(found, wanted, strict=True))
        if not row["correct"]:
            row["why"] = "not the reference's codes and scales: no time, no rate"
        slot = _slot(way, first)
        return lambda turn: way.run(sets[turn % SETS], slot)

    def derive(name: str, seconds: float, over: Callable) -> Row:
        rate = WAYS[name].bytes(first) / seconds
        target = TARGETS.get(name) if where.type == "cuda" else None
        return {"gb_per_s": rate / 1e9, "of_copy": rate / limits.bytes, "target": target}

    checks = {name: lambda row, way=way: check(row, way) for name, way in WAYS.items()}
    return harness.compare({"shape": list(shape)}, checks, derive, timer)


def _equal(one: Operand, other: Operand) -> bool:
    codes = torch.equal(one.data.contiguous().view(torch.uint8), other.data.contiguous().view(torch.uint8))
    return codes and torch.equal(one.scale, other.scale)


def _slot(way: Way, x: torch.Tensor) -> Slot:
    """A slot; where the scale is predicted, one under which nothing of random normal data saturates."""
    live = torch.tensor([[-1.0], [E4M3.max / 16 if way.predicted else 0.0]], device=x.device)
    return Slot(live, torch.zeros(len(COUNTERS), 1, dtype=torch.int64, device=x.device), 0)


def parse(text: str) -> list[tuple[int, int]]:
    """Shapes written as M,K joined by semicolons.  Raises ShapeError.

    >>> parse("64,128;3,5")
    [(64, 128), (3, 5)]
    """
    shapes = []
    for word in filter(None, (word.strip() for word in text.split(";"))):
        m, k = cases.sizes(word, "M,K", "two")
        shapes.append((m, k))
    if not shapes:
        raise ShapeError(f"no shapes in {text!r}; want M,K joined by semicolons")
    return shapes


def main() -> None:
    """Measure, print, write the result."""
    options = parser(__doc__)
    options.add_argument("--shapes", help="M,K joined by semicolons")
    asked = options.parse_args().shapes
    result = casts(parse(asked) if asked else SHAPES[WHERE.type], WHERE)
    print(f"a copy moves {result['limits']['copy_gb_per_s']:.4g} GB/s")
    show(result)
    print(f"written to {save('quantize', result)}")


if __name__ == "__main__":
    main()
