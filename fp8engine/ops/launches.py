"""Launches of a linear layer's training step on a card with FP8 Tensor Cores, from its recipe and its sizes.

    forward    casts of x and of w, and a matmul                backward    cast of dy, and two matmuls

What a cast is made of, per element of 16 bits read, and with one byte more where the transpose is written too:

    per tensor                measure: 2 bytes                      cast: 3
    per tensor, predicted     measure and cast in one: 3            cast: returns at once
    rows and columns          line_amax: 2                          line_cast: 3         also rows wider than WIDEST
    blocks; rows alone        short: 3

Groups have a workspace that torch fills with zeros.  A bias's gradient is summed by the two launches of dy's cast, or
by that of blocks and one more; where dy is not cast in both directions, by torch.  What torch launches itself is called
"torch".

tests/emulated/test_emulated_launches.py holds this against what the emulated card's driver is asked for.  Left out: the
update of a model's predicted scales, one launch a step for all of its layers.
"""

from __future__ import annotations

from typing import NamedTuple

from fp8engine.numerics.cast import Cast
from fp8engine.numerics.recipe import MATMULS, Recipe

WIDEST = 16384  # columns of a row that one launch casts (kernels/quantize_groups.py)
PARTIAL_SUMS = 4 / 64  # bytes an element of dy: FP32 sums of 64 rows each, of 128 where dy is cast in groups
HALF = 2  # bytes of an element in 16 bits


class Launch(NamedTuple):
    """One launch.  bytes: read and written; of a matmul 0, because matmul_time.py knows them.

    kernel: "matmul" and which; "torch" and what; or a kernel of kernels/quantize*.py or column_sums.py, and how it
    casts: "predicted", "transposed".
    """

    kernel: str
    bytes: float = 0.0


class Step(NamedTuple):
    """A layer's step: M tokens, N outputs, K inputs.  ours: the matmuls that kernels/ run, and not torch."""

    recipe: Recipe
    m: int
    n: int
    k: int
    bias: bool = False
    ours: tuple[str, ...] = MATMULS


def forward(step: Step, copies: bool = False) -> list[Launch]:
    """Launches of a forward.  copies: it finds the weight's FP8 copies.

    >>> from fp8engine.numerics.recipe import blockwise
    >>> [launch.kernel for launch in forward(Step(blockwise(), 256, 256, 256), copies=True)]
    ['torch fill', 'short transposed', 'matmul forward']
    """
    recipe, m, n, k, *_ = step
    (x, w), x_for_dw = recipe.forward, recipe.wgrad[1]
    if recipe.input_serves_both:
        found = cast(x, m, k, transposed=True)
    else:
        found = _one(x, m, k) + _one(x_for_dw, m, k, again=x)
    if not copies:
        transposed = recipe.weight_serves_both and recipe.cache_weights is not False
        found += cast(w, n, k, transposed) if transposed else _one(w, n, k)
    return found + product(step, "forward")


def backward(step: Step, copies: bool = False) -> list[Launch]:
    """Launches of a backward.  copies: an earlier backward of this version of the weight has cast it."""
    recipe, m, n, k, bias, _ = step
    (dy, w_for_dx), dy_for_dw = recipe.dgrad, recipe.wgrad[0]
    if recipe.grad_serves_both:
        found = cast(dy, m, n, transposed=True, sums=bias)
    else:
        found = _one(dy, m, n) + _one(dy_for_dw, m, n, again=dy) + [Launch("torch sum", HALF * m * n)] * bias
    if not recipe.weight_serves_both and not copies:
        found += _one(w_for_dx, n, k, again=recipe.forward[1])
    elif recipe.weight_serves_both and recipe.cache_weights is False:
        found += cast(recipe.forward[1], n, k, transposed=True, counted=False)
    return found + product(step, "dgrad") + product(step, "wgrad")


def kept(recipe: Recipe) -> bool:
    """Whether the second microbatch finds the weight's copies.  Where scales are predicted each forward casts anew."""
    return recipe.cache_weights is True or (recipe.cache_weights == "auto" and not recipe.predicts_weight)


def cast(
    how: Cast, rows: int, columns: int, transposed: bool = False, sums: bool = False, counted: bool = True
) -> list[Launch]:
    """Launches of one cast to FP8.  transposed: the transpose too.  sums: of the columns too.  counted: in a slot."""
    size, turned = rows * columns, " transposed" * transposed
    read, both = HALF * size, (HALF + 1 + transposed) * size
    parts = 2 * PARTIAL_SUMS * size * sums  # written by the launch before, and read
    long = how.rows == -1 or (how.cols == -1 and (transposed or columns > WIDEST))
    if how.per_tensor and how.delayed:
        return [Launch(f"measure predicted{turned}", both), Launch("cast", parts)]
    if how.per_tensor:
        return [Launch("measure", read), Launch(f"cast{turned}", both + parts)]
    if long:
        return [Launch("torch fill"), Launch("line_amax", read), Launch(f"line_cast{turned}", both + parts)]
    found = [Launch("torch fill")] * counted + [Launch(f"short{turned}", both)]
    return found + [Launch("column_sums", parts)] * sums


def _one(how: Cast, rows: int, columns: int, again: Cast | None = None) -> list[Launch]:
    """Of a cast for one matmul; none in 16 bits.  again: that for the other one, which has counted the tensor."""
    return cast(how, rows, columns, counted=again is None) if how.is_fp8 and how != again else []


def product(step: Step, name: str) -> list[Launch]:
    """A matmul, and what torch does for it: codes copied so that they lie along what is summed, scales, the bias."""
    recipe, m, n, k, bias, _ = step
    casts, found = recipe.operands(name), []
    ours = name in step.ours and casts[0].is_fp8
    if casts[0].is_fp8:
        if name == "dgrad" and not recipe.weight_serves_both:
            found.append(Launch("torch copy", 2 * n * k))
        if name == "wgrad" and not recipe.grad_serves_both:
            found.append(Launch("torch copy", 2 * m * n))
        if name == "wgrad" and not recipe.input_serves_both:
            found.append(Launch("torch copy", 2 * m * k))
        apart = len({how.per_tensor for how in casts}) == 2  # one scale becomes one a row
        if not ours and (apart or (recipe.by_block and name != "wgrad")):  # scales of lines are turned
            found.append(Launch("torch scales"))
    found.append(Launch(f"matmul {name}"))
    if bias and name == "forward" and recipe.by_block and not ours:  # else torch's matmul adds it: scaled_mm.adds_bias
        found.append(Launch("torch add", 2 * HALF * m * n))
    return found
