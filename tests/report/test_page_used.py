"""The page in a browser and in Node: it opens, is used with keys and mouse, and no name in it is anything but text."""

import re
from pathlib import Path
from typing import Any

import pytest
from made_reports import EVIL, trained
from page_engines import ENGINES, browser, used

import fp8engine as fe
from fp8engine.report.page import page


class Graph:
    """A flow that can draw itself, and that would run a script if it were not drawn as an image."""

    def to_svg(self) -> str:
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" width="64" height="32"><script>window.hacked = 2</script>'
            '<rect width="64" height="32"/></svg>'
        )


@pytest.fixture(scope="module")
def auto():
    """Four layers, eleven looks: (report, page)."""
    model, losses = trained(fe.auto(interval=1))
    report = fe.inspect(model)
    return report, page(report, losses, Graph())


@pytest.fixture(scope="module", params=ENGINES)
def seen(request: pytest.FixtureRequest, auto, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"engine": request.param} | used(auto[1], request.param, tmp_path_factory.mktemp("page"))


def test_names_are_text_and_nothing_comes_from_outside(seen, auto):
    """Not even where a browser would not ask: no address but XML's namespace, and a policy that forbids the rest."""
    assert (seen["hacked"], seen["injected"], seen["outside"]) == (None, False, [])
    assert "<b id=hacked>" not in auto[1]
    assert set(re.findall(r"https?://[^\"'\s]+", auto[1])) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in auto[1]
    assert "@import" not in auto[1]
    assert "url(" not in auto[1]
    assert seen["sections"] == [
        "loss", "formats", "detail", "outliers", "decisions", "layers", "left", "flow", "memory", "words",
    ]  # fmt: skip


def test_it_begins_with_the_latest_look_of_the_first_layer(seen, auto):
    """11 looks are in: the twelfth step's table is read when a thirteenth begins."""
    last = auto[0].auto.samples["up.input"][-1]
    assert last.step == 10
    assert seen["maps"] == 3
    assert seen["first"]["layer"] == "0"
    assert seen["first"]["status"].startswith("up.input  ·  step 10  ·  " + last.cast)
    assert f"SQNR {last.sqnr_db:.3g}"[:8] in seen["first"]["status"]
    amaxes = seen["first"]["readings"][3]
    assert amaxes.startswith(f"{last.amax:.3g}"[:3])
    assert seen["first"]["lines"] == 6 * 3  # six charts, three slots, all of them seen


def test_keys_move_over_the_maps_and_stop_at_their_ends(seen):
    assert seen["prevented"] is True  # the page does not scroll away under the arrow
    assert seen["down"]["layer"] == "1"
    assert seen["down"]["status"].startswith("mid.grad_output  ·  step 10")
    assert "step 0  ·  E5M2/tensor" in seen["left"]["status"]
    assert seen["left"]["when"].startswith("step 0:  input E4M3/tensor")
    assert seen["up"] == "0"
    assert seen["focus"] == "charts"
    assert seen["right"].startswith("step 1:")


def test_a_click_chooses_and_the_mouse_reads(seen):
    assert seen["picked"] == "2"
    assert seen["chosen"].startswith("up.grad_output")
    assert seen["tip"]["hidden"] is False
    assert seen["tip"]["text"].startswith(EVIL + ".grad_output\nstep 0\nE5M2/tensor\nSQNR ")
    assert seen["gone"] is True
    assert EVIL in seen["clicked"]


def test_maps_can_show_numbers_and_go_back(seen):
    assert seen["painted"]["paths"] == 5
    assert seen["painted"]["drawn"] is True
    assert seen["painted"]["key"].startswith("≥ 30 dB")
    assert seen["painted"]["key"].endswith("hatched: not seen at that step")
    assert seen["restored"] is True


def test_the_filter_wants_every_word_in_any_case(seen, auto):
    decisions = auto[0].decisions
    matching = [each for each in decisions if each["slot"] == "up.grad_output"]
    assert 0 < len(matching) < len(decisions)
    filtered = seen["filter"]
    assert filtered["all"] == {"shown": len(decisions), "count": f"{len(decisions)} changes"}
    assert filtered["some"] == {"shown": len(matching), "count": f"{len(matching)} of {len(decisions)}"}
    assert filtered["none"]["shown"] == filtered["groups"] == 0


def test_layers_are_sorted_by_loss_and_by_a_click(seen, auto):
    def flushed(name: str) -> float:
        layer = next(each for each in auto[0].layers if each["name"] == name)
        return max(layer[role].get("underflowed", -1.0) for role in ("input", "weight", "grad_output"))

    names = [layer["name"] for layer in auto[0].layers]
    at_first, by_flushed, by_place, by_shape = seen["orders"]
    assert sorted(at_first) == sorted(names)
    assert by_flushed[0] == by_place[0] == "ascending"
    assert [flushed(name) for name in by_flushed[1:]] == sorted(map(flushed, names))
    assert len(set(map(flushed, names))) > 1
    assert by_place[1:] == names  # the model's own order, not the alphabet's
    assert by_shape[0] == "descending"


def test_a_browser_draws_it(seen):
    """Rows beside their names, the formats in their colours, the graph as a picture, nothing wider than the window.

    Node runs the script and draws nothing; Chromium wherever there is one.
    """
    known = ["node", "chromium"] if browser() else ["node"]
    assert known == ENGINES
    assert seen["theme"] == "dark", "the button turns light into dark"
    if seen["engine"] != "chromium":
        assert "real" not in seen
        return
    real = seen["real"]
    assert real["dark"] == "rgb(15, 19, 24)"
    assert real["overflow"] <= 0
    assert real["names"] == [17, 17, 17]
    assert all(width > 150 and height == pytest.approx(51) for width, height in real["boxes"])
    assert "rgb(124, 192, 242)" in real["fills"][0]  # E4M3/tensor
    assert "rgb(245, 189, 79)" in real["fills"][2]  # E5M2/tensor, where gradients begin
    assert real["images"] == [64]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fixed_recipe_has_a_page_without_maps_and_says_why(engine: str, tmp_path: Path):
    model, _ = trained("current", steps=1)
    text = page(fe.inspect(model))
    seen = used(text, engine, tmp_path, width=420)  # a telephone
    assert seen["maps"] == 0
    assert seen["sections"] == ["formats", "outliers", "decisions", "layers", "left", "memory", "words"]
    assert "No layer is under auto: a fixed recipe gives each tensor one cast for good" in text
    assert (seen["hacked"], seen["injected"], seen["outside"]) == (None, False, [])
    if engine == "chromium":
        assert seen["real"]["overflow"] <= 0
