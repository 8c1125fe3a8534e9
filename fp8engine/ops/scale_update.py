"""The update of a model's predicted scales as one operation: amaxes of a step in, scales of the next step out."""

from __future__ import annotations

import torch

from fp8engine.ops import casts, ranks
from fp8engine.ops.library import in_backward, operation


@operation(
    "scale_update(Tensor history, Tensor live, Tensor rules, str ranks='', Tensor? saved=None) -> ()",
    lambda history, live, rules, ranks="", saved=None: None,
    effect=True,
)
def scale_update(history_HS, live_2S, rules_3S, group: str = "", saved_1: torch.Tensor | None = None) -> None:
    """Enter a step's amaxes into the windows and predict the next scales: one call for a whole model.

    saved_1: where given, the amaxes of several ranks are joined first, as ranks.py says.
    group: name of the process group that is joined; "" for DistributedDataParallel's, inside of one.
    """
    if in_backward():  # a checkpoint around the graph runs all of it again
        return
    if not len(history_HS):
        live_2S[0].fill_(-1.0)
        return
    if saved_1 is not None:
        ranks.join(live_2S[0], group, saved_1)
    casts.twin(history_HS.device).scale_update(history_HS, live_2S, rules_3S)
