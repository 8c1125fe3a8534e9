"""Predicted time of linear layers, in BF16 and under each recipe: of a model's, or of one of M x N x K.

    us        forward and backward of a layer in a training step, casts to FP8 included (ops/cost.py)
    speedup   the BF16 time over it

No card is needed and nothing is measured: every number is predicted.  Layers of the same shape under names that differ
only in numbers share a row.  Each casts its own input here: q, k and v, which share one, are a little faster.  A recipe
converts the layers that `fe.convert` would; the others stay in BF16.  "auto" is predicted as it begins, which is as
"current"; the model's other tensors are in BF16 under "fp16" and "fp32" too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fp8engine.bench.cases import Shape
from fp8engine.convert.swap import plan
from fp8engine.errors import ConversionError
from fp8engine.numerics.cards import Card
from fp8engine.numerics.recipe import RECIPES, resolve
from fp8engine.ops.cost import LayerTime, Setting, layer_time

EXPERTS = "experts: how many rows each gets is not known before it runs, and nothing is predicted"
ORDER = sorted(RECIPES, key=lambda name: name == "auto")  # last, because it begins as another
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)|(?<=\.)\d+$|^\d+$")


def of_shape(shape: Shape, card: Card) -> dict[str, Any]:
    """The prediction for one layer: M tokens, N outputs, K inputs.

    >>> from fp8engine.numerics.cards import H200
    >>> found = of_shape(Shape(8192, 14336, 4096), H200)
    >>> found["predicted"], 1.3 < found["rows"][0]["recipes"]["current"]["speedup"] < 1.7
    (True, True)
    """
    return _result(card, shape.m, [_row("linear", 1, shape, "", card, Setting())])


def of_model(model: nn.Module, tokens: int, card: Card) -> dict[str, Any]:
    """The prediction for the linear layers of a model, which may be on the meta device.  tokens: of a step.

    Raises ConversionError as `fe.convert` does, and where there are none.
    """
    groups: dict[tuple[str, tuple[int, ...], str, bool], int] = {}
    for decision in plan(model, "current"):
        reason = "" if decision.recipe is not None else decision.reason
        if len(decision.shape) != 2:
            reason = EXPERTS
        bias = getattr(decision.module, "bias", None) is not None
        key = NUMBER.sub("*", decision.name), tuple(decision.shape), reason, bias
        groups[key] = groups.get(key, 0) + 1
    rows = []
    for (name, shape, reason, bias), count in groups.items():
        if reason == EXPERTS:
            rows.append({"name": name, "count": count, "shape": list(shape), "why": reason, "recipes": {}})
        else:
            rows.append(_row(name, count, Shape(tokens, *shape), reason, card, Setting(bias)))
    if not rows:
        raise ConversionError(f"{type(model).__name__} has no linear layers: nothing of it is predicted")
    return _result(card, tokens, rows)


def _row(name: str, count: int, shape: Shape, why: str, card: Card, setting: Setting) -> dict[str, Any]:
    """A row; why: the reason why the layer stays in BF16, or ""."""
    times = {recipe: layer_time(resolve(recipe), *shape, card, setting) for recipe in ORDER}
    found = {"name": name, "count": count, "shape": list(shape), "why": why, "bf16_us": 1e6 * times["bf16"].fp8}
    return {**found, "recipes": {} if why else {recipe: _numbers(time) for recipe, time in times.items()}}


def _time(row: Mapping[str, Any], recipe: str) -> float:
    return row["recipes"][recipe]["us"] if row["recipes"] else row["bf16_us"]


def _numbers(time: LayerTime) -> dict[str, Any]:
    matmuls = {name: {"us": 1e6 * one.seconds, "limit": one.limit} for name, one in time.matmuls.items()}
    return {"us": 1e6 * time.fp8, "speedup": time.speedup, "casts_us": 1e6 * time.casts, "matmuls": matmuls}


def _result(card: Card, tokens: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    timed = [row for row in rows if "bf16_us" in row]
    bf16 = sum(row["count"] * row["bf16_us"] for row in timed)
    sums = {recipe: sum(row["count"] * _time(row, recipe) for row in timed) for recipe in ORDER}
    total = {name: {"us": us, "speedup": bf16 / us if us else 1.0} for name, us in sums.items()}
    about = {"predicted": True, "card": card.name, "tokens": tokens}
    return {**about, "rows": list(rows), "total": {"bf16_us": bf16, "recipes": total}}
