"""A report's text: repeated blocks as one row, exceptions by themselves, the terminal's width, pipes, commands.

Names and rows are counted in the text that a reader sees; shares are planted in a report's numbers.
"""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import shown, told
from support import converted
from tiny_models import llama
from torch import nn

import fp8engine as fe
from fp8engine.errors import ReportError
from fp8engine.report.flow import repeats
from fp8engine.report.folded import groups

BLOCKS = 30


def net(blocks: int = BLOCKS) -> nn.Module:
    block = lambda: nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)})  # noqa: E731
    model = nn.ModuleDict({"layers": nn.ModuleList([block() for _ in range(blocks)]), "lm_head": nn.Linear(16, 64)})
    return model


def run(model: nn.Module) -> fe.Report:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    for block in model.layers:  # pyright: ignore
        x = x + block["down"](block["up"](x).relu())
    model.lm_head(x).square().mean().backward()  # pyright: ignore
    return fe.inspect(model)


def rows(text: str, heading: str = "layer") -> dict[str, list[str]]:
    """First cell -> the others, of the table with that heading."""
    (table,) = [part for part in text.split("\n\n") if part.startswith(f"{heading} ")]
    cells = [[cell.strip() for cell in line.split("│")] for line in table.splitlines()[2:]]
    return {name: others for name, *others in cells}


@pytest.fixture(scope="module")
def current() -> fe.Report:
    torch.manual_seed(0)
    return run(converted(net()))


def test_equal_blocks_are_one_row_and_every_row_is_there_to_be_asked_for(current: fe.Report):
    text = current.table()
    assert list(rows(text)) == ["layers.0-29.up × 30", "layers.0-29.down × 30"]
    assert list(rows(text, "left alone")) == ["lm_head"]
    assert rows(text, "ran as")["A"][-1] == "60"
    _, summary, *others = text.splitlines()
    assert "60 of 61 layers in FP8 (60 emulated), 0 converted in 16 bits, 0 never ran, 1 left alone" in summary
    assert len(others) < 18
    assert len(rows(current.table(every=True))) == 60
    assert current.table(1).splitlines()[:2] == ["FP8", "  engine:"]
    for width in (0, -5, "x", 80.0):
        with pytest.raises(ReportError, match=rf"table\(width={width!r}\): want a whole number of columns"):
            current.table(width)  # pyright: ignore[reportArgumentType]


def test_layers_that_ran_otherwise_have_rows_of_their_own():
    torch.manual_seed(0)
    asked = {"layers.3.up": "bf16", "layers.7.up": "bf16", "layers.9.down": "rowwise"}
    report = run(converted(net(), overrides=asked))
    found = rows(report.table())
    assert list(found) == [
        "layers.0-2,4-6,8-29.up × 28", "layers.3,7.up × 2", "layers.0-8,10-29.down × 29", "layers.9.down"
    ]  # fmt: skip
    assert [cells[1] for cells in found.values()] == ["A", "B", "A", "C"]
    ways = rows(report.table(), "ran as")
    assert {letter: (cells[0], cells[-1]) for letter, cells in ways.items()} == {
        "A": ("current", "57"), "B": ("bf16", "2"), "C": ("rowwise", "1")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape", [1, 2]), ("recipe", "other"), ("backend", "triton"), ("kind", "Other"), ("reason", "told"),
        *((role, {"cast": "E5M2 per row"}) for role in ("input", "weight", "grad_output")),
    ],
)  # fmt: skip
def test_what_makes_two_rows_differ(current: fe.Report, key: str, value: Any):
    changed = copy.deepcopy(current)
    layer: Any = changed.layers[0]
    layer[key] = layer[key] | value if isinstance(value, dict) else value
    assert list(rows(changed.table()))[:2] == ["layers.1-29.up × 29", "layers.0.up"]


def planted(current: fe.Report, **shares: float) -> fe.Report:
    """The report with every share 0 but these of `up` in block 5: of its gradients, or flushed=, saturated=."""
    changed = copy.deepcopy(current)
    layers: list[Any] = changed.layers
    for layer in layers[:-1]:
        for role in ("input", "weight", "grad_output"):
            layer[role] |= {"saturated": 0.0, "underflowed": 0.01 if role == "input" else 0.0}
    layers[10]["grad_output"] |= shares
    return changed


@pytest.mark.parametrize("share", [{"underflowed": 0.08}, {"saturated": 0.001}])
def test_a_layer_whose_share_stands_out_has_its_row(current: fe.Report, share: dict):
    found = rows(planted(current, **share).table())
    assert list(found)[:2] == ["layers.0-4,6-29.up × 29", "layers.5.up"]
    assert found["layers.0-4,6-29.up × 29"][-1] == "1.00% / 0 / 0"
    assert found["layers.5.up"][2 if "saturated" in share else -1].endswith(f"{next(iter(share.values())):.2%}")


def test_harmless_shares_are_folded_to_the_largest(current: fe.Report):
    for share, printed in ((0.015, "1.50%"), (1e-9, "<0.01%")):  # and what is not zero is not printed as zero
        found = rows(planted(current, underflowed=share).table())
        assert found["layers.0-29.up × 30"][-1] == f"1.00% / 0 / {printed}"
    everywhere = planted(current)
    for layer in everywhere.layers[:-1:2]:
        layer["grad_output"]["underflowed"] = 0.08
    everywhere.layers[0]["grad_output"]["underflowed"] = 0.09
    assert rows(everywhere.table())["layers.0-29.up × 30"][-1] == "1.00% / 0 / 9.00%", "what all share is no exception"


def test_no_name_is_broken_and_no_line_is_wider_than_the_terminal():
    long = nn.ModuleDict({"a_model_with_a_long_name": nn.ModuleDict({"encoder_of_text": net(12)})})
    report = fe.inspect(converted(long, "blockwise"))
    for width in (60, 80, 100):
        lines = report.table(width).splitlines()
        assert max(map(len, lines)) <= width
        assert [line for line in lines if re.match(r"…?\S*0-11\.(up|down) × 12 ", line)] != []
    (longest,) = [line for line in report.table(80).splitlines() if ".down × 12" in line]
    assert longest.startswith(("…", "a_model_with_a_long_name."))


def test_a_terminal_wraps_and_a_pipe_does_not(current: fe.Report, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, current.table().splitlines())) > 100
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert max(map(len, current.table().splitlines())) <= 70


def test_nested_numbers_fold_where_all_are_equal():
    names = [f"stages.{i}.blocks.{j}.fc" for i in range(3) for j in range(4)]
    assert repeats.fold((name, "same") for name in names) == [("stages.0-2.blocks.0-3.fc × 12", list(range(12)))]
    odd = repeats.fold((name, name == "stages.1.blocks.3.fc") for name in names)
    assert [name for name, _ in odd] == [
        "stages.0,2.blocks.0-3.fc × 8", "stages.1.blocks.0-2.fc × 3", "stages.1.blocks.3.fc"
    ]  # fmt: skip
    assert sorted(i for _, members in odd for i in members) == list(range(12))
    assert groups([{"name": str(i)} for i in range(3)], []) == [(str(i), [{"name": str(i)}]) for i in range(3)]


def test_the_commands_fold_too(tmp_path: Path):
    model: Any = llama(num_hidden_layers=5, num_key_value_heads=2)
    model.save_pretrained(tmp_path / "model")
    text = shown("inspect", tmp_path / "model", "--override", "*.2.mlp.up_proj=bf16")
    found = rows(text)
    assert len(found) == 8
    assert found["model.layers.0-1,3-4.mlp.up_proj × 4"][-1] == ""
    assert found["model.layers.2.mlp.up_proj"][-1] == "overrides: bf16"
    layers = told("inspect", tmp_path / "model")["layers"]
    whole = sum(layer["flops_share"] for layer in layers if layer["name"].endswith("q_proj"))
    assert found["model.layers.0-4.self_attn.q_proj × 5"][2] == f"{whole:.1%}"
    assert list(rows(text, "left alone")) == ["lm_head"]
    assert len(rows(shown("inspect", tmp_path / "model", "--all"))) == 35
    written = rows(shown("export", tmp_path / "model", tmp_path / "out", "-r", "rowwise"))
    assert written["model.layers.0-4.mlp.down_proj × 5"][2:] == [f"{5 * 64 * 32 * 4:,}", f"{5 * (64 * 32 + 32 * 4):,}"]
    assert len(rows(shown("export", tmp_path / "model", tmp_path / "again", "-r", "rowwise", "--all"))) == 35
