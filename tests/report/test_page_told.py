"""What the page tells: sentences once, the greatest outliers first, words with their meaning, formats on the flow."""

import base64
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from made_reports import EVIL, of_auto
from support import converted
from torch import nn

import fp8engine as fe
from fp8engine.auto import Alarm
from fp8engine.auto.history import History, Sample, Samples
from fp8engine.report import flow
from fp8engine.report.facts import standing
from fp8engine.report.page import WORDS, explained, page

ROOT = Path(__file__).parents[2]
SENTENCE = "dgrad, the rows' 10th percentile: predicted SQNR {} dB where 31.9 dB can be had"


def decision(i: int, why: str, **others: Any) -> dict:
    plain = {"step": 1, "slot": f"layers.{i}.up.grad_output", "before": "E5M2/tensor", "after": "E4M3/row"}
    return plain | {"why": why, "sqnr_db": 30.0 + i} | others


def report_of(decisions: list[dict], ratios: dict[str, float], alarms: tuple[Alarm, ...] = ()) -> fe.Report:
    """A report with these decisions, and a latest amax/rms of some slots."""
    history = History()
    for slot, ratio in ratios.items():
        history.samples[slot] = Samples([Sample(16, "E4M3/row", ratio, 1.0, 3.0, 29.2, 0.0, 0.0, 0)])
    totals = fe.inspect(nn.Linear(2, 2)).totals
    told = [alarm._asdict() for alarm in alarms]
    seen: Any = SimpleNamespace(history=history)
    return fe.Report([], totals, decisions, of_auto(history.samples), told, outliers=standing([seen]))


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


def test_other_formats_or_other_words_are_other_rows():
    text = page(report_of([decision(0, "a"), decision(1, "a", after="BF16"), decision(2, "b")], {}))
    assert len(rows(text)) == 3


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


def test_names_in_tables_lose_their_beginning_and_are_whole_on_hover():
    text = page(report_of([decision(0, "a")], {}))
    assert '<code class="name" title="layers.0.up.grad_output"><bdi>layers.0.up.grad_output</bdi></code>' in text
    assert re.search(r"\.name \{[^}]*text-overflow: ellipsis[^}]*direction: rtl", text)


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def test_the_flow_has_residual_lines_formats_and_a_dark_form():
    model = converted(nn.Sequential(*(Block() for _ in range(3))), "current", overrides={"1.up": "bf16"})
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
