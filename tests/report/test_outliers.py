"""Standing outliers are listed in the text, the dict and on the page, and no all-clear stands above them."""

import json
import math
import pickle
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_reports import trained
from support import Block, converted
from torch import nn

import fp8engine as fe
from fp8engine.auto import Alarm
from fp8engine.auto.history import History, Sample, Samples
from fp8engine.report.facts import ABOVE, standing
from fp8engine.report.page import page
from fp8engine.report.state import controllers_of

CALM = "no tensor has outliers or grows them"


def seen(**slots: Sample) -> Any:
    """A controller whose slots have been sampled once each, after one that was calm."""
    history = History()
    for slot, sample in slots.items():
        history.samples[slot] = Samples([of(1.0), sample])
    return SimpleNamespace(history=history, plan=None)


def of(ratio: float, rms: float = 1.0, sqnr_db: float = 29.2) -> Sample:
    return Sample(16, "E4M3/row", ratio * rms, rms, 3.0, sqnr_db, 0.0, 0.0, 0)


def planted(factor: float, steps: int = 3) -> nn.Module:
    """A gated MLP whose product has one element `factor` times the rms of all."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(64))
    converted(model, fe.auto(interval=1))
    down = model.get_submodule("0.down")
    hook = down.register_forward_pre_hook(lambda _, args: (spiked(args[0], factor),))
    for _ in range(steps):
        model(torch.randn(512, 64)).square().mean().backward()
        model.zero_grad()
    hook.remove()
    return model


def spiked(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x with one element set to `factor` times its rms; no gradient goes back through it."""
    x = x.clone()
    x[1, 0] = factor * x.detach().square().mean().sqrt()
    return x


def cards(text: str) -> dict[str, tuple[str, str, str]]:
    """Title -> (mood, value, what stands below)."""
    found = re.findall(r'<div class="card (\w*)"><h3>(.*?)</h3><b>(.*?)</b><span>(.*?)</span>', text)
    bare = lambda piece: re.sub("<.*?>", "", piece)  # noqa: E731
    return {bare(title): (mood, value, bare(under)) for mood, title, value, under in found}


def test_the_latest_sample_counts_largest_first():
    """Above ABOVE, not at it; a slot that has calmed down, one of zeros and one of Inf are not listed."""
    one = seen(a=of(ABOVE), b=of(1.01 * ABOVE), c=of(3 * ABOVE, rms=1e-6), d=of(1.0, rms=0.0))
    one.history.samples["calmed"] = Samples([of(1000.0), of(5.0)])
    one.history.samples["endless"] = Samples([of(math.inf)])
    one.history.samples["empty"] = Samples()
    one.history.remedies["c"] = "fe.smooth(model, 'c')"
    found = standing([one, seen(e=of(2 * ABOVE, sqnr_db=math.inf))])
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
