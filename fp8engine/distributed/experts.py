"""fe.distributed.ExpertParallel: experts divided over ranks, rows sent to them in FP8, for torch's parallelize_module.

    forward     x  to the experts   codes and scales, which the first grouped matmul reads without a cast
                y  to the tokens    in its own dtype
    backward    dy to the experts   codes and scales; cast again by the last layer, to the same values
                dx to the tokens    in its own dtype

By default a transfer is in FP8 where it costs nothing: it is cast as the layer that reads it would, and that is all the
rounding there is.  By recipe:

    rowwise, blockwise    x, dy    scales are powers of two within a row: cast twice, a row has the same values;
                                   not dy where the last layer has a bias, whose gradient sums dy uncast
    current               x        one scale for the rows of all ranks, from one MAX all-reduce of three numbers
    rowwise_gw_hp         none     its wgrad reads x and dy in 16 bits
    delayed               none     ranks predict scales from what each has seen
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fp8engine import _torch
from fp8engine.autograd.numerics import Numerics
from fp8engine.distributed.agree import agree, check_one_dimension
from fp8engine.distributed.routes import Route, crossed
from fp8engine.distributed.tokens import wire_cast
from fp8engine.errors import UnknownName
from fp8engine.nn.experts import Float8Experts, matrices
from fp8engine.nn.grouped import GroupedLinear
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.recipe import MATMULS, Recipe
from fp8engine.ops.library import in_backward

BY_ROW = Cast.parse("e4m3 1x-1 p2")
TRANSFERS = ("input", "output", "grad_output", "grad_input")  # x, y, dy and dx of the experts


class ExpertParallel(ParallelStyle):
    """Give each rank of a mesh an equal part of the experts, and send rows to where their experts are.

    For `parallelize_module(model, mesh, {"layers.*.mlp.experts": fe.distributed.ExpertParallel()})`, after fe.convert.
    The module is called as before, with this rank's tokens, and gives their results:

        a GroupedLinear, or a module that holds some and is called with (x [T, K], sizes [E])
        experts of a transformers model that fe.convert has converted (forward(x [T, K], chosen [T, k], weights [T, k]))

    Parameters become DTensors divided by expert; names, shapes and checkpoints stay as they are.  Every rank has to
    call the module, with no rows too.  The gradient of an expert is the sum over all ranks' rows: where each rank's
    loss is the mean of its own tokens, divide it by the number of ranks (FSDP2: set_gradient_divide_factor).
    fp8: which of "input", "output", "grad_output", "grad_input" (x, y, dy, dx) are sent in FP8; None: those that lose
    nothing under the recipe (table above).  Others are rounded once more, to E4M3 by row.  A layer in 16 bits sends
    what it is given.
    Raises UnknownName for another word; ParallelError, on every rank, for a module without experts in FP8, one that is
    divided already, a number of experts that the ranks do not divide, and ranks that differ; a call raises what
    `GroupedLinear` does on the rank with bad input, ParallelError on the others.

    >>> ExpertParallel(fp8=["input"])
    ExpertParallel(fp8=['input'])
    """

    def __init__(self, *, fp8: Collection[str] | None = None):
        super().__init__()
        for name in fp8 or ():
            if name not in TRANSFERS:
                raise UnknownName("transfer", name, TRANSFERS)
        self.fp8 = fp8

    def __repr__(self) -> str:
        return f"ExpertParallel(fp8={self.fp8})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_one_dimension("ExpertParallel", device_mesh, "mesh['ep']")
        layers = _layers(module)
        problem = _problem(module, layers, device_mesh.size())
        said: dict[str, object] = {"fp8": None if self.fp8 is None else sorted(self.fp8)}
        for i, layer in enumerate(layers):
            recipe = None if layer.numerics is None else layer.numerics.recipe
            said[f"layer {i}'s recipe"] = recipe and recipe.name
            said[f"layer {i}'s casts"] = recipe and [tuple(map(str, recipe.operands(matmul))) for matmul in MATMULS]
            said[f"layer {i}'s [experts, out_features, in_features]"] = layer.shape
        agree("ExpertParallel", said, device_mesh.get_group(), problem)
        for layer in layers:
            layer.divide(device_mesh, self.src_data_rank)
        method = "of_rows" if isinstance(module, Float8Experts) else "forward"
        setattr(module, method, functools.partial(_Exchange(layers, device_mesh, self.fp8), getattr(module, method)))
        return module


class _Layer:
    """One matrix of experts of a module, and its bias.  numerics: None where it computes in 16 bits."""

    def __init__(self, module: Any, parameters: tuple[str, ...], numerics: Numerics | None, turned: bool):
        self.module, self.parameters, self.numerics = module, parameters, numerics
        e, a, b = getattr(module, parameters[0]).shape
        self.shape = (e, b, a) if turned else (e, a, b)

    @property
    def has_bias(self) -> bool:
        return len(self.parameters) > 1

    def divide(self, mesh: DeviceMesh, source: int | None) -> None:
        """Keep this rank's experts; source: the rank whose values all take, None: each its own."""
        for name in self.parameters:
            parameter = getattr(self.module, name)
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=source)
            self.module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        self.module.forget_copies()
        self.module.divided = True


class _Exchange:
    """What a divided module is called through: rows to the experts, the local module, results back."""

    def __init__(self, layers: list[_Layer], mesh: DeviceMesh, fp8: Collection[str] | None):
        self.layers, self.mesh, self.fp8 = layers, mesh, fp8

    @_torch.outside_of_graphs  # sizes of rows are numbers on the host
    def __call__(self, local: Callable, x_TK: torch.Tensor, sizes: Any) -> torch.Tensor:
        first, slot = self.layers[0], None
        numerics, name = first.numerics, "experts"
        if numerics is not None:
            numerics.state.enter()  # a step that begins here may change recipes
            name = numerics.name
        x, y, dy, dx = casts = [self._cast(name) for name in TRANSFERS]
        # Under its own cast the layer reads codes, which say no amax; under another it casts, and enters its own scale.
        if numerics is not None and x == numerics.recipe.forward[0]:
            slot = numerics.slot("input", record=torch.is_grad_enabled() or in_backward(), count=False)
        told = ", ".join(f"{key} {cast or 'it is'}" for key, cast in zip(TRANSFERS, casts, strict=True))
        kind = f"rows of {x_TK.dtype}, sent as {told}"
        route = Route(x_TK, sizes, (first.shape[0], first.shape[2]), self.mesh.get_group(), kind, name)
        rows = crossed(x_TK, route, True, (x, dx), slot)
        return crossed(local(rows, route.sizes), route, False, (y, dy))

    def _cast(self, name: str) -> Cast | None:
        """How a transfer is cast now, None for its own dtype; recipes may change from step to step."""
        layer = self.layers[0 if name in ("input", "grad_input") else -1]
        if layer.numerics is None or not layer.numerics.recipe.is_fp8:
            return None
        cast = _own_cast(name, layer.numerics.recipe, layer.has_bias)
        return (cast or BY_ROW) if (cast is not None if self.fp8 is None else name in self.fp8) else None


def _own_cast(name: str, recipe: Recipe, has_bias: bool) -> Cast | None:
    """The layer's own cast of what is sent, where it can be made before and nothing is rounded a second time."""
    if name not in ("input", "grad_output") or (name == "grad_output" and has_bias):
        return None  # a bias's gradient sums dy as it was before any cast
    read, again = (recipe.forward[0], recipe.wgrad[1]) if name == "input" else (recipe.dgrad[0], recipe.wgrad[0])
    cast = wire_cast(read, again, True)
    # One scale for all ranks' rows: x is read as codes, by wgrad too; dy arrives as values, which meet another scale.
    return None if cast is not None and cast.per_tensor and (name == "grad_output" or cast.delayed) else cast


def _layers(module: nn.Module) -> list[_Layer]:
    """The matrices of experts of a module, in order."""
    if isinstance(module, Float8Experts):
        own: Any = module
        biases = [(f"{key}_bias",) if own.has_bias else () for key in matrices(own)]
        return [
            _Layer(own, (key, *bias), own.numerics_of(key), own.is_transposed)
            for key, bias in zip(matrices(own), biases, strict=True)
        ]
    found = [layer for layer in module.modules() if isinstance(layer, GroupedLinear)]
    return [_Layer(x, ("weight",) if x.bias is None else ("weight", "bias"), x.numerics, x.turned) for x in found]


def _problem(module: nn.Module, layers: list[_Layer], ranks: int) -> str | None:
    """Why a module cannot be divided, with the remedy; None where it can."""
    kind = type(module).__name__
    if not layers:
        return (
            f"{kind} holds no experts that fe.convert has converted, and no fe.GroupedLinear: name the module of "
            "experts in the plan, and call fe.convert before"
        )
    if any(isinstance(getattr(layer.module, name), DTensor) for layer in layers for name in layer.parameters):
        return f"{kind}: its experts are DTensors, divided already: divide them once, and before fully_shard"
    numbers = sorted({layer.shape[0] for layer in layers})
    if len(numbers) > 1:
        return f"{kind} holds layers of {numbers} experts: name modules of one number of experts each"
    if numbers[0] % ranks:
        return f"{kind}: its {numbers[0]} experts are not divisible by {ranks} ranks: each rank holds as many"
    return None
