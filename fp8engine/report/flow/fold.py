"""Graph of a flow with repeated blocks folded: of `model.layers.0`, `.1`, ... neighbours that are equal become one.

Two blocks are equal when their parts have the same names and kinds, in the same order, and the same edges.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fp8engine.report.flow import repeats
from fp8engine.report.flow.graph import Consumer, Graph

FIRST_NUMBER = re.compile(r"^(.*?)(?:^|(?<=\.))(\d+)(?=\.|$)")
Block = tuple[str, int]  # (what stands before the first number in its name, that number)


@dataclass(frozen=True)
class Frame:
    """One block drawn for `times` equal neighbours: its nodes, the names of the first and the last of them.

    inner: the longest name that all its nodes' names begin with, the first block's or longer.
    """

    nodes: tuple[int, ...]
    first: str
    last: str
    times: int
    inner: str

    @property
    def blocks(self) -> list[str]:
        """The names of all blocks that it stands for."""
        family, number = self.first[: self.first.rfind(".") + 1], int(self.first.rpartition(".")[2])
        return [f"{family}{number + i}" for i in range(self.times)]

    @property
    def title(self) -> str:
        """The name of the block, or of the blocks that it stands for."""
        if self.times == 1:
            return self.inner
        return f"{self.first}-{self.last.rpartition('.')[2]}   × {self.times}"


@dataclass(frozen=True)
class Folded:
    """The graph to draw: nodes (numbers of the flow's) with their labels, edges, each from a node to a later one."""

    labels: dict[int, str]
    edges: tuple[tuple[int, int], ...]
    frames: tuple[Frame, ...]


def fold(flow: Graph) -> Folded:
    """The graph with each run of equal blocks as its first one.

    >>> from torch import nn
    >>> from fp8engine.report.flow import record
    >>> import torch
    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> [frame.title for frame in fold(record(nn.Sequential(block(), block(), block()), torch.ones(1, 4))).frames]
    ['0-2   × 3']
    """
    blocks: dict[Block, list[int]] = {}
    for index, node in enumerate(flow.nodes):
        if node.kind not in ("embedding", "input", "output") and (block := block_of(node)) is not None:
            blocks.setdefault(block, []).append(index)
    block_at = {index: block for block, nodes in blocks.items() for index in nodes}
    stands_for = list(range(len(flow.nodes)))
    frame_of: dict[int, Frame] = {}
    frames = []
    for run in _runs(flow, blocks):
        nodes, first, last = blocks[run[0]], *(f"{family}{number}" for family, number in (run[0], run[-1]))
        for other in run[1:]:
            for kept, folded in zip(nodes, blocks[other], strict=True):
                stands_for[folded] = kept
        inside = [flow.nodes[i].name for i in nodes if flow.nodes[i].name.startswith(f"{first}.")]
        frame = Frame(tuple(nodes), first, last, len(run), repeats.shared(inside).removesuffix(".") or first)
        frames.append(frame)
        frame_of.update((node, frame) for node in nodes)
    edges = {}
    for i, j in flow.edges:
        a, b = stands_for[i], stands_for[j]
        between = (i, j) != (a, b) and block_at.get(a) == block_at.get(b) and block_at.get(i) != block_at.get(j)
        if a < b and not between:
            edges[a, b] = None
    labels = {node: _label(flow, node, frame_of.get(node)) for node in sorted(set(stands_for))}
    return Folded(labels, tuple(edges), tuple(frames))


def block_of(node: Consumer) -> Block | None:
    """The block that a node's name, or else that of the module around it, is in; None without a number in either.

    >>> from fp8engine.report.flow import Consumer
    >>> block_of(Consumer("residual", "aten.add", "model.layers.3.mlp"))
    ('model.layers.', 3)
    """
    found = FIRST_NUMBER.match(node.name) or FIRST_NUMBER.match(node.where)
    return (found[1], int(found[2])) if found else None


def _runs(flow: Graph, blocks: dict[Block, list[int]]) -> list[list[Block]]:
    """Neighbouring blocks that are equal, and have more than one part."""
    equal: dict[tuple[str, tuple], list[int]] = {}
    for (family, number), nodes in blocks.items():
        if len(nodes) > 1:
            equal.setdefault((family, _content(flow, (family, number), nodes)), []).append(number)
    runs = [(key[0], run) for key, numbers in equal.items() for run in repeats.spans(numbers)]
    return [[(family, number) for number in range(first, last + 1)] for family, (first, last) in sorted(runs)]


def _content(flow: Graph, block: Block, nodes: Sequence[int]) -> tuple:
    """A block's parts and edges without its number."""
    place = {index: i for i, index in enumerate(nodes)}
    parts = ((flow.nodes[i].kind, flow.nodes[i].name.removeprefix(f"{block[0]}{block[1]}.")) for i in nodes)
    return tuple(parts), tuple(sorted({(place[i], place[j]) for i, j in flow.edges if i in place and j in place}))


def _label(flow: Graph, node: int, frame: Frame | None) -> str:
    """A node's name without that of its frame; a sign for an addition and a product."""
    shown = flow.nodes[node]
    if shown.kind == "residual" and shown.name.startswith("aten."):
        return "+"
    if shown.kind == "activation" and shown.name == "aten.mul":
        return "×"
    block = "" if frame is None else frame.first if frame.times > 1 else frame.inner
    name = shown.name.removeprefix(f"{block}.").removeprefix("aten.").removesuffix("_forward") or "(model)"
    calls = flow.layers[shown.name].calls if shown.kind == "matmul" and shown.name in flow.layers else 1
    return f"{name}  (called {calls} times)" if calls > 1 else name
