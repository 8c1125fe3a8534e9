"""A layer divided over ranks: what stands in for `linear`, `norm_linear` and `norm_mlp` where weights are DTensors.

    columns   each rank has N/w rows of the weight:  y[.., N/w] = gather(x) @ w^T + b
    rows      each rank has K/w columns of it:       y = scatter(x[.., K/w] @ w^T) + b

Where tokens are not divided, `gather` is a copy whose backward sums dx over ranks, and `scatter` a sum over ranks.
Layers of one parent that read the same tensor (q, k, v; gate, up) gather it once, and their dx crosses back once.
A norm before the gather runs on this rank's tokens, and its parameters' gradients are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fp8engine import _torch
from fp8engine.autograd.linear import check, linear
from fp8engine.autograd.mlp import norm_mlp
from fp8engine.autograd.norm import norm as norm_in_16_bits
from fp8engine.autograd.norm_linear import norm_linear
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.parts import Layer, Memory, NormOf, Part
from fp8engine.distributed.tokens import AddBias, Copy, Gather, Scatter, Tokens, Total, granularity_of, wire_cast
from fp8engine.errors import ParallelError
from fp8engine.ops.library import PLAIN, in_backward
from fp8engine.ops.reference.activations import ACTIVATIONS
from fp8engine.ops.tensor import Float8Tensor

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

    def __str__(self) -> str:
        return f"{self.by} over {self.mesh.size()} ranks"

    @_torch.outside_of_graphs
    def linear(self, x: Any, weight_NK: Any, bias_N: Any, numerics: Numerics) -> torch.Tensor:
        """`autograd.linear` of a layer whose parameters are DTensors."""
        needs_w = weight_NK.requires_grad
        if self.by == COLUMNS:
            own = local(weight_NK), local(bias_N)
            check(x, *own, numerics.name)  # before anything is sent
            _begin([numerics])
            whole = self.enters(x, [numerics], needs_w)
            return self.leaves(linear(whole, *own, numerics, True), None, numerics, needs_w)
        _begin([numerics])
        _, part = self.arriving(x, numerics.name)
        return self.leaves(linear(part, local(weight_NK), None, numerics, True), bias_N, numerics, needs_w)

    @_torch.outside_of_graphs
    def norm_linear(
        self, x: Any, norm: NormOf | None, layers: Sequence[Layer], memory: Memory
    ) -> tuple[torch.Tensor, ...]:
        """`autograd.norm_linear`: where tokens are gathered, the norm is rounded to 16 bits in between."""
        every = [layer.numerics for layer in layers]
        _check_together(every, [COLUMNS] * len(every))
        _begin(every)
        whole, norm_left = self._normed(x, norm, layers, memory)
        parts = _own_parts(layers)
        if norm_left is None:
            made = [linear(whole, *layer, part=True) for layer in parts]
        else:
            made = norm_linear(whole, norm_left, parts, memory)
        return tuple(n.shard.leaves(y, None, n, True) for y, n in zip(made, every, strict=True))

    @_torch.outside_of_graphs
    def norm_mlp(
        self, x: Any, norm: NormOf | None, firsts: Sequence[Layer], second: Layer, how: tuple[str, Memory]
    ) -> torch.Tensor:
        """`autograd.norm_mlp` of first layers divided by columns and a second divided by rows.  how: kind, memory."""
        every = [layer.numerics for layer in (*firsts, second)]
        if len(firsts) == 1 and ACTIVATIONS[how[0]].gated:
            raise ParallelError(
                f"{every[0].name}: its rows are [gate | up], of which equal parts would be other layers: use layers "
                "of their own for gate and up, as fe.TransformerLayer has them"
            )
        _check_together(every, [COLUMNS] * len(firsts) + [ROWS])
        _begin(every)
        whole, norm_left = every[0].shard._normed(x, norm, firsts, how[1])
        weight_NK, bias_N, numerics = second
        parts = _own_parts(firsts)
        first = parts[0] if len(parts) == 1 else (parts[0], parts[1])
        z = norm_mlp(whole, norm_left, first, Part(local(weight_NK), None, numerics), *how)
        return self.leaves(z, bias_N, numerics, weight_NK.requires_grad)

    def _normed(
        self, x: Any, norm: NormOf | None, layers: Sequence[Layer], memory: Memory
    ) -> tuple[torch.Tensor, NormOf | None]:
        """(what the layers' function is given, the norm that it still has to run): a norm before a gather runs here."""
        every, needs_w = [layer.numerics for layer in layers], any(layer.weight_NK.requires_grad for layer in layers)
        if norm is None:
            return self.enters(x, every, needs_w), None
        placement, part = self.arriving(x, every[0].name)
        if not isinstance(placement, Shard):
            return self.enters(x, every, needs_w), self.own(norm)
        n = norm_in_16_bits(part, cast(NormOf, self.own(norm)), memory)
        return self.enters(DTensor.from_local(n, self.mesh, [placement], run_check=False), every, needs_w), None

    def told(self, numerics: Numerics) -> str:
        """How the layer is divided and in what its tokens cross, for a report."""
        plan, columns = numerics.plan, self.by == COLUMNS
        layout = self.inputs if columns else self.outputs
        if not isinstance(layout, Shard):
            return f"{self}; no tokens are gathered"
        how = wire_cast(*((plan.forward[0], plan.wgrad[1]) if columns else (plan.dgrad[0], plan.wgrad[0])), True)
        crosses = "in 16 bits, which its wgrad reads" if how is None else f"as FP8 codes, {granularity_of(how)}"
        return f"{self}; its {'input' if columns else 'gradient'} is gathered {crosses}"

    def own(self, norm: NormOf | None) -> NormOf | None:
        """A norm of this rank's part of a tensor: its parameters' gradients are summed over ranks."""
        if norm is None:
            return None
        return norm._replace(weight_K=self._summed(norm.weight_K), bias_K=self._summed(norm.bias_K))

    def of_part(self, norm: NormOf) -> NormOf:
        """A norm of a residual: of this rank's tokens where they are divided, else of all."""
        if isinstance(self.inputs, Shard):
            return cast(NormOf, self.own(norm))
        return norm._replace(weight_K=local(norm.weight_K), bias_K=local(norm.bias_K))

    def _summed(self, parameter: Any) -> torch.Tensor | None:
        return None if parameter is None else Copy.apply(local(parameter), self.mesh.get_group())

    def tokens(self, placement: Placement, x: torch.Tensor, name: str) -> Tokens | None:
        """Which tokens a rank has of a tensor in that layout; None: all."""
        if not isinstance(placement, Shard):
            return None
        return Tokens(self.mesh.get_group(), placement.dim % x.dim(), name)

    def enters(self, x: Any, layers: Sequence[Numerics], needs_w: bool) -> torch.Tensor:
        """All tokens of x for layers divided by columns: gathered once for all that read this very tensor."""
        first = layers[0]
        placement, plain = self.arriving(x, first.name)
        if isinstance(plain, Float8Tensor):
            plain = plain.dequantize()  # under a scale of this rank's alone
        tokens = self.tokens(placement, plain, first.name)
        how, record = None, torch.is_grad_enabled() or in_backward()
        if tokens is not None:
            wgrad = needs_w and torch.is_grad_enabled()
            casts = {wire_cast(n.plan.forward[0], n.plan.wgrad[1], wgrad) for n in layers}
            how = casts.pop() if len(casts) == 1 else None
        kept = self._kept(x, first)
        key: Any = (placement, how, torch.is_grad_enabled())
        if (found := kept.get(key)) is None:
            if tokens is None:
                found = Copy.apply(plain, self.mesh.get_group()) if torch.is_grad_enabled() else plain
            else:
                found = Gather.apply(plain, tokens, first, how, record)
            kept[key] = found
        elif how is not None and record:
            first.observe("input", plain.detach().flatten(0, -2))
        return found

    def leaves(self, y: Any, bias_N: Any, layer: Numerics, needs_w: bool) -> torch.Tensor:
        """The layer's result, of this rank's part of it: summed over ranks for one divided by rows, and laid out."""
        y = y.dequantize() if isinstance(y, Float8Tensor) and not (self.local and self.by == COLUMNS) else y
        if self.by == COLUMNS:
            return self._laid_out(y, Shard(y.dim() - 1))
        tokens = self.tokens(self.outputs, y, layer.name)
        group = self.mesh.get_group()
        y = Total.apply(y, group) if tokens is None else Scatter.apply(y, tokens, layer, needs_w)
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

    def _kept(self, x: Any, numerics: Numerics) -> dict:
        """What a layer with the same parent has gathered of this very tensor in this forward."""
        state = numerics.state
        parent, held = state.parents[numerics.layer], _torch.local_tensor(x) if isinstance(x, DTensor) else x
        if parent is None or type(held) not in (*PLAIN, _torch.FakeTensor) or held.is_meta or held.is_inference():
            return {}
        return state.forward.operands(held, numerics.layer, parent)


def local(parameter: Any) -> Any:
    """This rank's part of a parameter; a gradient has the parameter's layout."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=parameter.placements)


def _own_parts(layers: Sequence[Layer]) -> list[Part]:
    return [Part(local(weight), local(bias), numerics) for weight, bias, numerics in layers]


def _begin(layers: Sequence[Numerics]) -> None:
    """A step may begin with these layers, and change their recipes: before anything is cast for them."""
    for numerics in layers:
        numerics.state.enter()


def _check_together(layers: Sequence[Numerics], by: Sequence[str]) -> None:
    """Raise ParallelError where layers that run as one are not divided alike."""
    for numerics, wanted in zip(layers, by, strict=True):
        shard = numerics.shard
        alike = shard is not None and shard.by == wanted and (wanted == ROWS or shard.inputs == layers[0].shard.inputs)
        if not alike:
            style = "Colwise" if wanted == COLUMNS else "Rowwise"
            names = ", ".join(each.name for each in layers)
            raise ParallelError(
                f"{numerics.name}: it runs as one with {names}, and is {shard or 'not divided'}: name all of them in "
                f"the plan, {numerics.name} as fe.distributed.{style}, with the same input_layouts"
            )
