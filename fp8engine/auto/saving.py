"""State of a controller as JSON and tensors, so that a resumed run decides as the uninterrupted one would have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

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

# Attributes that the JSON text holds as they are: of a controller, of a choice.
PLAIN = ("step", "tentative", "calibrated", "loss")
OF_CHOICE = ("layers", "margin", "changes", "spent")
PENDING = ("slots", "reads", "loss", "pending_counts", "pending_rules", "pending_amax")  # as `host_copy.Copied`
TABLES = (*PENDING, "counts", "remembered", "moves", "parts", "watched")


def state_dict(controller: Controller) -> dict[str, Any]:
    """Its decisions as JSON, and as tensors what it remembers and what it has not decided on yet."""
    state, pending, samples = controller.state, controller.pending, controller.state.samples
    decided = {key: getattr(controller, key) for key in PLAIN} | {
        "late": controller.steps_without_backward,
        "pending": None if pending is None else pending.step,
        "begun": state.begun,
        "decides_next": state.decides_next,
        "between": controller.between.kept(state),
        "choices": choices_to_list(controller.choices),
        "log": [change.to_dict() for change in controller.log],
        "trends": controller.history.trends_to_dict(),
        **controller.outputs.state_dict(),
        "remembered": [[i, seen.count] for i, seen in controller.reads.items()],
        "tries": [controller.moves.number, list(controller.moves.tries.items())],
    }
    tables: dict[str, torch.Tensor] = {"moves": torch.from_numpy(controller.moves.ranges)}
    if controller.counts is not None:
        tables["counts"] = controller.counts
    if controller.reads:
        tables["remembered"] = torch.stack([torch.from_numpy(seen.table) for seen in controller.reads.values()])
    if controller.watched is not None:
        tables["watched"] = controller.watched.copy.wait()[0]
    if pending is not None:
        tables |= zip(PENDING, pending.copy.wait(), strict=True)
    elif samples is not None and (samples.tables is not None or state.backward_seen):
        tables |= zip(PENDING[:3], samples.finish(controller.sizes(), state.backward_seen), strict=True)
    elif samples is not None:  # its backward, or another forward, is still to come
        decided["sampled"] = list(samples.layouts)
        tables |= {"slots": samples.slots_SL, "parts": samples.flat, "loss": samples.loss_1}
    kept = {key: tables.get(key, torch.empty(0)).detach().cpu().clone() for key in TABLES}
    return {"decided": json.dumps(decided), **kept}


def load_state_dict(controller: Controller, found: Mapping[str, Any]) -> None:
    """The inverse of `state_dict`.  Raises StateError for another controller's state, with nothing loaded."""
    state = controller.state
    try:
        decided = json.loads(found["decided"])
        tables = {key: found[key] for key in TABLES}
        new: dict[str, Any] = {key: decided[key] for key in PLAIN} | {"steps_without_backward": decided["late"]}
        new |= {"choices": choices_from_list(decided["choices"]), "pending": None, "watched": None}
        new["log"] = [Change.from_dict(change) for change in decided["log"]]
        new["moves"] = Moves(tables["moves"].numpy().copy().reshape(3, -1, 3), *decided["tries"])
        new["counts"] = tables["counts"] if len(tables["counts"]) else None
        remembered = zip(decided["remembered"], tables["remembered"], strict=True)
        new["reads"] = {i: Reads(table.numpy().copy(), count) for (i, count), table in remembered}
        if len(tables["watched"]):
            new["watched"] = PendingSample(new["step"], HostCopy([tables["watched"]]))
        if decided["pending"] is not None:
            new["pending"] = PendingSample(decided["pending"], HostCopy(tables[key] for key in PENDING))
        trends = trends_from_dict(decided["trends"])
        begun, decides_next, between = (decided[key] for key in ("begun", "decides_next", "between"))
        outputs = {key: decided[key] for key in ("outputs", "taken")}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"not the state of an auto recipe ({type(error).__name__}: {error})") from error
    unknown = {change.layer for change in new["log"]} - controller.by_name.keys()
    if unknown or set(new["choices"]) - set(range(len(controller.layers))):
        raise StateError("the state of an auto recipe for another model: its layers are not these")
    vars(controller).update(new)
    controller.history.trends = trends
    for numerics, recipe in zip(controller.layers, controller.recipes, strict=True):
        numerics.adopt(recipe if controller.plan is None else controller.plan.start)
    controller.outputs.load_state_dict(outputs)
    for change in controller.log:
        controller.by_name[change.layer].adopt(change.recipe)
    controller.between.load(*between)
    state.outputs.widen = not controller.frozen
    state.begun, state.decides_next = begun, decides_next
    state.sample(None)
    if "sampled" in decided:
        controller.begin_sampling(decided["sampled"])
        samples = cast(StepSamples, state.samples)
        for mine, key in ((samples.slots_SL, "slots"), (samples.flat, "parts"), (samples.loss_1, "loss")):
            mine.copy_(tables[key])
    elif decided["pending"] is None and len(tables["slots"]):
        finished = Tables(*(tables[key].to(state.device, copy=True) for key in PENDING[:3]))
        state.sample(StepSamples.finished(finished))


def choices_to_list(choices: Mapping[int, Choice]) -> list[dict]:
    """Each group's choice once, in types that JSON knows; the log has the reasons."""
    groups = {id(choice): choice for choice in choices.values()}.values()
    return [
        {key: getattr(choice, key) for key in OF_CHOICE}
        | {"fades": choice.fades_db, "cheaper": [[*key, count] for key, count in choice.cheaper.items()]}
        | {"matmuls": _casts_to_list(choice.matmuls), "paid": _casts_to_list(choice.paid)}
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
        parts: dict[str, Any] = {key: group[key] for key in OF_CHOICE} | {"layers": tuple(group["layers"])}
        parts |= {key: _casts_from_list(group[key]) for key in ("matmuls", "paid")}
        cheaper = {(layer, matmul): count for layer, matmul, count in group["cheaper"]}
        choice = Choice(**parts, fades_db=group["fades"], cheaper=cheaper)
        choices |= dict.fromkeys(choice.layers, choice)
    return choices


def _casts_to_list(casts: Mapping[tuple[int, str], Casts | None]) -> list[list]:
    """[layer, matmul] of one in 16 bits, [layer, matmul, granularity, first, second] of the others."""
    return [[*key, *map(str, found or ())] for key, found in casts.items()]


def _casts_from_list(found: Iterable[Sequence]) -> dict[tuple[int, str], Casts | None]:
    return {
        (layer, matmul): Casts(rest[0], *map(Format.named, rest[1:])) if rest else None
        for layer, matmul, *rest in found
    }
