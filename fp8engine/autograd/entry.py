"""Entry of x into a fused layer, through a norm or as it is, to the linear layers that read it; and its way back.

Saved, in this order: x, its scale, two row statistics, gamma and beta (OWN tensors); data and scale of each call's
operand; behind whatever the caller saves beside, the weight of each call with what `Call.forward` gave of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp8engine.autograd.call import Call
from fp8engine.autograd.linear import matrix
from fp8engine.autograd.norm import norm_gradients
from fp8engine.autograd.operands import Either, Gradient
from fp8engine.autograd.parts import Spec, keep, kept, made_together, produced, recomputed, tensors_of
from fp8engine.ops import norm_act
from fp8engine.ops.reference import RowStatistics
from fp8engine.ops.tensor import Float8Tensor

Saved = Sequence[torch.Tensor | None]
OWN = 6  # tensors that an Entry saves before those of its calls


def calls_of(spec: Spec, x: torch.Tensor, parameters: Sequence, needs: Sequence[bool], made: int) -> list[Call]:
    """A Call for each layer.  needs: whether x, gamma, beta, then the parameters want gradients.

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
    """The calls that read x or its norm.  Holds no tensors: what backward reads, `forward` returns to be saved."""

    def __init__(self, spec: Spec, calls: Sequence[Call]):
        self.norm, self.memory, self.out, self.calls = spec.norm, spec.memory, spec.out, calls
        self.recompute = spec.norm is not None and spec.memory.recompute_norm and calls[0].needs_x
        self.alias: list[int] = []  # for each call, the call beside whose operand its own was saved

    def forward(self, x: torch.Tensor, gamma_K, beta_K, parameters: Sequence) -> tuple[list[torch.Tensor], list, list]:
        """(y [M, N] of each call, what to save of x and the operands, what to save of the weights)."""
        self.shape, self.dtype = x.shape, x.dtype
        self.beta_dtype = None if beta_K is None else beta_K.dtype
        own: list = [None] * OWN
        if self.norm is None:
            x_MK = matrix(x)
            pairs = [
                call.take(x) if isinstance(x, Float8Tensor) else call.cast_input(x_MK, made_so_far)
                for call, made_so_far in zip(self.calls, made_together(self.calls), strict=True)
            ]
        else:
            pairs, (rows,) = produced(self.calls, self._make(matrix(x), gamma_K, beta_K))
            if self.calls[0].needs_x:
                data, scale = (x, None) if self.memory.store == "16 bits" else keep(matrix(x), self.memory)
                own = [data, scale, *rows, gamma_K, beta_K if self.recompute else None]
        results, weights = [], []
        for i, (call, (a, _)) in enumerate(zip(self.calls, pairs, strict=True)):
            weight_NK, bias_N = parameters[2 * i : 2 * i + 2]
            y_MN, transposed = call.forward(a, weight_NK, bias_N, self.out)
            results.append(y_MN)
            weights += [weight_NK, *transposed]
        return results, own + self._save([saved for _, saved in pairs]), weights

    def _save(self, operands: list[Either | None]) -> list:
        """Two tensors for each call, those of an operand that several share only once."""
        saved: list = []
        self.alias = []
        for i, (call, each) in enumerate(zip(self.calls, operands, strict=True)):
            pair = call.to_save(each)
            same = i
            if not torch.compiler.is_compiling() and each is not None:  # a graph saves no tensor twice anyway
                same = next(j for j in range(i + 1) if operands[j] is each)
            self.alias.append(same)
            saved += [None, None] if self.recompute or same != i else pair
        return saved

    def backward(self, gradients: Sequence[torch.Tensor | Gradient | None], saved: Saved, weights: tuple) -> tuple:
        """(dx, dgamma, dbeta, dw and db of each call) from dy [M, N] of each; None: its result has no gradient."""
        operands = self._operands(saved)
        dn_MK, found = None, []
        for i, (call, dy) in enumerate(zip(self.calls, gradients, strict=True)):
            if dy is None:
                found += [None, None]
                continue
            each, *own = call.backward(dy, operands[i], weights[3 * i : 3 * i + 3], self.dtype)
            found += own
            if each is not None:
                dn_MK = each if dn_MK is None else dn_MK.add_(each)
        if dn_MK is None:
            return None, None, None, *found
        if self.norm is None:
            return dn_MK.view(self.shape), None, None, *found
        _, _, rstd_M, mean_M, gamma_K, _ = saved[:OWN]
        rows = RowStatistics(rstd_M, mean_M)  # pyright: ignore[reportArgumentType] - saved with x, never None here
        dx_MK, *own = norm_gradients(dn_MK, self._x(saved), gamma_K, rows, self.norm, self.beta_dtype)
        return dx_MK.view(self.shape), *own, *found

    def _operands(self, saved: Saved) -> list[tuple]:
        """(data, scale) that each call's wgrad reads, made again where they were not saved."""
        if not (self.recompute and any(call.needs_w for call in self.calls)):
            return [(saved[OWN + 2 * i], saved[OWN + 1 + 2 * i]) for i in self.alias]
        again = recomputed(self.calls, self._make(self._x(saved), saved[4], saved[5]))
        return [tensors_of(each) for each in again]

    def _x(self, saved: Saved) -> torch.Tensor:
        data, scale = saved[:2]
        return matrix(kept(data, scale, self.dtype))  # pyright: ignore[reportArgumentType] - saved where it is read

    def _make(self, x_MK: torch.Tensor, gamma_K, beta_K):
        norm: Any = self.norm
        return lambda to: norm_act.norm_quantize(x_MK, gamma_K, beta_K, norm, to)
