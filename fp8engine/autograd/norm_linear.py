"""y_i = norm(x) @ w_i.T + b_i: the norm written once, straight in the format that its layers read.

    forward    n, rows = norm(x) in FP32    X = FP8(n), X^T where wgrad reads it    y_i = X @ W_i^T + b_i
    backward   dn = sum_i dy_i @ W_i    dw_i = dy_i^T @ X    dx, dgamma, dbeta = the norm's, from dn, x and rows

The norm is rounded once, from FP32 to FP8, where norm and Linear apart round it to 16 bits in between.  X, its scale
and its counters are made once for all layers whose recipes cast their input alike, as far as they share a scaling
state; where casts differ, or one needs 16 bits (wgrad of rowwise_gw_hp), the norm is stored in 16 bits and each layer
casts it: right, and slower.  Layers under a recipe without FP8 read torch's own norm.

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
from typing import Any

import torch

from fp8engine.autograd.call import Call, Either
from fp8engine.autograd.linear import check, dtype_of_result, enter, in_shape_of, linear, matrix
from fp8engine.autograd.parts import (
    KEEP,
    Layer,
    Memory,
    NormOf,
    Spec,
    check_memory,
    keep,
    kept,
    made_together,
    produced,
    produced_again,
    tensors_of,
)
from fp8engine.autograd.ready import suited, take
from fp8engine.errors import UnknownName
from fp8engine.ops import norm_act
from fp8engine.ops.reference import RowStatistics, column_sums
from fp8engine.ops.reference.norm_quantize import KINDS
from fp8engine.ops.tensor import Float8Tensor

Saved = list[torch.Tensor | None]
OWN = 6  # tensors that an Entry saves before those of its calls: x, its scale, two row statistics, gamma, beta


def norm_linear(
    x: torch.Tensor, norm: NormOf, layers: Sequence[Layer], memory: Memory = KEEP
) -> tuple[torch.Tensor, ...]:
    """norm(x) through each of the layers: x [..., K] to one [..., N_i] for each, in x's dtype or autocast's.

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
    out = x.dtype
    for weight_NK, bias_N, numerics in layers:
        check(x, weight_NK, bias_N, numerics.name)
        out = dtype_of_result(x, weight_NK, numerics.name)
    if not layers:
        return ()
    x = suited(x, layers[0].numerics, why="a norm reads it")
    if not all(layer.numerics.plan.fp8 for layer in layers):
        n = norm_in_16_bits(x, norm)
        return tuple(linear(n, *layer) for layer in layers)
    record = [enter(x, layer.weight_NK, layer.numerics) for layer in layers]
    spec = Spec(tuple(layer.numerics for layer in layers), norm.norm, memory, out, any(record))
    parameters = [parameter for layer in layers for parameter in layer[:2]]
    return _NormLinear.apply(spec, x, norm.weight_K, norm.bias_K, *parameters)


def norm_in_16_bits(x: torch.Tensor, norm: NormOf) -> torch.Tensor:
    """The norm as torch computes it, in x's dtype; through FP32 where its parameters have another."""
    (kind, eps, zero_centered), weight_K, bias_K = norm
    if kind not in KINDS:
        raise UnknownName("norm", kind, KINDS)
    given = [parameter for parameter in (weight_K, bias_K) if parameter is not None]
    wide = zero_centered or any(parameter.dtype != x.dtype for parameter in given)
    values = x.float() if wide else x
    weight_K, bias_K = (p.float() if wide and p is not None else p for p in (weight_K, bias_K))
    if zero_centered and weight_K is not None:
        weight_K = weight_K + 1
    if kind == "layer":
        n = torch.nn.functional.layer_norm(values, x.shape[-1:], weight_K, bias_K, eps)
    else:
        n = torch.nn.functional.rms_norm(values, x.shape[-1:], weight_K, eps)
        n = n if bias_K is None else n + bias_K
    return n.to(x.dtype)


def calls_of(spec: Spec, x: torch.Tensor, parameters: Sequence, needs: Sequence[bool], made: int) -> list[Call]:
    """A Call for each layer.  needs: gradients of x, gamma, beta, then the parameters.

    made: how many of the layers read x or its norm; the others read what those made.
    """
    calls = []
    for i, numerics in enumerate(spec.numerics):
        before = 3 + (2 * made if i >= made else 0)
        own = needs[3 + 2 * i : 5 + 2 * i]
        weight_NK, bias_N = parameters[2 * i : 2 * i + 2]
        calls.append(Call(numerics, x, weight_NK, bias_N, (any(needs[:before]), *own), spec.record))
    return calls


class Entry:
    """Where x enters a fused layer, through a norm or as it is: operands of the calls that read it, and the way back.

    Holds no tensors: what backward reads of them is `forward`'s second result, for save_for_backward.
    """

    def __init__(self, spec: Spec, calls: Sequence[Call]):
        self.norm, self.memory, self.calls = spec.norm, spec.memory, calls
        self.readers = [call for call in calls if call.needs_w]
        self.recompute = spec.norm is not None and spec.memory.recompute_norm and calls[0].needs_x
        self.alias: list[int] = []  # for each call, the call beside whose operand its own was saved

    def forward(self, x: torch.Tensor, gamma_K, beta_K) -> tuple[list[Either], Saved]:
        """(X for each call, what to save)."""
        self.shape, self.dtype = x.shape, x.dtype
        self.beta_dtype = None if beta_K is None else beta_K.dtype
        own: Saved = [None] * OWN
        if self.norm is None:
            x_MK = matrix(x)
            pairs = [
                take(call, x) if isinstance(x, Float8Tensor) else call.cast_input(x_MK, made_so_far)
                for call, made_so_far in zip(self.calls, made_together(self.calls), strict=True)
            ]
        else:
            pairs, (rows,) = produced(self.calls, self._make(matrix(x), gamma_K, beta_K))
            if self.calls[0].needs_x:
                data, scale = (x, None) if self.memory.store == "16 bits" else keep(matrix(x), self.memory)
                own = [data, scale, *rows, gamma_K, beta_K if self.recompute else None]
        return [first for first, _ in pairs], own + self._save([saved for _, saved in pairs])

    def _save(self, operands: list[Either | None]) -> Saved:
        """Two tensors for each call, those of an operand that several share only once."""
        saved: Saved = []
        self.alias = []
        for i, (call, each) in enumerate(zip(self.calls, operands, strict=True)):
            pair = call.to_save(each)
            same = i
            if not torch.compiler.is_compiling() and each is not None:  # a graph saves no tensor twice anyway
                same = next(j for j in range(i + 1) if operands[j] is each)
            self.alias.append(same)
            saved += [None, None] if self.recompute or same != i else pair
        return saved

    def operands(self, saved: Sequence[torch.Tensor | None]) -> list[tuple]:
        """(data, scale) that each call's wgrad reads, made again where they were not saved."""
        if not (self.recompute and self.readers):
            return [(saved[OWN + 2 * i], saved[OWN + 1 + 2 * i]) for i in self.alias]
        again = produced_again(self.calls, self._make(self._x(saved), saved[4], saved[5]))
        return [tensors_of(each) for each in again]

    def backward(self, dn_MK: torch.Tensor | None, saved: Sequence[torch.Tensor | None]) -> tuple:
        """(dx, dgamma, dbeta) from the gradient of what the calls read; None: there is none."""
        if dn_MK is None:
            return None, None, None
        if self.norm is None:
            return dn_MK.view(self.shape), None, None
        _, _, rstd_M, mean_M, gamma_K, _ = saved[:OWN]
        rows = RowStatistics(rstd_M, mean_M)  # pyright: ignore[reportArgumentType] - saved with x, never None here
        found: Any = norm_act.norm_quantize_backward(dn_MK, self._x(saved), gamma_K, rows, self.norm)
        dbeta_K = found.dbias_K
        if self.beta_dtype is None:
            dbeta_K = None
        elif dbeta_K is None:  # RMSNorm has no beta of its own
            dbeta_K = column_sums(dn_MK).to(self.beta_dtype)
        else:
            dbeta_K = dbeta_K.to(self.beta_dtype)
        return found.dx_MK.view(self.shape), found.dweight_K, dbeta_K

    def _x(self, saved: Sequence[torch.Tensor | None]) -> torch.Tensor:
        data, scale = saved[:2]
        return matrix(kept(data, scale, self.dtype))  # pyright: ignore[reportArgumentType] - saved where it is read

    def _make(self, x_MK: torch.Tensor, gamma_K, beta_K):
        norm: Any = self.norm
        return lambda to: norm_act.norm_quantize(x_MK, gamma_K, beta_K, norm, to)


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        # One parameter beside ctx: torch 2.13's Dynamo, tracing without gradients, drops ctx where a Function is called
        # with as many arguments as its forward has parameters.
        spec, x, gamma_K, beta_K, *parameters = arguments
        calls = calls_of(spec, x, parameters, ctx.needs_input_grad[1:], len(spec.numerics))
        entry = Entry(spec, calls)
        operands, saved = entry.forward(x, gamma_K, beta_K)
        results = []
        for i, (call, a) in enumerate(zip(calls, operands, strict=True)):
            weight_NK, bias_N = parameters[2 * i : 2 * i + 2]
            y_MN, turned = call.forward(a, weight_NK, bias_N, spec.out)
            results.append(in_shape_of(x, y_MN))
            saved += [weight_NK, *turned]
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)  # a result that nobody read has no gradient to cast
        ctx.entry = entry
        return tuple(results)

    @staticmethod
    def backward(ctx, *gradients):
        saved, entry = ctx.saved_tensors, ctx.entry  # read once: checkpoints unpack nothing a second time
        calls = entry.calls
        weights = saved[OWN + 2 * len(calls) :]
        dn_MK, found = None, []
        with calls[0].as_asked():
            operands = entry.operands(saved)
            for i, (call, dy) in enumerate(zip(calls, gradients, strict=True)):
                if dy is None:
                    found += [None, None]
                    continue
                each, *own = call.backward(matrix(dy), operands[i], weights[3 * i : 3 * i + 3], entry.dtype)
                found += own
                if each is not None:
                    dn_MK = each if dn_MK is None else dn_MK.add_(each)
            dx, dgamma_K, dbeta_K = entry.backward(dn_MK, saved)
        return None, dx, dgamma_K, dbeta_K, *found
