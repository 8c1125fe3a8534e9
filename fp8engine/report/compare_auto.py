"""The steps that a copy runs before a comparison of forwards, where its recipe depends on earlier steps.

`auto` decides from what it sees in training steps, and a forward without gradients is none.  So the copy runs a few
forwards and backwards of a loss (cross-entropy where there are targets, else the mean square of the output) on the
first batches; its weights are not changed, and its gradients are thrown away.

`delayed` predicts its scales from the amaxes of earlier steps; a forward with gradients enabled records them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from fp8engine._torch import tree_leaves
from fp8engine.report.compare_text import NOTHING, Batch

STEPS = 4  # a look, a closer one, and the decisions that follow


def show(model: nn.Module, batches: Sequence[Batch], run: Callable[[Batch], object]) -> None:
    """Let the `auto` layers of a model look at a few steps and decide.  run: the model's output for a batch.

    A parameter that takes no gradient gets one meanwhile, so that gradients are seen too.
    """
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    floats = [parameter for parameter in frozen if parameter.is_floating_point()]
    try:
        for parameter in floats:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            for step in range(STEPS):
                batch = batches[step % len(batches)]
                _loss(run(batch), batch).backward()
                model.zero_grad(set_to_none=True)
            run(batches[0])  # a step begins: what the last one showed is decided on
    finally:
        for parameter in floats:
            parameter.requires_grad_(False)


def fill_history(batches: Sequence[Batch], run: Callable[[Batch], object]) -> None:
    """Enter each batch's amaxes into the windows of a model under delayed scaling.  run: the model on a batch."""
    with torch.enable_grad():  # without gradients nothing is recorded
        for batch in [*batches, batches[0]]:  # a step's amaxes are entered when the next step begins
            run(batch)


def _loss(output: object, batch: Batch) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    values = logits if isinstance(logits, torch.Tensor) else _first(output)
    if batch.targets is not None and values.dim() == 3:
        return F.cross_entropy(values.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=NOTHING)
    return values.float().square().mean()


def _first(output: object) -> torch.Tensor:
    found = (value for value in tree_leaves(output) if isinstance(value, torch.Tensor) and value.requires_grad)
    return next(found)
