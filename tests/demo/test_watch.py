"""`fp8engine train --watch`: on a terminal every layer, live; elsewhere a line now and then."""

import io
import math
from dataclasses import replace

from made_reports import made_up
from rich.console import Console

from fp8engine.auto import Alarm
from fp8engine.demo import Config, Session, train
from fp8engine.demo.progress import Lines, Watch, last, layers, shown
from fp8engine.report.table import Report
from fp8engine.scaling.table import ROLES


def cells(report: Report, heading: str, most: int = 99) -> list[str]:
    """A column of the table of layers, as text."""
    table = layers(report, most)
    assert table is not None
    (column,) = (column for column in table.columns if column.header == heading)
    return list(map(str, column.cells))


def terminal(height: int = 50) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=160, height=height, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_every_layer_its_formats_and_what_was_decided(tmp_path):
    console, plain = terminal(), Console(file=io.StringIO(), width=160)
    with shown(console, ("fp32", "auto"), 22, watch=True) as screen:
        assert isinstance(screen, Watch)
        train(Config(size="tiny", steps=22, batch=2), Session(recipes=("fp32", "auto"), out=tmp_path), screen)
        plain.print(screen.drawn())
    text = printed(plain)
    bars = [line for line in text.splitlines() if line.startswith(("fp32 ", "auto "))]
    assert len(bars) == 2
    assert all("22/22" in bar and "loss " in bar and "tokens/s" in bar for bar in bars)
    rows = [line for line in text.splitlines() if line.lstrip().startswith("blocks.")]
    assert len(rows) == 8  # two blocks of four
    assert all(row.count("E4M3") >= 3 for row in rows)  # gradients too, as sampled at step 19
    assert "predicted SQNR" in text
    assert "22/22" in printed(console)


def test_the_bars_stand_above_the_layers_while_a_recipe_is_trained():
    console = terminal()
    with shown(console, ("fp32", "auto"), 22, watch=True) as screen:
        screen.step("fp32", 3, 4.25, 1000.0)
        assert isinstance(screen, Watch)
        console.print(screen.drawn())
    one, other = [line for line in printed(console).splitlines() if "/22" in line][:2]
    assert all(part in one for part in ("fp32 ", " 3/22 ", "loss 4.2500", "1,000 tokens/s"))
    assert all(part in other for part in ("auto ", " 0/22 ", "waiting"))


def test_elsewhere_there_are_lines(tmp_path):
    out = io.StringIO()
    with shown(Console(file=out, width=100), ("auto",), 4, watch=True) as screen:
        assert isinstance(screen, Lines)
        train(Config(size="tiny", steps=4, batch=2), Session(recipes=("auto",), out=tmp_path), screen)
    lines = out.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("auto          step 1/4  loss ")
    assert "\x1b" not in out.getvalue()


def test_of_more_layers_than_fit_those_with_the_least_sqnr_are_shown():
    report = made_up(40, 2)
    worst = report.layers[27]["name"]
    looks = report.auto.samples[f"{worst}.weight"]
    looks.append(looks[-1]._replace(sqnr_db=1.5))
    table = layers(report, 6)
    assert table is not None
    assert table.row_count == 6
    assert table.caption == "the 6 of 40 layers with the least SQNR"
    assert cells(report, "layer", 6)[0] == worst
    assert " 1.5 " in cells(report, "SQNR, dB", 6)[0]
    whole = layers(report, 40)
    assert whole is not None
    assert whole.caption is None


def test_warnings_are_counted_and_told_in_their_order():
    base = made_up(2, 2)
    slot = base.decisions[0]["slot"]
    told = [Alarm(20, slot, 81.5, 8.2, 128)._asdict(), Alarm(10, slot, 20.0, 4.0, 64)._asdict()]
    report = replace(base, decisions=base.decisions[:1], alarms=told)
    assert cells(report, "warnings") == ["2", ""]
    lines = [line for line, _ in last(report)]
    assert lines[0].startswith("⚠ step 10")
    assert lines[1].startswith("step 16")
    assert lines[2] == f"⚠ step 20 {slot}: amax/rms x8 in 128 steps, now 82"


def test_a_fixed_recipe_has_no_sqnr_and_is_drawn(tmp_path):
    with shown(terminal(height=20), ("current",), 2, watch=True) as screen:
        train(Config(size="tiny", steps=2, batch=2), Session(recipes=("current",), out=tmp_path), screen)
        assert isinstance(screen, Watch)
        assert screen.report is not None
        report = screen.report
    assert {cell.replace(" ", "") for cell in cells(report, "SQNR, dB")} == {"–––"}
    assert [cells(report, role)[0] for role in ROLES] == ["E4M3 per tensor", "E4M3 per tensor", "E5M2 per tensor"]
    amaxes = [float(amax) for cell in cells(report, "amax") for amax in cell.split()]
    assert all(math.isfinite(amax) and amax > 0 for amax in amaxes)
