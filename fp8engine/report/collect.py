"""From a model to the rows of its report: what each linear layer really ran, read from its counters and its record.

A layer's weight in the FP8 share is its matmul FLOPs: rows seen x N x K, times the share of its three matmuls in FP8.
Rows seen are counted where the input is cast; a layer left alone counts none, and is taken to have seen as many as
the median converted one.  Of experts in one 3-D parameter a row passes as many as its router chooses.
"""

from __future__ import annotations

import math
import statistics

from torch import nn

from fp8engine import ops
from fp8engine.controller import Controller
from fp8engine.convert import RECORD, Record
from fp8engine.functional import Numerics
from fp8engine.functional.ready import TAKEN
from fp8engine.modules.linear import Float8Module
from fp8engine.report.state import controllers_of, plain_name
from fp8engine.report.table import Report
from fp8engine.scaling import OUTPUT, ROLES
from fp8engine.select import experts_run, linear_layers, weight_of

NEVER_RAN = "never ran: its forward was not called (its weight may be read directly)"
REPLACED = "a new layer stands where fe.convert changed one: replace layers (resize_token_embeddings) before fe.convert"


def inspect(model: nn.Module) -> Report:
    """What every linear layer of the model has run so far; reading it waits for the device.

    >>> import torch, warnings
    >>> from fp8engine.convert import convert
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
    reasons, run = _reasons(model), experts_run(model)
    layers = []
    for name, module, shape in linear_layers(model):
        name = plain_name(model, name)
        if isinstance(module, Float8Module):
            layers.append(_converted(name, module, shape))
        else:
            layers.append(_left(name, module, shape, _why_left(name, reasons)))
            if len(shape) == 3:
                layers[-1]["experts"] = [run.get(id(module), shape[0]), shape[0]]
    totals = _totals(layers)
    for layer in layers:
        if layer["experts"]:
            used, of = layer["experts"]
            layer["reason"] += f"; {used} of {of} a token, {layer['flops_share']:.1%} of the model's linear FLOPs"
    controllers = controllers_of(model)
    changes = sorted((c for controller in controllers for c in controller.log), key=lambda change: change.step)
    return Report(layers, totals, [line for change in changes for line in change.decisions()], controllers)


def _reasons(model: nn.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        record = getattr(module, RECORD, None)
        if isinstance(record, Record):
            root = plain_name(model, name)
            known = {layer: REPLACED for state in record.states for layer, _ in state.layers} | record.reasons
            found |= {f"{root}.{layer}" if root else layer: why for layer, why in known.items()}
    return found


def _why_left(name: str, reasons: dict[str, str]) -> str:
    if not reasons:
        return "not converted: call fe.convert"
    before_peft = name.removesuffix(".base_layer")
    return reasons.get(name) or reasons.get(before_peft) or "not converted: added after fe.convert (an adapter?)"


def _converted(name: str, module: Float8Module, shape: tuple[int, ...]) -> dict:
    numerics = module.numerics
    state, recipe = numerics.state, numerics.recipe
    slots = {role: state.view(f"{name}.{role}", numerics.layer, role).to_dict() for role in ROLES}
    slots["input"]["ready"] = numerics.ready.get(TAKEN, 0)
    slots["input"]["dequantised"] = {why: count for why, count in numerics.ready.items() if why != TAKEN}
    rows = slots["input"]["elements"] // max(shape[-1], 1)
    ran = rows > 0 or (slots["input"]["calls"] > 0)
    where = weight_of(module).device
    backend = "torch"
    if recipe.is_fp8:
        # A compiled graph leaves no trace in Python; its matmuls choose by the same rule when they run.
        backend = numerics.ran or ops.choose(where, numerics.plan.by_block)
        if not ran:
            backend = "none"
    return {
        "name": name,
        "kind": type(module).__name__,
        "shape": list(shape),
        "recipe": recipe.name,
        "backend": backend,
        "emulated": ran and recipe.is_fp8 and ops.emulated(where, backend),
        "reason": "; ".join(filter(None, (_why(recipe, ran, where, backend), *_dequantised(slots["input"])))),
        "ran": ran or not recipe.is_fp8,
        "rows": rows,
        "fp8_share": recipe.fp8_share if ran else 0.0,
        "experts": None,
        "kept_bytes": sum(made.data.nbytes for made, _ in numerics.weight.kept.values()),
        "kept_why": numerics.weight.why,
        **slots,
        "output": _output(name, module),
    }


def _dequantised(slot: dict) -> list[str]:
    """Inputs that came in FP8 and were not read so."""
    return [f"{count} inputs in FP8 were dequantised: {why}" for why, count in slot["dequantised"].items()]


def _output(name: str, module: Float8Module) -> dict:
    """What the layer's result is stored in, who reads it, and why it is not FP8."""
    numerics = module.numerics
    state, layer = numerics.state, numerics.layer
    readers = [" ".join(filter(None, consumer)) for consumer in numerics.consumers]
    plain = {"format": str(weight_of(module).dtype).removeprefix("torch."), "cast": "none", "consumers": readers}
    if layer not in state.outputs.places:
        return plain | {"reason": _why_plain(numerics)}
    found = state.view(f"{name}.{OUTPUT}", layer, OUTPUT).to_dict() | {"consumers": readers}
    if numerics.recipe.stored is None:
        return found | plain | {"reason": _why_plain(numerics)}
    if layer not in state.outputs.known:
        compiled = numerics.ran is None and state.view("", layer, "input").calls
        why = "no scale is predicted yet" if not compiled else "torch.compile: a graph stores 16 bits"
        return found | plain | {"reason": why}
    return found | {"cast": f"{found['cast']} (delayed)", "reason": ""}


def _why_plain(numerics: Numerics) -> str:
    clock = getattr(numerics.state.clock, "__self__", None)
    if not (numerics.consumers and isinstance(clock, Controller)):
        return ""
    return clock.outputs.why(numerics)


def _why(recipe, ran: bool, where, backend: str) -> str:
    if not recipe.is_fp8:
        return f"asked for {recipe.name}"
    if not ran:
        return NEVER_RAN
    if why := ops.why_emulated(where, backend):
        return f"emulated: {why}"
    return ""


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
        "ran": True,
        "rows": None,
        "fp8_share": 0.0,
        "experts": None,
        "kept_bytes": 0,
        "kept_why": "",
        **{role: dict(nothing) for role in (*ROLES, "output")},
    }


def _totals(layers: list[dict]) -> dict:
    seen = [layer["rows"] for layer in layers if layer["rows"]]
    typical = statistics.median(seen) if seen else 1
    flops = fp8 = 0.0
    for layer in layers:
        rows = typical if layer["rows"] is None or not layer["ran"] else layer["rows"] or typical
        matrices = layer["experts"][0] if layer["experts"] else 1
        layer["flops_share"] = 2.0 * rows * matrices * math.prod(layer["shape"][-2:])
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
