"""Where a flow's nodes go on paper: in rows from top to bottom, no edge through a box.

A node's row is the longest way to it from an input (Sugiyama, Tagawa and Toda 1981).  An edge that crosses rows gets a
point in each of them, which takes part in the order like a box.  Frames whose rows overlap stand side by side.
Within a row the order is by the mean place of the neighbours, and the distances to those means are made as small as
the widths allow: isotonic regression (Barlow et al. 1972), one row at a time, down and up.  Boxes hold to boxes and
points to points, so that a chain of layers is straight and a residual's way beside it too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fp8engine.auto.flow.fold import Folded, Frame

GAP, ROW, POINT = 18.0, 62.0, 12.0  # between neighbours; from row to row; the width of an edge's point
SWEEPS, ORDERED = 160, 24  # down and up in turn; how many of them may change the order in a row
CENTRED = 0.1  # how much a box is drawn to the middle of its lane, beside one neighbour's pull: nothing drifts
RIGHT = 40.0  # by how much an edge's point may lie left of a box and still go right of it
STRAIGHT = 20.0  # how much more a box minds being away from a box than from an edge's point


@dataclass
class Spot:
    """A box, or an edge's point in a row.  x: its middle."""

    row: int
    lane: int
    width: float
    x: float = 0.0
    above: list[Spot] = field(default_factory=list)
    below: list[Spot] = field(default_factory=list)

    @property
    def is_box(self) -> bool:
        """Whether it is a node."""
        return self.width != POINT


@dataclass(frozen=True)
class Layout:
    """spots: by node.  ways: of each edge, the spots it goes through.  rows: how many there are."""

    spots: dict[int, Spot]
    ways: dict[tuple[int, int], list[Spot]]
    rows: int


def place(folded: Folded, widths: dict[int, float]) -> Layout:
    """A spot for every node and every edge's points.  widths: of the nodes' boxes."""
    rows = _rows(folded)
    lanes = _lanes(folded, rows)
    spots = {node: Spot(rows[node], lanes[node], widths[node]) for node in folded.nodes}
    everything = list(spots.values())
    ways = {}
    for i, j in folded.edges:
        way = [spots[i], *(Spot(row, lanes[i], POINT) for row in range(rows[i] + 1, rows[j])), spots[j]]
        everything += way[1:-1]
        for a, b in itertools.pairwise(way):
            a.below.append(b)
            b.above.append(a)
        ways[i, j] = way
    _settle(everything)
    return Layout(spots, ways, 1 + max(rows.values(), default=-1))


def _rows(folded: Folded) -> dict[int, int]:
    """The longest way from a node that reads nothing; one that reads nothing itself stands above its first reader."""
    rows = dict.fromkeys(folded.nodes, 0)
    readers: dict[int, list[int]] = {}
    for i, j in sorted(folded.edges, key=lambda edge: edge[1]):
        rows[j] = max(rows[j], rows[i] + 1)
        readers.setdefault(i, []).append(j)
    fed = {j for _, j in folded.edges}
    for node in folded.nodes:
        if node not in fed and node in readers:
            rows[node] = min(rows[j] for j in readers[node]) - 1
    return rows


def _lanes(folded: Folded, rows: dict[int, int]) -> dict[int, int]:
    """Frames that overlap in rows in lanes of their own; other nodes in the lane of what they are joined to."""
    taken: list[list[tuple[int, int]]] = []
    lanes: dict[int, int] = {}
    for frame in folded.frames:
        first, last = _span(frame, rows)
        free = (i for i, spans in enumerate(taken) if all(last < a or first > b for a, b in spans))
        lane = next(free, len(taken))
        taken[lane:] = taken[lane:] or [[]]
        taken[lane].append((first, last))
        lanes |= dict.fromkeys(frame.nodes, lane)
    for _ in folded.nodes:
        before = len(lanes)
        for i, j in folded.edges:
            if (i in lanes) != (j in lanes):
                lanes[i] = lanes[j] = lanes.get(i, lanes.get(j, 0))
        if len(lanes) == before:
            break
    return {node: lanes.get(node, 0) for node in folded.nodes}


def _span(frame: Frame, rows: dict[int, int]) -> tuple[int, int]:
    inside = [rows[node] for node in frame.nodes]
    return min(inside), max(inside)


def _settle(spots: list[Spot]) -> None:
    """Give every spot its x."""
    left = 0.0
    for lane in sorted({spot.lane for spot in spots}):
        mine = [spot for spot in spots if spot.lane == lane]
        by_row: dict[int, list[Spot]] = {}
        for spot in mine:
            by_row.setdefault(spot.row, []).append(spot)
        for row in by_row.values():
            _pack(row, [0.0] * len(row))
        for sweep in range(SWEEPS):
            down = sweep % 2 == 0
            for number in sorted(by_row, reverse=not down):
                row = by_row[number]
                wanted = [
                    _mean([s for s in (spot.above if down else spot.below) if s.lane == lane], spot) for spot in row
                ]
                if sweep < ORDERED:
                    order = sorted(
                        range(len(row)),
                        key=lambda i, wanted=wanted, row=row: (wanted[i] + RIGHT * (not row[i].is_box), row[i].x),
                    )
                    by_row[number] = row = [row[i] for i in order]
                _pack(row, [_mean([s for s in (*spot.above, *spot.below) if s.lane == lane], spot) for spot in row])
        start = min(spot.x - spot.width / 2 for spot in mine)
        for spot in mine:
            spot.x += left - start
        left = max(spot.x + spot.width / 2 for spot in mine) + 4 * GAP


def _mean(neighbours: Sequence[Spot], spot: Spot) -> float:
    weights = [STRAIGHT if other.is_box == spot.is_box else 1.0 for other in neighbours]
    total = sum(weight * other.x for weight, other in zip(weights, neighbours, strict=True))
    if not neighbours:
        return spot.x
    return total / sum(weights) / (1.0 + CENTRED if spot.is_box else 1.0)


def _pack(row: Sequence[Spot], wanted: Iterable[float]) -> None:
    """The nearest places to the wanted ones, in this order and without overlap: the pool of adjacent violators."""
    offsets, x = [], 0.0
    for i, spot in enumerate(row):
        x += (row[i - 1].width / 2 + GAP + spot.width / 2) if i else 0.0
        offsets.append(x)
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for spot, want, offset in zip(row, wanted, offsets, strict=True):
        pool = (want - offset, STRAIGHT if spot.is_box else 1.0, 1)
        while pools and pools[-1][0] > pool[0]:
            (a, n, i), (b, m, j) = pools.pop(), pool
            pool = ((a * n + b * m) / (n + m), n + m, i + j)
        pools.append(pool)
    starts = [mean for mean, _, count in pools for _ in range(count)]
    for spot, start, offset in zip(row, starts, offsets, strict=True):
        spot.x = start + offset
