"""A group's work in its own process: what it writes before, after and instead of each measurement."""

import logging
import time
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks.card import child, measure, records
from benchmarks.card.plan import NAMES
from benchmarks.card.records import Record, Sink
from fp8engine.bench import harness
from fp8engine.ops import device

CPU = torch.device("cpu")


def group(tmp_path: Path, seconds: float = 60.0) -> measure.Group:
    return measure.Group(CPU, Sink(tmp_path / "gpu.jsonl", "g"), time.perf_counter() + seconds)


def written(tmp_path: Path, kind: str = "") -> list[Record]:
    found, broken = records.read(tmp_path / "gpu.jsonl")
    assert broken == 0
    return [one for one in found if kind in one["kind"]]


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")


def lost() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_check_that_fails_or_raises_does_not_hide_the_others(tmp_path: Path):
    every = {"fine": lambda: None, "wrong": lambda: "3 of 9", "memory": out_of_memory, "last": lambda: None}
    group(tmp_path).checks([*every.items()])
    assert [one["what"] for one in written(tmp_path, "begin")] == list(every)
    wrong = [one["wrong"] for one in written(tmp_path, "check")]
    assert wrong == [None, "3 of 9", "OutOfMemoryError: CUDA out of memory. Tried to allocate 80 GiB", None]


def test_a_lost_context_ends_the_group_and_what_there_is_no_time_for_is_said(tmp_path: Path):
    group(tmp_path, -1.0).checks([("late", lambda: None)] * 3)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        group(tmp_path).checks([("lost", lost), ("last", lambda: None)])
    assert [one["text"] for one in written(tmp_path, "note")] == ["no time for 3 of 3: late ..."]
    assert [one["what"] for one in written(tmp_path, "begin")] == ["lost"]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch):
    """A CUDA device as far as a group's process asks for one before its work begins."""
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda it: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device, "has_fp8", lambda where: True)
    monkeypatch.setattr(device, "name", lambda where: "pretended card")
    monkeypatch.setattr(harness, "machine", lambda where: {"card": "pretended", "date": "2026-01-02"})
    monkeypatch.setattr(child.pack, "stable_keys", lambda: None)
    monkeypatch.setattr(child.launchers, "use", lambda cache: None)


def test_a_group_says_which_kernels_it_had_even_where_it_fails(card, monkeypatch, tmp_path: Path):
    def work(of: measure.Group) -> None:
        of.sink.write("note", text=f"{of.where}")
        lost()

    first = NAMES[0]  # which writes down the machine
    monkeypatch.setitem(measure.WORK, first, work)
    with pytest.raises(RuntimeError):
        child.work(first, tmp_path / "gpu.jsonl", tmp_path, 60.0)
    found = written(tmp_path)
    assert [one["kind"] for one in found] == ["begin", "machine", "note", "kernels"]
    assert (found[1]["card"], found[2]["text"]) == ("pretended", "cuda:0")
    assert [found[3][name] for name in ("pack", "cache", "compiled")] == [0, 0, 0]


def test_whichever_group_comes_first_writes_down_the_machine(card, monkeypatch, tmp_path: Path):
    for name in ("smoke", "gemm"):  # `--groups smoke,gemm`
        monkeypatch.setitem(measure.WORK, name, lambda of: None)
        child.work(name, tmp_path / "gpu.jsonl", tmp_path, 60.0)
    assert [one["group"] for one in written(tmp_path, "machine")] == ["smoke"]


def test_what_the_trials_say_is_a_note(monkeypatch, tmp_path: Path):
    def compare(shape, where, ways, timer):
        logging.getLogger("fp8engine.ops.card_trials").warning("measured %d of %d", 3, 4)
        return [{"name": "fp8engine current", "correct": None, "why": "not measured"}]

    monkeypatch.setattr(measure.linear, "compare", compare)
    monkeypatch.setitem(measure.linear.SHAPES, "cuda", measure.linear.SHAPES["cpu"][:1])
    measure.run_tuned(group(tmp_path))
    logging.getLogger("fp8engine").warning("not a trial's")
    assert [one["text"] for one in written(tmp_path, "note")] == ["measured 3 of 4"]
    assert [one["bench"] for one in written(tmp_path, "row")] == ["tuned"]


def test_a_group_has_its_time_less_a_margin(card, monkeypatch, tmp_path: Path):
    stops = []
    monkeypatch.setitem(measure.WORK, "gemm", lambda of: stops.append(of.stop - time.perf_counter()))
    for seconds in (120.0, 15.0):
        child.work("gemm", tmp_path / "gpu.jsonl", tmp_path, seconds)
    assert stops == pytest.approx([120 * (1 - child.MARGIN) - child.STARTING, 5.0], abs=1.0)


def test_a_card_without_fp8_is_not_measured(card, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(device, "has_fp8", lambda where: False)
    child.work("smoke", tmp_path / "gpu.jsonl", tmp_path, 60.0)
    assert written(tmp_path)[-1]["text"] == "not measured: pretended card has no FP8 Tensor Cores"


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder to hold torchao, which is on no path."""
    monkeypatch.setattr(measure.sys, "path", [str(tmp_path)])
    others = {name: it for name, it in measure.sys.modules.items() if "torchao" not in name}
    monkeypatch.setattr(measure.sys, "modules", others)
    return tmp_path


def test_torchao_comes_from_a_carried_wheel_or_is_said_to_be_missing(torchao: Path):
    assert "no torchao: put a folder that holds it on PYTHONPATH" in (measure.without_torchao(torchao) or "")
    (torchao / measure.WHEELS).mkdir()
    with zipfile.ZipFile(torchao / measure.WHEELS / "torchao-0.18.0-py3-none-any.whl", "w") as wheel:
        for name in ("torchao/__init__.py", "torchao/float8/__init__.py"):
            wheel.writestr(name, "")
    assert measure.without_torchao(torchao) is None


def test_a_torchao_that_does_not_import_is_no_peer(torchao: Path):
    (torchao / "torchao" / "float8").mkdir(parents=True)
    (torchao / "torchao" / "float8" / "__init__.py").write_text("raise ImportError('needs another torch')")
    assert measure.without_torchao(torchao) == "torchao cannot be imported: ImportError: needs another torch"
