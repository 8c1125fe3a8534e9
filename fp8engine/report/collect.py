"""From a model to the rows of its report: what each linear layer really ran, read from its counters and its record.

A layer's weight in the FP8 share is its matmul FLOPs: rows seen x N x K, times the share of its three matmuls in FP8.
Rows seen are counted where the input is cast; a layer left alone counts none, and is taken to have seen as many as
the median converted one.  Of experts in one 3-D parameter a token passes as many as its router chooses, and each
passage is a row.
"""

from __future__ import annotations

import math
import statistics

import torch
from torch import nn

from fp8engine._torch import plain_name
from fp8engine.autograd import Numerics
from fp8engine.autograd.ready import TAKEN
from fp8engine.convert.select import experts_run, linear_layers, parameter_of, weight_of
from fp8engine.convert.swap import RECORD, Record
from fp8engine.nn.linear import Float8Module
from fp8engine.ops import matmul
from fp8engine.report.slots import Slots
from fp8engine.report.state import controllers_of
from fp8engine.report.table import Report
from fp8engine.scaling.table import OUTPUT, ROLES

NOT_LOOKED = "auto has seen no training step (inference, or a model compiled whole): formats are those it begins with"
NEVER_RAN = "never ran: its forward was not called (its weight may be read directly)"
BYPASSED = "never ran: its weight is read directly, its forward was not called"


def inspect(model: nn.Module) -> Report:
    """What every linear layer of the model has run so far; reading it waits for the device.

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
    records, run = _records(model), experts_run(model)
    layers, tables = [], {}
    for name, module, shape in linear_layers(model):
        name = plain_name(model, name)
        key = parameter_of(name, module)
        numerics = module.numerics_of(key) if isinstance(module, Float8Module) else None
        if numerics is not None:
            if (slots := tables.get(id(numerics.state))) is None:
                slots = tables[id(numerics.state)] = Slots(numerics.state)
            layers.append(_converted(name, module, numerics, shape, slots))
        else:
            layers.append(_left(name, module, shape, _why_left(name, records)))
        if key != "weight" and len(shape) == 3:
            layers[-1]["experts"] = [run.get(id(module), shape[0]), shape[0]]
    totals = _totals(layers)
    for layer in layers:
        if layer["experts"]:
            used, of = layer["experts"]
            of_model = f"{layer['flops_share']:.1%} of the model's linear FLOPs"
            layer["reason"] = "; ".join(filter(None, [layer["reason"], f"{used} of {of} a token, {of_model}"]))
    controllers = controllers_of(model)
    changes = sorted((c for controller in controllers for c in controller.log), key=lambda change: change.step)
    decisions = [line for change in changes for line in change.decisions()]
    alarms = sorted((a for controller in controllers for a in controller.history.alarms), key=lambda alarm: alarm.step)
    return Report(layers, totals, decisions, controllers, [alarm._asdict() for alarm in alarms])


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


def _converted(name: str, module: nn.Module, numerics: Numerics, shape: tuple[int, ...], tables: Slots) -> dict:
    recipe = numerics.recipe
    slots = {role: tables.numbers(numerics.layer, role) for role in ROLES}
    slots["input"]["ready"] = numerics.ready.get(TAKEN, 0)
    slots["input"]["dequantised"] = {why: count for why, count in numerics.ready.items() if why != TAKEN}
    rows = slots["input"]["elements"] // max(shape[-1], 1)
    ran = rows > 0 or (slots["input"]["calls"] > 0)
    weight = weight_of(module, parameter_of(name, module))
    where = numerics.state.device  # a weight that Accelerate keeps elsewhere is here while it is multiplied by
    backend = "torch"
    if recipe.is_fp8:
        # A compiled graph leaves no trace in Python; its matmuls choose by the same rule when they run.
        backend = numerics.ran or matmul.choose(where, numerics.plan.by_block)
        if not ran:
            backend = "none"
    return {
        "name": name,
        "kind": type(module).__name__,
        "shape": list(shape),
        "recipe": recipe.name,
        "backend": backend,
        "emulated": ran and recipe.is_fp8 and matmul.emulated(where, backend),
        "reason": "; ".join(
            filter(None, (_not_looked(numerics, ran), _why(numerics, ran, backend), *_dequantised(slots["input"])))
        ),
        "fused": _fused(module),
        "ran": ran or not recipe.is_fp8,
        "rows": rows,
        "fp8_share": recipe.fp8_share if ran else 0.0,
        "experts": None,
        "kept_bytes": sum(made.data.nbytes for made, _ in numerics.weight.kept.values()),
        "kept_why": numerics.weight.why,
        **slots,
        "output": _output(numerics, weight, tables),
    }


def _dequantised(slot: dict) -> list[str]:
    """Inputs that came in FP8 and were not read so."""
    return [f"{count} inputs in FP8 were dequantised: {why}" for why, count in slot["dequantised"].items()]


def _output(numerics: Numerics, weight: torch.Tensor, tables: Slots) -> dict:
    """What the layer's result is stored in, who reads it, and why it is not FP8."""
    state, layer = numerics.state, numerics.layer
    readers = [" ".join(filter(None, consumer)) for consumer in numerics.consumers]
    plain = {"format": str(weight.dtype).removeprefix("torch."), "cast": "none", "consumers": readers}
    if layer not in state.outputs.places:
        return plain | {"reason": _why_plain(numerics)}
    found = tables.numbers(layer, OUTPUT) | {"consumers": readers}
    if numerics.recipe.stored is None:
        return found | plain | {"reason": _why_plain(numerics)}
    if layer not in state.outputs.known:
        compiled = numerics.ran is None and tables.numbers(layer, "input")["calls"]
        why = "no scale is predicted yet" if not compiled else "torch.compile: a graph stores 16 bits"
        return found | plain | {"reason": why}
    return found | {"cast": f"{found['cast']} (delayed)", "reason": ""}


def _why_plain(numerics: Numerics) -> str:
    controller = numerics.state.controller
    if not numerics.consumers or controller is None:
        return ""
    return controller.outputs.why(numerics)


def _not_looked(numerics: Numerics, ran: bool) -> str:
    """That `auto` has decided nothing, where a layer ran and no training step in eager code has begun."""
    controller = numerics.state.controller
    if not ran or controller is None:
        return ""
    # Step 0 may have begun in a forward without gradients: of an evaluation, unless a backward pass came.
    trained = controller.step > 0 or (
        controller.step == 0 and (numerics.state.backward_seen or not controller.tentative)
    )
    return "" if trained else NOT_LOOKED


def _why(numerics: Numerics, ran: bool, backend: str) -> str:
    if not numerics.recipe.is_fp8:
        return f"asked for {numerics.recipe.name}"
    if not ran:
        return BYPASSED if numerics.bypassed else NEVER_RAN
    if why := matmul.why_emulated(numerics.state.device, backend):
        return f"emulated: {why}"
    return ""


def _fused(module: nn.Module) -> str:
    """The group that the layer runs fused in, or why it is in none; "" where fuse=True was not asked."""
    group, why = getattr(module, "fused", None), getattr(module, "not_fused_because", "")
    return str(group) if group is not None else f"not fused: {why}" if why else ""


def _left(name: str, module: nn.Module, shape: tuple[int, ...], reason: str) -> dict:
    nothing = {"format": "none", "cast": "none"}
    return {
        "name": name,
        "kind": type(module).__name__,
        "shape": list(shape),
        "recipe": "none",
        "backend": "torch",
        "emulated": False,
        "reason": reason,
        "fused": "",
        "ran": True,
        "rows": None,
        "fp8_share": 0.0,
        "experts": None,
        "kept_bytes": 0,
        "kept_why": "",
        **{role: dict(nothing) for role in (*ROLES, "output")},
    }


def _totals(layers: list[dict]) -> dict:
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
    sampled = sum(slot["sampled"] * slot["elements"] for slot in slots)
    return {
        "layers": len(layers),
        "converted": len(converted),
        "left_alone": len(layers) - len(converted),
        "never_ran": sum(not layer["ran"] for layer in converted),
        "emulated": sum(layer["emulated"] for layer in converted),
        "fp8_flops_share": fp8 / flops if flops else 0.0,
        "saturated": sum(slot["saturated"] * slot["elements"] for slot in slots) / max(elements, 1),
        "underflowed": sum(s["underflowed"] * s["sampled"] * s["elements"] for s in slots) / max(sampled, 1),
        "sampled": sampled / max(elements, 1),
        "nonfinite": sum(slot["nonfinite"] for slot in slots),
        "recasts": sum(slot["recasts"] for slot in slots),
        "kept_weight_bytes": sum(layer["kept_bytes"] for layer in layers),
    }
