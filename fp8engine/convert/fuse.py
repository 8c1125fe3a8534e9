"""Norms, activations and MLPs of a converted model become producers of the codes that its layers read (nn/produce.py).

    norm          one of the width that a converted layer of the same block, or beside it, reads
    activation    one beside a converted layer, or of an MLP without a gate
    MLP           one with a gate, or whose activation is no module, before a converted `down`

Beside: under the same parent, and in the same repeated block or in none.  What a module computes the probe says; which
layers read its result, they tell it themselves when they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fp8engine.convert.blocks import repeated_blocks
from fp8engine.convert.formulas import Mlp
from fp8engine.convert.probe import Found, scope, survey
from fp8engine.convert.twin import TORCHS, codes_of, own_attributes, parts_of, plain_class
from fp8engine.nn.class_swap import Mixin, mix
from fp8engine.nn.linear import Float8Module
from fp8engine.nn.produce import VALUES, ProducingActivation, ProducingMlp, ProducingNorm, Recognised, Told
from fp8engine.ops.reference import Norm
from fp8engine.ops.reference.activations import ACTIVATIONS
from fp8engine.scaling.operands import Producer

NOTHING = "no norm, activation or MLP that the probe knows stands near a converted layer"


def fuse(model: nn.Module) -> int:
    """Make the recognised modules of a converted model producers; how many they are."""
    near, made, known = _Near(model), 0, {}
    for path, what in survey(model, known).items():
        for inside, mixin, recognised in _producers(model.get_submodule(path), what):
            name = f"{path}.{inside}".strip(".")
            module: Any = model.get_submodule(name)
            if isinstance(module, Mixin) or not near.reads(name, module, recognised, mixin):
                continue
            recognised.producer = Producer(name.removeprefix(near.block_of(name)))
            recognised.ranks, recognised.in_autocast = scope(module, known)
            mix(module, mixin)
            recognised.own = tuple((key, value) for key, value in _own(module) if key != recognised.eps)
            object.__setattr__(module, "recognised", recognised)
            made += 1
    return made


def _producers(module: Any, what: Found) -> Iterator[tuple[str, type[Mixin], Recognised]]:
    """(path within the module, class to mix in, what it is) of the producers in something that was recognised."""
    if isinstance(what, Norm):
        said = (key for key, value in vars(module).items() if isinstance(value, float) and value == what.eps)
        yield "", ProducingNorm, Recognised(what, eps=next(said, ""))
    elif not isinstance(what, Mlp):
        yield "", ProducingActivation, Recognised(what)
    elif not ACTIVATIONS[what.kind].gated and what.activation:
        yield what.activation, ProducingActivation, Recognised(what.kind)
    elif not what.residual:
        names = [name for name in (what.gate, what.up, what.gate_up, what.up_gate, what.down) if name]
        others = [(name, part) for name, part in parts_of(module) if name and name not in names]
        found = tuple((tuple(name.split(".")), part, _own(part)) for name, part in others)
        layers = tuple(tuple(name.split(".")) for name in names)
        yield "", ProducingMlp, Recognised(what.kind, "", layers, found, bool(what.up_gate))


def _own(module: nn.Module) -> Told:
    """(name, value) of the attributes on which a module's result may depend.

    They are what is set on the module, without private names that its code does not use; and plain values of its class
    that its code uses.  An attribute that is not there, and whose name the code has in a string, as in
    `getattr(self, "scale", 1)`, is None: it may be set later.
    """
    kind, codes = plain_class(module), codes_of(module)
    asked = {each for code in codes for each in code.co_consts if isinstance(each, str) and each.isidentifier()}
    names = asked | {name for code in codes for name in code.co_names}
    own = {key: value for key, value in own_attributes(module) if key in names or not key.startswith("_")}
    for name in names - TORCHS - own.keys():
        values = getattr(kind, name, None), getattr(module, name, None)
        if (name in asked or hasattr(kind, name)) and all(type(value) in VALUES for value in values):
            own[name] = values[1]
    return tuple(own.items())


class _Near:
    """The converted layers of a model by name, and its repeated blocks."""

    def __init__(self, model: nn.Module):
        names = {id(module): name for name, module in model.named_modules()}
        self.blocks = sorted((f"{names[id(block)]}." for block in repeated_blocks(model)), key=len, reverse=True)
        self.columns = {
            name: module.as_layer().weight_NK.shape[1]  # pyright: ignore[reportCallIssue]
            for name, module in model.named_modules()
            if isinstance(module, Float8Module) and hasattr(module, "as_layer") and module.numerics.recipe.is_fp8
        }

    def block_of(self, name: str) -> str:
        """The name of the repeated block that a module is in, with a dot at its end; "" for none."""
        return next((block for block in self.blocks if name.startswith(block)), "")

    def reads(self, name: str, module: Any, recognised: Recognised, mixin: type[Mixin]) -> bool:
        """Whether a converted layer may read the result of a module."""
        if mixin is ProducingMlp:
            down = ".".join((name, *recognised.layers[-1])).strip(".")
            return down in self.columns or f"{down}.base_layer" in self.columns
        above, block = name.rpartition(".")[0], self.block_of(name)
        around = (block if mixin is ProducingNorm else "") or (f"{above}." if above else "")
        near = (layer for layer in self.columns if layer.startswith(around) and self.block_of(layer) == block)
        beside = {self.columns[layer] for layer in near}
        weight = module._parameters.get("weight")
        return bool(beside) if weight is None else len(weight) in beside
