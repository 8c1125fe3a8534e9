"""The update of a model's predicted scales as one operation: amaxes of a step in, scales of the next step out."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8engine.numerics.recipe import OUTPUT, ROLES
from fp8engine.ops import casts, ranks
from fp8engine.ops.library import in_backward, operation

SLOTS = (*ROLES, OUTPUT)  # of a layer in the scaling table, a column each
INPUT, WEIGHT, GRAD_OUTPUT, RESULT = (slice(i, None, len(SLOTS)) for i in range(len(SLOTS)))  # columns of a table


class GradientCasts(NamedTuple):
    """What tells an update whether a gradient was cast since the update before it."""

    counts_CS: torch.Tensor
    """Counters of casts, a column for each of a layer's SLOTS."""
    entered_1: torch.Tensor
    """How many gradients had been cast at the update before; -1 where that is not known."""
    waits: bool
    """Whether nothing is done unless one was cast: a forward before the backward of another is of the same step."""


def scale_update(history_HS, live_2S, rules_3S, group: str, saved_1: torch.Tensor, gradients: GradientCasts) -> None:
    """Enter a step's amaxes into the windows and predict the next scales: one call for a whole model.

    group: name of the process group over which amaxes are joined first, as ranks.py says; "" for
    DistributedDataParallel's, inside of one.  saved_1: of ranks.py.
    """
    _scale_update(history_HS, live_2S, rules_3S, group, saved_1, *gradients)


@operation(
    "scale_update(Tensor history, Tensor live, Tensor rules, str ranks, Tensor saved, Tensor counts, Tensor entered, "
    "bool waits) -> ()",
    lambda *arguments: None,
    effect=True,
)
def _scale_update(history_HS, live_2S, rules_3S, group: str, saved_1: torch.Tensor, *casts_of) -> None:
    if in_backward():  # a checkpoint around the graph runs all of it again
        return
    counts_CS, entered_1, waits = GradientCasts(*casts_of)
    cast, before = counts_CS[0, GRAD_OUTPUT].sum(), []
    if waits:
        came = torch.where(entered_1 < 0, (live_2S[0, GRAD_OUTPUT] >= 0).any(), cast != entered_1)
        if came.device.type != "cpu":  # which the host does not wait for
            before = [(table, table.clone(), came) for table in (history_HS, live_2S)]
        elif not came:
            entered_1.fill_(cast)
            return
    entered_1.fill_(cast)
    if len(history_HS):
        _enter_kept_weights(history_HS, live_2S[0])
        ranks.join(live_2S[0], group, saved_1)
        casts.twin(history_HS.device).scale_update(history_HS, live_2S, rules_3S)
    else:
        live_2S[0].fill_(-1.0)
    for table, values, came in before:
        table.copy_(torch.where(came, table, values))


def _enter_kept_weights(history_HS: torch.Tensor, amax_S: torch.Tensor) -> None:
    """Of a weight whose FP8 copy was read again, nothing was cast: its amax is that of the step before.

    A run that is resumed has no copies, and casts: it enters the same.
    """
    ran, amax, before = amax_S[INPUT], amax_S[WEIGHT], history_HS[0, WEIGHT]
    amax.copy_(torch.where((ran >= 0) & (amax < 0) & (before > 0), before, amax))
