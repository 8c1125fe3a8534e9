"""Colwise and Rowwise: how torch's `parallelize_module` divides a converted layer, as ParallelStyles.

    Colwise   weight [N, K] and bias [N] divided along N        DTensors, Shard(0)
    Rowwise   weight [N, K] divided along K, bias replicated    DTensors, Shard(1) and Replicate()

Where input_layouts (Colwise) or output_layouts (Rowwise) name a dimension of tokens, the sequence or the batch, as
torch's SequenceParallel does, ranks hold a part of the tokens in between: shard.py.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fp8engine.autograd.features import RANKS, STORED, SUMS
from fp8engine.distributed.agree import check_one_dimension
from fp8engine.distributed.shard import COLUMNS, ROWS, Sharding
from fp8engine.errors import ParallelError
from fp8engine.nn.linear import Float8Module, Linear
from fp8engine.numerics.recipe import ROLES

# Layers of Hugging Face's families and of fe.LayerNormMLP that hold several matrices, stacked along N.
STACKED = ("gate_up", "gate_up_proj", "qkv_proj", "Wqkv")


class _Style(ParallelStyle):
    """What Colwise and Rowwise share: checks, parameters as DTensors, and the layer's sharding."""

    by: str
    weight: Placement
    bias: Placement
    usual: tuple[Placement, Placement]  # layouts of input and result where the user names none

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        super().__init__()
        self.inputs, self.outputs = input_layouts or self.usual[0], output_layouts or self.usual[1]
        self.local = use_local_output

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.inputs}, output_layouts={self.outputs}, "
            f"use_local_output={self.local})"
        )

    def problem(self, module: nn.Module, ranks: int, name: str = "") -> str | None:
        """Why a module cannot be divided so, with the remedy; None where it can."""
        style = type(self).__name__
        name = name or (module.numerics.name if isinstance(module, Float8Module) else type(module).__name__)
        if isinstance(module, nn.Linear) and isinstance(module.weight, DTensor):
            return (
                f"{name}: its weight is divided already, {module.weight.placements}: name each layer in one plan, once"
            )
        if not isinstance(module, Float8Module):
            torchs = "ColwiseParallel" if self.by == COLUMNS else "RowwiseParallel"
            return (
                f"{name}: {style} divides layers that fe.convert has converted, and it is a {type(module).__name__}: "
                f"call fe.convert before, or use torch's {torchs} for a layer that is to stay as it is"
            )
        wanted = (RANKS,) if self.by == COLUMNS else (RANKS, SUMS)
        if hasattr(module, "numerics") and (why := module.numerics.why_not(*wanted)):
            return why
        if not isinstance(module, Linear):
            return (
                f"{name}: {style} divides fe.Linear, and it is a {type(module).__name__}: name the layers in it, or "
                "leave it out of the plan"
            )
        if self.by == COLUMNS and name.rpartition(".")[2] in STACKED:
            return (
                f"{name}: its rows are several matrices stacked, [gate | up] or [q | k | v], and equal parts of them "
                "would be other layers: use a model that has a layer for each, as fe.TransformerLayer"
            )
        for what, layout in (("input_layouts", self.inputs), ("output_layouts", self.outputs)):
            if not (isinstance(layout, (Shard, Replicate))):
                return f"{name}: {style}({what}={layout}): want Replicate() or Shard(dimension)"
        features = "out_features" if self.by == COLUMNS else "in_features"
        if getattr(module, features) % ranks:
            return (
                f"{name}: {features}={getattr(module, features)} is not divisible by {ranks} ranks: {style} gives "
                "every rank an equal part; use fewer ranks, or leave the layer out of the plan"
            )
        return None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_one_dimension(type(self).__name__, device_mesh, "mesh['tp']")
        if found := self.problem(module, device_mesh.size()):
            raise ParallelError(found)
        layer: Any = module
        for key, placement in (("weight", self.weight), ("bias", self.bias)):
            if (parameter := layer._parameters[key]) is not None:
                whole = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=self.src_data_rank)
                layer.register_parameter(key, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        self.divide(layer, device_mesh)
        return layer

    def divide(self, layer: Linear, mesh: DeviceMesh) -> None:
        """Let the layer run as its parameters are divided."""
        # Its whole input, or the whole gradient of its result, has one amax on every rank without a collective.
        inputs = isinstance(self.inputs, Shard) or self.by == ROWS
        gradients = self.by == COLUMNS or isinstance(self.outputs, Shard)
        roles = [role for role, divided in zip(ROLES, (inputs, True, gradients), strict=True) if divided]
        layer.numerics.switch(Sharding(mesh, self.by, self.inputs, self.outputs, self.local))
        layer.numerics.state.divide(layer.numerics.layer, roles, mesh.get_group().group_name)
        layer.numerics.candidate &= not layer.numerics.why_not(STORED)


class Colwise(_Style):
    """Divide a converted Linear's result by columns: torch's ColwiseParallel, with the input gathered as FP8 codes.

    input_layouts: Replicate(), the whole input on every rank; or Shard(d), a part of dimension d, whose tokens are
    gathered.  output_layouts: Shard(-1), or Replicate() or Shard(d), which gathers the result in its own dtype.
    use_local_output: a plain tensor; else a DTensor, such as `loss_parallel` takes.

    The layers that read the same tensor (q, k, v; gate, up) gather it once.  What crosses is one byte an element where
    the recipe's wgrad can read those codes, else 16 bits ("rowwise_gw_hp", layers that auto left in 16 bits).
    Applying it raises ParallelError for a layer that it cannot divide; see `tensor_parallel`, which checks first.

    >>> from torch.distributed.tensor import Shard
    >>> Colwise(input_layouts=Shard(1))
    Colwise(input_layouts=S(1), output_layouts=S(-1), use_local_output=True)
    """

    by, weight, bias, usual = COLUMNS, Shard(0), Shard(0), (Replicate(), Shard(-1))


class Rowwise(_Style):
    """Divide a converted Linear's sum by columns of its input: torch's RowwiseParallel, with dy gathered as FP8 codes.

    input_layouts: Shard(-1), what Colwise returns; or Replicate(), of which each rank takes its part.
    output_layouts: Replicate(), summed over ranks; or Shard(d): each rank keeps a part of dimension d, and the backward
    gathers its gradient, cast to FP8 as the recipe's dgrad reads it.  use_local_output: as of `Colwise`.

    Results of the ranks are rounded to 16 bits before they are summed, and the bias is added after.
    Applying it raises ParallelError as `Colwise` does.

    >>> Rowwise()
    Rowwise(input_layouts=S(-1), output_layouts=R, use_local_output=True)
    """

    by, weight, bias, usual = ROWS, Shard(1), Replicate(), (Shard(-1), Replicate())
