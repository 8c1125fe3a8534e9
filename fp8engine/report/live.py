"""The report of a model while it trains: its page, TensorBoard's events, and wandb where a run of it is active.

For a loop of one's own, or Accelerate's.  trainer.py calls it from transformers' Trainer, lightning.py from Lightning.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8engine.auto.calibration import number
from fp8engine.errors import ReportError, ReportWarning
from fp8engine.ops import ranks
from fp8engine.report.collect import inspect
from fp8engine.report.events import EventWriter
from fp8engine.report.folded import measured
from fp8engine.report.table import Report

PAGE = "report.html"
SUMS = ("fp8_flops_share", "in_fp8", "in_16_bits", "nonfinite", "recasts", "cost_millinats")
SHARES = ("saturated", "underflowed")


class LiveReport:
    """Writes a model's report every so many steps into a folder, each time anew: report.html, and TensorBoard's events.

    every: steps from one to the next; writing waits for the device.  TensorBoard's events need its package; without it
    a ReportWarning says so and `targets` has no "tensorboard".  A run of wandb gets the report's sums and the page once
    `wandb.init` has begun it.
    Of several processes each calls `step`, and the first writes.  Raises ReportError for an `every` that is no whole
    number of 1 or more, and where a file cannot be written.

    >>> import tempfile
    >>> from fp8engine.nn import Linear
    >>> layer = Linear(16, 16, recipe="current")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     live = LiveReport(folder, every=2)
    ...     for step in range(4):
    ...         loss = layer(torch.ones(2, 16)).square().mean()
    ...         loss.backward()
    ...         live.step(layer, step, loss)
    ...     (Path(folder) / "report.html").exists()
    True
    """

    def __init__(self, folder: str | os.PathLike, every: int = 100):
        if not isinstance(every, int) or every < 1:
            raise ReportError(f"LiveReport(every={every!r}): want a whole number of steps, 1 or more")
        self.folder, self.every = Path(folder), every
        self.losses: dict[int, Any] = {}  # floats and tensors of one element
        self.events: EventWriter | None = None
        self.noted: int | None = None  # the latest step
        self.written: int | None = None  # the latest step of events and of wandb
        find = importlib.util.find_spec
        found = {"tensorboard": find("tensorboard"), "wandb": sys.modules.get("wandb") or find("wandb")}
        self.targets = ["page", *(name for name, package in found.items() if package)]
        if not found["tensorboard"]:
            why = "no TensorBoard events: the package tensorboard is missing; pip install 'fp8engine[report]' brings it"
            warnings.warn(f"LiveReport({str(folder)!r}) writes {why}", ReportWarning, stacklevel=2)

    def step(self, model: nn.Module, step: int, loss: float | torch.Tensor | None = None) -> None:
        """Note a step, counted from 0, and its loss; write where a multiple of `every` steps has been reached.

        Steps may be left out, as by a loop that calls this at each tenth one, or by Lightning with two optimizers.
        Raises ReportError for a loss that is not one number.
        """
        if loss is not None:
            # As a copy: a CUDA graph writes each loss to the same memory.
            self.losses[step] = number(loss, "LiveReport.step", ReportError).clone()
        before = step - 1 if self.noted is None else self.noted
        self.noted = step
        if (step + 1) // self.every > (before + 1) // self.every:
            self.write(model, step)

    def write(self, model: nn.Module, step: int) -> None:
        """Write the report as it is behind that step."""
        report = inspect(model)
        if not ranks.first():
            return
        self.losses = {at: float(loss) for at, loss in self.losses.items()}
        losses = [float(self.losses.get(at, math.nan)) for at in range(step + 1)] if self.losses else None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReportError(f"cannot write in {self.folder}: {error.strerror or error}") from error
        report.to_html(self.folder / PAGE, losses=losses)
        if step == self.written:  # the end of a training that was just written, with losses that came since
            return
        self.written = step
        if "tensorboard" in self.targets:
            self.events = self.events or EventWriter(self.folder)
            self.events.write_report(report, step)
        wandb: Any = sys.modules.get("wandb")  # who has begun a run has imported it
        if wandb is not None and wandb.run is not None:
            wandb.run.log(_sums(report, step) | {"fp8/report": wandb.Html(str(self.folder / PAGE))})


def _sums(report: Report, step: int) -> dict[str, Any]:
    sums: dict[str, Any] = {"step": step} | {key: report.totals[key] for key in SUMS}
    sums |= {key: share for key in SHARES if (share := measured(report.totals, key)) is not None}
    counts = {"decisions": report.decisions, "early_warnings": report.alarms, "standing_outliers": report.outliers}
    sums |= {key: len(found) for key, found in counts.items()}
    return {f"fp8/{key}": value for key, value in sums.items()}
