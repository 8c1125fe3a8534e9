"""Level 2 of fe.convert: which norms, linear layers and activations of a model run as one, and why not others.

    norm, q k v      where the norm comes before, and q, k and v alone read it
    norm, MLP        the same for up, or gate and up; with the activation and down
    MLP              up, act, down, where its input is in 16 bits anyway: norms after the residual, a shared expert

What reads what is known from the table of families.  The modules keep their parameters, names and places; how they run
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
from fp8engine.nn.families import Attention, Block, Experts
from fp8engine.nn.lazy import GATED, FusedActivation, FusedNorm, Group
from fp8engine.nn.linear import Float8Module
from fp8engine.ops.reference import Norm

ACTS = {  # class -> what ACTIVATIONS calls its formula; those of transformers by name
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "ReLU": "relu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
}
WHERE = ("transformers.activations", "torch.nn.modules.activation")
AFTER = "its norm comes after the residual, which reads the norm too"
EXPERTS = "its norm is read by a router, in 16 bits"
SHARED = "its norm is attention's too"


@dataclass(frozen=True)
class Fusion:
    """groups: what will run together.  unknown: why parts of the model are in no block of the table."""

    groups: tuple[Group, ...]
    unknown: tuple[str, ...]


def fuse(model: nn.Module) -> Fusion:
    """Make the recognised parts of a converted model run together, and note on every other layer why it does not."""
    try:
        found = describe(model)
    except ConversionError as error:
        found = None
        unknown = (str(error),)
    else:
        unknown = found.why
    layers = [module for _, module, _ in linear_layers(model) if isinstance(module, Float8Module)]
    for layer in layers:
        layer.fused, layer.alone = None, unknown[0] if unknown else "in no block of the table"
    groups = []
    for block in found.blocks if found else ():
        for group in _groups(model, block):
            groups.append(group)
            for layer in (*group.layers, group.second):
                if layer is not None:
                    layer.fused, layer.alone = group, ""
            _give(group.norm, FusedNorm, group)
            _give(group.act, FusedActivation, group)
    return Fusion(tuple(groups), unknown)


def _give(module: nn.Module | None, mixin: Any, group: Group) -> None:
    if module is not None:
        mix(module, mixin)
        object.__setattr__(module, "group", group)


def _groups(model: nn.Module, block: Block) -> Iterator[Group]:
    """The groups of one block; on layers that are in none, why."""
    of = _Of(model, block)
    structure = block.structure
    routed, shared = isinstance(structure.mlp, Experts), of.norm_name("mlp") == of.norm_name("attention")
    for prefix, attention in (("", structure.attention), ("cross_", structure.cross)):
        if attention is None:
            continue
        roles = _readers(attention, prefix)
        for role in (f"{prefix}{name}" for name in ("q", "k", "v", "qkv", "out")):
            of.note(role, "no norm and no activation stands before it")
        if structure.placement == "post":
            of.note_all(roles, AFTER)
            continue
        if shared and not prefix:
            roles += ["up", "gate", "gate_up"]
        yield from of.with_norm(f"{prefix}attention" if not prefix else "cross", roles)
    for prefix in ("", "shared_"):
        first = [role for role in (f"{prefix}{name}" for name in ("gate", "up", "gate_up")) if role in block.parts]
        if not first or f"{prefix}down" not in block.parts:
            continue
        if shared:
            of.note(f"{prefix}down", SHARED)
            continue
        alone = structure.placement == "post" or routed
        yield from of.mlp(first, f"{prefix}down", with_norm=not alone)
    of.note_all(["experts"], EXPERTS)


def _readers(attention: Attention, prefix: str) -> list[str]:
    names = ["q", "k", "v", "qkv"] if attention.kv_from == "self" else ["q"]
    return [f"{prefix}{name}" for name in names]


class _Of:
    """One block's modules by role."""

    def __init__(self, model: nn.Module, block: Block):
        self.block, self.root = block, model.get_submodule(block.name)
        self.module = {role: model.get_submodule(name) for role, name in block.parts.items()}

    def path(self, role: str) -> str:
        """A part's name within the block."""
        return self.block.parts[role].removeprefix(f"{self.block.name}.") if self.block.name else self.block.parts[role]

    def norm_name(self, what: str) -> str | None:
        return self.block.parts.get(f"{what}_norm")

    def note(self, role: str, why: str) -> None:
        module: Any = self.module.get(role)
        module = getattr(module, "base_layer", module)
        if isinstance(module, Float8Module) and module.fused is None:
            module.alone = why

    def note_all(self, roles: list[str], why: str) -> None:
        for role in roles:
            self.note(role, why)

    def with_norm(self, norm: str, roles: list[str]) -> Iterator[Group]:
        """A norm with all the layers that read it."""
        roles = [role for role in roles if role in self.module]
        which = self._norm(f"{norm}_norm")
        if why := self._trouble(roles) or (which if isinstance(which, str) else None):
            self.note_all(roles, why)
            return
        names = [f"{norm}_norm", *roles]
        first, *layers = (self.module[name] for name in names)
        label = " + ".join(map(self.path, names))
        yield Group(label, first, which, tuple(layers), places=self._places(names))  # pyright: ignore[reportArgumentType]

    def mlp(self, first: list[str], second: str, with_norm: bool) -> Iterator[Group]:
        """An MLP with its norm or without; where its activation is unknown, the norm with the first layers."""
        which = self._norm("mlp_norm") if with_norm else None
        act, kind = self._activation(first[0])
        gate = len(first) == 2 or first[0].endswith("gate_up")
        why = self._trouble([*first, second]) or ("" if kind else act)
        if gate and kind and kind not in GATED:
            why = why or f"a gated {kind} has no fused form"
        if why:
            self.note(second, why)
            if with_norm:
                yield from self.with_norm("mlp", first)
            else:
                self.note_all(first, why)
            return
        norm = None if which is None or isinstance(which, str) else self.module["mlp_norm"]
        label = [*([self.path("mlp_norm")] if norm is not None else []), *map(self.path, first), act, self.path(second)]
        names = [*(["mlp_norm"] if norm is not None else []), *first, second]
        layers = tuple(self.module[role] for role in first)
        places = self._places(names, act)
        which = None if norm is None else which
        found = self.root.get_submodule(act)
        yield Group(" + ".join(label), norm, which, layers, found, kind, self.module[second], places)  # pyright: ignore

    def _trouble(self, roles: list[str]) -> str | None:
        """Why these layers cannot be read by one cast, or None."""
        states = set()
        for role in roles:
            module = self.module[role]
            if not (isinstance(module, Float8Module) and hasattr(module, "as_layer")):
                kind = "adapter" if hasattr(module, "base_layer") else type(module).__name__
                return f"{self.path(role)} beside it is not in FP8 ({kind})"
            if not module.numerics.plan.fp8:
                return f"{self.path(role)} beside it has recipe {module.numerics.recipe.name}"
            if module.fused is not None:
                return f"{self.path(role)} stands in another block too"
            states.add(id(module.numerics.state))
        return None if len(states) == 1 else "its neighbours are on other devices"

    def _norm(self, role: str) -> Norm | str:
        """Which norm it is, or why that is not known."""
        module: Any = self.module[role]
        if isinstance(module, FusedNorm):
            return f"{self.path(role)} stands in another block too"
        if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
            return Norm("layer", module.eps)
        own, eps = {name for name, _ in module.named_parameters()}, vars(module).get("variance_epsilon")
        if self.block.structure.norm == "rms" and own == {"weight"} and isinstance(eps, float):
            return Norm("rms", eps)
        return f"{type(module).__name__} is no norm that is known"

    def _activation(self, role: str) -> tuple[str, str]:
        """(where the activation stands in the block, its formula's name), or (why that is not known, "")."""
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

    def _places(self, roles: list[str], *paths: str) -> tuple[tuple[nn.Module, str, nn.Module], ...]:
        """Every module on the way from the block to these parts, where it is found."""
        found = {}
        for path in (*map(self.path, roles), *paths):
            parent = self.root
            for key in path.split("."):
                module = parent.get_submodule(key)
                found[id(module)] = (parent, key, module)
                parent = module
        return tuple(found.values())
