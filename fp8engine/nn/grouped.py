"""fe.GroupedLinear, the linear layers of E experts as one module with a weight [E, N, K].

One scale per tensor serves all the experts.  Its cost to an expert whose weights are smaller than the largest expert's,
in dB of its own output against a scale of its own (recipe "current"; tests/nn/test_grouped.py measures it):

    ratio of magnitudes   2^0 to 2^-8   2^-10   2^-12   2^-14   2^-16
    loss, dB                  0.0        0.02    0.7     8.4     20

E4M3 has 15 binades of normal numbers, of which the values of one tensor use the upper few.  Where experts differ by
more, "rowwise" and "blockwise" scale each of them by itself, and lose nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fp8engine.auto import attach
from fp8engine.autograd.features import EXPERTS, STORED
from fp8engine.autograd.grouped import grouped_linear
from fp8engine.autograd.numerics import Numerics
from fp8engine.errors import ConversionError, ShapeError
from fp8engine.nn.linear import Float8Module
from fp8engine.numerics.names import RecipeName
from fp8engine.numerics.recipe import Recipe, resolve
from fp8engine.scaling.table import ScalingState


class GroupedLinear(Float8Module):
    """E nn.Linears in FP8, each for its own rows of one input: the experts of a mixture.

    weight [E, N, K], bias [E, N] or None; each expert is initialised as an nn.Linear is.  Made by hand it keeps its own
    scaling state, on the device that `with torch.device(...)` names.  Input [T, K] in FP32, BF16 or FP16, the rows of
    each expert together; output [T, N] in the input's dtype, or autocast's.
    divided: whether fe.distributed.ExpertParallel has given this rank some of the experts alone.
    Raises UnknownName for a recipe's name, ShapeError for no experts, ConversionError for a recipe that stores results.

    >>> experts = GroupedLinear(3, 32, 16, recipe="rowwise")
    >>> experts
    GroupedLinear(experts=3, in_features=32, out_features=16, bias=True, recipe=rowwise (E4M3xE4M3, grad E4M3))
    >>> experts(torch.ones(6, 32), [4, 0, 2]).shape
    torch.Size([6, 16])
    """

    bias: nn.Parameter | None
    divided: bool = False
    kinds = (EXPERTS,)

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | RecipeName,
        dtype: torch.dtype | None = None,
    ):
        recipe = resolve(recipe)
        super().__init__()
        weight = nn.Parameter(torch.empty(experts, out_features, in_features, dtype=dtype))
        self._hold(weight, nn.Parameter(torch.empty(experts, out_features, dtype=dtype)) if bias else None, recipe)
        self.reset_parameters()

    @classmethod
    def of(
        cls,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        *,
        recipe: Recipe | RecipeName,
        turned: bool = False,
    ) -> GroupedLinear:
        """A layer of parameters that exist: they are held, not copied.

        weight: [E, N, K], or [E, K, N] with `turned`, as some of Hugging Face's models store it; bias: [E, N].
        Raises ShapeError for other shapes.

        >>> GroupedLinear.of(nn.Parameter(torch.ones(2, 32, 16)), recipe="bf16", turned=True).shape
        (2, 16, 32)
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._hold(weight, bias, resolve(recipe), turned)
        return layer

    def _hold(self, weight: nn.Parameter, bias: nn.Parameter | None, recipe: Recipe, turned: bool = False) -> None:
        if weight.dim() != 3 or len(weight) < 1:
            raise ShapeError(f"GroupedLinear: weight is {list(weight.shape)}; want [E, N, K], at least one expert")
        self.turned, self.weight = turned, weight
        if bias is not None and bias.shape != self.shape[:2]:
            raise ShapeError(f"GroupedLinear: bias is {list(bias.shape)}; want [E, N] = {list(self.shape[:2])}")
        self.register_parameter("bias", bias)
        self.numerics = Numerics("GroupedLinear", recipe, ScalingState([("", recipe)], weight.device), standalone=True)
        self.numerics.kinds = self.kinds
        if recipe.stored is not None and (why := self.numerics.why_not(STORED)):
            raise ConversionError(why)
        attach([self.numerics], [tuple(weight.shape)])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K), however the weight is stored."""
        experts, n, k = self.weight.shape
        return (experts, k, n) if self.turned else (experts, n, k)

    def reset_parameters(self) -> None:
        """Each expert as nn.Linear begins: uniform within 1 / sqrt(K)."""
        bound = 1 / math.sqrt(self.shape[2]) if self.shape[2] else 0.0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        experts, n, k = self.shape
        bias = self.bias is not None
        return f"experts={experts}, in_features={k}, out_features={n}, bias={bias}{super().extra_repr()}"

    def forward(self, input: torch.Tensor, sizes: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """y [T, N] of x [T, K], its first sizes[0] rows the first expert's, the next sizes[1] the second's, ...

        sizes: E numbers of rows, 0 allowed, that sum to T.  Ints, or an int tensor on a CPU or beside the input; one on
        a card with FP8 Tensor Cores is not waited for (ops/grouped.py has the table).
        Raises ShapeError, UnsupportedDtype and BackendError (several devices), naming the layer.
        """
        weight, bias = own_experts(self.weight, self.divided), own_experts(self.bias, self.divided)
        return grouped_linear(input, weight.mT if self.turned else weight, bias, sizes, self.numerics)


def own_experts(parameter: Any, divided: bool) -> Any:
    """What a rank computes with: all of a parameter of experts, or its part of a DTensor that is divided by expert.

    >>> own_experts(torch.ones(1), divided=False)
    tensor([1.])
    """
    return parameter.to_local() if divided and parameter is not None else parameter
