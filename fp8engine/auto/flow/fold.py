"""Repeated blocks of a flow's graph, drawn once: equal neighbours among `model.layers.0`, `.1`, ... become one.

Two blocks are equal when their parts have the same names and kinds, in the same order, joined alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fp8engine.auto.flow.result import Consumer, Flow

FIRST_NUMBER = re.compile(r"^(.*?)(?:^|(?<=\.))(\d+)(?=\.|$)")


@dataclass(frozen=True)
class Frame:
    """A block drawn for itself and those that repeat it: the nodes, first and last name, how many there are.

    inner: the longest name that all its nodes' names begin with, the first block's or longer.
    """

    nodes: tuple[int, ...]
    first: str
    last: str
    times: int
    inner: str


@dataclass(frozen=True)
class Folded:
    """What is left to draw: nodes (numbers of the flow's), edges between them that all lead onward, frames."""

    nodes: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    frames: tuple[Frame, ...]


def fold(flow: Flow) -> Folded:
    """The graph with each run of equal blocks as its first one.

    >>> from torch import nn
    >>> from fp8engine.auto.flow import record
    >>> import torch
    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> [frame.times for frame in fold(record(nn.Sequential(block(), block(), block()), torch.ones(1, 4))).frames]
    [3]
    """
    blocks: dict[tuple[str, int], list[int]] = {}
    for index, node in enumerate(flow.nodes):
        if node.kind not in ("embedding", "input", "output") and (block := block_of(node)) is not None:
            blocks.setdefault(block, []).append(index)
    stands_for = list(range(len(flow.nodes)))
    block_at = {index: block for block, nodes in blocks.items() for index in nodes}
    frames = []
    for run in _runs(flow, blocks):
        first, *others = run
        for other in others:
            for kept, gone in zip(blocks[first], blocks[other], strict=True):
                stands_for[gone] = kept
        name, last = (f"{family}{number}" for family, number in (first, run[-1]))
        frames.append(Frame(tuple(blocks[first]), name, last, len(run), _common(flow, blocks[first], name)))
    edges = {}
    for i, j in flow.edges:
        a, b = stands_for[i], stands_for[j]
        between = (i, j) != (a, b) and block_at.get(a) == block_at.get(b) and block_at.get(i) != block_at.get(j)
        if a < b and not between:
            edges[a, b] = None
    return Folded(tuple(sorted(set(stands_for))), tuple(edges), tuple(frames))


def block_of(node: Consumer) -> tuple[str, int] | None:
    """(what stands before the first number in its name or in the name of where it is, that number); None without one.

    >>> block_of(Consumer("residual", "aten.add", "model.layers.3.mlp"))
    ('model.layers.', 3)
    """
    for name in (node.name, node.where):
        if found := FIRST_NUMBER.match(name):
            return found[1], int(found[2])
    return None


def _runs(flow: Flow, blocks: dict[tuple[str, int], list[int]]) -> list[list[tuple[str, int]]]:
    """Neighbouring blocks that are equal, and have more than one part."""
    runs: list[list[tuple[str, int]]] = []
    looks: dict[tuple[str, int], tuple] = {block: _look(flow, block, nodes) for block, nodes in blocks.items()}
    for block in sorted(blocks):
        family, number = block
        if runs and runs[-1][-1] == (family, number - 1) and looks[runs[-1][-1]] == looks[block]:
            runs[-1].append(block)
        else:
            runs.append([block])
    return [run for run in runs if len(blocks[run[0]]) > 1]


def _look(flow: Flow, block: tuple[str, int], nodes: Sequence[int]) -> tuple:
    """What a block is, without its number."""
    name = f"{block[0]}{block[1]}"
    place = {index: i for i, index in enumerate(nodes)}
    parts = tuple((flow.nodes[i].kind, within(flow.nodes[i].name, name)) for i in nodes)
    joints = {(place[i], place[j]) for i, j in flow.edges if i in place and j in place}
    return parts, tuple(sorted(joints))


def _common(flow: Flow, nodes: Sequence[int], block: str) -> str:
    """The longest name that is a whole part of each node's, beginning with the block's."""
    names = [flow.nodes[i].name for i in nodes]
    inside = [name.split(".")[:-1] for name in names if name.startswith(f"{block}.")]
    parts = block.split(".")
    for step in zip(*(name[len(parts) :] for name in inside), strict=False):
        if len(set(step)) > 1:
            break
        parts.append(step[0])
    return ".".join(parts)


def within(name: str, block: str) -> str:
    """A name as its block calls it."""
    return name.removeprefix(f"{block}.")
