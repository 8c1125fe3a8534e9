"""`fp8engine train -r auto`: what was decided, on screen, in JSON, on a page and in a plan that repeats the run."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fp8engine as fe
from fp8engine.cli import app
from fp8engine.demo import DEFAULT, config, session
from fp8engine.numerics.recipe import RECIPES

SMALLEST = ("train", "--size", "tiny", "--batch", "2", "--steps", "3", "-r", "auto", "-r", "current", "--out")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured beside the training takes less time."""
    monkeypatch.setattr(config, "VALIDATION_WINDOWS", 16)
    monkeypatch.setattr(session, "LENGTH", 10)


def call(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_page_and_the_plan_lie_beside_the_picture(tmp_path: Path):
    """Of auto alone: a fixed recipe decides nothing.  What is measured after the run is not in them."""
    result = call(*SMALLEST, tmp_path, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    names = [Path(name).name for name in told["files"]]
    assert names == ["table.json", "table.csv", "loss.png", "auto.html", "auto-plan.json"]
    assert all((tmp_path / name).stat().st_size > 200 for name in names)
    decisions = told["runs"]["auto"]["decisions"]
    assert told["runs"]["current"]["decisions"] == []
    assert all(each["after"].startswith("E4M3") for each in decisions if each["slot"].endswith("grad_output"))
    plan = json.loads((tmp_path / "auto-plan.json").read_text())
    assert sum(len(change["slots"]) for change in plan["changes"]) == len(decisions) >= 8
    page = (tmp_path / "auto.html").read_text()
    assert 'class="loss"' in page
    assert "blocks.1.down.grad_output" in page
    fe.auto(plan=tmp_path / "auto-plan.json")


def test_a_person_is_told_the_last_decisions(tmp_path: Path):
    shown = call(*SMALLEST, tmp_path, "--watch").stdout  # no terminal: lines, not a live view
    assert re.search(r"auto changed \d+ formats; the last:", shown)
    assert shown.count("predicted SQNR") >= 5
    assert "auto          step 3/3  loss " in shown
    assert "auto.html" in shown


def test_the_demo_trains_auto_too():
    assert DEFAULT[-1] == "auto"
    assert set(DEFAULT) <= set(RECIPES)
