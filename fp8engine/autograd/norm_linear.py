"""Fused norm and linear layers, y_i = norm(x) @ w_i.T + b_i: the norm writes its codes as its layers read them.

    forward    n, rows = norm(x) in FP32, rounded to x's dtype    X = FP8(n), X^T where wgrad reads it
               y_i = X @ W_i^T + b_i
    backward   dn = sum_i dy_i @ W_i    dw_i = dy_i^T @ X    dx, dgamma, dbeta = the norm's, from dn, x and rows

X is the cast of the rounded norm, bit for bit, as layers apart have it.  X, its scale and its counters are made once
for all layers whose recipes cast their input alike, as far as they share a scaling state; where casts differ, or one
needs 16 bits (wgrad of rowwise_gw_hp), the norm is made without codes and each layer casts it, which is slower.  Layers
under a recipe without FP8 read torch's own norm.

Saved beside parameters, for x [M, K] of e bytes an element:

    x                 e M K                 store="fp8": M K + 4 M
    row statistics    4 M (RMSNorm), 8 M (LayerNorm)
    X                 M K and its scales: 4 per tensor, 4 K per row, 4 K ceil(M / 128) per 1 x 128 block;
                      recompute_norm: none; rowwise_gw_hp: 2 M K, of an FP32 x for each of the layers

x and its statistics only where x, gamma or beta takes a gradient; X only where a weight does.
Source of fusing norm, cast and transpose: NVIDIA's Hopper whitepaper, "transformer engine" (DESIGN sections 1 and 7).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8engine.autograd.entry import OWN, Entry, calls_of
from fp8engine.autograd.linear import check, dtype_of_result, enter, in_shape_of, linear, matrix
from fp8engine.autograd.norm import norm_in_16_bits
from fp8engine.autograd.parts import KEEP, Layer, Memory, NormOf, Part, Spec, check_memory
from fp8engine.autograd.ready import suited


def norm_linear(
    x: torch.Tensor, norm: NormOf | None, layers: Sequence[Layer], memory: Memory = KEEP
) -> tuple[torch.Tensor, ...]:
    """norm(x) through each of the layers: x [..., K] to one [..., N_i] for each, in x's dtype or autocast's.

    norm: None for none: the layers read x, and share its casts.
    memory: what is kept for backward (the table above); without effect on layers whose recipe has no FP8.
    Raises as `linear` does, naming the layer; UnknownName for a norm or a store, ShapeError and UnsupportedDtype for
    gamma or beta; GradientError for the gradient of a gradient.

    >>> from fp8engine.autograd.numerics import Numerics
    >>> from fp8engine.numerics.recipe import rowwise
    >>> from fp8engine.ops.reference import Norm
    >>> from fp8engine.scaling.table import ScalingState
    >>> state = ScalingState([("q", rowwise()), ("k", rowwise())])
    >>> q, k = (Layer(torch.eye(4), None, Numerics(name, rowwise(), state, i)) for i, name in enumerate("qk"))
    >>> y_q, y_k = norm_linear(torch.tensor([[2.0, -2.0, 2.0, -2.0]]), NormOf(Norm("rms", eps=0.0), None), [q, k])
    >>> y_q, y_k.shape
    (tensor([[ 1., -1.,  1., -1.]]), torch.Size([1, 4]))
    """
    check_memory(memory)
    if layers and (shard := layers[0].numerics.shard) is not None and not isinstance(layers[0], Part):
        return shard.norm_linear(x, norm, layers, memory)
    out = x.dtype
    for weight_NK, bias_N, numerics in layers:
        check(x, weight_NK, bias_N, numerics.name)
        out = dtype_of_result(x, weight_NK, numerics.name)
    if not layers:
        return ()
    x = suited(x, *(layer.numerics for layer in layers), why="a norm reads it" if norm else "")
    if not all(layer.numerics.plan.fp8 for layer in layers):
        n = x if norm is None else norm_in_16_bits(x, norm)
        return tuple(linear(n, *layer, part=isinstance(layer, Part)) for layer in layers)
    record = [enter(x, layer.weight_NK, layer.numerics) for layer in layers]
    which, *of_norm = (None, None, None) if norm is None else norm
    spec = Spec(tuple(layer.numerics for layer in layers), which, memory, out, any(record))
    parameters = [parameter for layer in layers for parameter in layer[:2]]
    return _NormLinear.apply(spec, x, *of_norm, *parameters)


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        # One parameter beside ctx: torch 2.13's Dynamo, tracing without gradients, drops ctx where a Function is called
        # with as many arguments as its forward has parameters.
        spec, x, gamma_K, beta_K, *parameters = arguments
        calls = calls_of(spec, x, parameters, ctx.needs_input_grad[1:], len(spec.numerics))
        entry = Entry(spec, calls)
        results, saved, weights = entry.forward(x, gamma_K, beta_K, parameters)
        ctx.save_for_backward(*saved, *weights)
        ctx.set_materialize_grads(False)  # a result without a consumer has no gradient to cast
        ctx.entry = entry
        return tuple(in_shape_of(x, y_MN) for y_MN in results)

    @staticmethod
    def backward(ctx, *gradients):
        saved, entry = ctx.saved_tensors, ctx.entry  # read once: checkpoints unpack nothing a second time
        with entry.calls[0].as_asked():
            given = [None if dy is None else matrix(dy) for dy in gradients]
            return None, *entry.backward(given, saved, saved[OWN + 2 * len(entry.calls) :])
