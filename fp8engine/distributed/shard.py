"""A layer divided over ranks: what stands in for `linear` where weights are DTensors.

    columns   each rank has N/w rows of the weight:  y[.., N/w] = gather(x) @ w^T + b
    rows      each rank has K/w columns of it:       y = scatter(x[.., K/w] @ w^T) + b

Where tokens are not divided, `gather` is a copy whose backward sums dx over ranks, and `scatter` a sum over ranks.
Layers of one parent that read the same tensor (q, k, v; gate, up) gather it once, and their dx crosses back once.
A norm before the gather runs on this rank's tokens, and its parameters' gradients are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fp8engine import _torch
from fp8engine.autograd.features import RANKS, SUMS
from fp8engine.autograd.linear import check, linear
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.produce import NormOf
from fp8engine.distributed.tokens import AddBias, Tokens, copied, gathered, scattered, total, wire_cast
from fp8engine.errors import ParallelError
from fp8engine.ops.library import PLAIN, in_backward
from fp8engine.ops.tensor import Float8Tensor
from fp8engine.scaling.operands import Operands

COLUMNS, ROWS = "columns", "rows"


@dataclass(frozen=True)
class Sharding:
    """How one layer is divided over the ranks of a mesh of one dimension.

    by: "columns" or "rows" of the result's arithmetic, as above.  inputs, outputs: layouts of plain tensors that come
    and go; a DTensor brings its own.  local: whether the result is a plain tensor.
    """

    mesh: DeviceMesh
    by: str
    inputs: Placement
    outputs: Placement
    local: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The features of a layer that is divided so."""
        return (RANKS,) if self.by == COLUMNS else (RANKS, SUMS)

    def __str__(self) -> str:
        return f"{self.by} over {self.mesh.size()} ranks"

    @_torch.outside_of_graphs
    def run(self, x: Any, weight_NK: Any, bias_N: Any, numerics: Numerics) -> torch.Tensor:
        """`autograd.linear` of a layer whose parameters are DTensors."""
        needs_w = weight_NK.requires_grad
        if self.by == COLUMNS:
            own = local(weight_NK), local(bias_N)
            check(x, *own, numerics.name)  # before anything is sent
            numerics.state.enter()  # a step that begins here may change the recipe: before anything is cast for it
            whole = self.enters(x, numerics, needs_w)
            source = numerics.source
            y = linear(whole, *own, numerics)
            numerics.source = source  # of what was gathered
            return self.leaves(y, None, numerics, needs_w)
        numerics.state.enter()
        _, part = self.arriving(x, numerics.name)
        return self.leaves(linear(part, local(weight_NK), None, numerics), bias_N, numerics, needs_w)

    @_torch.outside_of_graphs
    def normed(self, x: Any, norm: NormOf, run: Callable[[torch.Tensor, NormOf], torch.Tensor]) -> Any:
        """run(x, norm) of this rank's tokens, laid out as they came.  Before a gather: what is gathered is normed."""
        if not isinstance(x, DTensor):
            return run(x, self.own(norm, isinstance(self.inputs, Shard)))
        placement, part = self.arriving(x, "norm")
        n = run(part, self.own(norm, isinstance(placement, Shard)))
        laid_out: Any = DTensor.from_local(n, self.mesh, [placement], run_check=False)
        if (found := vars(n).get("fp8")) is not None:
            _torch.local_tensor(laid_out).fp8 = found  # pyright: ignore[reportAttributeAccessIssue]
        return laid_out

    def told(self, numerics: Numerics) -> str:
        """How the layer is divided and in what its tokens cross, for a report."""
        recipe, columns = numerics.recipe, self.by == COLUMNS
        layout = self.inputs if columns else self.outputs
        if not isinstance(layout, Shard):
            return f"{self}; no tokens are gathered"
        cast = wire_cast(
            *((recipe.forward[0], recipe.wgrad[1]) if columns else (recipe.dgrad[0], recipe.wgrad[0])), True
        )
        crosses = "in 16 bits, which its wgrad reads" if cast is None else f"as FP8 codes, {cast.granularity}"
        return f"{self}; its {'input' if columns else 'gradient'} is gathered {crosses}"

    def own(self, norm: NormOf, divided: bool = True) -> NormOf:
        """A norm with plain parameters.  divided: it is of this rank's part of a tensor, so that the gradients of its
        parameters are summed over ranks; else of all of it, which every rank computes.
        """
        weight_K, bias_K = (local(parameter) for parameter in (norm.weight_K, norm.bias_K))
        if divided:
            group = self.mesh.get_group()
            weight_K, bias_K = (p if p is None else copied(p, group) for p in (weight_K, bias_K))
        return norm._replace(weight_K=weight_K, bias_K=bias_K)

    def tokens(self, placement: Placement, x: torch.Tensor, name: str) -> Tokens | None:
        """Which tokens a rank has of a tensor in that layout; None: all."""
        if not isinstance(placement, Shard):
            return None
        return Tokens(self.mesh.get_group(), placement.dim % x.dim(), name)

    def enters(self, x: Any, layer: Numerics, needs_w: bool) -> torch.Tensor:
        """All tokens of x for a layer divided by columns: gathered once for all that read this very tensor."""
        placement, plain = self.arriving(x, layer.name)
        if isinstance(plain, Float8Tensor):
            plain = plain.dequantize()  # under a scale of this rank's alone
        tokens = self.tokens(placement, plain, layer.name)
        cast, record = None, torch.is_grad_enabled() or in_backward()
        if tokens is not None:
            cast = wire_cast(layer.recipe.forward[0], layer.recipe.wgrad[1], needs_w and torch.is_grad_enabled())
        kept: Any = self._kept(x, layer)
        layer.source = "" if kept.producer is None else kept.producer.name
        key: Any = (placement, cast, torch.is_grad_enabled())
        if (found := kept.get(key)) is None:
            if tokens is None:
                found = copied(plain, self.mesh.get_group()) if torch.is_grad_enabled() else plain
            else:
                found = gathered(plain, tokens, layer, cast, record)
            kept[key] = found
        elif cast is not None and record:
            layer.observe("input", plain.detach().flatten(0, -2))
        return found

    def leaves(self, y: Any, bias_N: Any, layer: Numerics, needs_w: bool) -> torch.Tensor:
        """The layer's result, of this rank's part of it: summed over ranks for one divided by rows, and laid out."""
        y = y.dequantize() if isinstance(y, Float8Tensor) and not (self.local and self.by == COLUMNS) else y
        if self.by == COLUMNS:
            return self._laid_out(y, Shard(y.dim() - 1))
        tokens = self.tokens(self.outputs, y, layer.name)
        group = self.mesh.get_group()
        y = total(y, group) if tokens is None else scattered(y, tokens, layer, needs_w)
        if bias_N is not None:
            y = AddBias.apply(y, local(bias_N), None if tokens is None else group)
        return y if self.local else DTensor.from_local(y, self.mesh, [self.outputs], run_check=False)

    def _laid_out(self, y: torch.Tensor, has: Shard) -> torch.Tensor:
        wants = self.outputs
        wants = Shard(wants.dim % y.dim()) if isinstance(wants, Shard) else wants
        if wants == has and self.local:
            return y
        made = DTensor.from_local(y, self.mesh, [has], run_check=False).redistribute(placements=[wants])
        return made.to_local() if self.local else made

    def arriving(self, x: Any, name: str) -> tuple[Placement, torch.Tensor]:
        """(layout, this rank's part) of an input; for a layer divided by rows always of its last dimension."""
        last = x.dim() - 1
        if isinstance(x, DTensor) and x.device_mesh != self.mesh:
            raise ParallelError(
                f"{name}: its input is a DTensor on {x.device_mesh}, and the layer is divided over {self.mesh}: give "
                "it a plain tensor, or one on that mesh"
            )
        if self.by == ROWS:
            if not isinstance(x, DTensor):
                if isinstance(self.inputs, Shard) and self.inputs.dim % x.dim() == last:
                    return Shard(last), x
                x = DTensor.from_local(x, self.mesh, [self.inputs], run_check=False)
            return Shard(last), x.redistribute(placements=[Shard(last)]).to_local()
        if not isinstance(x, DTensor):
            if self.inputs != Shard(-1) and self.inputs != Shard(last):
                return self.inputs, x
            x = DTensor.from_local(x, self.mesh, [self.inputs], run_check=False)
        (placement,) = x.placements
        if not isinstance(placement, Shard) or placement.dim == last:
            x, placement = x.redistribute(placements=[Replicate()]), Replicate()
        elif x.shape[placement.dim] % self.mesh.size():
            raise ParallelError(
                f"{name}: its input is a DTensor whose {x.shape[placement.dim]} tokens {self.mesh.size()} ranks do not "
                "divide equally: pad them"
            )
        return placement, x.to_local(grad_placements=[placement])

    def _kept(self, x: Any, numerics: Numerics) -> Operands:
        """What a layer with the same parent has gathered of this very tensor in this forward."""
        state = numerics.state
        held = _torch.local_tensor(x) if isinstance(x, DTensor) else x
        if type(held) not in (*PLAIN, _torch.FakeTensor) or held.is_meta or held.is_inference():
            return Operands()
        return state.forward.operands(held, numerics.layer, state.parents[numerics.layer])


def local(parameter: Any) -> Any:
    """This rank's part of a parameter; a gradient has the parameter's layout."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=parameter.placements)
