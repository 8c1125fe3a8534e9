"""TensorBoard's events, read back by TensorBoard's own reader: every look at its step, once."""

import math
import sys
from typing import Any

import numpy
import pytest
import torch
from made_reports import trained
from support import converted
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import fp8engine as fe
from fp8engine.auto import Alarm
from fp8engine.auto.history import Spread
from fp8engine.errors import ReportError
from fp8engine.report.events import FORMATS
from fp8engine.report.state import controllers_of
from fp8engine.report.tensorboard import Writer


def read(folder) -> EventAccumulator:
    found = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0, "tensors": 0})
    found.Reload()
    return found


def series(found: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found.Scalars(tag)]


def texts(found: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found.Tensors(f"{tag}/text_summary")]


def test_every_look_of_every_slot_is_there(tmp_path):
    model, _ = trained(fe.auto(interval=1))
    report = fe.inspect(model)
    report.to_tensorboard(tmp_path)
    found = read(tmp_path)
    fields = {"amax": "amax", "sqnr": "sqnr_db", "flushed": "flushed", "saturated": "saturated"}
    for slot in ("up.input", "mid.weight", "up.grad_output"):
        for tag, field in fields.items():
            want = [(look.step, pytest.approx(getattr(look, field), rel=1e-6)) for look in report.auto.samples[slot]]
            assert series(found, f"{tag}/{slot}") == want
    for tag in fields:
        assert len([each for each in found.Tags()["scalars"] if each.startswith(f"{tag}/")]) == len(report.auto.samples)
    formats = [FORMATS[int(index)] for _, index in series(found, "format/up.grad_output")]
    assert formats == [look.cast.partition("/")[0] for look in report.auto.samples["up.grad_output"]]
    assert set(formats) == {"E5M2", "E4M3"}
    (scale,) = series(found, "scale/up.input")
    assert scale[1] == pytest.approx(float(fe.scaling_state(model)["up.input"].scale), rel=1e-6)


def test_a_second_write_adds_only_what_is_new(tmp_path):
    model, _ = trained(fe.auto(interval=1), steps=4)
    history = controllers_of(model)[0].history
    history.alarms.append(Alarm(2, "up.input", 81.5, 8.2, 128))
    with Writer(tmp_path) as writer:
        writer.write(model, 4)
        writer.write(model, 5)
        history.samples["up.input"].append(history.samples["up.input"][-1]._replace(step=9, amax=7.0, sqnr_db=math.inf))
        writer.write(model, 10)
    found = read(tmp_path)
    assert [step for step, _ in series(found, "amax/up.input")] == [0, 1, 2, 9]
    assert [step for step, _ in series(found, "sqnr/up.input")] == [0, 1, 2]  # infinite: no point
    assert [step for step, _ in series(found, "scale/up.input")] == [4, 5, 10]
    assert texts(found, "alarms") == [(2, "    step 2 up.input: amax/rms x8 in 128 steps, now 82\n")]
    report = fe.inspect(model)
    lines = "".join(text for _, text in texts(found, "decisions")).splitlines()
    assert len(lines) == len(report.decisions) > 0
    assert lines[0].startswith(f"    {report.decisions[0]['slot']} E5M2/tensor -> E4M3/tensor: dgrad, the ")


def test_a_training_that_forgets_its_evaluations_is_written_whole(tmp_path):
    """It begins its log and its samples anew at step 0, where those of the evaluations were written before."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    converted(model, fe.auto(interval=2))
    spread = torch.exp(3 * torch.randn(64, 1))
    with Writer(tmp_path) as writer:
        with torch.no_grad():
            for _ in range(2):
                model(torch.randn(64, 32) * spread)
        writer.write(model, 0)
        evaluated = fe.inspect(model)
        for step in range(6):
            model(torch.randn(64, 32) * spread).square().mean().backward()
            model.zero_grad()
            if step % 3 == 2:
                writer.write(model, step)
    report, found = fe.inspect(model), read(tmp_path)
    assert evaluated.decisions
    written = [line.strip() for _, text in texts(found, "decisions") for line in text.splitlines()]
    wanted = [f"{d['slot']} {d['before']} -> {d['after']}: {d['why']}" for d in report.decisions]
    assert set(wanted) <= set(written)
    assert len(written) == len(set(written))
    for slot, samples in report.auto.samples.items():
        earlier = [sample.amax for sample in evaluated.auto.samples.get(slot, [])]
        wanted = [(sample.step, pytest.approx(sample.amax, rel=1e-6)) for sample in samples]
        points = series(found, f"amax/{slot}")
        assert points in (wanted, [(0, pytest.approx(amax, rel=1e-6)) for amax in earlier] + wanted), slot


def test_a_histogram_counts_magnitudes_by_octaves(tmp_path):
    """2^2 seven times, the amax; a hundred elements 18 eighths of an octave lower; bins end an eighth above octaves."""
    model, _ = trained(fe.auto(interval=1), steps=2)
    history = controllers_of(model)[0].history
    counts = [0] * 512
    counts[511], counts[511 - 18], counts[0] = 7, 100, 1000  # at amax; 18/8 octaves below; zeros
    history.spreads["up.input"] = Spread(0, 4.0, numpy.array(counts))
    with Writer(tmp_path) as writer:
        writer.write(model, 0)
        writer.write(model, 1)  # of the same sample: nothing new
    (event,) = read(tmp_path).Histograms("log2_magnitude/up.input")
    told = event.histogram_value
    assert event.step == 0
    filled = {limit: count for limit, count in zip(told.bucket_limit, told.bucket, strict=True) if count}
    assert filled == {2.125: 7, 0.125: 100}
    assert (told.num, told.min, told.max) == (107, 2.125 - 63, 2.0)
    assert told.sum == pytest.approx(7 * 1.625 + 100 * -0.375, rel=1e-12)
    assert told.sum_squares == pytest.approx(7 * 1.625**2 + 100 * 0.375**2, rel=1e-12)


def test_a_tensor_of_zeros_has_no_crest_and_no_histogram(tmp_path):
    """Its amax is a point all the same, at 0."""
    model, _ = trained(fe.auto(interval=1), steps=3)
    history = controllers_of(model)[0].history
    history.samples["up.input"].append(history.samples["up.input"][-1]._replace(step=9, amax=0.0, rms=0.0))
    history.spreads["up.input"] = Spread(9, 0.0, numpy.eye(1, 512, 511, dtype=int)[0])
    fe.inspect(model).to_tensorboard(tmp_path)
    found = read(tmp_path)
    assert series(found, "amax/up.input")[-1] == (9, 0.0)
    assert [step for step, _ in series(found, "crest/up.input")] == [0, 1]
    assert "log2_magnitude/up.input" not in found.Tags()["histograms"]


def test_the_spread_is_of_the_slots_own_values():
    """All its elements, their largest at the end: of 64 x 64 inputs one is amax, and half lie above the median."""
    model, _ = trained(fe.auto(interval=1), steps=3)
    spread = fe.inspect(model).auto.spreads["up.input"]
    assert spread.step == 1
    assert spread.counts.sum() == 64 * 64
    assert spread.counts[-1] == 1


def test_a_fixed_recipe_has_a_point_for_each_write(tmp_path):
    model, _ = trained("delayed", steps=2)
    with Writer(tmp_path) as writer:
        writer.write(model, 3)
        writer.write(model, 8)
    found = read(tmp_path)
    slot = fe.scaling_state(model)["up.weight"]
    assert series(found, "amax/up.weight") == [(step, pytest.approx(float(slot.amax), rel=1e-6)) for step in (3, 8)]
    assert series(found, "format/up.grad_output") == [(3, FORMATS.index("E5M2")), (8, FORMATS.index("E5M2"))]
    assert not [tag for tag in found.Tags()["scalars"] if tag.startswith(("sqnr", "amax/lm_head"))]


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ReportError, match=r"tensorboard.*pip install 'fp8engine\[report\]'"):
        Writer(tmp_path)
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"cannot write in .*file/logs"):
        Writer(tmp_path / "file" / "logs")
