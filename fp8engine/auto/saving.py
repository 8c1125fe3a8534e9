"""State of a controller as JSON and tensors, so that a resumed run decides as the uninterrupted one would have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from fp8engine import _numpy as numpy
from fp8engine.auto.history import trends_from_dict
from fp8engine.auto.host_copy import PendingSample
from fp8engine.auto.log import Change
from fp8engine.auto.schedule import Moves
from fp8engine.errors import StateError
from fp8engine.files import HostCopy
from fp8engine.numerics.formats import Format
from fp8engine.scaling.choice import Casts, Choice
from fp8engine.scaling.reads import Reads
from fp8engine.scaling.sample import StepSamples, Tables

if TYPE_CHECKING:
    from fp8engine.auto.controller import Controller

PENDING = ("slots", "reads", "loss", "pending_counts", "pending_rules", "pending_amax")  # as `host_copy.Copied`


def state_dict(controller: Controller) -> dict[str, Any]:
    """Its decisions as JSON, and as tensors what it remembers and what it has not decided on yet."""
    state, pending = controller.state, controller.pending
    decided = {
        "step": controller.step,
        "late": controller.steps_without_backward,
        "tentative": controller.tentative,
        "calibrated": controller.calibrated,
        "loss": controller.loss,
        "pending": None if pending is None else pending.step,
        "begun": state.begun,
        "decides_next": state.decides_next,
        "between": controller.between.kept(state),
        "choices": choices_to_list(controller.choices),
        "log": [change.to_dict() for change in controller.log],
        "trends": controller.history.trends_to_dict(),
        "outputs": controller.outputs.state_dict(),
        "taken": {
            "last": controller.outputs.taken,
            "known": sorted(controller.outputs.known),
            "ready": [numerics.ready for numerics in controller.layers],
        },
        "remembered": [[i, seen.count] for i, seen in controller.reads.items()],
        "tries": [controller.moves.number, list(controller.moves.tries.items())],
    }
    undecided: list[torch.Tensor | None] = [None] * len(PENDING) if pending is None else [*pending.copy.wait()]
    samples, parts = state.samples, None
    if pending is None and samples is not None:
        if samples.tables is None and not state.backward_seen:  # its backward, or another forward, is still to come
            decided["sampled"], parts = list(samples.layouts), samples.flat
            undecided[:3] = samples.slots_SL, None, samples.loss_1
        else:
            undecided[:3] = samples.finish(controller.sizes(), state.backward_seen)
    remembered = [torch.from_numpy(seen.table) for seen in controller.reads.values()]
    moves = controller.moves.kept()
    tables = {
        "counts": controller.counts,
        "remembered": torch.stack(remembered) if remembered else None,
        "moves": None if moves is None else torch.from_numpy(moves),
        "parts": parts,
        "watched": None if controller.watched is None else controller.watched.copy.wait()[0],
        **dict(zip(PENDING, undecided, strict=True)),
    }
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
        step, late, tentative = int(decided["step"]), int(decided["late"]), bool(int(decided["tentative"]))
        trends = trends_from_dict(decided["trends"])
        counts, remembered, ranges = (
            table if len(table := found[key]) else None for key in ("counts", "remembered", "moves")
        )
        reads, moves, pending, sampled, parts, watched = {}, Moves(), None, None, None, None
        begun, decides_next = bool(decided.get("begun", step >= 0)), bool(decided.get("decides_next"))
        same, waited = map(int, decided.get("between", (0, 0)))
        taken = decided.get("taken", {})
        loss, calibrated = decided["loss"], bool(decided["calibrated"])
        for (i, count), table in zip(decided["remembered"], () if remembered is None else remembered, strict=True):
            reads[int(i)] = Reads(table.numpy().copy(), int(count))
        if ranges is not None:
            *low_high, wanted = ranges.numpy().copy()
            moves.range, moves.wanted = numpy.stack(low_high), wanted
        moves.number, tries = decided["tries"]
        moves.tries = {int(layer): int(count) for layer, count in tries}
        if len(looked := found.get("watched", ())):
            watched = PendingSample(step, HostCopy([looked]))
        if decided["pending"] is not None:
            pending = PendingSample(int(decided["pending"]), HostCopy(found[key] for key in PENDING))
        elif "sampled" in decided:
            parts = {int(layer) for layer in decided["sampled"]}, found["slots"], found["parts"], found["loss"]
        elif len(found["slots"]):
            sampled = Tables(*(found[key].to(controller.state.device, copy=True) for key in PENDING[:3]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"not the state of an auto recipe ({type(error).__name__}: {error})") from error
    unknown = {change.layer for change in log} - controller.by_name.keys()
    if unknown or set(choices) - set(range(len(controller.layers))):
        raise StateError("the state of an auto recipe for another model: its layers are not these")
    controller.step, controller.steps_without_backward = step, late
    controller.tentative, controller.calibrated, controller.loss = tentative, calibrated, loss
    controller.choices, controller.log, controller.pending, controller.counts = choices, log, pending, counts
    controller.reads, controller.moves, controller.watched = reads, moves, watched
    controller.history.trends = trends
    for numerics, recipe in zip(controller.layers, controller.recipes, strict=True):
        numerics.adopt(recipe if controller.plan is None else controller.plan.start)
    controller.outputs.load_state_dict(decided["outputs"])
    for change in log:
        controller.by_name[change.layer].adopt(change.recipe)
    controller.outputs.taken, controller.outputs.known = dict(taken.get("last", {})), set(taken.get("known", ()))
    for numerics, ready in zip(controller.layers, taken.get("ready", ()), strict=False):
        numerics.ready = dict(ready)
    controller.state.outputs.widen = not controller.frozen
    controller.between.load(same, waited)
    controller.state.begun, controller.state.decides_next = begun, decides_next
    controller.state.sample(None if sampled is None else StepSamples.finished(sampled))
    if parts is not None:
        layers, *tables = parts
        controller.begin_sampling(numerics for numerics in controller.layers if numerics.layer in layers)
        samples = cast(StepSamples, controller.state.samples)
        for mine, saved in zip((samples.slots_SL, samples.flat, samples.loss_1), tables, strict=True):
            mine.copy_(saved)


def choices_to_list(choices: Mapping[int, Choice]) -> list[dict]:
    """Each group's choice once, in types that JSON knows; the log has the reasons."""
    groups = {id(choice): choice for choice in choices.values()}.values()
    return [
        {
            "layers": list(choice.layers),
            "matmuls": _casts_to_list(choice.matmuls),
            "paid": _casts_to_list(choice.paid),
            "margin": choice.margin,
            "changes": choice.changes,
            "spent": choice.spent,
            "fades": choice.fades_db,
            "cheaper": [[layer, matmul, count] for (layer, matmul), count in choice.cheaper.items()],
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
        margin, changes = int(group["margin"]), int(group["changes"])
        matmuls, paid = (_casts_from_list(group[key]) for key in ("matmuls", "paid"))
        layers, spent = tuple(map(int, group["layers"])), float(group["spent"])
        fp8 = {key: casts for key, casts in matmuls.items() if casts}
        waits = {(int(layer), matmul): int(count) for layer, matmul, count in group["cheaper"]}
        choice = Choice(layers, fp8, margin, None, changes, spent, paid, float(group["fades"]), waits)
        choices |= dict.fromkeys(choice.layers, choice)
    return choices


def _casts_to_list(casts: Mapping[tuple[int, str], Casts | None]) -> list[list]:
    return [
        [layer, matmul, *((found.granularity, found.first.name, found.second.name) if found else ())]
        for (layer, matmul), found in casts.items()
    ]


def _casts_from_list(found: Iterable[Sequence]) -> dict[tuple[int, str], Casts | None]:
    return {
        (int(layer), matmul): Casts(rest[0], Format.named(rest[1]), Format.named(rest[2])) if rest else None
        for layer, matmul, *rest in found
    }
