"""TensorBoard writer for a training loop: `writer.write(model, step)` adds what is new (events.py lists the tags)."""

from __future__ import annotations

from torch import nn

from fp8engine.report.collect import inspect
from fp8engine.report.events import EventWriter


class Writer(EventWriter):
    """Writes a model's report into a folder that TensorBoard reads; each write adds what is new since the last.

    Raises ReportError where tensorboard is not installed, or the folder cannot be written.

    >>> import tempfile, torch
    >>> from fp8engine.nn import Linear
    >>> layer = Linear(16, 16, recipe="current")
    >>> _ = layer(torch.ones(2, 16))
    >>> with tempfile.TemporaryDirectory() as folder, Writer(folder) as writer:
    ...     writer.write(layer, step=0)
    """

    def write(self, model: nn.Module, step: int) -> None:
        """Add what the model has run since the last write; `step` is where numbers without a step of their own go."""
        self.write_report(inspect(model), step)
