"""One model in training: its optimizer, its loss scale, how far it has come.  Knows of no file and no screen."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import nn

from fp8engine.demo.config import Config
from fp8engine.demo.data import Text
from fp8engine.demo.model import GPT, loss_of
from fp8engine.demo.precision import Precision


@dataclass
class Curve:
    """What has been measured so far: a training loss and a time each step, a validation loss now and then."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    skipped: int = 0


class Trainer:
    """Trains one GPT under one recipe, a step at a time.

    The model's first weights, like the batches, depend on the seed and not on the recipe.

    >>> from fp8engine.demo.data import read
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
