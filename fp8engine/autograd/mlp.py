"""Fused MLP, z = act(norm(x) @ w1.T + b1) @ w2.T + b2: norm and activation are stored as the matmuls read them.

    forward    X1 = FP8(norm(x))    y = X1 @ W1^T + b1 in 16 bits    X2 = FP8(act(y))    z = X2 @ W2^T + b2
    backward   da = dz @ W2 in 16 bits    dy, dy^T = FP8(da * act'(y)), db1 = sums of the rounded dy
               dx as in norm_linear.py

act(y) and dy are computed in FP32, rounded to y's dtype, and then to FP8.  Where a recipe casts dy otherwise for dgrad
than for wgrad (rowwise_gw_hp), or the gate and up of a gated activation are two layers, each with a scale of its own,
dy goes through 16 bits and is cast by each layer, which is slower.

Saved beside parameters and what norm_linear.py names (x, its statistics, X1), with e bytes an element of y [M, N] and
act(y) [M, F]; N = 2 F of a gated activation, else F:

    y     e M N                 store="fp8": M N + 4 M, of gate and up as two layers + 8 M
    X2    M F and its scales    recompute_activation: none; rowwise_gw_hp: 2 M F

y only where x or a parameter before it takes a gradient; X2 only where w2 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp8engine.autograd.call import Call
from fp8engine.autograd.entry import OWN, Entry, calls_of
from fp8engine.autograd.linear import check, dtype_of_result, enter, in_shape_of, linear, matrix
from fp8engine.autograd.norm_linear import norm_linear
from fp8engine.autograd.parts import (
    KEEP,
    Layer,
    Memory,
    NormOf,
    Part,
    Spec,
    check_memory,
    keep,
    kept,
    produced,
    recomputed,
    sample_made,
    tensors_of,
)
from fp8engine.autograd.ready import suited, take_gradient
from fp8engine.errors import ShapeError, UnknownName
from fp8engine.ops import norm_act
from fp8engine.ops.reference.activations import ACTIVATIONS
from fp8engine.ops.reference.cast_transpose import IN_16_BITS, Store


def norm_mlp(
    x: torch.Tensor,
    norm: NormOf | None,
    first: Layer | tuple[Layer, Layer],
    second: Layer,
    kind: str,
    memory: Memory = KEEP,
) -> torch.Tensor:
    """x [..., K] through a norm (None: none), a layer, an activation and another layer; [..., N2] as `linear` has it.

    first: its output is [gate | up] for a gated kind; or the layers (gate, up), for a gated kind only.
    kind: a name of ops/reference/activations.py's table.
    memory: what is kept for backward (the table above); without effect on layers whose recipe has no FP8.
    Raises as `norm_linear` does; UnknownName for an activation, ShapeError for widths that do not fit it.

    >>> from fp8engine.autograd.numerics import Numerics
    >>> from fp8engine.numerics.recipe import current
    >>> from fp8engine.scaling.table import ScalingState
    >>> state = ScalingState([("up", current()), ("down", current())])
    >>> up, down = (Layer(torch.eye(2), None, Numerics("", current(), state, i)) for i in range(2))
    >>> norm_mlp(torch.tensor([[1.0, -1.0]]), None, up, down, "relu").shape
    torch.Size([1, 2])
    """
    check_memory(memory)
    firsts = (first,) if isinstance(first, Layer) else first
    if (shard := second.numerics.shard) is not None and not isinstance(second, Part):
        return shard.norm_mlp(x, norm, firsts, second, (kind, memory))
    layers = (*firsts, second)
    out = _check(x, layers, kind)
    if second.numerics.smooth or not all(layer.numerics.plan.fp8 for layer in layers):
        made = (
            norm_linear(x, norm, firsts, memory)
            if norm
            else [linear(x, *layer, part=isinstance(layer, Part)) for layer in firsts]
        )
        return linear(_activation(made, kind), *second, part=isinstance(second, Part))
    record = [enter(x, layer.weight_NK, layer.numerics) for layer in layers]
    x = suited(x, *(layer.numerics for layer in firsts), why="a norm reads it" if norm else "")
    which, *of_norm = (None, None, None) if norm is None else norm
    spec = Spec(tuple(layer.numerics for layer in layers), which, memory, out, any(record), kind)
    parameters = [parameter for layer in layers for parameter in layer[:2]]
    return _NormMLP.apply(spec, x, *of_norm, *parameters)


def _check(x: torch.Tensor, layers: Sequence[Layer], kind: str) -> torch.dtype:
    """Raise for what does not fit; the dtype of the result."""
    if kind not in ACTIVATIONS:
        raise UnknownName("activation", kind, ACTIVATIONS)
    *firsts, second = layers
    gated, widths = ACTIVATIONS[kind].gated, [len(layer.weight_NK) for layer in firsts]
    if len(firsts) == 2 and (not gated or widths[0] != widths[1]):
        raise ShapeError(
            f"{_names(firsts)}: layers of {widths[0]} and {widths[1]} rows under {kind!r}; "
            "two layers are the gate and the up of a gated activation, of equal size"
        )
    if gated and sum(widths) % 2:
        raise ShapeError(
            f"{_names(firsts)}: {kind} takes [gate | up], an even number of rows; its weight has {widths[0]}"
        )
    out = x.dtype
    for layer in firsts:
        check(x, layer.weight_NK, layer.bias_N, layer.numerics.name)
        out = dtype_of_result(x, layer.weight_NK, layer.numerics.name)
    check(x, second.weight_NK, second.bias_N, second.numerics.name, sum(widths) // 2 if gated else widths[0])
    dtype_of_result(x, second.weight_NK, second.numerics.name)
    return out


def _names(layers: Sequence[Layer]) -> str:
    return " and ".join(layer.numerics.name for layer in layers)


def _activation(made: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
    """The activation as torch computes it, in the dtype of what it is given."""
    activation = ACTIVATIONS[kind]
    return activation(made[0]) if len(made) == 1 else activation.of(*made)


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        spec, x, gamma_K, beta_K, *parameters = arguments  # unpacked here: see _NormLinear
        calls = calls_of(spec, x, parameters, ctx.needs_input_grad[1:], len(spec.numerics) - 1)
        *firsts, second = calls
        entry = Entry(spec, firsts)
        halves, saved, weights = entry.forward(x, gamma_K, beta_K, parameters)
        [(a, to_save)], _ = produced([second], lambda to: _activated(halves, spec.kind, to))
        weight_NK, bias_N = parameters[-2:]
        z_MN, transposed = second.forward(a, weight_NK, bias_N, spec.out)
        ctx.recompute = spec.memory.recompute_activation and second.needs_x
        for y_MN in halves:
            saved += keep(y_MN, spec.memory) if second.needs_x else (None, None)
        x2 = second.to_save(to_save)
        saved += (None, None) if ctx.recompute else x2
        ctx.save_for_backward(*saved, *weights, weight_NK, *transposed)
        ctx.entry, ctx.second, ctx.kind, ctx.dtype = entry, second, spec.kind, spec.out
        return in_shape_of(x, z_MN)

    @staticmethod
    def backward(ctx, dz):
        saved, entry, second = ctx.saved_tensors, ctx.entry, ctx.second  # read once, as in _Linear
        firsts = entry.calls
        start = OWN + 2 * len(firsts)
        of_y, x2 = saved[start : start + 2 * len(firsts)], saved[start + 2 * len(firsts) :][:2]
        weights = saved[start + 2 * len(firsts) + 2 :]
        with second.as_asked():
            pairs = zip(of_y[::2], of_y[1::2], strict=True)
            halves = [kept(data, scale, ctx.dtype) for data, scale in pairs if data is not None]
            if ctx.recompute and second.needs_w:
                [again] = recomputed([second], lambda to: _activated(halves, ctx.kind, to))
                x2 = tensors_of(again)
            dz_MN = take_gradient(second.use, matrix(dz))
            da_MF, *own = second.backward(dz_MN, tuple(x2), weights[-3:], ctx.dtype)
            if da_MF is None:
                return (None,) * (4 + 2 * len(firsts)) + tuple(own)
            gradients = _through_activation(firsts, da_MF, halves, ctx.kind)
            return None, *entry.backward(gradients, saved, weights), *own


def _activated(halves: Sequence[torch.Tensor], kind: str, to: Store) -> tuple:
    """The activation of [gate | up] or of a plain layer's result, or of gate and up as two tensors."""
    y_MN, *up = halves
    return norm_act.act_quantize(y_MN, kind, to, *up)


def _through_activation(firsts: Sequence[Call], da_MF: torch.Tensor, halves: Sequence[torch.Tensor], kind: str) -> list:
    """dy of each first layer: in FP8 as it reads it, or in 16 bits where it cannot or where there are two layers."""
    y_MN, *up = halves
    to = None if up else firsts[0].store_grad()
    if to is not None:
        sample_made(firsts, "grad_output", lambda to: norm_act.act_quantize_backward(da_MF, y_MN, kind, to))
    found: Any = norm_act.act_quantize_backward(da_MF, y_MN, kind, to or IN_16_BITS, *up)
    if to is None:
        return [found.dx_MK, found.dup_MN] if up else [found.dx_MK]
    return [firsts[0].stored_grad(found.q, found.q_t, found.dbias_K)]
