"""Reading of a sampled step on the host: statistics of slots, layers that share an input, time, saturation, costs.

Functions of a Controller's layers, shapes and recipes.  `read` and `remember` enter what they find; the others change
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from fp8engine.auto import budget
from fp8engine.auto.host_copy import PendingSample
from fp8engine.auto.known import Known
from fp8engine.auto.log import SlotChange
from fp8engine.numerics.cards import card_of
from fp8engine.numerics.formats import BF16
from fp8engine.numerics.recipe import ROLES, Cast
from fp8engine.ops import device
from fp8engine.ops.cost import speedup
from fp8engine.ops.reference.operand import COUNTERS
from fp8engine.scaling.choice import OPERANDS, Choice, SlotKey, begin, reads_of, recipe_of
from fp8engine.scaling.prediction import Measured, Prediction
from fp8engine.scaling.reads import READS, Reads
from fp8engine.scaling.sample import read_row

CALLS, ELEMENTS, SATURATED = (COUNTERS.index(name) for name in ("calls", "elements", "saturated"))


def read(controller: Known, slots: torch.Tensor) -> dict[SlotKey, Measured]:
    """Statistics of a controller's layers; layers whose inputs are the same tensor become a group."""
    found: dict[SlotKey, Measured] = {}
    consumers: dict[bytes, int] = {}
    for i, numerics in enumerate(controller.layers):
        for role in ROLES:
            row = slots[numerics.state.column(numerics.layer, role)]
            if measured := read_row(row):
                found[i, role] = measured
            if measured and role == "input" and i not in controller.choices and measured.amax > 0:
                _join(controller, i, consumers.setdefault(row.numpy().tobytes(), i))
    return {slot: measured for slot, measured in found.items() if slot[0] in controller.choices}


def _join(controller: Known, layer: int, first: int) -> None:
    """Begin with a layer that is sampled for the first time: alone, or with the first layer that has its input."""
    mine = begin([layer], controller.recipes[layer])
    if first != layer and controller.choices[first].changes == 0:
        group = controller.choices[first]
        mine = replace(group, layers=(*group.layers, layer), matmuls={**group.matmuls, **mine.matmuls})
    for i in mine.layers:
        controller.choices[i] = mine


def remember(controller: Known, found: Mapping[SlotKey, Measured], sample: PendingSample) -> set[int]:
    """Enter the tried casts of layers whose tensors were finite; returns those layers."""
    tried, usable = sample.tables.reads.double().numpy(), set()
    for i in {i for i, _ in found}:
        mine = [found[i, role] for role in ROLES if (i, role) in found]
        new = Reads(tried[controller.layers[i].layer])
        if any(measured.nonfinite for measured in mine) or not any(new.seen(read) for read in range(len(READS))):
            continue
        controller.reads[i] = new.after(controller.reads.get(i), controller.choices[i].fades_db)
        usable.add(i)
    return usable


def slower_in_fp8(controller: Known, choice: Choice, counts: torch.Tensor) -> str:
    """Why a group stays in 16 bits whatever its statistics: FP8 is predicted to take longer here; "" if not."""
    where = controller.state.device
    if where.type != "cuda" or device.capability(where) < (8, 9):
        return ""
    card = card_of(device.name(where), device.processors(where))
    took, flops = 0.0, 0.0
    for i in choice.layers:
        n, k = controller.shapes[i][-2:]
        column = controller.state.column(controller.layers[i].layer, "input")
        calls, elements = (int(counts[row, column]) for row in (CALLS, ELEMENTS))
        m = elements // max(calls * k, 1)
        flops += m * n * k
        took += m * n * k / speedup(recipe_of(controller.recipes[i], choice, i), m, n, k, card) if m else 0.0
    if took <= flops:
        return ""
    return (
        f"in FP8 it is predicted to take {took / flops:.2f}x its time in 16 bits on this card (fp8engine/ops/cost.py)"
    )


def saturated(controller: Known, choice: Choice, counts: torch.Tensor) -> float:
    """Share of a group's elements that saturated under predicted scales since the last sample.

    Of inputs and gradients: how often a weight was cast depends on the copies that are kept of it.
    """
    layers, roles = [controller.layers[i].layer for i in choice.layers], ("input", "grad_output")
    columns = [controller.state.column(layer, role) for layer in layers for role in roles]
    since = counts[:, columns].sum(1)
    if controller.counts is not None:
        since = since - controller.counts[:, columns].sum(1)
    return float(since[SATURATED]) / max(float(since[ELEMENTS]), 1.0)


def paid_for(controller: Known, choice: Choice) -> dict[tuple[int, str], tuple[str, str]]:
    """The reasons of casts that the budget has asked for, as `policy.reasons` takes them."""
    found = {}
    allowed = 1e3 * (controller.allowed or 0.0)
    for i in choice.layers:
        if (casts := choice.matmuls.get((i, "forward"))) and i in controller.reads:
            costs = {role: budget.cost_of(controller.reads[i], casts, role) for role in OPERANDS["forward"]}
            role = max(costs, key=lambda each: costs[each])
            why = f"predicted cost {1e3 * costs[role]:.2g} millinats, where {allowed:.3g} are the budget of all casts"
            found[i, "forward"] = role, f"forward: {why}"
    return found


def outcome_of(seen: Reads | None, slot: SlotKey, choice: Choice, measured: Measured) -> Prediction:
    """What is predicted of a slot's casts: the least SQNR that its matmuls' results keep."""
    used = reads_of(slot, choice)
    known = [each for each in used if seen is not None and seen.seen(each[0])]
    if seen is None or not known:
        formats = [format for _, format in choice.casts(slot).values()] or [BF16]
        return measured.predict(Cast(formats[0]), choice.margin if used else 0)
    values = [seen.value(*each) for each in known]
    return Prediction(min(values), max(seen.flushed(*each) for each in known), 0.0, 0.0)


def slot_change(name: str, labels: tuple[str, str], why: str, outcome: Prediction | None) -> SlotChange:
    """A change as the log holds it.  outcome: predicted of the new cast; an infinite SQNR is None, for JSON's sake."""
    if outcome is None:
        return SlotChange(name, *labels, why)
    sqnr_db = round(float(outcome.sqnr_db), 2) if math.isfinite(outcome.sqnr_db) else None
    return SlotChange(name, *labels, why, sqnr_db, round(float(outcome.flushed), 6))
