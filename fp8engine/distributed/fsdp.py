"""fe.distributed.fsdp: torch's fully_shard on every block and the root, with weights gathered as FP8 codes.

forward of the root   a step begins (recipes may change), amaxes of all weights are joined, in this order
gather of a block     each rank casts its rows under the joined scales and sends one byte an element
the layer             reads the codes; nothing is cast a second time
step of an optimizer  ends the step: until then no gather changes its format, and amaxes are not joined again
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8engine import _torch
from fp8engine._torch import Model, plain_name
from fp8engine.convert.blocks import repeated_blocks
from fp8engine.convert.select import linear_layers, parameter_of
from fp8engine.distributed.agree import agree, layers_of
from fp8engine.distributed.amax import reduce_amax, states_of
from fp8engine.distributed.gathers import GATHER
from fp8engine.distributed.sharded_weight import (
    EXPERTS,
    Scales,
    ShardedWeight,
    never_as_codes,
    not_as_codes,
    numerics_of,
)
from fp8engine.distributed.weight_scales import WeightScales, sample_weights
from fp8engine.errors import ParallelError, ParallelWarning, StrictError
from fp8engine.nn.linear import Float8Module, float8_modules
from fp8engine.nn.serving import Served
from fp8engine.ops import ranks
from fp8engine.ops.library import in_backward
from fp8engine.scaling.sample import outside_of_autocast
from fp8engine.scaling.table import ScalingState

UNCOUNTED = 64  # forwards after which a model whose optimizer is not seen is told so
UNCOMPARED = ("ignored_params", "shard_placement_fn")  # options that are no plain values


def fsdp(
    model: Model,
    *,
    mesh: dist.DeviceMesh | None = None,
    blocks: Sequence[nn.Module] | None = None,
    strict: bool = False,
    **fully_shard_options,
) -> Model:
    """Shard a converted model by torch's `fully_shard`, block by block, and gather its weights as FP8 codes.

    mesh: one dimension (FSDP), or two with names (HSDP: replicas, then shards); None: all processes.
    blocks: modules that are gathered and freed by themselves; None: the repeated blocks (blocks.py).
    strict: raise StrictError, before anything is sharded, where experts would be gathered in high precision.
    fully_shard_options: reshard_after_forward (True or False), mp_policy, offload_policy, ignored_params.  After a
    forward without gradients weights that are codes are freed, under reshard_after_forward=False too, so that whoever
    reads parameters then finds DTensors.
    Returns the model, changed in place.  The loss is that of `fully_shard`'s gather in high precision.  Parameters,
    `state_dict` and checkpoints are torch's ordinary DTensors.  A weight that FP8 codes cannot stand for (its layer
    computes in 16 bits, or other modules read it too) is gathered in high precision; fe.inspect says which, and why.
    Amaxes of activations are joined over all processes of the mesh, as `reduce_amax` does it.
    Raises ParallelError for a model that is not converted, or sharded already; for a mesh without names for its
    two dimensions; for ranks whose layers, recipes or options differ (on every rank).
    """
    from torch.distributed.fsdp import fully_shard

    if not ranks.running():
        raise ParallelError("fe.distributed.fsdp: torch.distributed is not initialised; call init_process_group first")
    if mesh is not None and (mesh.ndim > 2 or (mesh.ndim == 2 and not mesh.mesh_dim_names)):
        raise ParallelError(
            f"fe.distributed.fsdp: the mesh has {mesh.ndim} dimensions, named {mesh.mesh_dim_names}: give one "
            "dimension, such as mesh['dp'], or two with names, (replicas, shards), as fully_shard asks"
        )
    layers, problem = float8_modules(model), None
    try:  # what one rank can see by itself, of which the others learn below
        _check(model, layers, fully_shard_options)
        if strict:
            ignored = {id(parameter) for parameter in fully_shard_options.get("ignored_params") or ()}
            own = ((layer, *each) for layer in layers for each in layer.named_parameters(recurse=False))
            sharded = {(id(layer), key) for layer, key, parameter in own if id(parameter) not in ignored}
            _tell_of_experts("fe.distributed.fsdp", model, sharded, strict)
    except (ParallelError, StrictError) as error:
        problem = error
    blocks = repeated_blocks(model) if blocks is None else list(blocks)
    everyone = None if mesh is None else group_of(mesh)
    _check_alike(model, blocks, everyone, fully_shard_options, problem)
    if mesh is None:
        mesh = dist.init_device_mesh(_device_type(layers), (dist.get_world_size(),))
        everyone = group_of(mesh)
    if not blocks:
        warnings.warn(
            f"fe.distributed.fsdp: {type(model).__name__} has no repeated blocks: "
            "it is gathered as one; name blocks=[...]",
            ParallelWarning,
            stacklevel=2,
        )
    for block in blocks:
        fully_shard(block, mesh=mesh, **fully_shard_options)
    fully_shard(model, mesh=mesh, **fully_shard_options)
    gather_fp8(model)
    reduce_amax(model, everyone)  # scales are predicted from the largest amaxes of all ranks
    return model


def gather_fp8(model: Model, *, strict: bool = False) -> Model:
    """Gather the weights of a converted model as FP8 codes that other code has sharded by `fully_shard`.

    For Accelerate, torchtitan and scripts that call fully_shard themselves; `fsdp` calls it.  Returns the model.
    strict: raise StrictError where experts would be gathered in high precision, of which else a ParallelWarning tells.
    Raises ParallelError for a model that is not converted, not sharded, or gathered so already; and where its weights
    are sharded over several groups of ranks.  Amaxes of activations are not joined: `reduce_amax` does that, which has
    to be called under "auto", whose decisions ranks would else make apart: the first forward raises ParallelError.
    """
    from torch.distributed.fsdp import FSDPModule

    here = "fe.distributed.gather_fp8"
    _check_converted(here, model)
    if any(GATHER in vars(module) for module in model.modules()):
        raise ParallelError(f"{here}: {type(model).__name__} is gathered in FP8 already: call it, or fsdp, once")
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    parameters = [parameter for module in sharded for parameter in _torch.sharded_parameters(module)]
    if not parameters:
        raise ParallelError(f"{here}: fully_shard was called on no part of {type(model).__name__}; call it before")
    for each in parameters:
        if each.post_forward_mesh_info not in (None, each.mesh_info):
            _refuse_partial_reshard(here, each.post_forward_mesh_info.shard_mesh_size)
    groups = {parameter.shard_mesh_from_root.get_group() for parameter in parameters}
    if len(groups) > 1:
        raise ParallelError(f"{here}: weights are sharded over {len(groups)} groups of ranks; one is supported")
    owners = (parameter._module_info for parameter in parameters)
    _tell_of_experts(here, model, {(id(owner.module), owner.param_name) for owner in owners}, strict)
    gather = Gather(sharded, states_of(model))
    setattr(model, GATHER, gather)
    gather.watch(model)
    return model


class Gather:
    """All weights of a model that are gathered as FP8 codes, and the scales that ranks share.

    modules: that fully_shard was called on.  states: of the converted layers.  parameters: all that are sharded.
    weights: those that codes can stand for.  scales: their table.  current: whether a forward of the root, which has
    joined amaxes, is under way.
    """

    def __init__(self, modules: Sequence[nn.Module], states: list[ScalingState]):
        self.states, self.current = states, False
        self.parameters = [(module, each) for module in modules for each in _torch.sharded_parameters(module)]
        _, first = self.parameters[0]
        self.scales = WeightScales(first.shard_mesh_from_root.get_group(), first.device)
        self.versions: list[tuple] = []  # of the weights, when the last forward with gradients began
        self.uncounted = 0  # forwards with gradients before the first optimizer step
        self.weights = [
            ShardedWeight(module, parameter, numerics, self.scales_of)
            for module, parameter in self.parameters
            if (numerics := numerics_of(parameter)) is not None and not never_as_codes(parameter)
        ]
        for weight in self.weights:
            weight.follow()

    def as_codes(self) -> list[ShardedWeight]:
        """The weights that are gathered as codes now."""
        return [weight for weight in self.weights if weight.chosen is not None]

    def scales_of(self, weight: ShardedWeight) -> Scales:
        """A weight's scales.  Outside of the root's forward (a block that is called by itself, `unshard()`) amaxes are
        joined anew: weights may have changed since, which no counter tells.
        """
        if weight not in self.scales.found or not (self.current or in_backward()):
            self.scales.join(self.as_codes())
        return self.scales.found[weight]

    def watch(self, model: nn.Module) -> None:
        """Join the amaxes when a forward of the model begins, before fully_shard gathers the root's own weights."""
        model.register_forward_pre_hook(self._begin, prepend=True)
        for state in self.states:
            _torch.call_first(model, state.begin_forward)  # a step begins: recipes may change
        model.register_forward_hook(self._end, always_call=True)
        _torch.around_methods(model, self._begin, self._end)
        me = weakref.ref(self)  # torch keeps the hook

        @_torch.outside_of_graphs
        def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
            gather = me()
            if gather is not None:
                gather.after_step(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: if it has parameters of this model, a step has ended."""
        mine = {id(parameter.sharded_param) for _, parameter in self.parameters}
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            for state in self.states:
                state.optimizer_steps += 1

    def _begin(self, *_: object) -> None:
        """A forward begins, or is run again in backward.

        Weights stand until an optimizer steps, or torch counts a write to them.  Where no optimizer of torch has ever
        stepped, code of the user's own may write what torch does not count; around evaluations too (weights that are
        averaged, and put back).
        """
        if not in_backward():
            for state in self.states:  # of layers that have no root: before their weights' scales are read
                state.enter()
        for weight in self.weights:
            weight.attach()
        stepped, trains = any(state.optimizer_steps for state in self.states), torch.is_grad_enabled()
        if not in_backward():
            self.current, same_step = True, all(state.must_wait for state in self.states)
            if not same_step:
                for weight in self.weights:
                    weight.follow()
            versions = [weight.version() for weight in self.weights]
            if same_step and versions == self.versions and stepped and trains:
                self.scales.predict()
            else:
                self.scales.join(self.as_codes())
            self.versions = versions if trains else []
            if trains or any(state.decides_next for state in self.states):
                with outside_of_autocast(self.states[0].device):
                    sample_weights(self.as_codes(), self.scales.group)
            self._tell(trains and not stepped)
        if trains:
            for state in self.states:
                state.trained = state.optimizer_steps

    def _tell(self, uncounted: bool) -> None:
        """Say once that recipes stay as they are because no step has ended."""
        self.uncounted += uncounted
        waits = any(state.must_wait and state.controller for state in self.states)
        if uncounted and self.uncounted == UNCOUNTED and waits:
            warnings.warn(
                f"fe.distributed.fsdp: auto changes recipes between the steps of an optimizer of torch, and none has "
                f"stepped these parameters in {UNCOUNTED} forwards: call fe.weights_changed(model) after each update",
                ParallelWarning,
                stacklevel=2,
            )

    def _end(self, *_: object) -> None:
        """A forward has ended.  One without gradients leaves no weight as codes, which torch's root would keep so."""
        self.current &= in_backward()
        if not torch.is_grad_enabled():
            for module in {weight.module for weight in self.weights}:
                cast(Any, module).reshard()
        auto = any(state.controller and not (state.controller.plan or state.ranks) for state in self.states)
        if auto and dist.get_world_size(self.scales.group) > 1:
            raise ParallelError(
                "fe.distributed.gather_fp8: under auto each rank would decide by itself, and weights would be gathered "
                "in several formats: call fe.distributed.reduce_amax(model) before the first forward"
            )


def _check(model: nn.Module, layers: list[Float8Module], options: dict) -> None:
    """What one rank can see by itself."""
    here = "fe.distributed.fsdp"
    _check_converted(here, model)
    for name, module in model.named_modules():
        if found := _torch.wrapper_of(module):
            where = f"its part {name!r}" if name else "the model"
            raise ParallelError(f"{here}: {where} is under {found} already: convert, shard once, then wrap")
    again = options.get("reshard_after_forward")
    if isinstance(again, int) and not isinstance(again, bool):
        _refuse_partial_reshard(here, again)
    if options.get("shard_placement_fn") is not None and any(not_as_codes(layer.numerics) == "" for layer in layers):
        warnings.warn(
            f"{here}: weights that shard_placement_fn shards along another dimension than 0 are "
            "gathered in high precision",
            ParallelWarning,
            stacklevel=3,
        )


def _check_converted(here: str, model: nn.Module) -> None:
    """Raise ParallelError for a model that is not converted, and for one that stores weights as FP8 codes alone."""
    if not float8_modules(model):
        raise ParallelError(f"{here}: {type(model).__name__} has no converted layers; call fe.convert first")
    stored = [plain_name(model, name) for name, module in model.named_modules() if isinstance(module, Served)]
    if stored:
        raise ParallelError(
            f"{here}: {len(stored)} weights ({stored[0]} the first) are FP8 codes alone, which fully_shard cannot "
            "divide with their scales: fe.convert the frozen model without frozen='fp8'; its weights are gathered as "
            "codes too"
        )


def _tell_of_experts(here: str, model: nn.Module, sharded: set[tuple[int, str]], strict: bool) -> None:
    """Say, on the first rank, which experts in FP8 are gathered in high precision.

    sharded: (id of a layer, name of a parameter).  Raises StrictError on every rank instead, where that is not allowed.
    """
    found = []
    for name, layer, shape in linear_layers(model):
        key = parameter_of(name, layer)
        numerics = layer.numerics_of(key) if isinstance(layer, Float8Module) and (id(layer), key) in sharded else None
        if numerics is not None and numerics.recipe.is_fp8 and len(shape) != 2:
            found.append(plain_name(model, name))
    if not found:
        return
    named = f"{len(found)} weights ({found[0]}{f' and {len(found) - 1} more' * (len(found) > 1)})"
    if strict:
        raise StrictError(f"strict=True: {here}: {named} would be gathered in high precision: {EXPERTS}")
    if ranks.first():
        warnings.warn(f"{here}: {named} are gathered in high precision: {EXPERTS}", ParallelWarning, stacklevel=3)


def _refuse_partial_reshard(here: str, ranks: int) -> NoReturn:
    """fully_shard makes a parameter of the codes' bytes, and has no gather of weights with hooks from some ranks."""
    raise ParallelError(
        f"{here}: reshard_after_forward={ranks} keeps weights on {ranks} ranks after forward, which fully_shard does "
        "not do for weights that are gathered in another format: give True or False"
    )


def _check_alike(
    model: nn.Module,
    blocks: list[nn.Module],
    group: dist.ProcessGroup | None,
    options: dict,
    problem: ParallelError | StrictError | None,
) -> None:
    """Raise ParallelError on every rank where ranks were called differently, or one has a problem, which it raises."""
    here = "fe.distributed.fsdp"
    names = {id(module): name for name, module in model.named_modules()}
    names_of = {id(parameter): name for name, parameter in model.named_parameters()}
    described = {
        **layers_of(model),
        **{f"block {names.get(id(block), '?')}": type(block).__name__ for block in blocks},
        **{f"option {name}": str(value) for name, value in options.items() if name not in UNCOMPARED},
        # Sorted: ranks go through a set of parameters in different orders.
        "option ignored_params": sorted(names_of[id(each)] for each in options.get("ignored_params") or ()),
    }
    try:
        agree(here, described, group, problem and str(problem).removeprefix(f"{here}: "))
    except ParallelError as told:
        raise (problem or told) from None


def _device_type(layers: list[Float8Module]) -> str:
    where = next(parameter.device.type for layer in layers for parameter in layer.parameters(recurse=False))
    if where != "meta":
        return where
    return "cuda" if torch.cuda.is_available() else "cpu"


def group_of(mesh: dist.DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of a mesh."""
    return (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
