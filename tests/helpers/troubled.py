"""Training with planted trouble, and how well a slot is cast in it: under a recipe, and under the best choice there is.

One layer y = x W^T of 256 x 64 in a real training: loss = sum(y * dy) / 2 with a planted x and dy, SGD on W.  What is
measured is the tensor against its real cast under the layer's recipe of that step, once for each matmul that reads it
(along rows and along columns); a matmul in 16 bits counts as BF16's cast.  SQNR over the part that matters, `part`:
ordinary channels, or each row by itself and then the median, since a sum would only see the largest.

The best possible choice: one format and one granularity for the slot, of {E4M3, E5M2} x {tensor, row, block}, whose
worse matmul is best, among those that flush no more than max_flushed; where all flush more, that matmul in 16 bits.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from support import converted, dequantised
from torch import nn

import fp8engine as fe
from fp8engine.numerics.recipe import Cast, Recipe, auto
from fp8engine.scaling.choice import GRANULARITIES, casts, reading

M, K, N = 128, 256, 64
FIXED = ("current", "delayed", "rowwise", "blockwise")
MOST_FLUSHED = auto().max_flushed
SIXTEEN = 40.0  # dB that no FP8 cast reaches
Part = Callable[[torch.Tensor], torch.Tensor]  # what matters of a tensor


def everything(x: torch.Tensor) -> torch.Tensor:
    return x


def db(x: torch.Tensor, back: torch.Tensor) -> float:
    """Median over rows of signal over noise, in dB; rows of zeros left out."""
    signal, noise = x.square().sum(1), (x - back).square().sum(1)
    some = signal > 0
    ratio = (signal[some] / noise[some].clamp(min=1e-300)).clamp(max=1e10)
    return 10 * math.log10(float(ratio.median()))


def of_cast(x: torch.Tensor, cast: Cast, part: Part) -> tuple[float, float]:
    """(dB of what matters of x under its real cast, share of all of x flushed to zero)."""
    back = torch.from_numpy(dequantised(x, cast))
    wide = x.double()
    flushed = float(((back == 0) & (wide != 0)).sum() / (wide != 0).sum())
    return db(part(wide), part(back)), flushed


MATMULS = {"input": ("forward", "wgrad"), "grad_output": ("dgrad", "wgrad")}


def cast_of(recipe: Recipe, role: str, matmul: str) -> Cast:
    """What a matmul reads of a slot."""
    first, second = recipe.operands(matmul)
    return second if (role, matmul) == ("input", "wgrad") else first


def of_recipe(x: torch.Tensor, recipe: Recipe, role: str, part: Part) -> dict[str, float]:
    """dB by matmul."""
    return {matmul: of_cast(x, cast_of(recipe, role, matmul), part)[0] for matmul in MATMULS[role]}


def best(x: torch.Tensor, role: str, part: Part) -> dict[str, float]:
    """dB by matmul of the best possible choice."""
    tried = []
    for granularity in GRANULARITIES:
        for format in (fe.E4M3, fe.E5M2):
            both = casts(role, granularity, format)
            tried.append({m: of_cast(x, both[min(reading(role, m), len(both) - 1)], part) for m in MATMULS[role]})
    sixteen = of_cast(x, Cast(fe.BF16), part)[0]
    never = {m for m in MATMULS[role] if all(each[m][1] > MOST_FLUSHED for each in tried)}
    found = [
        {m: sixteen if m in never else value for m, (value, _) in each.items()}
        for each in tried
        if all(m in never or flushed <= MOST_FLUSHED for m, (_, flushed) in each.items())
    ]
    return max(found, key=lambda each: min(each.values()))


class Scene:
    """A layer in training.  tensors(step) gives its x and dy.  role, part: what is measured."""

    def __init__(self, tensors: Callable[[int], tuple[torch.Tensor, torch.Tensor]], role: str, part: Part = everything):
        self.tensors, self.role, self.part = tensors, role, part

    def train(self, recipe: str | Recipe, steps: int, before: Any = None) -> tuple[nn.Module, list[dict[str, float]]]:
        """(the model, dB by matmul at every step).  before(model, step): called before each."""
        torch.manual_seed(0)
        model = converted(nn.Sequential(nn.Linear(K, N, bias=False)), recipe)
        found = []
        for step in range(steps):
            if before is not None:
                before(model, step)
            x, dy = self.tensors(step)
            y = model(x.requires_grad_())
            used = model[0].numerics.recipe  # of this step
            y.backward(dy)
            with torch.no_grad():
                weight = model[0].weight
                weight.sub_(nn.functional.normalize(weight.grad.flatten(), dim=0).view_as(weight), alpha=0.01)
                weight.grad = None
            seen = x.detach() if self.role == "input" else dy
            found.append(of_recipe(seen, used, self.role, self.part))
        return model, found

    def best(self, step: int) -> dict[str, float]:
        """Of the tensor at a step."""
        x, dy = self.tensors(step)
        return best(x if self.role == "input" else dy, self.role, self.part)


def short_of(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> list[float]:
    """At each step, by how many dB the worse of the two matmuls falls short of the worse of the best, or of its own."""
    return [
        max([min(want.values()) - min(got.values())] + [want[m] - got[m] for m in want if want[m] > SIXTEEN])
        for got, want in zip(found, wanted, strict=True)
    ]


def typical(values: list[float]) -> float:
    """Median over steps."""
    return statistics.median(values)
