"""What the page says is what was seen: numbers come back from its JSON, none is thinned away, and it stays small."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from made_reports import made_up, of_auto, trained
from page_engines import ENGINES, used
from torch import nn

import fp8engine as fe
from fp8engine.auto import Alarm
from fp8engine.auto.history import Sample, Samples
from fp8engine.errors import ReportError
from fp8engine.report.page import _template, page, parts
from fp8engine.report.page.data import ALPHABET, blob, samples_of
from fp8engine.report.page.svg import colour, format_map, loss_curve, row_height
from fp8engine.report.state import controllers_of
from fp8engine.report.table import Report


def report_of(looks: list[Sample], slot: str = "up.input") -> Report:
    """A report of one slot."""
    model, _ = trained("current", steps=1)
    return replace(fe.inspect(model), auto=of_auto({slot: Samples(looks)}))


def look(step: int, cast: str = "E4M3/tensor", **numbers: float) -> Sample:
    usual = {"amax": 2.0, "rms": 1.0, "kurtosis": 3.0, "sqnr_db": 31.4, "flushed": 0.0, "saturated": 0.0}
    return Sample(step, cast, **(usual | numbers), nonfinite=0)


def slot_of(report: Report) -> dict:
    return blob(report, samples_of(report))["layers"][0]["slots"]["input"]


def decoded(text: str, width: int) -> list[int]:
    """A row's numbers, by the rule in data.py's docstring."""
    letters = [ALPHABET.index(letter) for letter in text]
    return [
        sum(n * 64 ** (width - 1 - k) for k, n in enumerate(letters[i : i + width]))
        for i in range(0, len(letters), width)
    ]


def casts_of(rows: dict) -> list[int | None]:
    return [cast for cast, length in rows["cast"] for _ in range(length)]


def embedded(text: str) -> dict:
    """The page's numbers, read as strict JSON from between its tags."""
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, flags=re.DOTALL)
    return json.loads(found, parse_constant=pytest.fail)


def lost(name: str, flushed: float, saturated: float) -> Any:
    """A layer of a report whose gradient loses that."""
    slot = {"elements": 8, "sampled": 8, "underflowed": 0.0, "saturated": 0.0}
    layer: Any = fe.inspect(nn.Linear(2, 2)).layers[0]
    worst = {"underflowed": flushed, "saturated": saturated}
    return layer | {"name": name, "input": slot, "weight": slot, "grad_output": slot | worst}


def test_the_layer_that_loses_most_is_a_headline_and_the_first_row():
    """Beside what harms nothing: 0.1 % saturated (20 times) is more than 26 % flushed (13 times)."""
    layers = [lost("a", 0.0, 0.0), lost("b", 0.26, 0.0), lost("c", 0.03, 1e-3), lost("d", 0.0, 0.0)]
    totals: Any = fe.inspect(nn.Linear(2, 2)).totals
    totals |= {"elements": 8, "sampled": 8, "underflowed": 0.07, "saturated": 2e-4}
    report = Report(layers, totals)
    found = [(place, layer["name"]) for place, layer in parts.troubled(report)]
    assert found == [(2, "c"), (1, "b"), (0, "a"), (3, "d")]
    cards = {card.title: card for card in parts.cards(report, {}, None)}
    assert cards["flushed to zero"] == parts.Card("flushed to zero", "7 %", "most 26 %:", "warn", "b.grad_output")
    assert cards["saturated"] == parts.Card("saturated", "0.02 %", "most 0.1 %:", "warn", "c.grad_output")
    alone = parts.cards(Report([lost("", 0.0, 1e-3)], totals), {}, None)
    assert {card.slot for card in alone} == {"", "grad_output"}, "of a model that is one layer"


def test_numbers_come_back_as_they_were_seen():
    """To half a step: 1/1000 decade, 0.12 %; 0.1 dB; 1/100 octave, 0.35 %; of shares 1/500 decade, 0.24 %."""
    model, losses = trained(fe.auto(interval=1))
    report = fe.inspect(model)
    told = embedded(page(report, losses))
    assert told["steps"] == list(range(11))
    assert [layer["name"] for layer in told["layers"]] == [layer["name"] for layer in report.layers[:3]]
    compared = 0
    for layer in told["layers"]:
        for role, rows in layer["slots"].items():
            looks = report.auto.samples[f"{layer['name']}.{role}"]
            amax, sqnr, crest, flushed = (
                decoded(rows[key], 3 if key == "amax" else 2) for key in ("amax", "sqnr", "crest", "flushed")
            )
            for i, each in enumerate(looks):
                assert told["casts"][casts_of(rows)[i]]["label"] == each.cast
                assert 10 ** ((amax[i] - 60000) / 1000) == pytest.approx(each.amax, rel=1.2e-3)
                assert (sqnr[i] - 1000) / 10 == pytest.approx(each.sqnr_db, abs=0.051)
                assert 2 ** (crest[i] / 100) == pytest.approx(each.amax / each.rms, rel=3.6e-3)
                share = 10 ** ((flushed[i] - 1) / 500 - 8) if flushed[i] else 0.0
                assert share == pytest.approx(each.flushed, rel=2.4e-3)
                compared += 1
    assert compared == 3 * 3 * 11


def test_what_is_not_finite_is_json_all_the_same():
    seen = [look(0, sqnr_db=math.inf), look(16, sqnr_db=-math.inf), look(32, amax=0.0, rms=0.0), look(48, rms=math.nan)]
    report = report_of(seen)
    told = embedded(page(report, [math.nan, 1.0, math.inf]))
    rows = told["layers"][0]["slots"]["input"]
    none = 64**2 - 1
    assert decoded(rows["sqnr"], 2) == [none, none - 1, 1314, 1314]
    assert decoded(rows["amax"], 3) == [60301, 60301, 64**3 - 1, 60301]
    assert decoded(rows["crest"], 2) == [100, 100, none, none]


def test_of_many_looks_each_column_keeps_the_worst():
    seen = [look(step) for step in range(950)]
    seen[511] = look(511, "E4M3/row", sqnr_db=12.3, flushed=0.5, saturated=0.25, amax=1000.0)
    report = report_of(seen)
    told = blob(report, samples_of(report))
    assert told["thinned"]
    assert told["steps"][:2] == [31, 63]  # spans of 32 steps: 16 would be more than 48 before the latest 32
    assert told["steps"][-1] == 949
    rows = slot_of(report)
    bad, sqnr = 511 // 32, decoded(rows["sqnr"], 2)
    assert (sqnr[bad], decoded(rows["amax"], 3)[bad]) == (1123, 63000)
    assert decoded(rows["flushed"], 2)[bad] == 1 + round(500 * (8 + math.log10(0.5)))
    assert decoded(rows["saturated"], 2)[bad] == 1 + round(500 * (8 + math.log10(0.25)))
    assert rows["cast"] == [[0, 15], [1, 1], [0, 14]]  # of each column's last look
    assert sorted(set(sqnr)) == [1123, 1314]
    # Few enough to keep them all: they are thinned as the input's.
    fewer = [look(step, sqnr_db=9.5 if step == 512 else 31.4) for step in range(0, 950, 8)]
    report.auto.samples["up.weight"] = Samples(fewer)
    slots = blob(report, samples_of(report))["layers"][0]["slots"]
    assert slots["weight"]["cast"] == [[0, 30]], "no column is without one"
    assert [i for i, n in enumerate(decoded(slots["weight"]["sqnr"], 2)) if n == 1095] == [512 // 32]
    assert slots["input"] == rows


def test_a_slot_that_was_not_seen_has_a_gap():
    report = report_of([look(0), look(32)])
    report.auto.samples["up.weight"] = Samples([look(0), look(16), look(32)])
    told = blob(report, samples_of(report))
    assert told["steps"] == [0, 16, 32]
    assert told["layers"][0]["slots"]["input"]["cast"] == [[0, 1], [None, 1], [0, 1]]
    assert format_map(told, "input") == [(colour("E4M3/tensor"), "M0 0.06h1v.88h-1zM2 0.06h1v.88h-1z")]
    assert [path.count("h3v") for _, path in format_map(told, "weight")] == [1]
    assert 'd="M0 0.06h1v.88h-1zM2 0.06h1v.88h-1z"' in page(report)


def test_rows_are_lower_the_more_layers_there_are():
    assert [row_height(layers) for layers in (1, 40, 41, 100, 101, 1000)] == [17, 17, 13, 13, 9, 9]
    report = report_of([look(0)])
    report.auto.samples.update({f"{i}.input": Samples([look(0)]) for i in range(40)})
    text = page(report)  # 41 rows of 13 pixels
    assert "--row:13px" in text
    assert 'height="533"' in text


def test_margins_and_formats_are_read_from_a_casts_name():
    report = report_of([look(0, "E5M2/tensor margin 2"), look(16, "BF16")])
    casts = blob(report, samples_of(report))["casts"]
    assert casts == [
        {"label": "E5M2/tensor margin 2", "max": 57344.0, "margin": 2},
        {"label": "BF16", "max": None, "margin": 0},
    ]
    assert colour("no such") == colour("neither")
    assert len({colour(label) for label in ("E4M3/tensor", "E4M3/row", "E4M3/block", "E5M2/tensor", "BF16")}) == 5


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_hundred_layers_and_a_hundred_looks_are_under_2_mb_and_open(engine: str, tmp_path):
    text = page(made_up(200, 100), [5.0 - 0.001 * i for i in range(1600)])
    assert len(text.encode()) < 2_000_000
    seen = used(text, engine, tmp_path)
    assert seen["filter"]["rows"] == 1800
    assert seen["first"]["lines"] == 6 * 3
    assert "step 1584  ·  BF16  ·  exact" in seen["first"]["status"]


def test_json_cannot_end_its_script():
    told = _template().environment.from_string("{{ value|tojson }}").render(value={"</ScRiPt>": "<!-- & \u2028"})
    assert "<" not in told
    assert "&" not in told
    assert json.loads(told) == {"</ScRiPt>": "<!-- & \u2028"}


def test_the_loss_curve_has_every_step_in_place():
    """A line through (step, loss) from left to right; broken by NaN; a mark where formats changed."""
    losses = [4.0, 3.0, math.nan, 2.0, 1.0]
    curve = loss_curve(losses, {1: 12, 99: 1})
    assert curve is not None
    raw = curve["raw"]
    points = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", raw)]
    assert raw.count("M") == 2
    assert [x for x, _ in points] == pytest.approx([46, 46 + 944 / 4, 46 + 3 * 944 / 4, 990])
    ys = [y for _, y in points]
    assert ys == sorted(ys)
    assert ys[1] - ys[0] == pytest.approx(ys[3] - ys[2], abs=0.11)  # equal falls, to a tenth of a unit
    assert curve["marks"] == [(46 + 944 / 4, 1, 12)]
    changed = [{"step": 1, "slot": f"{i}.input", "before": "E4M3", "after": "E5M2", "why": ""} for i in range(12)]
    report = replace(fe.inspect(nn.Linear(2, 2)), decisions=[each | {"sqnr_db": 20.0} for each in changed])
    drawn = page(report, losses)
    assert raw in drawn
    assert drawn.count('class="mark"') == 1
    assert "step 1: 12 slots changed" in drawn
    assert "No loss was finite" in page(report, [math.nan])
    long = loss_curve([float(i % 7) for i in range(10_000)], {})
    assert long is not None
    assert len(str(long)) < 60_000


def test_alarms_are_in_the_report_everywhere():
    model, losses = trained(fe.auto(interval=1))
    alarm = Alarm(160, "up.input", 81.5, 8.2, 128, "fe.smooth(model, '<up>')")
    controllers_of(model)[0].history.alarms.append(alarm)
    report = fe.inspect(model)
    assert report.alarms[-1] == alarm._asdict()
    told = report.to_dict()
    assert told["alarms"] == report.alarms
    assert json.loads(json.dumps(told, allow_nan=False))["alarms"][-1] == alarm._asdict()
    latest = "early warnings, the latest: step 160 up.input: amax/rms x8 in 128 steps"
    assert f"{len(report.alarms)} {latest}" in str(report)
    text = page(report, losses)
    assert "×8.2 in 128 steps" in text
    assert "fe.smooth(model, &#39;&lt;up&gt;&#39;)" in text


def test_what_cannot_be_drawn_or_written_is_refused(tmp_path):
    model, losses = trained("current", steps=1)
    report: Any = fe.inspect(model)
    for option, value, told in (
        ("losses", ["a"], "one number a training step"), ("losses", 3.0, "one number a training step"),
        ("losses", [10**400], "one number a training step"),
        ("losses", [], "leave losses= out"), ("flow", "graph", "flow: str has no to_svg"),
    ):  # fmt: skip
        with pytest.raises(ReportError, match=told):
            report.to_html(tmp_path / "page.html", **{option: value})
    with pytest.raises(ReportError, match=r"cannot write .*nowhere/page.html: No such file"):
        report.to_html(tmp_path / "nowhere" / "page.html")
    with pytest.raises(ReportError, match="cannot write"):
        report.to_html("")
    assert list(tmp_path.iterdir()) == []
    report.to_html(tmp_path / "page.html", losses=losses)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text().endswith("</html>\n")


def test_a_run_under_a_plan_has_decisions_and_says_why_there_are_no_maps(tmp_path):
    model, _ = trained(fe.auto(interval=1))
    report = fe.inspect(model)
    for write in (report.save_plan, report.to_csv):
        with pytest.raises(ReportError, match=r"cannot write .*nowhere/plan.json: No such file"):
            write(tmp_path / "nowhere" / "plan.json")
    report.save_plan(tmp_path / "plan.json")
    again, _ = trained(fe.auto(plan=tmp_path / "plan.json"))
    text = page(fe.inspect(again))
    assert "This run repeats a plan: nothing is measured" in text
    assert 'id="decided"' in text
    fresh, _ = trained(fe.auto(), steps=1)
    assert "Nothing has been seen yet" in page(fe.inspect(fresh))
