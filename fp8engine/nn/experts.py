"""Float8Experts, experts that a transformers model keeps in 3-D parameters, run in FP8 by a change of class.

    order    pairs (token t, choice j) sorted by expert; sizes: how many pairs each expert has; T tokens, k choices
    y        = gate(rows of x @ gate_up^T + b)  by expert, in 16 bits        rows: x[t] of each pair, k of a token
    out[t]   = sum_j weight[t, j] * (y @ down^T + b)[t, j]

Two grouped matmuls (autograd/grouped.py), each with slots of its own; the router's choice and weights are inputs, in
their own precision.  transformers writes these modules under one decorator, use_experts_implementation, whose
attributes say how the parameters are laid out; the module's own `_apply_gate` and `act_fn` are called.  Modules written
otherwise are left alone.  (An entry in transformers' registry of implementations would hold for the whole process, and
its name would be saved in the config; changing the class changes one module.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp8engine.autograd.features import EXPERTS
from fp8engine.autograd.grouped import grouped_linear, grouped_plain
from fp8engine.autograd.numerics import Numerics
from fp8engine.errors import ParallelError
from fp8engine.nn.class_swap import Mixin, mix
from fp8engine.nn.grouped import own_experts
from fp8engine.nn.linear import Float8Module
from fp8engine.numerics.formats import FLOATS

# Attributes that transformers' decorator sets on a module; found by these, so that transformers need not be there.
DECORATED = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel", "_apply_gate")
DECORATED += ("num_experts",)


def matrices(module: Any) -> tuple[str, str]:
    """Names of the first and the second matrix of a decorated module."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def obstacle(module: nn.Module) -> str | None:
    """Why a module with 3-D parameters of experts cannot run in FP8 without changing what it does, or None."""
    kind = type(module).__name__
    stacked = f"{kind} keeps its experts in one 3-D parameter"
    if not all(hasattr(module, name) for name in DECORATED) or not hasattr(type(module).forward, "__wrapped__"):
        return f"{stacked}, and is not written as transformers' use_experts_implementation wants it"
    keys = matrices(module)
    wanted = {*keys, *(f"{key}_bias" for key in keys if module.has_bias)}
    if found := {name for name, _ in module.named_parameters(recurse=False)} ^ wanted:
        return f"{stacked}, and {', '.join(sorted(found))} is not as use_experts_implementation has it"
    if module._is_expert_parallel:
        return f"{stacked}, divided over processes (expert parallelism)"
    for key in keys:
        data = getattr(module, key).data
        if type(data) is not torch.Tensor:
            return f"{stacked}: a {type(data).__name__}, quantised or sharded already"
        if data.dtype not in FLOATS:
            return f"{stacked}, of {data.dtype}; FP8 casts take float32, bfloat16 or float16"
    return None


class Float8Experts(Mixin, Float8Module):
    """Experts of a transformers model in FP8, made by `fe.convert`: forward(x [T, K], chosen [T, k], weights [T, k]).

    parts: parameter -> its numerics; a parameter without computes in its own precision.
    divided: whether fe.distributed.ExpertParallel has given this rank some of the experts alone.
    Raises ParallelError where expert parallelism came after fe.convert, and what `grouped_linear` raises.
    """

    prefix = "Float8"
    parts: dict[str, Numerics]
    divided: bool = False
    kinds = (EXPERTS,)

    @property
    def numerics(self) -> Numerics:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Numerics of its first matrix; all matrices share the scaling state."""
        return next(iter(self.parts.values()))

    def numerics_of(self, parameter: str) -> Numerics | None:
        return self.parts.get(parameter)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        own: Any = self
        if own._is_expert_parallel:
            raise ParallelError(
                f"{self.numerics.name}: expert parallelism came after fe.convert; "
                "divide converted experts by fe.distributed.ExpertParallel, or distribute the model first: its experts "
                "then stay in 16 bits, with the reason in the report"
            )
        tokens, chosen = top_k_index.shape
        ids, order = top_k_index.flatten().sort(stable=True)
        # Where each expert's pairs end; counted without waiting for a card.
        experts = torch.arange(own.num_experts, device=ids.device)
        sizes = torch.diff(torch.searchsorted(ids, experts, right=True), prepend=ids.new_zeros(1))
        y = self.of_rows(hidden_states[order // chosen], sizes)
        if own.has_post_expert_norm:
            y = own.post_expert_norm(y)
        weighted = y * top_k_weights.flatten()[order, None]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return weighted[back].unflatten(0, (tokens, chosen)).sum(1).to(hidden_states.dtype)

    def of_rows(self, x_RK: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """y [R, K]: both matmuls and the activation between them, of rows that lie together by expert."""
        own: Any = self
        first, second = matrices(own)
        y = self._multiply(first, x_RK, sizes)
        y = own._apply_gate(y) if own.has_gate else own.act_fn(y)
        return self._multiply(second, y, sizes)

    def _multiply(self, key: str, x_TK: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        own: Any = self
        weight_ENK = own_experts(getattr(self, key), self.divided)
        if own.is_transposed:
            weight_ENK = weight_ENK.mT
        bias_EN = own_experts(getattr(self, f"{key}_bias"), self.divided) if own.has_bias else None
        numerics = self.parts.get(key)
        if numerics is None:
            return grouped_plain(x_TK, weight_ENK, bias_EN, sizes, key)
        return grouped_linear(x_TK, weight_ENK, bias_EN, sizes, numerics)

    def extra_repr(self) -> str:
        recipes = (f"{key}: recipe={numerics.recipe.name}" for key, numerics in self.parts.items())
        return ", ".join(filter(None, [super(Float8Module, self).extra_repr(), *recipes]))


def put(module: nn.Module, key: str, numerics: Numerics) -> None:
    """Give one matrix of a decorated module its numerics; the first one changes the module's class."""
    if not isinstance(module, Float8Experts):
        mix(module, Float8Experts)
        object.__setattr__(module, "parts", {})
    module.parts[key] = numerics  # pyright: ignore[reportArgumentType, reportCallIssue, reportIndexIssue]
