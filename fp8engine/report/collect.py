"""`fe.inspect`: the rows and sums of a model's report, read from its layers' counters and conversion records.

A layer's weight in the FP8 share is its matmul FLOPs, rows x N x K, times the share of its three matmuls in FP8.  Rows
are counted where the input is cast.  A layer left alone counts none, and is given the median of the converted ones.
Of experts in one 3-D parameter a token passes as many as its router chooses, and each passage is a row.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import nn

from fp8engine._torch import foreach_norm, plain_name
from fp8engine.autograd import Numerics
from fp8engine.autograd.ready import TAKEN
from fp8engine.convert.record import RECORD, Record
from fp8engine.convert.select import experts_run, linear_layers, parameter_of, weight_of
from fp8engine.distributed.gathers import gathers, totals
from fp8engine.nn.fp8_attention import Softmax
from fp8engine.numerics.formats import word
from fp8engine.ops import matmul
from fp8engine.ops.reference.operand import COUNTERS
from fp8engine.ops.scale_update import RESULT
from fp8engine.report.facts import AutoRun, Totals, standing
from fp8engine.report.state import StateView
from fp8engine.report.table import Report
from fp8engine.scaling.slot_view import numbers_of
from fp8engine.scaling.table import OUTPUT, ROLES, ScalingState

NOT_SAMPLED = "auto has seen no training step (inference, or one graph of the model): formats are those it begins with"
FROM_FORWARD = "auto has seen no training step: formats are those that it has decided on without one"
NEVER_RAN = "never ran: its forward was not called (its weight may be read directly)"
DECIDED = "16 bits, as auto has decided: its decisions say why"
BYPASSED = "never ran: its weight is read directly, its forward was not called"
READ_IN_ONE_MODE = "in training or in evaluation its weight is read directly, and not in FP8"


def inspect(model: nn.Module) -> Report:
    """What every linear layer of the model has run so far; reading it waits for the device.

    Raises ConversionError for what is no nn.Module.

    >>> import torch, warnings
    >>> from fp8engine.convert.swap import convert
    >>> model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     _ = convert(model, "current", overrides={"2": "fp32"})
    >>> _ = model(torch.randn(4, 32))
    >>> report = inspect(model)
    >>> [(layer["name"], layer["recipe"], layer["backend"]) for layer in report.layers]
    [('0', 'current', 'reference'), ('2', 'none', 'torch')]
    >>> report.totals["fp8_flops_share"]
    0.8
    """
    found = StateView(model, "inspect")
    records, run, sharded = _records(model), experts_run(model), gathers(model)
    tables = {id(state): _slots(state) for state in found.states}
    layers: list[Any] = []
    idle: set[str] = set()
    again: list[tuple[dict, torch.Tensor]] = []
    for name, module, shape in linear_layers(model):
        name = plain_name(model, name)
        key, numerics = parameter_of(name, module), found.layers.get(name)
        layer = _row(name, module, shape)
        if numerics is None:
            layer["reason"] = _why_left(name, records)
        else:
            layer |= _ran(weight_of(module, key), numerics, tables[id(numerics.state)])
            layer["fused"] = f"fused: reads what {numerics.source} wrote" if numerics.source else ""
            layer["outliers"] = "smoothed" if numerics.smooth else ""
            layer["divided"] = "" if numerics.shard is None else numerics.shard.told(numerics)
            # A forward in 16 bits casts no input; the backward's casts count the same rows.
            layer["rows"] = max(
                layer["input"]["elements"] // max(shape[-1], 1), layer["grad_output"]["elements"] // max(shape[-2], 1)
            )
            if not layer["ran"] and numerics.bypassed is False:
                idle.add(name)
            if gathered := sharded.get((id(module), key)):
                layer["gather"] = f"high precision: {gathered.why}" if gathered.why else "FP8 codes"
            if _read_again(weight_of(module, key), numerics, layer["weight"]):
                again.append((layer["weight"], weight_of(module, key)))
        if len(shape) == 3 and (key != "weight" or id(module) in run):
            layer["experts"] = [run.get(id(module), shape[0]), shape[0]]
        layers.append(layer)
    _enter_amaxes(again)
    sums = _totals(layers, idle, totals(sharded))
    for layer in layers:
        if layer["experts"]:
            used, of = layer["experts"]
            of_model = f"{layer['flops_share']:.1%} of the model's linear FLOPs"
            layer["reason"] = "; ".join(filter(None, [layer["reason"], f"{used} of {of} a token, {of_model}"]))
    controllers = found.controllers
    changes = sorted((c for controller in controllers for c in controller.log), key=lambda change: change.step)
    decisions = [line for change in changes for line in change.decisions()]
    alarms = sorted((a for controller in controllers for a in controller.history.alarms), key=lambda alarm: alarm.step)
    told = [alarm._asdict() for alarm in alarms]
    return Report(layers, sums, decisions, AutoRun.of(controllers), told, _attention(model), standing(controllers))


def _attention(model: nn.Module) -> tuple[dict, ...]:
    """What each attention was asked to run in, what it ran in last, and why."""
    found = ((name, value) for name, module in model.named_modules() for value in vars(module).values())
    return tuple(
        {"name": plain_name(model, name), "asked": softmax.asked, "ran": softmax.ran, "why": softmax.why}
        for name, softmax in found
        if isinstance(softmax, Softmax)
    )


def _records(model: nn.Module) -> list[tuple[str, Record]]:
    """(name, record) of every part that fe.convert was called on."""
    # Its own attribute: peft's and torch.compile's shells pass on what the model below them has.
    found = ((name, vars(module).get(RECORD)) for name, module in model.named_modules())
    return [(plain_name(model, name), record) for name, record in found if isinstance(record, Record)]


def _why_left(name: str, records: list[tuple[str, Record]]) -> str:
    for root, record in records:
        if not root or f"{name}.".startswith(f"{root}."):
            return record.why_left(name.removeprefix(root).removeprefix("."))
    return "not converted: call fe.convert"


def _row(name: str, module: nn.Module, shape: tuple[int, ...]) -> dict:
    """The row of a layer that is not converted; of a converted one `_ran` replaces most of it."""
    row = {"name": name, "kind": type(module).__name__, "shape": list(shape), "recipe": "none", "backend": "torch"}
    row |= {"emulated": False, "reason": "", "fused": "", "outliers": "", "ran": True, "rows": None, "fp8_share": 0.0}
    row |= {"experts": None, "kept_bytes": 0, "kept_why": "", "gather": "", "divided": ""}
    return row | {role: {"format": "none", "cast": "none"} for role in (*ROLES, OUTPUT)}


def _ran(weight: torch.Tensor, numerics: Numerics, table: dict[tuple[int, str], dict]) -> dict:
    """What a converted layer has run.  table: the slots of its scaling state."""
    recipe, state = numerics.recipe, numerics.state
    slots = {role: table[numerics.layer, role] for role in ROLES}
    for role in ROLES:
        cost = None if state.controller is None else state.controller.cost(numerics, role)
        slots[role]["cost_millinats"] = None if cost is None else 1e3 * cost
    kept = numerics.weight.kept.values()
    dequantised = {why: count for why, count in numerics.ready.items() if why != TAKEN}
    slots["input"] |= {"ready": numerics.ready.get(TAKEN, 0), "dequantised": dequantised}
    cast = any(slots[role]["calls"] > 0 or slots[role]["elements"] > 0 for role in ("input", "grad_output"))
    ran = cast or (recipe.is_fp8 and not recipe.input.is_fp8 and numerics.ran is not None)  # the forward in 16 bits
    device = state.device  # a weight that Accelerate keeps elsewhere is here while it is multiplied by
    backend = "torch"
    if recipe.is_fp8:
        # A compiled graph leaves no trace in Python; its matmuls choose by the same rule when they run.
        backend = (numerics.ran or matmul.choose(device, recipe.by_block)) if ran else "none"
    told = [f"{count} inputs in FP8 were dequantised: {why}" for why, count in dequantised.items()]
    return {
        "recipe": recipe.name,
        "backend": backend,
        "emulated": ran and recipe.is_fp8 and matmul.why_emulated(device, backend) is not None,
        "reason": "; ".join(filter(None, (_not_sampled(numerics, ran), _why(numerics, ran, backend), *told))),
        "ran": ran or not recipe.is_fp8,
        "fp8_share": recipe.fp8_share if ran else 0.0,
        "kept_bytes": sum(made.data.nbytes for made, _ in kept),
        "kept_why": numerics.weight.why,
        **slots,
        OUTPUT: _output(numerics, weight.dtype, table),
    }


def _read_again(weight: torch.Tensor, numerics: Numerics, slot: dict) -> bool:
    """Whether a layer's kept copy was read again in this step, in which its weight then was not cast or measured."""
    real = type(weight) in (nn.Parameter, torch.Tensor) and not weight.is_meta
    return bool(numerics.weight.kept) and not slot["amax"] and numerics.feature is None and real


@torch.no_grad()
def _enter_amaxes(again: list[tuple[dict, torch.Tensor]]) -> None:
    """Give slots the largest finite magnitude of their weights; a device is waited for once for all of a dtype."""
    for kind in {(weight.device, weight.dtype) for _, weight in again}:
        here = [(slot, weight) for slot, weight in again if (weight.device, weight.dtype) == kind]
        largest = torch.stack(foreach_norm([weight for _, weight in here], math.inf)).tolist()
        for (slot, weight), amax in zip(here, largest, strict=True):
            slot["amax"] = amax if math.isfinite(amax) else float(weight.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _output(numerics: Numerics, dtype: torch.dtype, table: dict[tuple[int, str], dict]) -> dict:
    """The slot of the layer's result: its format, its consumers, and why it is not stored in FP8."""
    layer, controller = numerics.layer, numerics.state.controller
    found = table.get((layer, OUTPUT), {})
    told, why = {"format": word(dtype), "cast": "none"}, ""
    if not found or numerics.recipe.stored is None:
        if controller is not None and numerics.consumers:
            why = controller.outputs.why(numerics)
    elif layer in numerics.state.outputs.known:
        told = {"cast": f"{found['cast']} (delayed)"}
    else:
        compiled = numerics.ran is None and table[layer, "input"]["calls"]
        why = "torch.compile: a graph stores 16 bits" if compiled else "no scale is predicted yet"
    consumers = [" ".join(filter(None, consumer)) for consumer in numerics.consumers]
    return found | told | {"consumers": consumers, "reason": why}


def _not_sampled(numerics: Numerics, ran: bool) -> str:
    """What `auto` has decided on, where a layer ran before any training step in eager code: a forward, or nothing."""
    controller = numerics.state.controller
    if not ran or controller is None or controller.step > 0:
        return ""
    # Step 0 may have begun in a forward without gradients: of an evaluation, unless a backward pass came.
    begun = controller.step == 0 and (numerics.state.backward_seen or not controller.tentative)
    return "" if begun else FROM_FORWARD if controller.choices or controller.log else NOT_SAMPLED


def _why(numerics: Numerics, ran: bool, backend: str) -> str:
    recipe, state = numerics.recipe, numerics.state
    if not recipe.is_fp8:
        decides = state.controller is not None and numerics.layer in state.controller.by_layer
        return DECIDED if decides else f"asked for {recipe.name}"
    if not ran:
        return BYPASSED if numerics.bypassed else NEVER_RAN
    if numerics.bypassed:
        return READ_IN_ONE_MODE
    if why := matmul.why_emulated(state.device, backend):
        return f"emulated: {why}"
    if numerics.sizes is None or numerics.kind is None:
        return ""
    return matmul.why_chosen(state.device, numerics.sizes, recipe.precision["forward"], numerics.kind, backend)


def _slots(state: ScalingState) -> dict[tuple[int, str], dict]:
    """(layer, role) -> its slot as `ScalingState.view(...).to_dict()` gives it, from one copy of all to the host."""
    if state.device.type == "meta":  # nothing has run: fresh tables
        state = ScalingState(state.layers)
    state.outputs.settle(state.counts_CS)
    s_S = state.live_2S[1].cpu().clone()
    stored_L = state.outputs.scale_L.cpu()  # under the scale that results were stored with, not the one predicted next
    s_S[RESULT] = torch.where(stored_L > 0, 1.0 / stored_L, 0.0)
    scale, amax = (1.0 / s_S).tolist(), state.live_2S[0].tolist()
    before, numerator = state.history_HS[:1].flatten().tolist(), state.rules_3S[0].tolist()
    counts, found = state.counts_CS.t().tolist(), {}
    for layer, (_, recipe) in enumerate(state.layers):
        for role in state.roles(layer):
            i, cast, margin = state.column(layer, role), state.cast(layer, role), recipe.margin
            if role == OUTPUT:
                margin = round(math.log2(cast.format.max / numerator[i])) if recipe.stored else 0
            latest = amax[i] if amax[i] >= 0 else (before[i] or None) if recipe.delayed else None
            last = scale[i] if math.isfinite(scale[i]) else None  # without gradients nothing is recorded
            found[layer, role] = numbers_of(cast, last, latest, dict(zip(COUNTERS, counts[i], strict=True)), margin)
    return found


def _totals(layers: list[Any], idle: set[str], gather: dict | None) -> Totals:
    """Sums over the layers, each of which gets its share of the FLOPs; idle: names of those that multiplied nothing."""
    chosen = [layer["experts"][0] if layer["experts"] else 1 for layer in layers]
    typical = statistics.median(
        [layer["rows"] / k for layer, k in zip(layers, chosen, strict=True) if layer["rows"]] or [1]
    )
    for layer, k in zip(layers, chosen, strict=True):
        rows = 0 if layer["name"] in idle else (layer["rows"] if layer["ran"] else None) or typical * k
        layer["flops_share"] = 2.0 * rows * math.prod(layer["shape"][-2:])
    flops = sum(layer["flops_share"] for layer in layers) or 1.0
    fp8 = sum(layer["flops_share"] * layer["fp8_share"] for layer in layers)
    for layer in layers:
        layer["flops_share"] /= flops
    converted = [layer for layer in layers if layer["recipe"] != "none"]
    every = [layer[role] for layer in converted for role in ROLES]
    slots = [slot for slot in every if slot.get("elements")]
    shares = [layer["fp8_share"] for layer in converted if layer["ran"]]
    elements = sum(slot["elements"] for slot in slots)
    sampled = sum(slot["sampled"] * slot["elements"] for slot in slots)
    return {
        "layers": len(layers),
        "converted": len(converted),
        "in_fp8": sum(share > 0 for share in shares),
        "in_fp8_in_part": sum(0 < share < 1 for share in shares),
        "in_16_bits": sum(share == 0 for share in shares),
        "left_alone": len(layers) - len(converted),
        "never_ran": sum(not layer["ran"] for layer in converted),
        "emulated": sum(layer["emulated"] for layer in converted),
        "fp8_flops_share": fp8 / flops,
        "elements": elements,
        "saturated": sum(slot["saturated"] * slot["elements"] for slot in slots) / max(elements, 1),
        "underflowed": sum(s["underflowed"] * s["sampled"] * s["elements"] for s in slots) / max(sampled, 1),
        "sampled": sampled / max(elements, 1),
        "nonfinite": sum(slot["nonfinite"] for slot in slots),
        "recasts": sum(slot["recasts"] for slot in slots),
        "cost_millinats": sum(slot.get("cost_millinats") or 0.0 for slot in every),
        "kept_weight_bytes": sum(layer["kept_bytes"] for layer in layers),
        "gather": gather,
    }
