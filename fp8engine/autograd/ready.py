"""Inputs and gradients that are in FP8 already: read as they are where the layer's plan allows it, else dequantised.

What is read is saved for backward too: the codes that the layer before wrote, one byte an element, held once by both.
The input's slot counts them and takes amax and scale over from the slot of the result: no pass over memory.

Codes that were gathered from several ranks were counted by the layer's own slots when they were cast.  Where a matmul
reads the other direction under scales of its own, it is cast from the codes: under powers of two nothing but what the
first cast flushed or rounded is lost.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.operands import GRAD_OUTPUT, INPUT, Either, Use, enter_again, one, plain, same
from fp8engine.autograd.stored_tensor import StoredTensor
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.recipe import Recipe
from fp8engine.ops.reference import Operand
from fp8engine.ops.tensor import Float8Tensor
from fp8engine.scaling.operands import Made

TAKEN = ""  # in place of a reason
WRITTEN = "other code wrote into it, or took its memory (.data, .numpy())"
E5M2 = torch.float8_e5m2


class GatheredTensor(Float8Tensor):
    """The codes of all ranks' parts of a tensor, for the layers that read it; nothing writes into it.

    made: what wgrad reads, made by the first of them.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.made: Made = {}


def suited(x: Float8Tensor, numerics: Numerics, compiling: bool, why: str = TAKEN) -> torch.Tensor:
    """x as it is if the layer can read its codes, else dequantised; the layer counts in `ready` what was done.

    why: the caller's reason to dequantise.
    """
    if compiling:
        return x.dequantize()  # a compiled graph takes plain tensors; nothing in it can be counted on the host
    why = why or why_not(x, numerics.recipe)
    numerics.ready[why] = numerics.ready.get(why, 0) + 1
    return x if why == TAKEN else x.dequantize()


def why_not(x: Float8Tensor, recipe: Recipe) -> str:
    """Why a layer under that plan does not read these codes; TAKEN where it does."""
    (first, weight), (grad, saved) = recipe.forward, recipe.wgrad
    if not first.is_fp8:
        return "its forward is in 16 bits"
    if isinstance(x, StoredTensor) and x.written:
        return WRITTEN
    q = x.operand()
    if not (q.rows == 1 or q.rows == q.cols == -1) or (first.rows, first.cols) != (q.rows, q.cols):
        return f"it casts {first.granularity}, not {x.granularity}"
    if q.scaled_along_k and not q.power_of_2:
        return "its scales within a row are not known to be powers of two"
    dtype = q.data.dtype
    if (dtype, weight.dtype) == (E5M2, E5M2) or (_reads_codes(saved, q) and (dtype, grad.dtype) == (E5M2, E5M2)):
        return "Tensor Cores do not multiply E5M2 by E5M2"
    return TAKEN


def take(
    use: Use, x: Float8Tensor, cast_again: Callable[[torch.Tensor, Made], Either]
) -> tuple[Operand, Either | None]:
    """(X for forward, what wgrad will read, not transposed) of an input that `suited` let pass.

    cast_again: casts its values for wgrad, where that does not read the codes; they are counted no more.
    """
    numerics, q = use.numerics, x.operand()
    gathered, slot = isinstance(x, GatheredTensor), use.slots[INPUT, use.record, use.count]
    if not (gathered and x.source is not None and same(x.source, slot)):  # this slot counted it when it was cast
        known = x.source is not None and x.source.live_2S is numerics.state.live_2S
        enter_again(x.source if known else None, slot, x.numel())
    values = None
    if use.sampled and not gathered:
        values = x.values().view(q.data.shape)
        numerics.observe("input", values, use.sampled)
    if not use.needs_w:
        return q, None
    saved: Cast = use.recipe.wgrad[1]
    if _reads_codes(saved, q):
        return q, q
    made = x.made if isinstance(x, GatheredTensor) else {}
    if (found := made.get(saved.text)) is not None:
        return q, found[0]
    values = x.values().view(q.data.shape) if values is None else values
    return q, cast_again(values, made)


def take_gradient(use: Use, dy_MN: torch.Tensor) -> torch.Tensor | tuple:
    """dy as `gradients` takes it: as it is, or the gathered codes, cast as the layer's plan casts dy for dgrad.

    A bias's gradient is not among what they give: a layer whose dy is gathered adds its bias elsewhere.
    """
    if not isinstance(dy_MN, Float8Tensor):
        return dy_MN
    q, second = dy_MN.operand(), use.recipe.wgrad[0]
    if not use.needs_w or _reads_codes(second, q):
        return q, q.t(), None
    values = dy_MN.values()
    if not second.is_fp8:
        return q, plain(values, second).t(), None
    return q, one(use, values, second, {}, use.slots[GRAD_OUTPUT, False, False], None).t(), None


def _reads_codes(saved: Cast, q: Operand) -> bool:
    """Whether wgrad reads the very codes of forward: one scale serves both directions."""
    return saved.per_tensor and q.rows == q.cols == -1
