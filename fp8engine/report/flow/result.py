"""Result of a recording: the graph and its forms."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from fp8engine.amp.text import FOLD, as_text
from fp8engine.report.flow import draw, repeats
from fp8engine.report.flow.graph import Consumer, Graph, Layer
from fp8engine.report.flow.origins import Origin


class Flow(Graph):
    """Data flow of a model and its forms; `record` makes it."""

    def to_dict(self) -> dict:
        """Everything, in types that JSON knows."""
        return json.loads(json.dumps(asdict(self)))

    def table(self, width: int = 160) -> str:
        """Text, `width` columns wide; layers whose rows differ in the numbers of their blocks alone are one row."""
        rows, names, layers = [], list(self.layers), list(self.layers.values())
        for name, members in repeats.fold(zip(names, map(_alike, names, layers), strict=True)):
            those = [layers[i] for i in members]
            others = _told((other, "") for layer in those for other in layer.shares_input_with)
            read_by = _told((each.name, each.kind) for layer in those for each in layer.consumers)
            cells = [
                [name or "(the model)"],
                _told((each.name, each.kind) for layer in those for each in layer.producer),
                read_by or ["nothing reads it" if those[0].calls else "never ran"],
                [other.removeprefix(name[: name.rfind(".") + 1]) for other in others],  # from the module around both
                [str(those[0].calls)],
            ]
            rows.append(["\n".join(lines) for lines in cells])
        headings = ("layer", "input from", "output to", "reads the same input", "calls")
        return as_text("Who consumes what", [(heading, FOLD) for heading in headings], rows, (), width)

    def to_svg(self, formats: Mapping[str, Sequence[str]] | None = None) -> str:
        """The graph as one self-contained SVG, repeated blocks drawn once.

        formats: name of a layer -> those of its input, weight and grad_output, which a report's page gives.
        """
        return draw.svg(self, formats)

    def to_mermaid(self) -> str:
        """The same graph as a Mermaid flowchart, which GitHub, notebooks and documentation tools render."""
        return draw.mermaid(self)

    def __str__(self) -> str:
        return self.table()


def flow_of(names: Iterable[str], made: Sequence[Origin], sharing: Iterable[Sequence[str]]) -> Flow:
    """A Flow of what was recorded.

    names: of the layers that are modules.  made: every origin, in order.  sharing: layers that read one tensor.
    Calls of one layer are one node, and so is the second addition in a module in each call of that module; of the rest
    only what layers read or are read by is a node.
    """
    nodes: dict[tuple, Consumer] = {}
    key_of: dict[Origin, tuple] = {}
    seen: Counter[tuple] = Counter()
    for origin in made:
        if origin.same_as is None:
            here = (origin.kind, origin.name, origin.where)
            seen[here, origin.call] += 1
            key = (*here, seen[here, origin.call]) if origin.layer is None else (origin.layer,)
            key_of[origin] = key
            attention = origin.kind == "softmax" and origin.name.endswith("attention")
            nodes.setdefault(key, Consumer("attention" if attention else origin.kind, origin.name, origin.where))
    pairs = {(key_of[source.resolved()], key_of[origin.resolved()]): None for origin in made for source in origin.of}
    readers, makers = repeats.grouped(pairs), repeats.grouped((reader, maker) for maker, reader in pairs)
    together = repeats.grouped((layer, other) for group in sharing for layer in group for other in group)
    calls = Counter(origin.layer for origin in made if origin.layer is not None)
    layers = {}
    for name in dict.fromkeys((*calls, *names)):
        layers[name] = Layer(
            tuple(dict.fromkeys(_as_reader(nodes[key]) for key in readers.get((name,), ()))),
            tuple(dict.fromkeys(nodes[key] for key in makers.get((name,), ()))),
            tuple(other for other in dict.fromkeys(together.get(name, ())) if other != name),
            calls[name],
        )
    edges = [edge for edge in pairs if edge[0] != edge[1]]
    used = {key for edge in edges for key in edge} | {(name,) for name in calls}
    number = {key: i for i, key in enumerate(key for key in nodes if key in used)}
    return Flow(layers, tuple(nodes[key] for key in number), tuple((number[i], number[j]) for i, j in edges))


def _as_reader(node: Consumer) -> Consumer:
    """What makes a tensor as an attention has read one with its softmax."""
    return replace(node, kind="softmax") if node.kind == "attention" else node


def _alike(name: str, layer: Layer) -> str:
    """What layers of one row have in common; layers that read one tensor are told by the names of all of them."""
    sharing = _told((each, "") for each in (name, *layer.shares_input_with))
    ends = [[(each.kind, _seen_from(name, each.name)) for each in those] for those in (layer.producer, layer.consumers)]
    return str((layer.calls, ends, sorted(_seen_from(name, each) for each in sharing)))


def _seen_from(name: str, other: str) -> str:
    """Another name with its blocks' numbers as distances from those of `name`.

    >>> _seen_from("h.3.q", "h.2.norm.0")
    'h.-1.norm.0'
    """
    parts = other.split(".")
    for i, (part, own) in enumerate(zip(parts, name.split("."), strict=False)):
        if part.isdecimal() and own.isdecimal():
            parts[i] = f"{int(part) - int(own)}"
        elif part != own:
            break
    return ".".join(parts)


def _told(named: Iterable[tuple[str, str]]) -> list[str]:
    """Each (name, kind) once as text, names of repeated blocks as one."""
    once = list(dict.fromkeys(named))
    return [f"{once[i][1]} {name.partition(' × ')[0]}".lstrip() for name, (i, *_) in repeats.fold(once)]
