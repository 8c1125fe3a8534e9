"""Graph of a recording: layers, their consumers and producers, the edges between them; and with repeated blocks folded.

Of `model.layers.0`, `.1`, ... neighbours that are equal become one when the graph is drawn: their parts have the same
names and kinds, in the same order, and the same edges.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from fp8engine.report.flow import repeats

FIRST_NUMBER = re.compile(r"^(.*?)(?:^|(?<=\.))(\d+)(?=\.|$)")
Block = tuple[str, int]  # (what stands before the first number in its name, that number)


@dataclass(frozen=True)
class Consumer:
    """A node of the graph: something that reads a tensor, or made it.

    kind: "matmul", "softmax" (attention), "norm", "residual", "activation", "loss", "output" (it leaves the model) or
    "unknown"; of what made an input also "attention", "embedding" and "input".
    name: of the module that does it ("model.layers.0.mlp.act_fn"), or of the function ("aten.add", "attention").
    where: the module in whose forward that happens, "" for the model itself.
    """

    kind: str
    name: str
    where: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Layer:
    """One linear layer: the consumers of its output, the producers of its input, layers with the very same input.

    calls: how often it ran in the recorded forward; the consumers are those of all calls.
    """

    consumers: tuple[Consumer, ...] = ()
    producer: tuple[Consumer, ...] = ()
    shares_input_with: tuple[str, ...] = ()
    calls: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its consumers, each once."""
        return tuple(dict.fromkeys(consumer.kind for consumer in self.consumers))


@dataclass(frozen=True)
class Graph:
    """Data flow of a model, without the forms in which `Flow` shows it.

    layers: by name, in the order in which they first ran, those that never ran last.
    nodes, edges: the graph: layers (kind "matmul") and all else that made or read a tensor, in the order in which they
    ran; an edge (i, j) says that node j reads what node i made.
    """

    layers: dict[str, Layer]
    nodes: tuple[Consumer, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Frame:
    """One block that is drawn for equal neighbours.

    nodes: of the first of them.  blocks: the names of all.  name: what its nodes' labels leave out of their names; of a
    block without equals the longest name that all its nodes' names begin with.  title: that name, or all blocks'.
    """

    nodes: tuple[int, ...]
    blocks: tuple[str, ...]
    name: str
    title: str


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
    inner = (pair for pair in enumerate(flow.nodes) if pair[1].kind not in ("embedding", "input", "output"))
    blocks = repeats.grouped((block, index) for index, node in inner if (block := block_of(node)) is not None)
    block_at = {index: block for block, nodes in blocks.items() for index in nodes}
    stands_for = list(range(len(flow.nodes)))
    frames, frame_of = [], {}
    for run in _runs(flow, blocks):
        nodes, names = tuple(blocks[run[0]]), tuple(f"{family}{number}" for family, number in run)
        for other in run[1:]:
            for kept, folded in zip(nodes, blocks[other], strict=True):
                stands_for[folded] = kept
        inside = [flow.nodes[i].name for i in nodes if flow.nodes[i].name.startswith(f"{names[0]}.")]
        alone = repeats.shared(inside).removesuffix(".") or names[0]
        title = f"{names[0]}-{run[-1][1]}   × {len(run)}"
        frames.append(Frame(nodes, names, *((names[0], title) if run[1:] else (alone, alone))))
        frame_of |= dict.fromkeys(nodes, frames[-1])
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
    equal = repeats.grouped(
        ((family, _content(flow, f"{family}{number}.", nodes)), number)
        for (family, number), nodes in blocks.items()
        if len(nodes) > 1
    )
    runs = [(key[0], run) for key, numbers in equal.items() for run in repeats.spans(numbers)]
    return [[(family, number) for number in range(first, last + 1)] for family, (first, last) in sorted(runs)]


def _content(flow: Graph, prefix: str, nodes: Sequence[int]) -> tuple:
    """A block's parts and edges without its number."""
    place = {index: i for i, index in enumerate(nodes)}
    parts = tuple((flow.nodes[i].kind, flow.nodes[i].name.removeprefix(prefix)) for i in nodes)
    return parts, tuple(sorted({(place[i], place[j]) for i, j in flow.edges if i in place and j in place}))


def _label(flow: Graph, node: int, frame: Frame | None) -> str:
    """A node's name without that of its frame; a sign for an addition and a product."""
    shown = flow.nodes[node]
    if shown.kind == "residual" and shown.name.startswith("aten."):
        return "+"
    if shown.kind == "activation" and shown.name == "aten.mul":
        return "×"
    name = shown.name.removeprefix(f"{frame.name if frame else ''}.").removeprefix("aten.").removesuffix("_forward")
    calls = flow.layers[shown.name].calls if shown.kind == "matmul" and shown.name in flow.layers else 1
    return f"{name or '(model)'}  (called {calls} times)" if calls > 1 else name or "(model)"
