"""A flow as table, dict and picture: nothing missing, nothing overlapping, repeated blocks once."""

import itertools
import json
import re
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from hf_families import FAMILIES
from overflow_cases import Part
from torch import nn

from fp8engine.report import flow
from fp8engine.report.flow.draw import HEIGHT, INK
from fp8engine.report.flow.graph import fold

SVG = "{http://www.w3.org/2000/svg}"


class Box(NamedTuple):
    """A node or a frame on paper: its left and top edges, its width and height, a node's kind."""

    x: float
    y: float
    width: float
    height: float
    kind: str = ""


class Picture(NamedTuple):
    """What an SVG shows."""

    width: float
    height: float
    boxes: list[Box]
    curves: list[list[tuple[float, float]]]
    frames: list[Box]


def picture(found: flow.Flow) -> Picture:
    """The shapes of a flow's SVG, in pixels from the top left."""
    root, kinds = ElementTree.fromstring(found.to_svg()), {ink.fill: kind for kind, ink in INK.items()}

    def box(rect: ElementTree.Element) -> Box:
        x, y, width, height = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        return Box(x, y, width, height, kinds.get(rect.attrib["fill"], ""))

    curves = []
    for path in root.iterfind(f"{SVG}path"):
        numbers = [float(number) for number in re.findall(r"[-\d.]+", path.attrib["d"])]
        points = list(zip(numbers[::2], numbers[1::2], strict=True))
        curves.append(points[::3])  # between them are the handles of each bend
    frames = [box(rect) for rect in root.iterfind(f"{SVG}rect") if "stroke-dasharray" in rect.attrib]
    boxes = [box(rect) for rect in root.iterfind(f"{SVG}g/{SVG}rect")]
    return Picture(float(root.attrib["width"]), float(root.attrib["height"]), boxes, curves, frames)


def recorded(family: str, **options: int) -> flow.Flow:
    row = FAMILIES[family]
    return flow.record(row.build(**options), row.batch())


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
    unread = nn.Linear(2, 2)
    model = Part(lambda x: (unread(x), x)[1], unread=unread, never=nn.Linear(2, 2))
    text = str(flow.record(model, torch.ones(1, 2)))
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
    shown = picture(recorded(family))
    for box, other in itertools.combinations(shown.boxes, 2):
        apart = box.x + box.width <= other.x + 0.1 or other.x + other.width <= box.x + 0.1  # the SVG is exact to 0.1
        assert apart or abs(box.y - other.y) >= HEIGHT
    for box in shown.boxes:
        assert box.kind
        assert box.height == HEIGHT
        assert 0 < box.x < box.x + box.width < shown.width
        assert HEIGHT / 2 < box.y < shown.height - HEIGHT
    for points in shown.curves:
        assert all(a[1] < b[1] for a, b in itertools.pairwise(points))
    for a, b in itertools.combinations(shown.frames, 2):
        beside = a.x + a.width <= b.x or b.x + b.width <= a.x
        assert beside or a.y + a.height <= b.y or b.y + b.height <= a.y


def test_a_chain_is_straight():
    """Boxes of a chain stand above each other to a pixel, beside a residual's way."""
    parts = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(4, 4), nn.GELU())))
    chain = Part(lambda x: x + parts(x), parts=parts)
    middles = [box.x + box.width / 2 for box in picture(flow.record(chain, torch.ones(1, 4))).boxes]
    assert max(middles) - min(middles) < 12  # the residual's way pulls a little, and a box is at least 30 wide


@pytest.mark.parametrize("family", ["llama", "t5", "mixtral"])
def test_svg_and_mermaid_have_every_node_edge_and_frame_of_the_folded_graph(family: str):
    """And stand alone: the SVG's only address is its namespace."""
    found = recorded(family)
    graph, svg, mermaid = fold(found), found.to_svg(), found.to_mermaid()
    root = ElementTree.fromstring(svg)
    assert len(root.findall(f"{SVG}g")) == len(graph.labels)
    assert len(root.findall(f"{SVG}path")) == len(graph.edges)
    assert "href" not in svg
    assert "<script" not in svg
    assert svg.count("http") == 1
    assert len(svg) < 40_000
    assert svg == recorded(family).to_svg()
    boxes = dict(re.findall(r'^ *n(\d+)\["(.*)"\]:::\w+$', mermaid, re.M))
    assert {int(node): label for node, label in boxes.items()} == graph.labels
    joined = re.findall(r"^n(\d+) --> n(\d+)$", mermaid, re.M)
    assert [(int(i), int(j)) for i, j in joined] == list(graph.edges)
    for frame in graph.frames:
        assert f'["{frame.title}"]' in mermaid
    assert mermaid.count("\nsubgraph ") == mermaid.count("\nend\n") == len(graph.frames)


def test_a_model_without_layers_draws_nothing_and_names_are_text_and_no_markup():
    found = flow.record(nn.Identity(), torch.ones(1))
    assert found.layers == {}
    assert ElementTree.fromstring(found.to_svg()) is not None
    assert found.to_mermaid().startswith("flowchart TD")
    model = nn.Sequential()
    model.add_module('<b>&"', nn.Linear(2, 2))
    found = flow.record(model, torch.ones(1, 2))
    assert '<b>&"' in "".join(ElementTree.fromstring(found.to_svg()).itertext())
    assert '["#60;b#62;#38;#34;"]' in found.to_mermaid()
