"""A flow as table, dict and picture: nothing missing, nothing overlapping, repeated blocks once."""

import itertools
import json
import re
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from hf_families import FAMILIES
from torch import nn

from fp8engine.report import flow
from fp8engine.report.flow.draw import HEIGHT, INK
from fp8engine.report.flow.graph import fold

SVG = "{http://www.w3.org/2000/svg}"


class Box(NamedTuple):
    """A node on paper: its middle, its width, its kind."""

    x: float
    y: float
    width: float
    kind: str


class Picture(NamedTuple):
    """What an SVG shows.  frames: (x, y, width, height)."""

    width: float
    height: float
    boxes: list[Box]
    curves: list[list[tuple[float, float]]]
    frames: list[tuple[float, float, float, float]]


def picture(found: flow.Flow) -> Picture:
    """The shapes of a flow's SVG, in pixels from the top left."""
    root = ElementTree.fromstring(found.to_svg())
    kinds = {ink.fill: kind for kind, ink in INK.items()}
    boxes = []
    for rect in root.iterfind(f"{SVG}g/{SVG}rect"):
        x, y, width, height = rectangle(rect)
        assert height == HEIGHT
        boxes.append(Box(x + width / 2, y + height / 2, width, kinds[rect.attrib["fill"]]))
    curves = []
    for path in root.iterfind(f"{SVG}path"):
        numbers = [float(number) for number in re.findall(r"[-\d.]+", path.attrib["d"])]
        points = list(zip(numbers[::2], numbers[1::2], strict=True))
        curves.append(points[::3])  # between them are the handles of each bend
    frames = [rectangle(rect) for rect in root.iterfind(f"{SVG}rect") if "stroke-dasharray" in rect.attrib]
    return Picture(float(root.attrib["width"]), float(root.attrib["height"]), boxes, curves, frames)


def rectangle(rect: ElementTree.Element) -> tuple[float, float, float, float]:
    x, y, width, height = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
    return x, y, width, height


def recorded(family: str, **options: int) -> flow.Flow:
    row = FAMILIES[family]
    return flow.record(row.build(**options), row.batch())


def drawn(family: str) -> Picture:
    return picture(recorded(family))


def test_table_and_dict():
    found = recorded("llama")
    text = str(found)
    for words in ("layers.0-1.self_attn.q_proj × 2", "softmax attention", "activation aten.mul", "output logits"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 160
    told = json.loads(json.dumps(found.to_dict()))
    assert told["layers"]["model.layers.0.mlp.up_proj"] == {
        "consumers": [{"kind": "activation", "name": "aten.mul", "where": "model.layers.0.mlp"}],
        "producer": [{"kind": "norm", "name": "model.layers.0.post_attention_layernorm", "where": "model.layers.0"}],
        "shares_input_with": ["model.layers.0.mlp.gate_proj"],
        "calls": 1,
    }
    assert len(told["nodes"]) == len(found.nodes)
    assert all(0 <= i < j < len(found.nodes) for i, j in told["edges"])


@pytest.mark.parametrize(
    ("family", "depth", "rows"),
    [("llama", 3, 7 + 1), ("bert", 3, 3 * 2 + 3 + 2), ("t5", 3, 6 + 10 + 1)],
    ids=["llama: one block, lm_head", "bert: q, k, v of block 0 read another norm; 2 in the head", "t5: cross k and v"],
)
def test_a_table_has_one_row_for_layers_that_differ_in_their_blocks_alone(family: str, depth: int, rows: int):
    """Each row stands for layers with the row's consumers and producers, wherever those are seen from the layer."""
    found = recorded(family, num_hidden_layers=depth) if family != "t5" else recorded(family, num_layers=depth)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in found.table(400).splitlines() if "│" in line]
    assert len([first for first, *_ in cells if first]) == rows
    if family == "bert":
        query = {first: (source, reads) for first, source, _, reads, _ in cells if "self.query" in first}
        assert query == {
            "bert.encoder.layer.0.attention.self.query": ("norm bert.embeddings.LayerNorm", "key"),
            "bert.encoder.layer.1-2.attention.self.query × 2": ("norm bert.encoder.layer.0-1.output.LayerNorm", "key"),
        }


def test_a_table_says_what_never_ran_and_what_nothing_reads():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.unread, self.never = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            self.unread(x)
            return x

    text = str(flow.record(Two(), torch.ones(1, 2)))
    assert "nothing reads it" in text
    assert "never ran" in text


@pytest.mark.parametrize("depth", [1, 2, 24])
def test_equal_blocks_are_drawn_once(depth: int):
    found = recorded("llama", num_hidden_layers=depth)
    (frame,) = fold(found).frames
    assert len(frame.blocks) == depth
    assert len(fold(found).labels) == len(fold(recorded("llama", num_hidden_layers=2)).labels)
    svg = found.to_svg()
    assert (f"model.layers.0-{depth - 1}   × {depth}" in svg) == (depth > 1)
    assert svg.count("self_attn.q_proj</text>") == 1


def test_a_block_unlike_its_neighbours_is_drawn_for_itself():
    def block(activation: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), activation)

    model = nn.Sequential(block(nn.ReLU()), block(nn.ReLU()), block(nn.LayerNorm(4)), block(nn.ReLU()))
    frames = fold(flow.record(model, torch.ones(1, 4))).frames
    assert [frame.blocks for frame in frames] == [("0", "1"), ("2",), ("3",)]


@pytest.mark.parametrize("family", FAMILIES)
def test_boxes_do_not_overlap_and_edges_lead_down(family: str):
    shown = drawn(family)
    spans = [(box.y, box.x - box.width / 2, box.x + box.width / 2) for box in shown.boxes]
    for (y, left, right), (other, start, end) in itertools.combinations(spans, 2):
        assert abs(y - other) >= HEIGHT or right <= start + 0.1 or end <= left + 0.1  # the SVG is exact to 0.1
    for y, left, right in spans:
        assert 0 < left < right < shown.width
        assert HEIGHT < y < shown.height - HEIGHT / 2
    for points in shown.curves:
        assert all(a[1] < b[1] for a, b in itertools.pairwise(points))
    for (x, y, w, h), (x2, y2, w2, h2) in itertools.combinations(shown.frames, 2):
        assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_a_chain_is_straight():
    """Boxes of a chain stand above each other to a pixel, beside a residual's way."""

    class Chain(nn.Sequential):
        def forward(self, input):
            return input + super().forward(input)

    parts = [part for _ in range(4) for part in (nn.Linear(4, 4), nn.GELU())]
    shown = picture(flow.record(Chain(*parts), torch.ones(1, 4)))
    x = [box.x for box in shown.boxes]
    assert max(x) - min(x) < 12  # the residual's way pulls a little, and a box is at least 30 wide


@pytest.mark.parametrize("family", ["llama", "t5", "mixtral"])
def test_svg_is_well_formed_and_stands_alone(family: str):
    found = recorded(family)
    svg = found.to_svg()
    root = ElementTree.fromstring(svg)
    graph = fold(found)
    assert len(root.findall(f"{SVG}g")) == len(graph.labels)
    assert len(root.findall(f"{SVG}path")) == len(graph.edges)
    assert "href" not in svg
    assert "<script" not in svg
    assert svg.count("http") == 1  # the namespace
    assert len(svg) < 40_000
    assert svg == recorded(family).to_svg()


def test_names_are_text_and_no_markup():
    model = nn.Sequential()
    model.add_module('<b>&"', nn.Linear(2, 2))
    root = ElementTree.fromstring(flow.record(model, torch.ones(1, 2)).to_svg())
    assert '<b>&"' in "".join(root.itertext())


def test_a_model_without_layers_draws_nothing_and_does_not_fail():
    found = flow.record(nn.Identity(), torch.ones(1))
    assert found.layers == {}
    assert ElementTree.fromstring(found.to_svg()) is not None
    assert found.to_mermaid().startswith("flowchart TD")


@pytest.mark.parametrize("family", ["llama", "t5", "mixtral"])
def test_mermaid_has_every_node_edge_and_frame_of_the_folded_graph(family: str):
    found = recorded(family)
    graph, mermaid = fold(found), found.to_mermaid()
    boxes = dict(re.findall(r'^ *n(\d+)\["(.*)"\]:::\w+$', mermaid, re.M))
    assert {int(node): label for node, label in boxes.items()} == graph.labels
    joined = re.findall(r"^n(\d+) --> n(\d+)$", mermaid, re.M)
    assert [(int(i), int(j)) for i, j in joined] == list(graph.edges)
    for frame in graph.frames:
        assert f'["{frame.title}"]' in mermaid
    assert mermaid.count("\nsubgraph ") == mermaid.count("\nend\n") == len(graph.frames)


def test_markup_in_a_name_is_text_in_mermaid_too():
    model = nn.Sequential()
    model.add_module('<b>&"', nn.Linear(2, 2))
    assert '["#60;b#62;#38;#34;"]' in flow.record(model, torch.ones(1, 2)).to_mermaid()
