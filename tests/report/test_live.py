"""The report while a model trains, by the real Trainer, Lightning and Accelerate; wandb alone is a stand-in module."""

import importlib.util
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import lightning
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader
from trainers import LIGHTNING, TRAINER, Lines, Module, llama
from transformers import Trainer, TrainingArguments

import fp8engine as fe
from fp8engine.report.lightning import ReportCallback as ForLightning
from fp8engine.report.live import LiveReport
from fp8engine.report.trainer import ReportCallback

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
STEPS = 5
LINES = Lines(2 * STEPS)


def written(folder: Path) -> tuple[int, list[int]]:
    """(losses on the page, steps of an amax in TensorBoard)."""
    text = (folder / "report.html").read_text()
    found = re.search(r"Loss over (\d+) steps", text)
    events = EventAccumulator(str(folder))
    events.Reload()
    tag = next(tag for tag in events.Tags()["scalars"] if tag.startswith("scale/") and tag.endswith("q_proj.input"))
    return int(found[1]) if found else 0, [event.step for event in events.Scalars(tag)]


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.parametrize(("logging", "steps", "written_after"), [(1, 5, [1, 3, 4]), (2, 5, [1, 3, 4]), (1, 4, [1, 3])])
def test_trainer_writes_page_and_events(logging: int, steps: int, written_after: list[int], tmp_path: Path):
    """A last step that is one of every so many is in the events once."""
    callback = ReportCallback(tmp_path / "live", every=2)
    arguments = TrainingArguments(str(tmp_path), max_steps=steps, logging_steps=logging, save_strategy="no", **TRAINER)
    trainer = Trainer(llama("current"), arguments, train_dataset=LINES, callbacks=[callback])
    trainer.train()
    assert written(tmp_path / "live") == (steps, written_after)
    logged = {int(entry["step"]): entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    for step, loss in logged.items():
        assert [callback.live.losses[at] for at in range(step - logging, step)] == [loss] * logging
    assert (steps - 1 in callback.live.losses) == (logging == 1), "what Trainer has not logged is not made up"


@pytest.mark.slow
def test_a_resumed_trainer_has_gaps_where_it_saw_no_loss(tmp_path: Path):
    def run(steps: int, **more: Any) -> ReportCallback:
        callback = ReportCallback(tmp_path / "live", every=100)
        arguments = TrainingArguments(str(tmp_path), max_steps=steps, save_steps=2, logging_steps=1, **TRAINER)
        Trainer(llama("current"), arguments, train_dataset=LINES, callbacks=[callback]).train(**more)
        return callback

    run(2)
    resumed = run(4, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sorted(resumed.live.losses) == [2, 3]
    assert written(tmp_path / "live")[0] == 4


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_lightning_writes_once_for_optimizer_steps(accumulate: int, tmp_path: Path):
    callback = ForLightning(tmp_path / "live", every=2)
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "default_root_dir": tmp_path, **LIGHTNING}
    runner = lightning.Trainer(max_epochs=1, callbacks=[callback], **options)
    returned: list[float] = []

    class Kept(Module):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            returned.append(loss.item())
            return loss

    runner.fit(Kept("current"), DataLoader(LINES, 2))
    ended = [min(STEPS, i + accumulate) - 1 for i in range(0, STEPS, accumulate)]
    # Lightning divides by a power of two, and so nothing is rounded.
    assert callback.live.losses == {step: returned[at] for step, at in enumerate(ended)}
    assert written(tmp_path / "live") == (len(ended), {1: [1, 3, 4], 2: [1, 2], 4: [1]}[accumulate])


def test_accelerates_own_loop(tmp_path: Path):
    accelerator = accelerate.Accelerator(cpu=True)
    inner = llama(fe.auto(interval=1))
    model, optimizer = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters()))
    live = LiveReport(tmp_path, every=2)
    losses = []
    for step, batch in enumerate(DataLoader(LINES, 2)):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        live.step(accelerator.unwrap_model(model), step, loss)
        losses.append(loss.item())
    assert list(live.losses.values())[:4] == losses[:4]
    assert written(tmp_path)[0] == 4
    assert 'id="decided"' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("recipe", ["current", "bf16", None])
def test_a_run_of_wandb_gets_sums_and_the_page(recipe: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not what was not measured; None: no run has begun."""
    logged: list[dict] = []
    run = SimpleNamespace(log=logged.append) if recipe else None
    stand_in: Any = SimpleNamespace(run=run, Html=lambda path: Path(path).read_text()[:15])
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    model, live = llama(recipe or "current"), LiveReport(tmp_path, every=1)
    assert live.targets == ["page", "tensorboard", "wandb"]
    loss = model(LINES.ids[:2], labels=LINES.ids[:2]).loss
    loss.backward()
    live.step(model, 0, loss)
    if not recipe:
        assert logged == []
        return
    told = {name.removeprefix("fp8/"): value for name, value in logged[0].items()}
    assert told["report"] == "<!DOCTYPE html>"
    assert told["fp8_flops_share"] == fe.inspect(model).totals["fp8_flops_share"]
    assert (told["in_fp8"], told["in_16_bits"]) == ((14, 0) if recipe == "current" else (0, 14)), "of 15: not the head"
    assert (told["fp8_flops_share"] > 0.5) == ("saturated" in told) == ("underflowed" in told) == (recipe == "current")
    assert (told["step"], told["decisions"]) == (0, 0)


def test_a_folder_that_wandb_writes_into_is_not_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Python imports any folder: where wandb is not installed, `wandb.run` of an empty one was an AttributeError."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    LiveReport(tmp_path / "live", every=1).step(torch.nn.Linear(2, 2), 0, 1.0)
    assert "wandb" not in sys.modules
    assert (tmp_path / "live" / "report.html").exists()


def test_without_packages_the_page_alone_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # pyright: ignore[reportArgumentType]
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorboard" else real(name))
    for callback in (ReportCallback, ForLightning):
        with pytest.warns(fe.errors.ReportWarning, match=r"no TensorBoard events.*pip install 'fp8engine\[report\]'"):
            callback(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        live = LiveReport(tmp_path / "a" / "b", every=1)
    assert live.targets == ["page"]
    assert [(warning.category, warning.filename) for warning in caught] == [(fe.errors.ReportWarning, __file__)]
    live.step(torch.nn.Linear(2, 2), 0, 1.0)
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["report.html"]


def test_a_loss_in_memory_that_the_next_step_writes_to(tmp_path: Path):
    """As a CUDA graph's; what is no loss is refused where it is given."""
    live, loss = LiveReport(tmp_path, every=100), torch.zeros(())
    for step in range(3):
        live.step(torch.nn.Linear(2, 2), step, loss.fill_(step))
    assert list(live.losses.values()) == [0, 1, 2]
    for several in (torch.ones(3), "x"):
        with pytest.raises(fe.errors.ReportError, match=r"LiveReport.step: a loss of .*; want one number"):
            live.step(torch.nn.Linear(2, 2), 3, several)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [(range(0, 60, 7), [14, 21, 35, 42, 49]), (range(9, 25), [9, 19]), (range(1, 40, 2), [9, 19, 29, 39])],
)
def test_steps_that_are_left_out_do_not_keep_it_from_writing(steps: range, wanted: list[int], tmp_path: Path):
    live, wrote = LiveReport(tmp_path, every=10), []
    live.write = lambda model, step: wrote.append(step)
    for step in steps:
        live.step(torch.nn.Linear(2, 2), step)
    assert wrote == wanted


def test_what_cannot_be_written_so_is_refused(tmp_path: Path):
    for callback in (LiveReport, ReportCallback, ForLightning):
        for every in (0, -1, 1.5, "100"):
            with pytest.raises(fe.errors.ReportError, match=r"every=.*1 or more"):
                callback(tmp_path, every)  # pyright: ignore[reportArgumentType]
    (tmp_path / "file").touch()
    for folder in ("file", "file/below"):
        with pytest.raises(fe.errors.ReportError, match=f"cannot write in .*{folder}: "):
            LiveReport(tmp_path / folder, every=1).step(torch.nn.Linear(2, 2), 0, 1.0)
