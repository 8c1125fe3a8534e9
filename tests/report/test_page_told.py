"""What the page tells: sentences once, the greatest outliers first, words with their meaning, formats on the flow.

Standing outliers are listed in the text, the dict and on the page, and no all-clear stands above them.
"""

import base64
import json
import math
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_reports import EVIL, of_auto, trained
from overflow_cases import Part
from support import Block, converted
from torch import nn

import fp8engine as fe
from fp8engine.auto import Alarm
from fp8engine.auto.history import History, Sample, Samples
from fp8engine.report import flow
from fp8engine.report.facts import ABOVE, standing
from fp8engine.report.page import WORDS, explained, page
from fp8engine.report.state import controllers_of

ROOT = Path(__file__).parents[2]
SENTENCE = "dgrad, the rows' 10th percentile: predicted SQNR {} dB where 31.9 dB can be had"


def decision(i: int, why: str, **others: Any) -> dict:
    plain = {"step": 1, "slot": f"layers.{i}.up.grad_output", "before": "E5M2/tensor", "after": "E4M3/row"}
    return plain | {"why": why, "sqnr_db": 30.0 + i} | others


def look(ratio: float, rms: float = 1.0, sqnr_db: float = 29.2) -> Sample:
    return Sample(16, "E4M3/row", ratio * rms, rms, 3.0, sqnr_db, 0.0, 0.0, 0)


def seen(**slots: Sample) -> Any:
    """A controller whose slots have been sampled once each, after one look that was calm."""
    history = History()
    for slot, sample in slots.items():
        history.samples[slot] = Samples([look(1.0), sample])
    return SimpleNamespace(history=history, plan=None)


def report_of(decisions: list[dict], ratios: dict[str, float], alarms: tuple[Alarm, ...] = ()) -> fe.Report:
    """A report with these decisions, and a latest amax/rms of some slots."""
    controller = seen(**{slot: look(ratio) for slot, ratio in ratios.items()})
    totals, told = fe.inspect(nn.Linear(2, 2)).totals, [alarm._asdict() for alarm in alarms]
    auto = of_auto(controller.history.samples)
    return fe.Report([], totals, decisions, auto, told, outliers=standing([controller]))


def plain(html: str) -> str:
    return re.sub("<.*?>", "", html)


def rows(text: str) -> list[str]:
    """The rows of the decisions, without the rows that are inside them."""
    _, _, table = text.partition('<table id="decided">')
    return [plain(row) for row in re.findall(r"<tr>(<td class=\"n\">\d+</td><td><span.*?)<details>", table)]


def test_equal_sentences_are_told_once_with_the_range_of_their_numbers():
    many = [decision(i, SENTENCE.format(round(24.9 + i / 10, 1))) for i in range(20)]
    other = decision(3, "2.0% of the rows lost > 1.5%", after="E5M2/row")
    text = page(report_of([*many, other], {}))
    first, second = rows(text)
    assert first.startswith("1E5M2/tensor → E5M2/row2.0% of the rows lost")
    assert second == "20E5M2/tensor → E4M3/row" + SENTENCE.format("24.9 to 26.8").replace("'", "&#39;")
    assert "layers.0-19.up.grad_output × 20" in text
    assert "SQNR 25.3 dB where" in text, "each one is inside"
    assert "30.0 dB or more" in plain(text)
    text = page(report_of([decision(0, "a"), decision(1, "a", after="BF16"), decision(2, "b")], {}))
    assert len(rows(text)) == 3, "other formats or other words are other rows"
    name = '<code class="name" title="layers.0.up.grad_output"><bdi>layers.0.up.grad_output</bdi></code>'
    assert name in text, "names lose their beginning and are whole on hover"
    assert re.search(r"\.name \{[^}]*text-overflow: ellipsis[^}]*direction: rtl", text)


def test_the_sentence_about_the_greatest_outlier_is_first():
    decisions = [decision(0, "calm"), decision(1, "calm"), decision(2, "spiked"), decision(3, "rare")]
    ratios = {"layers.0.up.grad_output": 9.0, "layers.2.up.grad_output": 166.0, "layers.3.up.grad_output": 7.0}
    told = rows(page(report_of(decisions, ratios)))
    assert [re.sub(r".*E4M3/row", "", row) for row in told] == ["spiked", "calm", "rare"]


def test_growing_and_standing_outliers_are_one_table_with_a_row_for_each_slot():
    alarms = Alarm(8, "grows", 40.0, 5.0, 128), Alarm(16, "both", 300.0, 8.2, 64)
    text = page(report_of([], {"stands": 156.0, "both": 300.0, "calm": 3.0}, alarms))
    section = re.search(r'<section id="outliers".*?</section>', text, re.DOTALL)
    assert section is not None
    found = [[plain(cell) for cell in re.findall(r"<td.*?</td>", row)[:3]] for row in section[0].split("<tr>")[2:]]
    assert found == [
        ["both", "300", "×8.2 in 64 steps"],
        ["stands", "156", "stands"],
        ["grows", "40", "×5.0 in 128 steps"],
    ]


def test_words_are_explained_in_the_glossarys_own_sentences():
    glossary = (ROOT / "docs" / "README.md").read_text()
    for word, meaning in WORDS.items():
        assert meaning.removesuffix(".") in glossary, word
    assert {"SQNR", "slot", "amax", "flushed", "granularity", "recipe", "emulated"} <= WORDS.keys()
    text = page(report_of([], {}))
    for word, meaning in WORDS.items():
        assert f"<dt>{word}</dt>" in text
        assert explained(f"a {word} b").startswith('a <abbr title="')
        assert meaning.split("'")[0] in explained(f"a {word} b")
    assert explained("a_slot <slots>").count("<abbr") == 1, "not inside a longer name"
    assert re.search(r'<th scope="col"><abbr title="[^"]+">amax</abbr> / <abbr', page(report_of([], {"stands": 156.0})))


def test_the_flow_has_residual_lines_formats_and_a_dark_form():
    def block() -> nn.Module:
        layers = nn.Sequential(OrderedDict(up=nn.Linear(16, 32), act=nn.ReLU(), down=nn.Linear(32, 16)))
        residual = Part(lambda x: x + layers(x), mlp=layers)
        return residual

    model = converted(nn.Sequential(*(block() for _ in range(3))), "current", overrides={"1.mlp.up": "bf16"})
    model(torch.randn(2, 16)).sum().backward()
    drawn = flow.record(model, torch.randn(2, 16))
    formats = {row["name"]: [row[role]["format"] for role in ("input", "weight", "grad_output")]
               for row in fe.inspect(model).layers}  # fmt: skip
    svg = drawn.to_svg(formats)
    assert re.findall(r">(E4M3[^<]*)</text>", svg) == ["E4M3|BF16 · E4M3|BF16 · E5M2|BF16", "E4M3 · E4M3 · E5M2"]
    assert ">BF16</text>" in drawn.to_svg(dict.fromkeys(formats, ["BF16"] * 3))
    assert "E4M3" not in drawn.to_svg()
    assert svg.count('class="residual"') == 1, "the block is drawn once"
    assert "prefers-color-scheme: dark" in svg
    text = page(fe.inspect(model), flow=drawn)
    (code,) = re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", text)
    assert base64.b64decode(code).decode() == svg


def test_nothing_that_a_model_names_is_markup():
    """Names, kinds, recipes, casts, reasons and remedies, each an attack: the page has the same elements as without."""

    def told(text: str) -> str:
        layer: Any = fe.inspect(converted(nn.Sequential(nn.Linear(2, 2)), "current")).layers[0]
        layer |= dict.fromkeys(("name", "kind", "recipe", "backend", "reason", "kept_why"), text) | {"kept_bytes": 1}
        layer["input"] = layer["input"] | {"cast": text}
        samples = {f"{text}.input": Samples([Sample(16, text, 9.0, 1.0, 3.0, 29.2, 0.0, 0.0, 0)])}
        slot = f"{text}.input"
        made = decision(0, text, slot=slot, before=text, after=text)
        alarm = Alarm(8, slot, 40.0, 5.0, 128, text)._asdict()
        standing_one = {"step": 8, "slot": text, "ratio": 99.0, "cast": text, "sqnr_db": 20.0, "remedy": text}
        totals: Any = fe.inspect(nn.Linear(2, 2)).totals
        totals |= {"kept_weight_bytes": 1}
        report = fe.Report([layer], totals, [made], of_auto(samples), [alarm], outliers=[standing_one])
        return page(report, [1.0])

    def tags(html: str) -> list[str]:
        return re.findall(r"<[a-zA-Z!/][^\s>]*", html)

    assert tags(told(EVIL)) == tags(told("calm"))
    assert EVIL not in told(EVIL)


CALM = "no tensor has outliers or grows them"


def planted(factor: float, steps: int = 3) -> nn.Module:
    """A gated MLP whose product has one element `factor` times the rms of all; no gradient goes back through it."""

    def spiked(module: nn.Module, args: tuple) -> tuple:
        x = args[0].clone()
        x[1, 0] = factor * args[0].detach().square().mean().sqrt()
        return (x,)

    torch.manual_seed(0)
    model = converted(nn.Sequential(Block(64)), fe.auto(interval=1))
    hook = model[0].down.register_forward_pre_hook(spiked)
    for _ in range(steps):
        model(torch.randn(512, 64)).square().mean().backward()
        model.zero_grad()
    hook.remove()
    return model


def cards(text: str) -> dict[str, tuple[str, str, str]]:
    """Title -> (mood, value, what stands below)."""
    found = re.findall(r'<div class="card (\w*)"><h3>(.*?)</h3><b>(.*?)</b><span>(.*?)</span>', text)
    bare = lambda piece: re.sub("<.*?>", "", piece)  # noqa: E731
    return {bare(title): (mood, value, bare(under)) for mood, title, value, under in found}


def test_the_latest_sample_counts_largest_first():
    """Above ABOVE, not at it; a slot that has calmed down, one of zeros and one of Inf are not listed."""
    one = seen(a=look(ABOVE), b=look(1.01 * ABOVE), c=look(3 * ABOVE, rms=1e-6), d=look(1.0, rms=0.0))
    one.history.samples |= {"calmed": Samples([look(1000.0), look(5.0)]), "endless": Samples([look(math.inf)])}
    one.history.samples["empty"] = Samples()
    one.history.remedies["c"] = "fe.smooth(model, 'c')"
    found = standing([one, seen(e=look(2 * ABOVE, sqnr_db=math.inf))])
    assert [(each["slot"], each["remedy"]) for each in found] == [("c", "fe.smooth(model, 'c')"), ("e", ""), ("b", "")]
    assert [each["ratio"] for each in found] == pytest.approx([300, 200, 101])
    assert [each["sqnr_db"] for each in found] == [29.2, None, 29.2]
    assert {(each["step"], each["cast"]) for each in found} == {(16, "E4M3/row")}


def test_a_planted_outlier_is_told_everywhere_with_its_remedy():
    """amax is 600 times what rms was, and with it rms is sqrt(1 + 600^2 / n) = 2.5 times that, n = 512 K elements.  The
    other elements have 15 % of that energy: where the sampled rows misjudge theirs by half, rms is 4 % off."""
    model = planted(600.0)
    report = fe.inspect(model)
    first, n = report.outliers[0], 512 * model[0].down.weight.shape[1]  # pyright: ignore
    assert first["slot"] == "0.down.input"
    assert first["ratio"] == pytest.approx(600 / math.sqrt(1 + 600**2 / n), rel=0.05)
    sample = report.auto.samples["0.down.input"][-1]
    assert (first["step"], first["cast"], first["sqnr_db"]) == (sample.step, sample.cast, sample.sqnr_db)
    assert first["remedy"] == "fe.smooth(model, '0.down')"
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["outliers"] == report.outliers
    line = rf"\n1 slot has standing outliers, the largest 0.down.input: amax {first['ratio']:.0f}x rms; remedy: "
    assert re.search(line + re.escape(first["remedy"]) + "\n", str(report))
    text = page(report)
    assert report.alarms == []
    assert cards(text)["early warnings"] == ("", "0", "none grows: see standing outliers")
    under = f"largest {first['ratio']:.0f} × rms: 0.down.input"
    assert cards(text)["standing outliers"] == ("warn", "1", under)
    assert '<td class="n">stands</td>' in text
    assert "<code>fe.smooth(model, &#39;0.down&#39;)</code></td>" in text
    assert CALM not in text
    assert pickle.loads(pickle.dumps(report)).outliers == report.outliers


def test_a_calm_model_shows_nothing_but_the_all_clear():
    model, losses = trained(fe.auto(interval=1), steps=8)
    report = fe.inspect(model)
    assert report.outliers == report.to_dict()["outliers"] == []
    assert "standing" not in str(report)
    text = page(report, losses)
    assert '<td class="n">stands</td>' not in text
    assert "standing outliers" not in cards(text)
    assert cards(text)["early warnings"] == ("good", "0", CALM)


def test_an_alarm_and_nothing_sampled_are_no_all_clear(tmp_path):
    model, _ = trained(fe.auto(interval=1), steps=8)
    fe.inspect(model).save_plan(tmp_path / "plan.json")
    again, _ = trained(fe.auto(plan=tmp_path / "plan.json"), steps=2)
    assert cards(page(fe.inspect(again)))["early warnings"] == ("", "0", "no tensor was sampled")
    controllers_of(model)[0].history.alarms.append(Alarm(6, "up.input", 81.5, 8.2, 128))
    assert cards(page(fe.inspect(model)))["early warnings"] == ("bad", "1", "on 1 slot")
