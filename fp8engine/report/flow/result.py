"""Result of a recording: the graph and its forms."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

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
    """
    calls = repeats.grouped((origin.layer, origin) for origin in made if origin.layer is not None)
    together = repeats.grouped(
        (layer, other) for group in sharing for layer in group for other in group if other != layer
    )
    layers = {}
    for name in dict.fromkeys((*calls, *names)):
        mine = calls.get(name, [])
        layers[name] = Layer(
            _told_of((consumer for call in mine for consumer in call.consumers), made=False),
            _told_of((origin for call in mine for origin in call.of), made=True),
            tuple(dict.fromkeys(together.get(name, ()))),
            len(mine),
        )
    return Flow(layers, *_graph(made))


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


def _told_of(origins: Iterable[Origin], *, made: bool) -> tuple[Consumer, ...]:
    """Each once as a Consumer.  made: they made a tensor, rather than read it: a softmax made it as an attention."""
    found = {}
    for origin in (origin.resolved() for origin in origins):
        attention = made and origin.kind == "softmax" and origin.name.endswith("attention")
        found[Consumer("attention" if attention else origin.kind, origin.name, origin.where)] = None
    return tuple(found)


def _graph(made: Sequence[Origin]) -> tuple[tuple[Consumer, ...], tuple[tuple[int, int], ...]]:
    """(nodes, edges): calls of one layer are one node, and of the rest only what layers read or are read by."""
    node_of: dict[int, int] = {}
    nodes: list[Consumer] = []
    known: dict[tuple, int] = {}  # the second addition in a module is the same node in each call of that module
    seen: dict[tuple, int] = {}
    for origin in made:
        if origin.same_as is not None:
            continue
        here = (origin.kind, origin.name, origin.where, origin.call)
        seen[here] = seen.get(here, 0) + 1
        key = (origin.layer,) if origin.layer is not None else (*here[:3], seen[here])
        if key not in known:
            known[key] = len(nodes)
            nodes += _told_of([origin], made=True)
        node_of[id(origin)] = known[key]
    pairs = (
        (node_of[id(source.resolved())], node_of[id(origin.resolved())]) for origin in made for source in origin.of
    )
    edges = tuple(dict.fromkeys((i, j) for i, j in pairs if i != j))
    used = sorted({i for edge in edges for i in edge} | {i for key, i in known.items() if len(key) == 1})
    number = {old: new for new, old in enumerate(used)}
    return tuple(nodes[i] for i in used), tuple((number[i], number[j]) for i, j in edges)
