"""Checkpoints of the demo: a resumed run is the uninterrupted one bit for bit; a wrong file loads nothing."""

import copy
import errno
import io
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import same

from fp8engine.demo import Config, DemoError, Keeping, Session, disk, run, train
from fp8engine.demo.config import read
from fp8engine.demo.trainer import Trainer
from fp8engine.errors import StateError
from fp8engine.report.state import scaling_state_dict

CONFIG = Config(size="tiny", steps=8, batch=2)


def fresh(recipe: str = "delayed", config: Config = CONFIG, seed: int = 0) -> Trainer:
    return Trainer(config, recipe, seed, read(config.text, config.shape.context))


def tensors(trainer: Trainer) -> list[torch.Tensor]:
    """Everything that training changes: weights, moments, scaling state."""
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    slots = [value for slot in scaling_state_dict(trainer.model)["slots"].values() for value in slot.values()]
    return [tensor.detach().clone() for tensor in (*trainer.model.parameters(), *moments, *slots)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of CONFIG under delayed scaling."""
    path = tmp_path_factory.mktemp("saved") / "delayed-seed0.pt"
    one = fresh()
    for _ in range(3):
        one.step()
    one.save(path)
    return path


def refused(path: Path, trainer: Trainer, told: str) -> None:
    """The file is refused with these words, and the trainer is as it was."""
    trainer.step()
    before, curve = tensors(trainer), copy.deepcopy(trainer.curve)
    with pytest.raises(StateError, match=told):
        trainer.load(path)
    assert same(tensors(trainer), before)
    assert trainer.curve == curve


@pytest.mark.parametrize("recipe", ["fp32", "fp16", "current", "delayed", "blockwise"])
def test_a_resumed_run_is_the_uninterrupted_one(recipe: str, tmp_path: Path):
    """Stopped after step 5, in the middle between two validations and two checkpoints."""
    straight = run(CONFIG, recipe)
    keeping = Keeping(tmp_path, every=3)
    stopped = run(CONFIG, recipe, on_step=lambda step, *_: step < 5, keeping=keeping)
    assert stopped.steps == 5
    assert stopped.curve.losses == straight.curve.losses[:5]
    resumed = run(CONFIG, recipe, keeping=Keeping(tmp_path, every=3, resume=True))
    assert resumed.curve.losses == straight.curve.losses
    assert set(straight.curve.validation) <= set(resumed.curve.validation)
    for key in ("validation_loss", "sample", "saturated", "underflowed", "activation_bytes", "fp8_flops_share"):
        assert getattr(resumed, key) == getattr(straight, key), key


@pytest.mark.parametrize("recipe", ["fp16", "delayed"])
def test_weights_moments_and_scaling_state_are_too(recipe: str, tmp_path: Path):
    """Scales of delayed scaling come from a window that spans the stop; fp16's loss scale is not where it began."""
    straight, first, second = fresh(recipe), fresh(recipe), fresh(recipe)
    for one, steps in ((straight, 6), (first, 3)):
        one.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, enabled=recipe == "fp16")
        for _ in range(steps):
            one.step()
    first.save(tmp_path / "x.pt")
    second.load(tmp_path / "x.pt")
    for _ in range(3):
        second.step()
    assert same(tensors(second), tensors(straight))
    assert second.scaler.state_dict() == straight.scaler.state_dict()
    assert second.curve.losses == straight.curve.losses
    assert second.curve.skipped == straight.curve.skipped
    assert (straight.curve.skipped > 0) == (recipe == "fp16")


def test_a_finished_run_is_resumed_by_measuring_it(tmp_path: Path):
    keeping = Keeping(tmp_path, resume=True)
    first = run(CONFIG, "current", keeping=keeping)
    again = run(CONFIG, "current", on_step=lambda *_: pytest.fail("trained again"), keeping=keeping)
    assert again == first


def one_bit(raw: bytes) -> bytes:
    """torch.load does not notice it: the check is ours."""
    changed = bytearray(raw)
    changed[len(raw) // 2] ^= 1
    torch.load(io.BytesIO(changed), weights_only=True)
    return bytes(changed)


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    f"cut to {share} of it": lambda raw, share=share: raw[: int(share * len(raw))] for share in (0, 0.001, 0.5, 0.999)
} | {"one bit of one weight": one_bit}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file(damage: str, saved: Path, tmp_path: Path):
    path = tmp_path / "damaged.pt"
    path.write_bytes(DAMAGED[damage](saved.read_bytes()))
    refused(path, fresh(), r"damaged.pt is not a whole checkpoint \(\d+ bytes: cut short or damaged\)")


class Hostile:
    """Runs code when unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_hostile_pickle_is_not_run(form: str, saved: Path, tmp_path: Path):
    path, harm = tmp_path / "hostile.pt", tmp_path / "harm"
    content = torch.load(saved, weights_only=True) | {"curve": Hostile(harm)}
    if form == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    refused(path, fresh(), "was not executed" if form == "torch" else "not a whole checkpoint")
    assert not harm.exists()


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"recipe": "current"}, "recipe 'delayed' there, 'current' here"),
        ({"seed": 1}, "seed 0 there, 1 here"),
        ({"config": replace(CONFIG, size="small")}, "size 'tiny' there, 'small' here"),
        ({"config": replace(CONFIG, steps=9)}, "steps 8 there, 9 here"),
        ({"config": replace(CONFIG, lr=1e-3)}, "lr 0.004 there, 0.001 here"),
        ({"config": replace(CONFIG, text=__file__)}, "text '"),
    ],
)
def test_a_checkpoint_of_another_run(other: dict[str, Any], told: str, saved: Path):
    refused(saved, fresh(**other), told)


BIAS = "blocks.1.down.bias"
SPOILT: list[tuple[Callable[[Any], object], str]] = [
    (lambda parts: parts["model"].pop(BIAS), f"'{BIAS}' the first"),
    (
        lambda parts: parts["model"].update({BIAS: torch.zeros(3)}),
        rf"{BIAS} is torch.float32 \[3\]; want torch.float32 \[64\]",
    ),
    (
        lambda parts: parts["model"].update({"lm_head.weight": parts["model"]["lm_head.weight"].half()}),
        r"lm_head.weight is torch.float16",
    ),
    (
        lambda parts: parts["optimizer"]["state"][5].update(exp_avg=torch.zeros(2)),
        "optimizer's exp_avg of parameter 5",
    ),
    (lambda parts: parts["optimizer"]["param_groups"].pop(), "the optimizer's groups"),
    (lambda parts: parts["scaling"]["slots"].popitem(), "1 slots missing"),
    (lambda parts: parts.update(curve={"losses": [1.0], "seconds": []}), "the curves cannot be read"),
    (lambda parts: parts.pop("scaler"), "not a checkpoint of `fp8engine train`"),
    (lambda parts: parts.update(version=2), "not a checkpoint of `fp8engine train`, version 1"),
]


@pytest.mark.parametrize(("change", "told"), SPOILT, ids=[told for _, told in SPOILT])
def test_a_whole_file_that_does_not_fit(change, told: str, saved: Path, tmp_path: Path):
    parts = torch.load(saved, weights_only=True)
    change(parts)
    path = tmp_path / "other.pt"
    torch.save(parts, path)
    refused(path, fresh(), told)


def test_a_checkpoint_that_is_not_there(tmp_path: Path):
    refused(tmp_path / "none.pt", fresh(), "No such file")
    assert run(CONFIG, "fp32", keeping=Keeping(tmp_path, resume=True)).steps == 8  # resume begins where nothing is


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_whole(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.pt"
    disk.write(path, b"older")
    path.chmod(0o640)
    disk.write(path, b"old")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, broken, mock.Mock(side_effect=full))
    with pytest.raises(DemoError, match=r"cannot write .*x.pt: No space left on device; what was there before"):
        disk.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["x.pt"]


def test_a_disk_that_fills_up_keeps_the_report_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second recipe's checkpoint fails: the first one's row and the checkpoints before it are there."""
    write = disk.write

    def fails_for_bf16(path: Path, content: bytes) -> None:
        if path.name.startswith("bf16"):
            raise DemoError("No space left on device")
        write(path, content)

    monkeypatch.setattr(disk, "write", fails_for_bf16)
    with pytest.raises(DemoError, match="No space left"):
        train(CONFIG, Session(recipes=("fp32", "bf16"), out=tmp_path))
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 2
    fresh("fp32").load(tmp_path / "checkpoints" / "fp32-seed0.pt")


def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path: Path):
    (tmp_path / "file").write_text("")
    session = Session(recipes=("fp32",), out=tmp_path / "file" / "report")
    with pytest.raises(DemoError, match="choose another with --out"):
        train(Config(steps=10**9), session)
