"""State of a controller as JSON and tensors, so that a resumed run decides as the uninterrupted one would have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fp8engine.auto.history import trends_from_dict
from fp8engine.auto.host_copy import PendingSample
from fp8engine.auto.log import Change
from fp8engine.errors import StateError
from fp8engine.files import HostCopy
from fp8engine.numerics.formats import Format
from fp8engine.scaling.choice import Choice

if TYPE_CHECKING:
    from fp8engine.auto.controller import Controller

PENDING = ("samples", "pending_counts", "pending_rules")  # tables of a sample that was not decided on yet


def state_dict(controller: Controller) -> dict[str, Any]:
    """Its decisions as JSON, and as tensors the statistics on which it has not decided yet.

    The keys are those of version 0.1: "again" is `resample`, "late" `steps_without_backward`, "closely" detailed layers.
    """
    state, pending = controller.state, controller.pending
    decided = {
        "step": controller.step,
        "again": controller.resample,
        "late": controller.steps_without_backward,
        "tentative": controller.tentative,
        "closely": sorted(state.detailed_layers),
        "pending": None if pending is None else [pending.step, sorted(pending.detailed_layers)],
        "choices": choices_to_list(controller.choices),
        "log": [change.to_dict() for change in controller.log],
        "trends": controller.history.trends_to_dict(),
        "outputs": controller.outputs.state_dict(),
    }
    undecided = [state.samples, None, None] if pending is None else pending.copy.wait()
    tables = {"counts": controller.counts, **dict(zip(PENDING, undecided, strict=True))}
    nothing = torch.empty(0)
    return {"decided": json.dumps(decided)} | {
        key: nothing if table is None else table.detach().cpu().clone() for key, table in tables.items()
    }


def load_state_dict(controller: Controller, found: Mapping[str, Any]) -> None:
    """The inverse of `state_dict`.  Raises StateError for another controller's state, with nothing loaded."""
    try:
        decided = json.loads(found["decided"])
        choices = choices_from_list(decided["choices"])
        log = [Change.from_dict(change) for change in decided["log"]]
        step, late = int(decided["step"]), int(decided["late"])
        resample, tentative = bool(int(decided["again"])), bool(int(decided["tentative"]))
        detailed, trends = frozenset(map(int, decided["closely"])), trends_from_dict(decided["trends"])
        counts, *tables = (table if len(table := found[key]) else None for key in ("counts", *PENDING))
        pending = None
        if decided["pending"] is not None:
            at, layers = decided["pending"]
            pending = PendingSample(int(at), HostCopy(found[key] for key in PENDING), frozenset(map(int, layers)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"not the state of an auto recipe ({type(error).__name__}: {error})") from error
    if {change.layer for change in log} - controller.by_name.keys() or set(choices) - set(
        range(len(controller.layers))
    ):
        raise StateError("the state of an auto recipe for another model: its layers are not these")
    controller.step, controller.steps_without_backward = step, late
    controller.resample, controller.tentative = resample, tentative
    controller.choices, controller.log, controller.pending, controller.counts = choices, log, pending, counts
    controller.history.trends = trends
    for numerics, recipe in zip(controller.layers, controller.recipes, strict=True):
        numerics.adopt(recipe if controller.plan is None else controller.plan.start)
    controller.outputs.load_state_dict(decided["outputs"])
    for change in log:
        controller.by_name[change.layer].adopt(change.recipe)
    state, samples = controller.state, tables[0] if pending is None else None
    state.detailed_layers = detailed
    state.samples = None if samples is None else samples.to(state.device, copy=True)


def choices_to_list(choices: Mapping[int, Choice]) -> list[dict]:
    """Each group's choice once, in types that JSON knows; the log has the reasons."""
    groups = {id(choice): choice for choice in choices.values()}.values()
    return [
        {
            "grain": choice.granularity,
            "formats": [[layer, role, format.name] for (layer, role), format in choice.formats.items()],
            "fp8": sorted([layer, matmul] for layer, matmul in choice.fp8),
            "margin": choice.margin,
            "cheaper": choice.cheaper,
            "changes": choice.changes,
        }
        for choice in groups
    ]


def choices_from_list(found: Iterable[Mapping]) -> dict[int, Choice]:
    """The inverse of `choices_to_list`.

    >>> from fp8engine.scaling.choice import begin
    >>> from fp8engine.numerics.recipe import auto
    >>> choices = {0: begin([0], auto())}
    >>> choices_from_list(choices_to_list(choices)) == choices
    True
    """
    choices = {}
    for group in found:
        formats = {(int(layer), role): Format.named(name) for layer, role, name in group["formats"]}
        fp8 = frozenset((int(layer), matmul) for layer, matmul in group["fp8"])
        margin, cheaper, changes = (int(group[key]) for key in ("margin", "cheaper", "changes"))
        choice = Choice(group["grain"], formats, fp8, margin, None, cheaper, changes)
        choices |= {layer: choice for layer, _ in formats}
    return choices
