"""Random training programs that can be saved after every operation and gone on with in a fresh model.

A program is a list of names of operations.  What an operation computes depends on how many forwards came before it, on
the state of the run, and on nothing else, so that a resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

import contextlib
import io
import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from contracts import in_bytes
from random_models import RECIPES, Model, batch, loss_of
from torch import nn

import fp8engine as fe
from fp8engine.report.state import controllers_of

OPERATIONS = (
    *("train", "train", "train", "accumulate", "microbatch", "microbatch", "step", "evaluate", "infer", "forward"),
    *("siamese", "write", "write data", "freeze", "rescale", "forget"),
)


@dataclass(frozen=True)
class Setting:
    """What a run is made of, all of a seed."""

    seed: int
    recipe: str
    dtype: torch.dtype
    autocast: bool
    fuse: bool
    example: bool
    adam: bool
    override: str | None

    @staticmethod
    def of(seed: int, recipe: str | None = None) -> Setting:
        """A random setting.  recipe: a name that it shall have."""
        draw = random.Random(seed)
        drawn = draw.choice(sorted(RECIPES))
        dtype = draw.choice([torch.float32, torch.bfloat16])
        override = draw.choice([None, None, "rowwise", "delayed", "bf16"])
        return Setting(
            seed=seed,
            recipe=recipe or drawn,
            dtype=dtype,
            autocast=dtype == torch.float32 and draw.random() < 0.4,
            fuse=draw.random() < 0.7,
            example=draw.random() < 0.4,
            adam=draw.random() < 0.5,
            override=override,
        )

    def program(self, length: int) -> list[str]:
        """Operations of this seed: a few of any kind, with a training step at the end."""
        draw = random.Random(self.seed + 1)
        return [*draw.choices(OPERATIONS, k=length - 1), "train"]

    def model(self) -> Any:
        """A converted model, the same every time."""
        torch.manual_seed(self.seed)
        model: Any = Model(random.Random(self.seed + 2))
        model.to(self.dtype)
        if any(kept in f"{self.recipe} {self.override}" for kept in ("gw_hp", "bf16", "auto")):
            # Layers in 16 bits keep their input as it is, and torch refuses a backward that reads what was written.
            for block in model.blocks:
                vars(block)["between"] = "another"
        options: dict[str, Any] = {"overrides": {} if self.override is None else {"blocks.0.*": self.override}}
        if self.example:
            options["example_inputs"] = (self.inputs(model, -1).requires_grad_(),)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fe.errors.EmulationWarning)
            warnings.simplefilter("ignore", fe.errors.FusionWarning)  # of a model that has nothing to fuse
            return fe.convert(model, RECIPES[self.recipe](), fuse=self.fuse, skip=lambda name, module: False, **options)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(parameters, lr=1e-3)
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)

    def inputs(self, model: Any, place: int) -> torch.Tensor:
        """The batch of a call: its size and its outliers change, which no predicted scale expects."""
        draw = random.Random(1000 * self.seed + place)
        torch.manual_seed(1000 * self.seed + place + 1)
        return batch(model, draw, self.dtype)

    def loss(self, model: Any, place: int) -> torch.Tensor:
        """The loss of a forward on the batch of that place."""
        draw = random.Random(1000 * self.seed + place)
        x = self.inputs(model, place)
        if torch.is_grad_enabled():
            x.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            loss = loss_of(model(x), draw)
        if self.recipe == "auto, budget" and torch.is_grad_enabled():
            fe.scaling_state(model).see_loss(loss)
        return loss

    def before_step(self, parameters: list[nn.Parameter]) -> None:
        """What is done to the gradients before an optimizer step: nothing."""


class Run:
    """A model in training.  setting: a Setting, or what has its methods.  at: how many forwards it has had."""

    def __init__(self, setting: Any):
        self.setting, self.at = setting, 0
        self.model: Any = setting.model()
        self.parameters = list(self.model.parameters())
        self.optimizer = setting.optimizer(self.parameters)

    def call(self) -> torch.Tensor:
        """The loss of the next forward."""
        self.at += 1
        return self.setting.loss(self.model, self.at - 1)

    def do(self, operation: str) -> list[float]:
        """Do the next operation; the losses that it saw."""
        if operation in ("train", "accumulate", "microbatch"):
            losses = []
            for _ in range(3 if operation == "accumulate" else 1):
                loss = self.call()
                loss.backward()
                losses.append(loss.item())
            if operation != "microbatch":
                self.step()
            return losses
        if operation == "siamese":
            loss = (self.call() - self.call()) * 0.5
            loss.backward()
            self.step()
            return [loss.item()]
        if operation == "forward":  # of which no backward comes
            return [self.call().item()]
        if operation in ("evaluate", "infer"):
            self.model.eval()
            with torch.no_grad() if operation == "evaluate" else torch.inference_mode():
                losses = [self.call().item(), self.call().item()]
            self.model.train()
            return losses
        losses = []
        watched = any(found.step >= 0 and not found.tentative for found in controllers_of(self.model))
        if watched and operation in ("write", "write data", "freeze", "forget"):
            # Between microbatches `auto` takes such a change for an optimizer's step, and a run that was resumed there
            # can tell only if a training forward has come since.
            losses = [self.call().item()]
        self.change(operation, random.Random(f"{operation} {self.at}"))
        return losses

    def change(self, operation: str, draw: random.Random) -> None:
        """An operation that computes nothing."""
        if operation == "step":
            self.step()
        elif operation == "rescale":
            fe.scaling_state(self.model).rescale_gradients(draw.choice([0.5, 4.0]))
        elif operation == "forget":
            fe.weights_changed(self.model)
        elif operation == "freeze":
            chosen = draw.choice([parameter for parameter in self.parameters if parameter.dim() == 2])
            chosen.requires_grad_(not chosen.requires_grad)
            chosen.grad = None
        else:
            chosen = draw.choice(self.parameters)
            with torch.no_grad():
                (chosen.data if operation == "write data" else chosen).mul_(1.25)

    def step(self) -> None:
        """A step of the optimizer."""
        self.setting.before_step(self.parameters)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> bytes:
        """A checkpoint as users write it, with the gradients of microbatches whose optimizer step is still to come."""
        file = io.BytesIO()
        gradients = [(parameter.requires_grad, parameter.grad) for parameter in self.parameters]
        scaling = fe.scaling_state_dict(self.model)
        torch.save([self.at, self.model.state_dict(), self.optimizer.state_dict(), gradients, scaling], file)
        return file.getvalue()

    @staticmethod
    def resumed(setting: Any, saved: bytes) -> Run:
        """A run in a fresh model, converted again, that goes on from a checkpoint."""
        at, weights, optimizer, gradients, scaling = torch.load(io.BytesIO(saved), weights_only=True)
        run = Run(setting)
        run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(optimizer)
        for parameter, (trained, gradient) in zip(run.parameters, gradients, strict=True):
            parameter.requires_grad_(trained)
            parameter.grad = gradient
        fe.load_scaling_state_dict(run.model, scaling)
        run.at = at
        return run

    def state(self) -> dict[str, Any]:
        """All that the run has come to: equal for runs that are the same."""
        found: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = in_bytes(parameter)
            found[f"gradient of {name}"] = in_bytes(parameter.grad)
        for name, slot in fe.scaling_state_dict(self.model)["slots"].items():
            for key, tensor in slot.items():
                if name.endswith(".weight") and key in ("counts", "live"):
                    # Copies of a weight that are kept are no state.  A resumed run casts it once more, counts that, and
                    # has its amax in this step already; when the step ends, the other run enters the same.
                    tensor = tensor[:0] if key == "counts" else tensor[1:]
                found[f"{name}, {key}"] = in_bytes(tensor)
        for controller in controllers_of(self.model):
            found["decisions"] = [line for change in controller.log for line in change.lines()]
            found["step of auto"] = controller.step
            found["trends"] = controller.history.trends_to_dict()
            found["early warnings"] = list(controller.history.alarms)
        return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What two states differ in: the names, the first of them with both its values."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    shown = [f"{name}: {str(one.get(name))[:120]} / {str(other.get(name))[:120]}" for name in names[:1]]
    return [*shown, *names[1:]]
