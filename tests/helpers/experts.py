"""What the tests of GroupedLinear share: E Linears in NumPy, and a layer run once.

A cast per tensor sees all the experts at once; any other begins anew at each expert's first row.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from support import Products, dequantised, multiplied, turned

import fp8engine as fe
from fp8engine.nn.grouped import GroupedLinear
from fp8engine.numerics.recipe import Cast, Recipe

SIZES = [5, 0, 130, 9]


def cast_of_each(parts: list[torch.Tensor], cast: Cast) -> list[np.ndarray]:
    """Each expert's matrix under a cast, as float64."""
    if not isinstance(cast.granularity, fe.PerTensor):
        return [dequantised(part, cast) for part in parts]
    whole = dequantised(torch.cat(parts), cast)
    return np.split(whole, np.cumsum([len(part) for part in parts])[:-1])


def wanted(recipe: Recipe, layer: GroupedLinear, x: torch.Tensor, dy: torch.Tensor, sizes: list[int]) -> list[Products]:
    """Each expert's three matmuls from the cast operands, in float64."""
    w = layer.weight.mT if layer.turned else layer.weight
    of_rows = lambda t, cast: cast_of_each(list(t.split(sizes)), cast)  # noqa: E731 - four uses, one line each
    x_y, w_y = of_rows(x, recipe.input), cast_of_each(list(w), recipe.weight)
    dy_x = of_rows(dy, recipe.grad_output)
    w_x = cast_of_each(list(w), recipe.weight_for_dgrad or turned(recipe.weight))
    dy_w = of_rows(dy, recipe.grad_output_for_wgrad or turned(recipe.grad_output))
    x_w = of_rows(x, recipe.input_for_wgrad or turned(recipe.input))
    bias = [None] * len(sizes) if layer.bias is None else layer.bias
    return [
        multiplied((x_y[e], w_y[e].T), (dy_x[e], w_x[e]), (dy_w[e].T, x_w[e]), bias[e], rows)
        for e, rows in enumerate(dy.split(sizes))
    ]


class Ran(NamedTuple):
    """A layer after one forward and backward, and what it gave.  Any: gradients are there."""

    layer: GroupedLinear
    x: Any
    dy: torch.Tensor
    y: torch.Tensor
    dw: Any
    db: Any


def run(layer: GroupedLinear, sizes, dtype=torch.float32, x: torch.Tensor | None = None) -> Ran:
    """One forward and backward on random numbers."""
    _, n, k = layer.shape
    rows = int(sum(sizes))
    x = torch.randn(rows, k).to(dtype) if x is None else x
    dy = torch.randn(rows, n).to(dtype)
    x.requires_grad_()
    y = layer(x, sizes)
    y.backward(dy)
    return Ran(layer, x, dy, y, layer.weight.grad, None if layer.bias is None else layer.bias.grad)


def uneven(layer: GroupedLinear) -> GroupedLinear:
    """Its experts' weights of different magnitude, so that it matters who shares a scale with whom."""
    with torch.no_grad():
        powers = torch.exp2(-torch.arange(len(layer.weight)) * 1.5)
        layer.weight.mul_(powers[:, None, None])
    return layer


def linears(layer: GroupedLinear, ran: Ran, sizes: list[int]) -> dict[str, torch.Tensor]:
    """The same by E fe.Linears, each on its own rows."""
    _, n, k = layer.shape
    found: dict[str, list] = {"y": [], "dx": [], "dw": [], "db": []}
    for e, (x_e, dy_e) in enumerate(zip(ran.x.detach().split(sizes), ran.dy.split(sizes), strict=True)):
        one = fe.Linear(k, n, layer.bias is not None, recipe=layer.numerics.recipe, dtype=layer.weight.dtype)
        with torch.no_grad():
            one.weight.copy_(layer.weight[e])
            if layer.bias is not None:
                one.bias.copy_(layer.bias[e])
        x_e = x_e.clone().requires_grad_()
        y = one(x_e)
        y.backward(dy_e)
        results = (y.detach(), x_e.grad, one.weight.grad, one.bias.grad if layer.bias is not None else torch.zeros(n))
        for part, result in zip(found.values(), results, strict=True):
            part.append(result)
    return {name: torch.cat(part) if name in ("y", "dx") else torch.stack(part) for name, part in found.items()}
