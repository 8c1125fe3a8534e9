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

from fp8engine._torch import plain_name
from fp8engine.autograd import Numerics
from fp8engine.autograd.ready import TAKEN
from fp8engine.convert.record import RECORD, Record
from fp8engine.convert.select import experts_run, linear_layers, parameter_of, weight_of
from fp8engine.distributed.gathers import gathers, totals
from fp8engine.nn.fp8_attention import Softmax
from fp8engine.nn.linear import Float8Module
from fp8engine.numerics.formats import word
from fp8engine.ops import matmul
from fp8engine.ops.reference.operand import COUNTERS
from fp8engine.report.auto_run import AutoRun
from fp8engine.report.outliers import standing
from fp8engine.report.rows import Totals
from fp8engine.report.state import controllers_of, require_module
from fp8engine.report.table import Report
from fp8engine.scaling.slot_view import numbers_of
from fp8engine.scaling.table import OUTPUT, ROLES, ScalingState

NOT_SAMPLED = "auto has seen no training step (inference, or a model compiled whole): formats are those it begins with"
NEVER_RAN = "never ran: its forward was not called (its weight may be read directly)"
DECIDED = "16 bits, as auto has decided: its decisions say why"
BYPASSED = "never ran: its weight is read directly, its forward was not called"


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
    require_module(model, "inspect")
    records, run = _records(model), experts_run(model)
    tables, sharded = {}, gathers(model)
    layers: list[Any] = []
    for name, module, shape in linear_layers(model):
        name = plain_name(model, name)
        key = parameter_of(name, module)
        numerics = module.numerics_of(key) if isinstance(module, Float8Module) else None
        layer = _row(name, module, shape)
        if numerics is None:
            layer["reason"] = _why_left(name, records)
        else:
            if (slots := tables.get(id(numerics.state))) is None:
                slots = tables[id(numerics.state)] = _Slots(numerics.state)
            layer |= _ran(module, numerics, weight_of(module, key).dtype, slots)
            # A forward in 16 bits casts no input; the backward's casts count the same rows.
            layer["rows"] = max(
                layer["input"]["elements"] // max(shape[-1], 1), layer["grad_output"]["elements"] // max(shape[-2], 1)
            )
            if gathered := sharded.get((id(module), key)):
                layer["gather"] = f"high precision: {gathered.why}" if gathered.why else "FP8 codes"
        if len(shape) == 3 and (key != "weight" or id(module) in run):
            layer["experts"] = [run.get(id(module), shape[0]), shape[0]]
        layers.append(layer)
    sums = _totals(layers, totals(sharded))
    for layer in layers:
        if layer["experts"]:
            used, of = layer["experts"]
            of_model = f"{layer['flops_share']:.1%} of the model's linear FLOPs"
            layer["reason"] = "; ".join(filter(None, [layer["reason"], f"{used} of {of} a token, {of_model}"]))
    controllers = controllers_of(model)
    changes = sorted((c for controller in controllers for c in controller.log), key=lambda change: change.step)
    decisions = [line for change in changes for line in change.decisions()]
    alarms = sorted((a for controller in controllers for a in controller.history.alarms), key=lambda alarm: alarm.step)
    told = [alarm._asdict() for alarm in alarms]
    return Report(layers, sums, decisions, AutoRun.of(controllers), told, _attention(model), standing(controllers))


def _attention(model: nn.Module) -> tuple[dict, ...]:
    """What each attention was asked to run in, what it ran in last, and why."""
    found = ((name, getattr(module, "softmax", None)) for name, module in model.named_modules())
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
    nothing = {"format": "none", "cast": "none"}
    return {
        "name": name,
        "kind": type(module).__name__,
        "shape": list(shape),
        "recipe": "none",
        "backend": "torch",
        "emulated": False,
        "reason": "",
        "fused": "",
        "outliers": "",
        "ran": True,
        "rows": None,
        "fp8_share": 0.0,
        "experts": None,
        "kept_bytes": 0,
        "kept_why": "",
        "gather": "",
        "divided": "",
        **{role: dict(nothing) for role in (*ROLES, OUTPUT)},
    }


def _ran(module: nn.Module, numerics: Numerics, dtype: torch.dtype, tables: _Slots) -> dict:
    """What a converted layer has run.  dtype: of its weight, and so of its result where that is not FP8."""
    recipe = numerics.recipe
    slots = {role: tables.numbers(numerics.layer, role) for role in ROLES}
    for role in ROLES:
        cost = None if numerics.state.controller is None else numerics.state.controller.cost(numerics, role)
        slots[role]["cost_millinats"] = None if cost is None else 1e3 * cost
    slots["input"]["ready"] = numerics.ready.get(TAKEN, 0)
    dequantised = {why: count for why, count in numerics.ready.items() if why != TAKEN}
    slots["input"]["dequantised"] = dequantised
    cast = any(slots[role]["calls"] > 0 or slots[role]["elements"] > 0 for role in ("input", "grad_output"))
    ran = cast or (recipe.is_fp8 and not recipe.input.is_fp8 and numerics.ran is not None)  # the forward in 16 bits
    device = numerics.state.device  # a weight that Accelerate keeps elsewhere is here while it is multiplied by
    backend = "torch"
    if recipe.is_fp8:
        # A compiled graph leaves no trace in Python; its matmuls choose by the same rule when they run.
        backend = (numerics.ran or matmul.choose(device, numerics.recipe.by_block)) if ran else "none"
    told = [f"{count} inputs in FP8 were dequantised: {why}" for why, count in dequantised.items()]
    return {
        "recipe": recipe.name,
        "backend": backend,
        "emulated": ran and recipe.is_fp8 and matmul.emulated(device, backend),
        "reason": "; ".join(filter(None, (_not_sampled(numerics, ran), _why(numerics, ran, backend), *told))),
        "fused": f"fused: reads what {numerics.source} wrote" if numerics.source else "",
        "outliers": "smoothed" if numerics.smooth else "",
        "ran": ran or not recipe.is_fp8,
        "fp8_share": recipe.fp8_share if ran else 0.0,
        "kept_bytes": sum(made.data.nbytes for made, _ in numerics.weight.kept.values()),
        "kept_why": numerics.weight.why,
        "divided": "" if numerics.shard is None else numerics.shard.told(numerics),
        **slots,
        "output": _output(numerics, dtype, tables),
    }


def _output(numerics: Numerics, dtype: torch.dtype, tables: _Slots) -> dict:
    """The slot of the layer's result: its format, its consumers, and why it is not stored in FP8."""
    state, layer = numerics.state, numerics.layer
    consumers = [" ".join(filter(None, consumer)) for consumer in numerics.consumers]
    plain = {"format": word(dtype), "cast": "none", "consumers": consumers}
    if layer not in state.outputs.places:
        return plain | {"reason": _why_not_stored(numerics)}
    found = tables.numbers(layer, OUTPUT) | {"consumers": consumers}
    if numerics.recipe.stored is None:
        return found | plain | {"reason": _why_not_stored(numerics)}
    if layer not in state.outputs.known:
        compiled = numerics.ran is None and tables.numbers(layer, "input")["calls"]
        why = "no scale is predicted yet" if not compiled else "torch.compile: a graph stores 16 bits"
        return found | plain | {"reason": why}
    return found | {"cast": f"{found['cast']} (delayed)", "reason": ""}


def _why_not_stored(numerics: Numerics) -> str:
    controller = numerics.state.controller
    return "" if controller is None or not numerics.consumers else controller.outputs.why(numerics)


def _not_sampled(numerics: Numerics, ran: bool) -> str:
    """That `auto` has decided nothing, where a layer ran and no training step in eager code has begun."""
    controller = numerics.state.controller
    if not ran or controller is None:
        return ""
    # Step 0 may have begun in a forward without gradients: of an evaluation, unless a backward pass came.
    begun = controller.step == 0 and (numerics.state.backward_seen or not controller.tentative)
    return "" if begun or controller.step > 0 else NOT_SAMPLED


def _why(numerics: Numerics, ran: bool, backend: str) -> str:
    if not numerics.recipe.is_fp8:
        controller = numerics.state.controller
        decides = controller is not None and numerics.layer in controller.by_layer
        return DECIDED if decides else f"asked for {numerics.recipe.name}"
    if not ran:
        return BYPASSED if numerics.bypassed else NEVER_RAN
    if why := matmul.why_emulated(numerics.state.device, backend):
        return f"emulated: {why}"
    recipe = numerics.recipe
    if numerics.sizes is None or numerics.kind is None:
        return ""
    return matmul.why_chosen(numerics.state.device, numerics.sizes, recipe.precision["forward"], numerics.kind)


class _Slots:
    """All slots of a scaling state as `ScalingState.view(...).to_dict()` gives one, from one copy to the host."""

    def __init__(self, state: ScalingState):
        if state.device.type == "meta":  # nothing has run: fresh tables
            state = ScalingState(state.layers)
        self.state = state
        state.outputs.settle(state.counts_CS)
        live_2S, rules_3S = state.live_2S.cpu(), state.rules_3S.cpu()
        s_S = live_2S[1].clone()
        if outputs := len(state.outputs):  # under the scale that results were stored with, not the one predicted next
            stored_O = state.outputs.scale_O.cpu()
            s_S[-outputs:] = torch.where(stored_O > 0, 1.0 / stored_O, 0.0)
        self.scale = torch.where(s_S > 0, 1.0 / s_S, 1.0).tolist()
        self.amax, self.numerator = live_2S[0].tolist(), rules_3S[0].tolist()
        self.before = state.history_HS[0].tolist() if len(state.history_HS) else []
        self.counts = state.counts_CS.t().tolist()

    def numbers(self, layer: int, role: str) -> dict:
        """One slot, in types that JSON knows."""
        recipe, index, cast = self.state.layers[layer][1], self.state.column(layer, role), self.state.cast(layer, role)
        amax, margin = self.amax[index], recipe.margin
        if amax < 0:
            amax = self.before[index] if recipe.delayed else 0.0
        if role == OUTPUT:
            margin = round(math.log2(cast.format.max / self.numerator[index])) if recipe.stored else 0
        counted: dict[str, int] = dict(zip(COUNTERS, self.counts[index], strict=True))
        return numbers_of(cast, self.scale[index], amax, counted, margin)


def _totals(layers: list[Any], gather: dict | None) -> Totals:
    chosen = lambda layer: layer["experts"][0] if layer["experts"] else 1  # noqa: E731 - two uses, one line each
    seen = [layer["rows"] / chosen(layer) for layer in layers if layer["rows"]]
    typical = statistics.median(seen) if seen else 1
    flops = fp8 = 0.0
    for layer in layers:
        rows = (layer["rows"] if layer["ran"] else None) or typical * chosen(layer)
        layer["flops_share"] = 2.0 * rows * math.prod(layer["shape"][-2:])
        flops += layer["flops_share"]
        fp8 += layer["flops_share"] * layer["fp8_share"]
    for layer in layers:
        layer["flops_share"] /= flops or 1.0
    converted = [layer for layer in layers if layer["recipe"] != "none"]
    slots = [layer[role] for layer in converted for role in ROLES if layer[role].get("elements")]
    elements = sum(slot["elements"] for slot in slots)
    shares = [layer["fp8_share"] for layer in converted if layer["ran"]]
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
        "fp8_flops_share": fp8 / flops if flops else 0.0,
        "elements": elements,
        "saturated": sum(slot["saturated"] * slot["elements"] for slot in slots) / max(elements, 1),
        "underflowed": sum(s["underflowed"] * s["sampled"] * s["elements"] for s in slots) / max(sampled, 1),
        "sampled": sampled / max(elements, 1),
        "nonfinite": sum(slot["nonfinite"] for slot in slots),
        "recasts": sum(slot["recasts"] for slot in slots),
        "cost_millinats": sum(layer[role].get("cost_millinats") or 0.0 for layer in converted for role in ROLES),
        "kept_weight_bytes": sum(layer["kept_bytes"] for layer in layers),
        "gather": gather,
    }
