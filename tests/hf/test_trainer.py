"""Trainer, Accelerate and Lightning as people use them: stopped after two steps and resumed, the run is the same."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
from hf_families import FAMILIES
from support import converted, same, tables
from torch.utils.data import DataLoader, Subset
from trainers import LIGHTNING, TRAINER, Lines, Module, llama
from transformers import Trainer, TrainingArguments

import fp8engine as fe
from fp8engine.report.trainer import FILE, ScalingStateCallback

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
STEPS, STOP = 4, 2
LINES = Lines(2 * STEPS)


def everything(model: Any) -> list[torch.Tensor]:
    return [*(p.detach().clone() for p in model.parameters()), *tables(model)]


def trainer(model: Any, folder: Path, callback: Any = None, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        save_steps=STOP,
        learning_rate=1e-2,
        seed=1,
        **{"max_steps": STEPS, **TRAINER, **options},
    )
    return Trainer(model, arguments, train_dataset=LINES, callbacks=[callback] if callback else [])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "current", "auto"])
def test_trainer_resumes_exactly(recipe: str, tmp_path: Path):
    straight = llama(recipe)
    trainer(straight, tmp_path / "a", ScalingStateCallback()).train()
    checkpoint = tmp_path / "a" / f"checkpoint-{STOP}"
    assert (checkpoint / FILE).exists()
    assert not list(checkpoint.glob("*.part"))
    plain = FAMILIES["llama"].build()
    saved = type(plain).from_pretrained(checkpoint)
    assert list(saved.state_dict()) == list(plain.state_dict())
    resumed = llama(recipe)
    trainer(resumed, tmp_path / "a", ScalingStateCallback()).train(resume_from_checkpoint=str(checkpoint))
    assert same(everything(resumed), everything(straight))


def test_the_best_checkpoints_weights_come_with_their_scales(tmp_path: Path):
    """Under delayed scaling a metric depends on them: of the last step's scales it is another one."""
    model = llama("delayed")
    options = {"eval_strategy": "steps", "eval_steps": STOP, "load_best_model_at_end": True, "greater_is_better": True}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3 * STOP, save_steps=STOP, learning_rate=1.0, seed=1, **{**TRAINER, **options}
    )
    ran = Trainer(model, arguments, train_dataset=LINES, eval_dataset=LINES, callbacks=[ScalingStateCallback()])
    ran.train()
    assert str(ran.state.best_model_checkpoint).endswith(f"checkpoint-{STOP}"), "the largest loss is the first"
    assert ran.evaluate()["eval_loss"] == ran.state.best_metric
    (tmp_path / f"checkpoint-{STOP}" / FILE).unlink()
    with pytest.warns(fe.errors.ResumeWarning, match="is not there: the weights are the best checkpoint's"):
        ScalingStateCallback().on_train_end(arguments, ran.state, ran.control, model=model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "lost"), [("delayed", "the windows of amaxes of"), ("auto", "decisions of auto for")]
)
def test_without_the_callback_a_resumed_run_says_what_begins_anew(recipe: str, lost: str, tmp_path: Path):
    """The weights and the optimizer come back, the scaling state does not; `Trainer` alone cannot save it."""
    straight, resumed = llama(recipe), llama(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fe.errors.ResumeWarning)
        trainer(straight, tmp_path).train()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", fe.errors.ResumeWarning)
        trainer(resumed, tmp_path).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STOP}"))
    (told,) = [str(each.message) for each in found if each.category is fe.errors.ResumeWarning]
    layers = len(fe.inspect(resumed).layers)
    assert told.startswith("LlamaForCausalLM: weights were loaded")
    assert f"{lost} {layers - 1} layers begin anew" in told, "all but the output head"
    assert "ScalingStateCallback()" in told
    if recipe == "delayed":
        assert not same(tables(resumed)[:1], tables(straight)[:1])


@pytest.mark.slow
def test_a_checkpoint_elsewhere_or_fresh_scales(tmp_path: Path):
    first = llama("delayed")
    trainer(first, tmp_path / "a", ScalingStateCallback()).train()
    checkpoint = str(tmp_path / "a" / f"checkpoint-{STOP}")
    with pytest.raises(fe.errors.StateError, match=r"resumed at step 2, but .*names the checkpoint's folder"):
        trainer(llama("delayed"), tmp_path / "b", ScalingStateCallback()).train(resume_from_checkpoint=checkpoint)
    moved = llama("delayed")
    trainer(moved, tmp_path / "c", ScalingStateCallback(checkpoint)).train(resume_from_checkpoint=checkpoint)
    assert same(everything(moved), everything(first))
    fresh = llama("delayed")
    with warnings.catch_warnings():
        warnings.simplefilter("error", fe.errors.ResumeWarning)
        trainer(fresh, tmp_path / "d", ScalingStateCallback(False)).train(resume_from_checkpoint=checkpoint)
    assert not same(tables(fresh)[:1], tables(first)[:1])


@pytest.mark.slow
def test_a_damaged_file_loads_nothing(tmp_path: Path):
    trainer(llama("delayed"), tmp_path, ScalingStateCallback(), max_steps=STOP).train()
    checkpoint = tmp_path / f"checkpoint-{STOP}"
    whole = (checkpoint / FILE).read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"not a file of torch"):
        (checkpoint / FILE).write_bytes(damaged)
        model = llama("delayed")
        before = tables(model)
        with pytest.raises(fe.errors.StateError, match="cut short or damaged"):
            trainer(model, tmp_path, ScalingStateCallback()).train(resume_from_checkpoint=str(checkpoint))
        assert same(tables(model), before)
    torch.save(fe.scaling_state_dict(converted(FAMILIES["gpt2"].build(), "delayed")), checkpoint / FILE)
    with pytest.raises(fe.errors.StateError, match="another model"):
        trainer(llama("delayed"), tmp_path, ScalingStateCallback()).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"bf16": True}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}]
)
def test_trainer_options_train(options: dict, tmp_path: Path):
    model = llama("delayed")
    before = [p.detach().clone() for p in model.parameters()]
    result = trainer(model, tmp_path, save_strategy="no", max_steps=STOP, **options).train()
    assert 0 < result.training_loss < 10
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    history_HS = tables(model)[0]
    assert ((history_HS[:, 0::4] > 0).sum(0) >= 1).all(), "each layer's input entered the window between two steps"
    assert fe.inspect(model).totals["never_ran"] == 0


def test_accelerate_resumes_exactly(tmp_path: Path):
    """What was saved after two steps is there after load_state, and the other two go as if nothing had happened."""

    def run(steps: range, load: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What a model has before and after those steps, which are saved."""
        accelerator, inner = accelerate.Accelerator(cpu=True), llama("delayed")
        model, optimizer = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters(), lr=1e-2))
        accelerator.register_for_checkpointing(fe.scaling_state(inner))
        if load:
            accelerator.load_state(str(tmp_path))
        before = everything(inner)
        for batch in itertools.islice(DataLoader(LINES, 2), steps.start, steps.stop):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(str(tmp_path))
        return before, everything(inner)

    _, straight = run(range(STEPS))
    _, stopped = run(range(STOP))
    before, resumed = run(range(STOP, STEPS), load=True)
    assert same(before, stopped)
    assert same(resumed, straight)


def test_lightning_resumes_exactly(tmp_path: Path):
    class Resumed(Module):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["scaling_state"] = fe.scaling_state_dict(self.model)

        def on_load_checkpoint(self, checkpoint):
            fe.load_scaling_state_dict(self.model, checkpoint["scaling_state"])

    def run(epochs: int, path: Path | None = None) -> tuple[Any, Any]:
        module = Resumed("delayed")
        runner = lightning.Trainer(max_epochs=epochs, default_root_dir=tmp_path, **LIGHTNING)
        # Two steps an epoch: Lightning resumes exactly between epochs, but not inside one with a plain DataLoader.
        lines = Subset(LINES, range(2 * STOP))
        runner.fit(module, DataLoader(lines, 2), ckpt_path=path, weights_only=True if path else None)
        return module, runner

    straight, _ = run(2)
    _, runner = run(1)
    runner.save_checkpoint(tmp_path / "stopped.ckpt")
    resumed, _ = run(2, tmp_path / "stopped.ckpt")
    assert same(everything(resumed.model), everything(straight.model))
