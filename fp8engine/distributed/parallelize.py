"""fe.distributed.tensor_parallel, which divides a converted model by a plan, or raises on every rank."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from fp8engine._torch import Model
from fp8engine.convert.blocks import repeated_blocks
from fp8engine.distributed.agree import agree, check_one_dimension, layers_of
from fp8engine.distributed.shard import COLUMNS
from fp8engine.distributed.styles import _Style
from fp8engine.errors import ParallelError, UnknownName
from fp8engine.nn.attention import Attention
from fp8engine.nn.layernorm_mlp import LayerNormMLP
from fp8engine.nn.linear import Float8Module, float8_modules
from fp8engine.nn.produce import ProducingMlp, ProducingNorm, alone
from fp8engine.nn.transformer import MLP

# Names of the layers of q and k in transformers' attentions, and of how many features a head has.
Q_AND_K = (("q_proj", "k_proj"), ("query", "key"), ("query_proj", "key_proj"), ("q", "k"), ("q_lin", "k_lin"))
HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim")
TORCHS = {ColwiseParallel: "Colwise", RowwiseParallel: "Rowwise"}


def tensor_parallel(
    model: Model, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle], *, dim: str | None = None
) -> Model:
    """Divide the layers of a converted model over the ranks of `mesh`, in place; returns the model.

    plan: {"layers.*.mlp.up_proj": Colwise(...)}, names or globs of parts to styles: Colwise and Rowwise for converted
    layers, torch's own (SequenceParallel, PrepareModuleInput, ...) for others.  mesh: of one dimension; of a mesh with
    several, `dim` names one.  Every rank of the mesh calls it, with the same model and plan.

    Nothing is divided unless everything fits.  Raises ParallelError on every rank for a mesh that has no such
    dimension, or several of which none is named; a name in the plan that no part has; a layer that is not converted,
    is divided already, or does not divide equally; ranks whose plans, recipes or layers differ.

    >>> from torch.distributed.tensor import Shard
    >>> from fp8engine.distributed.styles import Colwise, Rowwise
    >>> plan = {"layers.*.up": Colwise(input_layouts=Shard(1)), "layers.*.down": Rowwise(output_layouts=Shard(1))}
    >>> model = tensor_parallel(model, init_device_mesh("cuda", (8,)), plan)  # doctest: +SKIP
    """
    mesh = _one_dimension(mesh, dim)
    problems = list(_problems(model, plan, mesh.size()))[:8]
    problem = "; ".join([*problems, "nothing was divided"]) if problems else None
    said = layers_of(model) | {f"the plan's {pattern!r}": str(style) for pattern, style in plan.items()}
    agree("tensor_parallel", said, mesh.get_group(), problem)
    parallelize_module(model, mesh, dict(plan))  # in place
    for block in repeated_blocks(model) or [model]:
        _sum_over_ranks(block)
    return model


def _sum_over_ranks(block: nn.Module) -> None:
    """Let the norms of a block whose layers gather tokens sum the gradients of their parameters over ranks.

    Norms that fe.convert has recognised, as wide as what such a layer reads; not those that the plan has made DTensors.
    """
    normed = {}
    for layer in float8_modules(block):
        if (shard := layer.numerics.shard) is not None and shard.by == COLUMNS and isinstance(shard.inputs, Shard):
            normed[getattr(layer, "in_features", 0)] = shard.normed
    for norm in block.modules():
        if isinstance(norm, ProducingNorm) and (weight := norm._parameters.get("weight")) is not None:
            norm.recognised.around = alone if isinstance(weight, DTensor) else normed.get(len(weight), alone)


def _one_dimension(mesh: DeviceMesh, dim: str | None) -> DeviceMesh:
    names = mesh.mesh_dim_names
    if dim is not None:
        if dim not in (names or ()):
            raise ParallelError(
                f"tensor_parallel: the mesh has no dimension {dim!r}, only {names or 'dimensions without names'}: name "
                "it in init_device_mesh(..., mesh_dim_names=...)"
            )
        mesh = mesh[dim]
    check_one_dimension("tensor_parallel", mesh, "mesh['tp'], or its name as dim='tp'")
    return mesh


def _matches(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """The parts that parallelize_module applies a plan's entry to: one glob for each level of names."""
    wanted = pattern.split(".")
    for name, module in model.named_modules():
        parts = name.split(".")
        if len(parts) == len(wanted) and all(map(fnmatch.fnmatch, parts, wanted)):
            yield name, module


def _problems(model: nn.Module, plan: Mapping[str, ParallelStyle], ranks: int) -> Iterator[str]:
    """What is wrong with the plan on this rank; each a sentence for an error."""
    if not plan:
        yield "the plan names no layer: {'layers.*.up_proj': fe.distributed.Colwise(), ...}"
    if not any(isinstance(module, Float8Module) for module in model.modules()):
        yield f"{type(model).__name__} has no converted layers: call fe.convert first"
        return
    divided: dict[str, str] = {}
    for pattern, style in plan.items():
        found = list(_matches(model, pattern))
        if not found:
            names = [name for name, module in model.named_modules() if isinstance(module, Float8Module)]
            yield str(UnknownName("part in the plan", pattern, names))
        for name, module in found:
            if isinstance(style, _Style):
                if problem := style.problem(module, ranks, name):
                    yield problem
                if name in divided:
                    yield f"{name}: {divided[name]!r} and {pattern!r} of the plan both divide it: name it once"
                divided[name] = pattern
            elif type(style) in TORCHS and isinstance(module, Float8Module) and module.numerics.recipe.is_fp8:
                ours = TORCHS[type(style)]
                yield f"{name}: torch's {type(style).__name__} divides no FP8 layer: use fe.distributed.{ours}"
    styles: dict[str, Any] = {name: plan[pattern] for name, pattern in divided.items()}
    yield from _heads(model, styles, ranks)
    yield from _halves(model, styles)


def _halves(model: nn.Module, styles: Mapping[str, Any]) -> Iterator[str]:
    """Layers of one attention or MLP that are left whole where others pass on, or take, this rank's part of a result.

    styles: Colwise or Rowwise of the layers in the plan; those that are divided already have a Sharding, alike.
    """
    numerics = {name: module.numerics for name, module in model.named_modules() if isinstance(module, Float8Module)}
    found = {name: each.shard for name, each in numerics.items() if each.shard is not None} | dict(styles)
    for name, module in model.named_modules():
        together: tuple[str, ...] = ()
        if isinstance(module, Attention):
            together = ("q_proj", "k_proj", "v_proj", "o_proj")
        elif isinstance(module, MLP | LayerNormMLP):
            together = tuple(key for key, child in module.named_children() if isinstance(child, Float8Module))
        elif isinstance(module, ProducingMlp):
            together = tuple(".".join(path) for path in module.recognised.layers)
        names = [f"{name}.{key}".strip(".") for key in together]
        left = [key for key in names if key not in found]
        layouts = (each.outputs if each.by == COLUMNS else each.inputs for key in names if (each := found.get(key)))
        if left and Shard(-1) in layouts:
            style = "Rowwise" if left == names[-1:] else "Colwise"
            yield (
                f"{left[0]}: it works on the same parts as {', '.join(names)}, and is not divided: name all of them in "
                f"the plan, {left[0]} as fe.distributed.{style}"
            )


def _heads(model: nn.Module, styles: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """Attentions whose heads the ranks do not divide.  styles: Colwise or Rowwise of the layers in the plan."""
    by_columns = {name for name, style in styles.items() if style.by == COLUMNS}
    for name, (q, k, *counts) in _attentions(model).items():
        if {q, k} & by_columns and any(count % ranks for count in counts):
            yield f"{name}: {counts[0]} heads, {counts[1]} of keys, are not divisible by {ranks} ranks: use fewer"


def _attentions(model: nn.Module) -> dict[str, tuple[str, str, int, int]]:
    """By name, fe.Attention and transformers' attentions: names of the layers of q and k, heads, heads of keys."""
    found = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, Attention):
            count = module.heads.count
            found[name] = f"{prefix}q_proj", f"{prefix}k_proj", count, module.heads.of_keys or count
            continue
        size = next((size for key in HEAD_SIZES if isinstance(size := getattr(module, key, None), int)), 0)
        for q, k in Q_AND_K:
            layers = (module._modules.get(key) for key in (q, k))
            rows = [getattr(getattr(layer, "base_layer", layer), "out_features", 0) for layer in layers]
            if size and all(rows):
                found[name] = (f"{prefix}{q}", f"{prefix}{k}", *(count // size for count in rows))
    return found
