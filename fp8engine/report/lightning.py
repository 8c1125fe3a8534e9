"""A callback for Lightning that writes a model's report while it trains; nothing else imports it."""

from __future__ import annotations

import os
from typing import Any

from lightning import Callback

from fp8engine.report.live import LiveReport


class ReportCallback(Callback):
    """Calls a `LiveReport` (live.py) with each of Lightning's optimizer steps and its loss, and at the training's end.

    folder, every: as of `LiveReport`.

    >>> ReportCallback("runs/first", every=500).live.every
    500
    """

    def __init__(self, folder: str | os.PathLike, every: int = 100):
        self.live, self.seen = LiveReport(folder, every), 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the loss of the batch that ended an optimizer step."""
        if trainer.global_step > self.seen:
            self.seen = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is not None:  # which Lightning has divided: a last, shorter group's by as much
                loss = loss * trainer.accumulate_grad_batches
            self.live.step(pl_module, self.seen - 1, loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the last report."""
        self.live.write(pl_module, trainer.global_step - 1)
