"""Trainer of one model: its optimizer, its loss scale, its curves, and its checkpoints.

A checkpoint is all that a run needs to go on as if it had never stopped, in one file of torch's own format: model,
optimizer, loss scale, the scaling state of FP8 layers, and the curves so far (whose length is the step).  Batches are a
function of (seed, step), and nothing else is random: there is no random state to keep.

A file is loaded only if it is whole (the CRC-32 of each of its parts is right, which torch.load does not check), holds
tensors and plain values (weights_only), belongs to this very run, and fits it tensor by tensor.  All of that is checked
before the first value is put in place.
"""

from __future__ import annotations

import io
import pickle
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8engine.demo import disk
from fp8engine.demo.config import Config, Text
from fp8engine.demo.model import GPT, loss_of
from fp8engine.demo.precision import Precision
from fp8engine.errors import StateError
from fp8engine.report.state import load_scaling_state_dict, scaling_state_dict

VERSION = 1
PARTS = {"version", "run", "model", "optimizer", "scaler", "scaling", "curve"}
# step, its loss, tokens a second -> False to stop after this step
OnStep = Callable[[int, float, float], bool]


@dataclass
class Curve:
    """Curves so far: a training loss and a time each step, a validation loss now and then."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    skipped: int = 0


@dataclass(frozen=True)
class Keeping:
    """Where and how often a run is saved, and whether one found there is continued."""

    folder: Path
    every: int = 100
    resume: bool = False

    def path(self, recipe: str, seed: int) -> Path:
        """The checkpoint of one recipe and seed.

        >>> print(Keeping(Path("report")).path("current", 0))
        report/current-seed0.pt
        """
        return self.folder / f"{recipe}-seed{seed}.pt"


class Trainer:
    """Trains one GPT under one recipe, a step at a time.

    The model's first weights, like the batches, depend on the seed and not on the recipe.

    >>> from fp8engine.demo.config import read
    >>> config = Config(size="tiny", steps=2, batch=2)
    >>> trainer = Trainer(config, "fp32", 0, read(None, config.shape.context))
    >>> trainer.step(), len(trainer.curve.losses)
    (5..., 1)
    """

    def __init__(self, config: Config, recipe: str, seed: int, text: Text):
        self.config, self.recipe, self.seed, self.text = config, recipe, seed, text
        self.device = torch.device(config.device)
        self.precision = Precision(recipe, self.device)
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            model = GPT(config.shape).to(self.device)
        self.model = self.precision.prepare(model)
        self.scaler = self.precision.scaler
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.peak, betas=(0.9, 0.95), fused=True)
        self.curve = Curve()

    @property
    def steps_done(self) -> int:
        """Steps taken since the start, over all resumed runs."""
        return len(self.curve.losses)

    def step(self) -> float:
        """One optimizer step on the next batch; returns its loss, in nats a byte."""
        config, number = self.config, self.steps_done
        start = time.perf_counter()
        ids = self.text.batch(self.seed, number, config.batch, config.shape.context).to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr_at(number)
        with self.precision.step():
            with self.precision.forward():
                loss = loss_of(self.model, ids)
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.curve.skipped += self.scaler.get_scale() < scale
        self.curve.losses.append(loss.item())
        self.curve.seconds.append(time.perf_counter() - start)
        return self.curve.losses[-1]

    def validate(self) -> float:
        """Mean loss over the validation windows, and a point of the curve."""
        total = count = 0
        for ids in self.text.windows(self.config.shape.context):
            with torch.no_grad(), self.precision.step(), self.precision.forward():
                total += loss_of(self.model, ids.to(self.device)).item() * len(ids)
            count += len(ids)
        self.curve.validation.append((self.steps_done, total / count))
        return total / count

    def run(self, on_step: OnStep | None, keeping: Keeping | None) -> None:
        """Train to the last step, or until on_step returns False; validated and saved on the way."""
        config, curve = self.config, self.curve
        path = keeping.path(self.recipe, self.seed) if keeping else None
        every = keeping.every if keeping else config.steps
        judged = {config.steps * quarter // 4 for quarter in (1, 2, 3)}  # and the end, where the result is made
        more, saved = True, self.steps_done
        while self.steps_done < config.steps and more:
            if self.steps_done in judged and self.steps_done not in dict(curve.validation):
                self.validate()
            loss = self.step()
            if on_step is not None:
                more = on_step(self.steps_done, loss, config.tokens_per_step / curve.seconds[-1])
            if path is not None and self.steps_done % every == 0:
                self.save(path)
                saved = self.steps_done
        if path is not None and saved != self.steps_done:
            self.save(path)

    def identity(self) -> dict:
        """What must be equal for a run to be the same run; the device may differ."""
        config = self.config
        about = {"recipe": self.recipe, "seed": self.seed, "size": config.size, "shape": asdict(config.shape)}
        return about | {"steps": config.steps, "batch": config.batch, "lr": config.peak, "text": self.text.digest}

    def save(self, path: Path) -> None:
        """Write the run's state so that `path` is whole at any moment.  Raises DemoError where it cannot be written."""
        content = {
            "version": VERSION,
            "run": self.identity(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "scaling": scaling_state_dict(self.model),
            "curve": asdict(self.curve),
        }
        memory = io.BytesIO()
        torch.save(content, memory)
        disk.write(path, memory.getvalue())

    def load(self, path: Path) -> None:
        """Put the run saved at `path` into a trainer of the same run.

        Raises StateError, with nothing loaded, for a file that is not whole, holds code, or is of another run.
        """
        saved, own = _read(path, self.device), self.identity()
        theirs = saved["run"] if isinstance(saved["run"], Mapping) else {}
        differ = [f"{key} {theirs.get(key)!r} there, {own[key]!r} here" for key in own if theirs.get(key) != own[key]]
        if differ:
            raise StateError(f"{path} is of another run: {'; '.join(differ)}. Nothing was loaded")
        _check_tensors(path, saved["model"], self.model.state_dict())
        _check_optimizer(path, saved["optimizer"], self.optimizer)
        curve = _curve(path, saved["curve"])
        if not isinstance(saved["scaler"], dict) or set(saved["scaler"]) != set(self.scaler.state_dict()):
            raise StateError(f"{path}: the loss scale is missing or of another kind; nothing was loaded")
        load_scaling_state_dict(self.model, saved["scaling"])
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])
        self.curve = curve


def _read(path: Path, device: torch.device) -> dict:
    """The content of a checkpoint that is whole and has all PARTS."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}") from error
    content = None
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as file:
            if file.testzip() is None:
                content = torch.load(io.BytesIO(raw), map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise StateError(f"{path} holds more than tensors and plain values, and was not executed") from error
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, KeyError):
        content = None
    if content is None:
        broken = f"{len(raw)} bytes: cut short or damaged"
        raise StateError(f"{path} is not a whole checkpoint ({broken}); delete it to start afresh")
    if not isinstance(content, dict) or set(content) != PARTS or content["version"] != VERSION:
        raise StateError(f"{path} is not a checkpoint of `fp8engine train`, version {VERSION}")
    return content


def _check_tensors(path: Path, saved: object, own: Mapping[str, torch.Tensor]) -> None:
    """Raise StateError unless the saved tensors have the names, shapes and dtypes of one's own."""
    saved = saved if isinstance(saved, Mapping) else {}
    if odd := sorted(map(str, set(saved) ^ set(own))):
        raise StateError(f"{path}: {len(odd)} tensors missing or unknown, {odd[0]!r} the first; nothing was loaded")
    for name, tensor in own.items():
        there = saved[name]
        if not isinstance(there, torch.Tensor) or there.shape != tensor.shape or there.dtype != tensor.dtype:
            found = f"{there.dtype} {list(there.shape)}" if isinstance(there, torch.Tensor) else type(there).__name__
            want = f"{tensor.dtype} {list(tensor.shape)}"
            raise StateError(f"{path}: {name} is {found}; want {want}. Nothing was loaded")


def _check_optimizer(path: Path, saved: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise StateError unless it has the optimizer's groups, and AdamW's moments of all parameters or of none."""
    own = optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        groups, states = saved["param_groups"], saved["state"]
        alike = [(set(group), group["params"]) for group in groups] == [(set(group), group["params"]) for group in own]
        moments = {_of(key, index): state[key] for index, state in states.items() for key in state if key != "step"}
    except (TypeError, KeyError, AttributeError):
        alike, moments = False, {}
    if not alike:
        raise StateError(f"{path}: the optimizer's groups or state are not this run's; nothing was loaded")
    known = {_of(key, i): like for i, like in enumerate(parameters) for key in ("exp_avg", "exp_avg_sq")}
    _check_tensors(path, moments, known if moments else {})


def _of(key: str, index: int) -> str:
    return f"optimizer's {key} of parameter {index}"


def _curve(path: Path, saved: object) -> Curve:
    try:
        curve = Curve(**saved)  # pyright: ignore[reportCallIssue] - a mapping or a TypeError
        curve.validation = [(int(step), float(loss)) for step, loss in curve.validation]
        if len(curve.losses) != len(curve.seconds):
            raise ValueError("as many times as losses")
    except (TypeError, ValueError) as error:
        raise StateError(f"{path}: the curves cannot be read ({error}); nothing was loaded") from error
    return curve
