"""Predicted time of a linear layer's training step, in BF16 and under a recipe, on a card; nothing here is measured.

A Linear's forward and backward are three matmuls of the same size: y = x w^T, dx = dy w, dw = dy^T x.  FP8 multiplies
faster and adds casts, which move bytes that a 16-bit Linear does not:

    16 bits   3 matmuls
    FP8       3 matmuls + casts of x, w and dy            cast = its bytes / bandwidth + the start of its kernels

    bytes of an element: 2 read, 1 written for each orientation in which a matmul reads it; 2 more where its scale is
    that of a whole tensor, row or column, which has to be read before it is cast, and is not predicted

Which kernel multiplies follows from the recipe: cuBLASLt, and for scales in blocks ours (ops/matmul.py, `choose`).
Times of matmuls are matmul_time.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8engine.numerics.cards import H100_SXM, Card
from fp8engine.numerics.matmul_time import CEILINGS, START, Kernel, Prediction, library, predict
from fp8engine.numerics.recipe import MATMULS, Cast, PerBlock, Recipe

BF16_BYTES = 2
CAST_MEMORY = 0.88  # share of the bandwidth that a cast reaches: 85 to 94 % published of torchao's Triton kernels
TILE = (128, 128)  # of our kernels of scales in blocks


@dataclass(frozen=True)
class LayerTime:
    """Predicted seconds of one training step of a linear layer.

    bf16: in 16 bits.  matmuls: by name, forward, dgrad and wgrad.  casts: to FP8, all of them.
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


def layer_time(recipe: Recipe, m: int, n: int, k: int, card: Card = H100_SXM) -> LayerTime:
    """Predicted time of a Linear's forward and backward.  M tokens, N outputs, K inputs.

    >>> from fp8engine.numerics.recipe import blockwise, current, high_precision
    >>> [round(layer_time(each(), 8192, 14336, 4096).speedup, 1) for each in (current, blockwise, high_precision)]
    [1.4, 1.2, 1.0]
    """
    shapes = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
    bf16 = sum(library(card, "fast", 16, shape).seconds for shape in shapes.values())
    matmuls = {name: matmul_time(recipe, name, shape, card) for name, shape in shapes.items()}
    return LayerTime(bf16, matmuls, _casts(recipe, (m, n, k), card))


def speedup(recipe: Recipe, m: int, n: int, k: int, card: Card = H100_SXM) -> float:
    """How much faster than in 16 bits a Linear's forward and backward are predicted to be."""
    return layer_time(recipe, m, n, k, card).speedup


def sums_of(recipe: Recipe, matmul: str) -> str | None:
    """What a matmul's main loop does with its sums, a key of CEILINGS; None where it is in 16 bits.

    >>> from fp8engine.numerics.recipe import blockwise, rowwise_gw_hp
    >>> [sums_of(blockwise(), name) for name in ("forward", "dgrad", "wgrad")]
    ['block', 'block', 'block by block']
    >>> sums_of(rowwise_gw_hp(), "wgrad")
    """
    a, b = recipe.operands(matmul)
    if not a.is_fp8:
        return None
    blocks = [cast.granularity for cast in (a, b) if isinstance(cast.granularity, PerBlock)]
    if blocks:
        return "block" if any(min(block.rows, block.cols) > 1 for block in blocks) else "block by block"
    return "fast" if matmul in recipe.fast_accumulation else "promoted"


def matmul_time(recipe: Recipe, matmul: str, shape: tuple[int, int, int], card: Card) -> Prediction:
    """Predicted time of one of a recipe's matmuls.  shape: M, N, K of that matmul."""
    sums = sums_of(recipe, matmul)
    if sums is None:
        return library(card, "fast", 16, shape)
    if not sums.startswith("block"):
        return library(card, sums, 8, shape)
    return predict(card, Kernel(*TILE, ceiling=CEILINGS["triton"][sums], overlapped=True), shape)


def _casts(recipe: Recipe, shape: tuple[int, int, int], card: Card) -> float:
    m, n, k = shape
    read_by = {name: recipe.operands(name) for name in MATMULS}
    (x, w), (dy, w_for_dx), (dy_for_dw, x_for_dw) = (read_by[name] for name in ("forward", "dgrad", "wgrad"))
    operands = ((m * k, (x, x_for_dw)), (n * k, (w, w_for_dx)), (m * n, (dy, dy_for_dw)))
    return sum(_cast(size, tuple(cast for cast in casts if cast.is_fp8), card) for size, casts in operands)


def _cast(elements: int, casts: tuple[Cast, ...], card: Card) -> float:
    """Seconds to cast one operand for the matmuls that read it in FP8."""
    if not casts:
        return 0.0
    twice = any(not cast.delayed and not isinstance(cast.granularity, PerBlock) for cast in casts)
    read = BF16_BYTES * (2 if twice else 1)
    return elements * (read + len(casts)) / (CAST_MEMORY * card.memory) + START * (2 if twice else 1)
