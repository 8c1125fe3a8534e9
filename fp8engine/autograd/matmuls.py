"""The three matmuls of one call of a layer, on operands that are cast already, and the weight's part in them.

    forward   y[M, N]  = X[M, K]  @ W[N, K]^T + b        X, W reduced along -1
    dgrad     dx[M, K] = DY[M, N] @ (W^T)[K, N]^T        W cast along 0
    wgrad     dw[N, K] = (DY^T)[N, M] @ (X^T)[K, M]^T    DY, X cast along 0;  db = sum of dy over rows

Saved for backward: X as FP8 codes in the orientation wgrad reads (or in 16 bits where wgrad is), its scale, and the
parameter itself.  What the 16-bit alternative keeps, x, is not.  A weight that needs no gradient saves no X; an x that
needs none spends no dgrad.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fp8engine.autograd import gathered, stored
from fp8engine.autograd.operands import (
    GRAPH,
    GRAPH_ON_CARD,
    WEIGHT,
    Either,
    Use,
    both,
    chosen,
    gradient_pair,
    one,
    plain,
    transpose,
    transposed,
)
from fp8engine.autograd.refusals import no_transform
from fp8engine.ops import matmul
from fp8engine.ops.backends import asked
from fp8engine.ops.reference import Operand, operand
from fp8engine.scaling.columns import GraphSlots
from fp8engine.scaling.operands import Made, Operands

NOTHING = (None, None)


class Product(NamedTuple):
    """y [M, N]; the weight's transpose as (codes, scale) where a graph saves it; else the copies that wait here."""

    y_MN: torch.Tensor
    weight_KN: tuple
    copies: Made


def forward(use: Use, a: Either, weight_NK: torch.Tensor, bias_N, out: torch.dtype, fp8: bool = False) -> Product:
    """X @ W^T + b.  fp8: y may be a Float8Tensor, where the recipe stores it so."""
    numerics, recipe = use.numerics, use.recipe
    second, sampled = recipe.forward[1], numerics.state.samples is not None and use.samples
    slot = use.slots[use.first + WEIGHT, use.record, use.count]
    weight_KN, holds, transposes = NOTHING, False, use.where.on_codes and recipe.weight_serves_both
    made: Made = {}
    wait, outlive = use.where.compiling, True
    if type(weight_NK) is gathered.GatheredWeight:
        b: Either = gathered.for_forward(weight_NK, second, slot)
    else:
        if sampled:  # of a gathered weight: distributed/weight_samples.py
            use.observe("weight", weight_NK)
        if use.real:
            made, wait, outlive = numerics.weight.operands(
                weight_NK, use.record, numerics.state.predictions if recipe.predicts_weight else 0
            )
        holds = use.needs_x and wait
        if not second.is_fp8:
            b = plain(weight_NK, second)
        elif holds and transposes:
            b, b_t = both(use, weight_NK, second, made, slot)
            weight_KN = b_t[:2] if use.where.compiling else NOTHING
        else:
            b = one(use, weight_NK, second, made, slot, use.where.emulation(weight_NK.device, weight_NK.numel()))
        if not outlive and (transposes or second is not recipe.dgrad[1]):
            made.pop(second.text, None)  # forward has read it, and backward will not
    if fp8 and recipe.stored is not None and not use.where.compiling:
        y_MN = stored.multiply(numerics, recipe, (a, b, bias_N), out, use.record)
    else:
        y_MN = product(use, a, b, bias_N, out, "forward")
        if fp8 and sampled and numerics.samples_output:
            use.observe("output", y_MN)
    return Product(y_MN, weight_KN, made if holds and not use.where.compiling else {})


def backward(
    use: Use,
    dy: torch.Tensor | tuple,
    kept: Either | None,
    weight: tuple,
    dtype: torch.dtype,
    found: Operands | None = None,
) -> tuple:
    """(dx [M, K] in `dtype`, dw, db), None for what is not needed.

    dy: [M, N], or its operands.  found: what an activation's backward has made of it.  kept: X^T for wgrad.
    weight: the parameter, then what `forward` gave beside y.
    """
    numerics, compiling = use.numerics, torch.compiler.is_compiling()
    if not compiling:
        numerics.state.backward_seen = True
        numerics.weight.after_backward()
        if torch.is_grad_enabled():
            raise no_transform(numerics.name, "create_graph=True: its gradient has no gradient of its own")
        if asked() not in (None, use.where.asked):
            use = use._replace(where=chosen(use.where.backend or "reference", use.where.asked))
        if use.slots is not numerics.state.slots:  # the tables have moved or grown since
            use = use._replace(slots=numerics.state.slots)
    elif not use.where.compiling:  # compiled autograd: of a forward that ran in eager code
        where = GRAPH_ON_CARD if use.where.on_codes else GRAPH
        use = use._replace(where=where, slots=GraphSlots(numerics.columns), first=0)
    if found is not None and found.producer is not None:
        found.producer.read_by(numerics, use.where.on_codes and use.needs_x and use.needs_w)
    d, d_t, db_N = gradient_pair(use, dy, found or {}) if isinstance(dy, torch.Tensor) else dy
    weight_NK, weight_KN, copies = weight
    dx_MK = dw_NK = None
    if use.needs_x:
        dx_MK = product(use, d, _weight_for_dgrad(use, weight_NK, weight_KN, copies), None, dtype, "dgrad")
    if use.needs_w:
        dw_NK = product(use, d_t, kept, None, weight_NK.dtype, "wgrad")
    if db_N is None or not use.needs_b:
        return dx_MK, dw_NK, None
    return dx_MK, dw_NK, db_N if db_N.dtype == use.bias_dtype else db_N.to(use.bias_dtype)


def _weight_for_dgrad(use: Use, weight_NK: torch.Tensor, weight_KN: tuple, copies: Made) -> Either:
    """The weight's transpose [K, N]: from forward where it waits, else cast now."""
    first, second = use.recipe.forward[1], use.recipe.dgrad[1]
    codes, scale = weight_KN
    if codes is not None:
        return operand(codes, scale, first)
    slot = use.slots[use.first + WEIGHT, False, False]
    if type(weight_NK) is gathered.GatheredWeight:
        return transposed(gathered.for_dgrad(weight_NK, first, second, slot))
    if use.where.on_codes and use.recipe.weight_serves_both:
        return transpose(use, weight_NK, first, copies, slot)
    if not second.is_fp8:
        return plain(weight_NK, second).t()
    held = use.where.emulation(weight_NK.device, weight_NK.numel())
    return transposed(one(use, weight_NK, second, copies, slot, held))


def product(use: Use, a: Any, b: Any, bias_N, out: torch.dtype, which: str) -> torch.Tensor:
    """One of the three matmuls, in FP8 where its operands are."""
    if isinstance(a, Operand):
        return use.where.products.matmul(a, b, bias_N, out, use.recipe.precision[which])
    y_MN = matmul.matmul_fp16(a, b.to(a.dtype)).to(out)
    return y_MN if bias_N is None else y_MN + bias_N
