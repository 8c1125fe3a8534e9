"""Mermaid source of a flow's graph, and the colours of its kinds of nodes."""

from __future__ import annotations

import re
from typing import NamedTuple

from fp8engine.report.flow.fold import fold
from fp8engine.report.flow.graph import Graph


class Ink(NamedTuple):
    """Colours of a kind of nodes: of the box, its border, its text.  legend: what the kind is called beside them."""

    fill: str
    border: str
    text: str
    legend: str


INK = {
    "matmul": Ink("#1f4e79", "#163a5c", "#ffffff", "matmul"),
    "attention": Ink("#e6dcf5", "#8e6bbf", "#3b2363", "attention, softmax"),
    "norm": Ink("#fbe9c6", "#d19a2a", "#5c3f05", "norm"),
    "residual": Ink("#dff0df", "#5b9b5b", "#1e4a1e", "residual"),
    "activation": Ink("#fbdccb", "#d9774a", "#632a0c", "activation"),
    "embedding": Ink("#dce9f5", "#7fa6cc", "#1f3d5c", "input, embedding"),
    "loss": Ink("#f8d3d6", "#c4515b", "#5f141b", "loss"),
    "output": Ink("#eeeeee", "#8a8a8a", "#333333", "output"),
    "unknown": Ink("#ffffff", "#8a8a8a", "#333333", "other"),
}
SAME_INK = {"softmax": "attention", "input": "embedding"}


def ink_of(kind: str) -> str:
    """The key of INK for a node's kind."""
    return SAME_INK.get(kind, kind)


def mermaid(flow: Graph) -> str:
    """The graph as a Mermaid flowchart, which GitHub and notebooks render.

    >>> import torch
    >>> from fp8engine.report.flow import record
    >>> print(mermaid(record(torch.nn.Linear(2, 2), torch.ones(1, 2))))
    flowchart TD
    n0["[0]"]:::embedding
    n1["(model)"]:::matmul
    n2["output"]:::output
    n0 --> n1
    n1 --> n2
    classDef matmul fill:#1f4e79,stroke:#163a5c,color:#ffffff
    classDef embedding fill:#dce9f5,stroke:#7fa6cc,color:#1f3d5c
    classDef output fill:#eeeeee,stroke:#8a8a8a,color:#333333
    """
    folded = fold(flow)
    kinds = {node: ink_of(flow.nodes[node].kind) for node in folded.labels}
    boxes = {node: f'n{node}["{_escaped(label)}"]:::{kinds[node]}' for node, label in folded.labels.items()}
    lines = ["flowchart TD"]
    for number, frame in enumerate(folded.frames):
        inside = [f"    {boxes.pop(node)}" for node in frame.nodes]
        lines += [f'subgraph block{number}["{_escaped(frame.title)}"]', *inside, "end"]
    lines += [*boxes.values(), *(f"n{i} --> n{j}" for i, j in folded.edges)]
    used = {kind: ink for kind, ink in INK.items() if kind in kinds.values()}
    lines += [f"classDef {kind} fill:{ink.fill},stroke:{ink.border},color:{ink.text}" for kind, ink in used.items()]
    return "\n".join(lines)


def _escaped(label: str) -> str:
    """A label between Mermaid's quotes: markup as its decimal codes."""
    return re.sub(r'[<>"&#;]', lambda found: f"#{ord(found[0])};", label)
