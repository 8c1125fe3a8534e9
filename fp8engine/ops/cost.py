"""Predicted time of a linear layer's training step, in BF16 and under a recipe, on a Hopper card; nothing is measured.

    step    3 matmuls + other launches            a launch = START + bytes / (share of the card's bandwidth)

Launches are launches.py's, times of matmuls numerics/matmul_time.py's; a launch's share is what its machine code allows
(numerics/memory_time.py), OTHERS at most.  Which kernel multiplies is what ops/matmul.py chooses by the tuning
table alone: cuBLASLt, and for scales in blocks ours, by Gluon where it can and else by Triton.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fp8engine.numerics.cards import H100_SXM, Card
from fp8engine.numerics.cast import Cast, PerBlock
from fp8engine.numerics.formats import FP32
from fp8engine.numerics.matmul_time import START, Prediction, library, predict
from fp8engine.numerics.memory_time import share
from fp8engine.numerics.recipe import Recipe, high_precision
from fp8engine.ops import casts, launches, matmul, predicted, triton_backend
from fp8engine.ops.launches import Launch
from fp8engine.ops.reference import Epilogue, Operand

HOPPER = (9, 0)
OTHERS = 0.88  # most of the bandwidth that a launch other than a matmul reaches: torchao's casts, published, 85 to 94 %
FP32_ADDS = 128  # multiply-adds a clock of a Hopper multiprocessor without Tensor Cores, as torch multiplies FP32


class Setting(NamedTuple):
    """How a layer is trained.  bias: it has one.  microbatches: forwards and backwards between two optimizer steps."""

    bias: bool = False
    microbatches: int = 1


ALONE = Setting()


@dataclass(frozen=True)
class LayerTime:
    """Predicted seconds of one training step of a linear layer, or of one of its microbatches.

    bf16: in 16 bits.  matmuls: by name, forward, dgrad and wgrad.  casts: all other launches under the recipe.
    """

    bf16: float
    matmuls: dict[str, Prediction]
    casts: float

    @property
    def fp8(self) -> float:
        """Seconds under the recipe."""
        return self.casts + sum(one.seconds for one in self.matmuls.values())

    @property
    def speedup(self) -> float:
        """How much faster than in 16 bits."""
        return self.bf16 / self.fp8


def layer_time(recipe: Recipe, m: int, n: int, k: int, card: Card = H100_SXM, setting: Setting = ALONE) -> LayerTime:
    """Predicted time of a Linear's forward and backward.  M tokens, N outputs, K inputs.

    >>> from fp8engine.numerics.recipe import current, delayed
    >>> found = [layer_time(each(), 8192, 14336, 4096).speedup for each in (delayed, current, high_precision)]
    >>> found == sorted(found, reverse=True), found[-1]
    (True, 1.0)
    """
    shapes = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
    biased = {name: setting.bias and name == "forward" for name in shapes}
    matmuls = {name: matmul_time(recipe, name, shape, card, biased[name]) for name, shape in shapes.items()}
    ours = tuple(name for name, shape in shapes.items() if dispatched(recipe, name, shape, biased[name]) is not None)
    step = launches.Step(recipe, m, n, k, setting.bias, ours)
    first, later = (
        _seconds(launches.forward(step, copies) + launches.backward(step, copies), card)
        for copies in (False, launches.kept(recipe))
    )
    others = (first + (setting.microbatches - 1) * later) / setting.microbatches
    if recipe == (plain := high_precision()):
        return LayerTime(others + sum(one.seconds for one in matmuls.values()), matmuls, others)
    return LayerTime(layer_time(plain, m, n, k, card, setting).bf16, matmuls, others)


def speedup(recipe: Recipe, m: int, n: int, k: int, card: Card = H100_SXM, setting: Setting = ALONE) -> float:
    """How much faster than in 16 bits a Linear's forward and backward are predicted to be."""
    return layer_time(recipe, m, n, k, card, setting).speedup


def sums_of(recipe: Recipe, name: str) -> str | None:
    """What a matmul's main loop does with its sums, a key of CEILINGS; None where it is not in FP8.

    >>> from fp8engine.numerics.recipe import MATMULS, blockwise, rowwise_gw_hp
    >>> [sums_of(blockwise(), name) for name in MATMULS]
    ['block', 'block', 'block by block']
    >>> sums_of(rowwise_gw_hp(), "wgrad")
    """
    a, b = recipe.operands(name)
    if not a.is_fp8:
        return None
    blocks = [cast.granularity for cast in (a, b) if isinstance(cast.granularity, PerBlock)]
    if blocks:
        return "block" if any(min(block.rows, block.cols) > 1 for block in blocks) else "block by block"
    return "fast" if name in recipe.fast_accumulation else "promoted"


def matmul_time(recipe: Recipe, name: str, shape: tuple[int, int, int], card: Card, bias: bool = False) -> Prediction:
    """Predicted time of one of a recipe's matmuls.  shape: M, N, K of that matmul.  bias: it adds one."""
    sums = sums_of(recipe, name)
    if (ours := dispatched(recipe, name, shape, bias)) is not None:
        return predict(card, predicted.kernel_of(*ours, sums), shape)
    if recipe.operands(name)[0].format is FP32:
        m, n, k = shape
        compute = m * n * k / (FP32_ADDS * card.processors * card.clock)
        alone = Prediction(START + compute, compute, 0.0, card.clock, "FP32 units", 0.0, 0.0)
        # BF16 moves half of its bytes and multiplies on faster units: where that takes longer, so does FP32
        return max(alone, library(card, "fast", 16, shape), key=lambda one: one.seconds)
    return library(card, sums or "fast", 8 if sums else 16, shape)


@functools.lru_cache(maxsize=4096)
def dispatched(recipe: Recipe, name: str, shape: tuple[int, int, int], bias: bool = False) -> tuple[str, Any] | None:
    """Our operation and its configuration that run a recipe's matmul on a Hopper card; None where torch's does.

    bias: the matmul adds one.  As long as FP8ENGINE_GLUON has not switched Gluon off.

    >>> from fp8engine.numerics.recipe import blockwise, current
    >>> dispatched(current(), "forward", (8192, 4096, 4096))
    >>> print(*dispatched(blockwise(), "forward", (1024, 2048, 8192)))
    matmul_block 128x128x128 g8 w8 s5 p2 gluon
    """
    if (sums := sums_of(recipe, name)) is None:
        return None
    by_block, (m, n, k) = sums.startswith("block"), shape
    operation = matmul.operation_of(recipe.precision[name], by_block)
    a, b = _operands(recipe, name, shape)
    size = a.cols if a.scaled_along_k else b.cols
    torch_can = not by_block or size == predicted.BLOCK
    ratio = triton_backend.measured(operation, HOPPER, m, n)
    if matmul.by_ratio(by_block, torch_can, ratio, k if bias else None) != "triton":
        return None
    limits, tuning = (importlib.import_module(f"fp8engine.kernels.{module}") for module in ("limits", "tuning"))
    if by_block:
        a, b = triton_backend.in_groups(a, size), triton_backend.in_groups(b, size)
    config = tuning.pick(operation, HOPPER, m, n, limits.describable(a.data) and limits.describable(b.data))
    if limits.gluon(a, b, Epilogue(), config, n):
        config = tuning.plain(config)
    return operation, config._replace(block_k=size) if by_block else config


def _operands(recipe: Recipe, name: str, shape: tuple[int, int, int]) -> tuple[Operand, Operand]:
    """The operands of a matmul as a layer's casts lay them out, without values."""
    (a, b), (rows, columns, depth) = recipe.operands(name), shape
    if name == "forward":
        return _operand(a, rows, depth), _operand(b, columns, depth)
    if name == "dgrad":
        return _operand(a, rows, depth), _operand(b, columns, depth, recipe.weight_serves_both)
    of_a, of_b = recipe.grad_serves_both, recipe.input_serves_both
    return _operand(a, rows, depth, of_a), _operand(b, columns, depth, of_b)


def _operand(cast: Cast, rows: int, depth: int, written: bool | None = None) -> Operand:
    """written: None: cast along what is summed; else whether a cast wrote the transpose, or it is a view's copy."""
    x = torch.empty((rows, depth) if written is None else (depth, rows), device="meta")
    how = cast.t() if written else cast
    q, q_t = casts.operands(casts.shapes_of_both(x, how, bool(written)), how, bool(written))
    if q_t is not None or written is None:
        return q_t or q
    return q.t()._replace(data=q.data.t().contiguous())


def _seconds(found: list[Launch], card: Card) -> float:
    """Of launches other than matmuls."""
    others = (launch for launch in found if not launch.kernel.startswith("matmul"))
    return sum(START + launch.bytes / (min(OTHERS, share(launch.kernel, card)) * card.memory) for launch in others)
