"""Everything a run needs to go on as if it had never stopped, in one file of torch's own format.

Model, optimizer, loss scale, the scaling state of FP8 layers, and the curves so far (whose length is the step).
Batches are a function of (seed, step), and nothing else is random: there is no random state to keep.

A file is believed only when it is whole (the CRC-32 of each of its parts is right, which torch.load does not look at),
holds tensors and plain values (weights_only), belongs to this very run, and fits it tensor by tensor.  All of that is
checked before the first value is put in place.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from fp8engine.demo import files
from fp8engine.demo.trainer import Curve, Trainer
from fp8engine.errors import StateError
from fp8engine.report import load_scaling_state_dict, scaling_state_dict

VERSION = 1
PARTS = {"version", "run", "model", "optimizer", "scaler", "scaling", "curve"}


def save(path: Path, trainer: Trainer) -> None:
    """Write the run's state so that `path` is whole at any moment.  Raises DemoError where it cannot be written."""
    content = {
        "version": VERSION,
        "run": identity(trainer),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "scaling": scaling_state_dict(trainer.model),
        "curve": asdict(trainer.curve),
    }
    memory = io.BytesIO()
    torch.save(content, memory)
    files.write(path, memory.getvalue())


def load(path: Path, trainer: Trainer) -> None:
    """Put the run saved at `path` into a trainer of the same run.

    Raises StateError, with nothing loaded, for a file that is not whole, holds code, or is of another run.
    """
    content = _read(path, trainer.device)
    _check_run(path, content["run"], identity(trainer))
    _check_tensors(path, content["model"], trainer.model.state_dict())
    _check_optimizer(path, content["optimizer"], trainer.optimizer)
    curve = _curve(path, content["curve"])
    if not isinstance(content["scaler"], dict) or set(content["scaler"]) != set(trainer.scaler.state_dict()):
        raise StateError(f"{path}: the loss scale is missing or of another kind; nothing was loaded")
    load_scaling_state_dict(trainer.model, content["scaling"])
    trainer.model.load_state_dict(content["model"])
    trainer.optimizer.load_state_dict(content["optimizer"])
    trainer.scaler.load_state_dict(content["scaler"])
    trainer.curve = curve


def identity(trainer: Trainer) -> dict:
    """What must be equal for a run to be the same run; the device may differ."""
    config = trainer.config
    return {
        "recipe": trainer.recipe,
        "seed": trainer.seed,
        "size": config.size,
        "shape": asdict(config.shape),
        "steps": config.steps,
        "batch": config.batch,
        "lr": config.peak,
        "text": trainer.text.digest,
    }


def _read(path: Path, device: torch.device) -> dict:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}") from error
    broken = f"{path} is not a whole checkpoint ({len(raw)} bytes: cut short or damaged); delete it to start afresh"
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as parts:
            if parts.testzip() is not None:
                raise StateError(broken)
        content = torch.load(io.BytesIO(raw), map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise StateError(f"{path} holds more than tensors and plain values, and was not executed") from error
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, KeyError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(broken) from error
    if not isinstance(content, dict) or set(content) != PARTS or content["version"] != VERSION:
        raise StateError(f"{path} is not a checkpoint of `fp8engine train`, version {VERSION}")
    return content


def _check_run(path: Path, saved: object, own: dict) -> None:
    saved = saved if isinstance(saved, Mapping) else {}
    differ = [f"{key} {saved.get(key)!r} there, {own[key]!r} here" for key in own if saved.get(key) != own[key]]
    if differ:
        raise StateError(f"{path} is of another run: {'; '.join(differ)}. Nothing was loaded")


def _check_tensors(path: Path, saved: object, own: Mapping[str, torch.Tensor]) -> None:
    if not isinstance(saved, Mapping) or set(saved) != set(own):
        names = set(saved) if isinstance(saved, Mapping) else set()
        odd = sorted(map(str, names ^ set(own)))
        raise StateError(f"{path}: {len(odd)} parameters missing or unknown, {odd[0]!r} the first; nothing was loaded")
    for name, tensor in own.items():
        _check_like(f"{path}: {name}", saved[name], tensor)


def _check_optimizer(path: Path, saved: object, optimizer: torch.optim.Optimizer) -> None:
    own = optimizer.state_dict()["param_groups"]
    saved = saved if isinstance(saved, Mapping) else {}
    groups, states = saved.get("param_groups"), saved.get("state")
    if (
        not isinstance(groups, list)
        or not isinstance(states, Mapping)
        or list(map(_key, groups)) != list(map(_key, own))
    ):
        raise StateError(f"{path}: the optimizer's groups are not this run's; nothing was loaded")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, state in states.items():
        if index not in range(len(parameters)) or set(state) != {"step", "exp_avg", "exp_avg_sq"}:
            raise StateError(f"{path}: the optimizer's state of parameter {index} is not AdamW's; nothing was loaded")
        for key in ("exp_avg", "exp_avg_sq"):
            _check_like(f"{path}: optimizer's {key} of parameter {index}", state[key], parameters[index])


def _key(group: object) -> tuple:
    """What tells one group of parameters from another."""
    return (sorted(group), group.get("params")) if isinstance(group, dict) else ()


def _check_like(what: str, saved: object, own: torch.Tensor) -> None:
    if not isinstance(saved, torch.Tensor) or saved.shape != own.shape or saved.dtype != own.dtype:
        found = f"{saved.dtype} {list(saved.shape)}" if isinstance(saved, torch.Tensor) else type(saved).__name__
        raise StateError(f"{what} is {found}; want {own.dtype} {list(own.shape)}. Nothing was loaded")


def _curve(path: Path, saved: object) -> Curve:
    try:
        curve = Curve(**saved)  # pyright: ignore[reportCallIssue] - a mapping or a TypeError
        curve.validation = [(int(step), float(loss)) for step, loss in curve.validation]
        if len(curve.losses) != len(curve.seconds):
            raise ValueError("as many times as losses")
    except (TypeError, ValueError) as error:
        raise StateError(f"{path}: the curves cannot be read ({error}); nothing was loaded") from error
    return curve
