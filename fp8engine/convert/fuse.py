"""Fusion of norms, linear layers and activations into groups that run as one call (level 2 of fe.convert).

    norm, q k v      where the norm comes before, and q, k and v are its only consumers
    norm, MLP        the same for up, or gate and up; with the activation and down
    MLP              up, act, down, where its input is in 16 bits anyway: norms after the residual, a shared expert

Consumers are known from the table of families.  The modules keep their parameters, names and places; how they run
together: nn/lazy.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8engine.convert.describe import describe
from fp8engine.convert.select import linear_layers
from fp8engine.errors import ConversionError
from fp8engine.nn.class_swap import mix
from fp8engine.nn.families import Block, Experts
from fp8engine.nn.group import FusedBlock, Group, epsilon, foreign_code
from fp8engine.nn.lazy import FusedActivation, FusedNorm
from fp8engine.nn.linear import Float8Module
from fp8engine.ops.reference import Norm
from fp8engine.ops.reference.activations import GATED

ACTS = {  # name of the class -> its formula's key in ACTIVATIONS
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "ReLU": "relu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "QuickGELUActivation": "qgelu",
    "ReLUSquaredActivation": "srelu",
}
WHERE = ("transformers.activations", "torch.nn.modules.activation")
AFTER = {
    "post": "its norm comes after the residual, which reads the norm too",
    "branch": "no norm and no activation stands before it",
}
EXPERTS = "its norm is read by a router, in 16 bits"
SHARED = "its norm is attention's too"


@dataclass(frozen=True)
class Fusion:
    """Result of `fuse`.  groups: that will run fused.  unknown: why parts of the model are in no block of the table."""

    groups: tuple[Group, ...]
    unknown: tuple[str, ...]


def fuse(model: nn.Module) -> Fusion:
    """Make the recognised parts of a converted model run together, and note on every other layer why it does not."""
    try:
        found = describe(model)
    except ConversionError as error:  # no module of it has a config: it is no model of transformers
        return Fusion((), (str(error),))
    unknown = found.why
    for _, layer, _ in linear_layers(model):
        if isinstance(layer, Float8Module):
            layer.fused, layer.not_fused_because = None, unknown[0] if unknown else "in no block of the table"
    groups = []
    for block in found.blocks:
        # Every block: FSDP and accelerate take the class of the first for all.
        FusedBlock.put(model.get_submodule(block.name))
        for group in list(_groups(model, block)):
            groups.append(group)
            for layer in (*group.layers, group.second):
                if layer is not None:
                    layer.fused, layer.not_fused_because = group, ""
            for module, mixin in ((group.norm, FusedNorm), (group.act, FusedActivation)):
                if module is not None:
                    mix(module, mixin)
                    object.__setattr__(module, "group", group)
    return Fusion(tuple(groups), unknown)


def _groups(model: nn.Module, block: Block) -> Iterator[Group]:
    """The groups of one block; notes on its other layers why they are in none."""
    parts = _Parts(model, block)
    structure = block.structure
    routed = isinstance(structure.mlp, Experts)
    shared = block.parts.get("mlp_norm") == block.parts.get("attention_norm")
    for prefix, attention in (("", structure.attention), ("cross_", structure.cross)):
        if attention is None:
            continue
        roles = [f"{prefix}{name}" for name in ("q", "k", "v", "qkv")]
        parts.note([*roles, f"{prefix}out"], "no norm and no activation stands before it")
        if attention.kv_from != "self":
            roles = roles[:1]
        if structure.placement in AFTER:
            parts.note(roles, AFTER[structure.placement])
            continue
        if shared and not prefix:
            roles += ["up", "gate", "gate_up"]
        yield from parts.with_norm("cross_norm" if prefix else "attention_norm", roles)
    for prefix in ("", "shared_"):
        first = [role for role in (f"{prefix}{name}" for name in ("gate", "up", "gate_up")) if role in block.parts]
        if not first or f"{prefix}down" not in block.parts:
            continue
        if shared:
            parts.note([f"{prefix}down"], SHARED)
            continue
        yield from parts.mlp(first, f"{prefix}down", with_norm=structure.placement not in AFTER and not routed)
    parts.note(["experts"], EXPERTS)


class _Parts:
    """One block's modules by role."""

    def __init__(self, model: nn.Module, block: Block):
        self.block, self.root = block, model.get_submodule(block.name)
        self.module = {role: model.get_submodule(name) for role, name in block.parts.items()}

    def path(self, role: str) -> str:
        """A part's name within the block."""
        return self.block.parts[role].removeprefix(f"{self.block.name}.") if self.block.name else self.block.parts[role]

    def note(self, roles: list[str], why: str) -> None:
        """Note on layers that are in no group why they are not."""
        for role in roles:
            module: Any = self.module.get(role)
            module = getattr(module, "base_layer", module)
            if isinstance(module, Float8Module) and module.fused is None:
                module.not_fused_because = why

    def with_norm(self, norm: str, roles: list[str]) -> Iterator[Group]:
        """A norm with all the layers that read it."""
        roles = [role for role in roles if role in self.module]
        which = self._norm(norm)
        why = self._obstacle(roles)
        if why or isinstance(which, str):
            self.note(roles, why or str(which))
            return
        paths = [self.path(role) for role in (norm, *roles)]
        layers = tuple(self.module[role] for role in roles)
        yield Group(" + ".join(paths), self.module[norm], which, layers, places=self._places(paths))

    def mlp(self, first: list[str], second: str, with_norm: bool) -> Iterator[Group]:
        """An MLP with its norm or without; where its activation is unknown, the norm with the first layers."""
        which = self._norm("mlp_norm") if with_norm else None
        act, kind = self._activation(first[0])
        gate = len(first) == 2 or first[0].endswith("gate_up")
        why = self._obstacle([*first, second]) or ("" if kind else act)
        if gate and kind and kind not in GATED:
            why = why or f"a gated {kind} has no fused form"
        if why:
            self.note([second], why)
            if with_norm:
                yield from self.with_norm("mlp_norm", first)
            else:
                self.note(first, why)
            return
        fused_norm = isinstance(which, Norm)
        paths = [*([self.path("mlp_norm")] if fused_norm else []), *map(self.path, first), act, self.path(second)]
        around = act.rpartition(".")[0]  # where a dropout may stand before `second`, and be given placeholders
        beside = self.root.get_submodule(around).named_children()
        dropouts = [f"{around}.{key}".strip(".") for key, child in beside if isinstance(child, nn.Dropout)]
        yield Group(
            " + ".join(paths),
            self.module["mlp_norm"] if fused_norm else None,
            which if fused_norm else None,
            tuple(self.module[role] for role in first),
            self.root.get_submodule(act),
            kind,
            self.module[second],
            self._places([*paths, *dropouts]),
        )

    def _obstacle(self, roles: list[str]) -> str | None:
        """Why one cast of their input cannot serve these layers, or None."""
        states = set()
        for role in roles:
            module = self.module[role]
            if not (isinstance(module, Float8Module) and hasattr(module, "as_layer")):
                kind = "adapter" if hasattr(module, "base_layer") else type(module).__name__
                if isinstance(module, Float8Module):
                    return f"{self.path(role)} beside it stores FP8 codes ({kind})"
                return f"{self.path(role)} beside it is not in FP8 ({kind})"
            if not module.numerics.plan.fp8:
                return f"{self.path(role)} beside it has recipe {module.numerics.recipe.name}"
            if module.fused is not None:
                return f"{self.path(role)} stands in another block too"
            states.add(id(module.numerics.state))
        return None if len(states) == 1 else "its neighbours are on other devices"

    def _norm(self, role: str) -> Norm | str:
        """The norm, or why it is not known."""
        module: Any = self.module[role]
        if isinstance(module, FusedNorm):
            return f"{self.path(role)} stands in another block too"
        if why := foreign_code(type(module)):
            return why
        if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
            return Norm("layer", module.eps)
        own, kind = {name for name, _ in module.named_parameters()}, self.block.structure.norm
        eps = epsilon(module)
        if kind != "layer" and own == {"weight"} and isinstance(eps, float):
            return Norm("rms", eps, kind == "rms zero-centered")
        return f"{type(module).__name__} is no norm that is known"

    def _activation(self, role: str) -> tuple[str, str]:
        """(the activation's path in the block, its formula's name), or (why it is not known, "")."""
        above = self.path(role).rpartition(".")[0]
        parent = self.root.get_submodule(above)
        found = [key for key, child in parent.named_children() if type(child).__module__ in WHERE]
        if len(found) != 1:
            return f"{len(found)} activations stand beside {self.path(role)}", ""
        act = parent.get_submodule(found[0])
        kind = type(act).__name__
        if kind == "GELU":
            name = "gelu_tanh" if getattr(act, "approximate", "none") == "tanh" else "gelu"
        else:
            name = ACTS.get(kind, "")
        return (f"{above}.{found[0]}".strip("."), name) if name else (f"{kind} has no fused form", "")

    def _places(self, paths: list[str]) -> tuple[tuple[nn.Module, str, nn.Module], ...]:
        """(parent, key, module) of every module on the way from the block to these parts."""
        found = {}
        for path in paths:
            parent = self.root
            for key in path.split("."):
                module = parent.get_submodule(key)
                found[id(module)] = (parent, key, module)
                parent = module
        return tuple(found.values())
