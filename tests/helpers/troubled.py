"""Training with planted trouble, and what reaches the results of the matmuls: under a recipe, and under the best cast.

One layer y = x W^T of 256 x 64 in a real training step, y.backward(dy), with a planted x, dy and W.  A matmul's operand
is judged by itself: the result with this operand under its real cast, beside the result without any cast, both in
float64.  The operand's own rows make rows (or columns) of the result, whose SQNR is taken one by one; an operand is
worth the least of the whole result's, the median row's and the 10th percentile's.  What is in 16 bits is cast to BF16.

The best single cast of an operand: of {E4M3, E5M2} x {tensor, row, block} with exact scales, the one worth most.
This computes nothing as `fp8engine/scaling/reads.py` does: it casts whole tensors and multiplies.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from matmul_truth import product
from support import converted, dequantised
from torch import nn

from fp8engine.numerics.recipe import MOST_DB, Cast, Recipe
from fp8engine.scaling.choice import OPERANDS, casts, reading
from fp8engine.scaling.reads import OPTIONS

M, K, N = 128, 256, 64
FIXED = ("current", "delayed", "rowwise", "blockwise")
READS = [(role, matmul) for matmul, roles in OPERANDS.items() for role in roles]
Read = tuple[str, str]  # (role, matmul)
Tensors = Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # step -> x [M, K], dy [M, N]


def result(read: Read, operands: dict[str, torch.Tensor]) -> torch.Tensor:
    """The matmul's result in float64, with the rows of the read operand as its rows."""
    role, matmul = read
    y = product(matmul, *(operands[each].double() for each in OPERANDS[matmul]))
    return y.t() if OPERANDS[matmul].index(role) else y


def worth(read: Read, operands: dict[str, torch.Tensor], cast: Cast) -> float:
    """In dB, of an operand under its real cast."""
    role = read[0]
    y = result(read, operands)
    noise = y - result(read, operands | {role: torch.from_numpy(dequantised(operands[role], cast))})
    signal_R, noise_R = y.square().sum(1), noise.square().sum(1)
    some = signal_R > 0
    ratio_R = (signal_R[some] / noise_R[some].clamp(min=1e-300)).clamp(max=1e10)
    whole = signal_R.sum() / noise_R.sum().clamp(min=1e-300)
    return 10 * math.log10(
        min(float(whole), float(ratio_R.median()), float(ratio_R.quantile(0.1, interpolation="lower")))
    )


def cast_of(recipe: Recipe, read: Read) -> Cast:
    """What a matmul reads of an operand, lengthwise."""
    role, matmul = read
    return recipe.operands(matmul)[OPERANDS[matmul].index(role)]


def best(read: Read, operands: dict[str, torch.Tensor]) -> float:
    """In dB, of the best single cast of an operand."""
    role, matmul = read
    both = [casts(role, granularity, format) for granularity, format in OPTIONS]
    return max(worth(read, operands, each[min(reading(role, matmul), len(each) - 1)]) for each in both)


class Scene:
    """A layer in training.  weight: changes the initial weight in place.  reads: those that are judged."""

    def __init__(self, tensors: Tensors, weight: Any = None, reads: list[Read] = READS):
        self.tensors, self.weight, self.reads = tensors, weight, reads

    def model(self, recipe: str | Recipe) -> Any:
        torch.manual_seed(0)
        layer = nn.Linear(K, N, bias=False)
        if self.weight is not None:
            with torch.no_grad():
                self.weight(layer.weight)
        return converted(nn.Sequential(layer), recipe)

    def operands(self, step: int) -> dict[str, torch.Tensor]:
        """What the layer's matmuls read at a step; its weight stays as it is."""
        x, dy = self.tensors(step)
        return {"input": x, "weight": self.model("bf16")[0].weight.detach(), "grad_output": dy}

    def train(self, recipe: str | Recipe, steps: int, before: Any = None) -> tuple[nn.Module, list[dict[Read, float]]]:
        """(the model, dB by read at every step).  before(model, step): called before each."""
        model, found = self.model(recipe), []
        for step in range(steps):
            if before is not None:
                before(model, step)
            operands = self.operands(step)
            y = model(operands["input"].clone().requires_grad_())
            used = model[0].numerics.recipe  # of this step
            y.backward(operands["grad_output"])
            model.zero_grad()
            found.append({read: worth(read, operands, cast_of(used, read)) for read in self.reads})
        return model, found

    def best(self, step: int) -> dict[Read, float]:
        """Of the best single cast of each read at a step."""
        operands = self.operands(step)
        return {read: best(read, operands) for read in self.reads}


def short_of(found: list[dict[Read, float]], wanted: list[dict[Read, float]]) -> list[float]:
    """At each step, by how many dB the worst read falls short of its best single cast; 0 where none does.

    More than MOST_DB is luck: where a row of the result is one product, a scale may make that one exact.
    """
    short = [[min(want[read], MOST_DB) - got[read] for read in want] for got, want in zip(found, wanted, strict=True)]
    return [max(0.0, *each) for each in short]


def typical(values: list[float]) -> float:
    """Median over steps."""
    return statistics.median(values)
