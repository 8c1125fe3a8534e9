"""Activations and MLPs by what they compute: what the layers of an MLP's twin read is compared with what they wrote.

    activation   y = f(x)
    MLP          x -> up -> h = f(up(x)), or f(gate(x)) * u(up(x)) -> down -> y

Stand-ins write fixed random tensors, so that no matrix is needed, however wide the MLP is.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from fp8engine.convert.twin import IN_FP32, Draw, StandIn, linear_layers_of, parts_of, run, twin_of
from fp8engine.ops.reference.activations import ACTIVATIONS, GATED, Activation

PLAIN = {kind: act for kind, act in ACTIVATIONS.items() if not act.gated}
FUNCTIONS = PLAIN | {"sigmoid": ACTIVATIONS["glu"]._replace(gated=False)}
UNGATED = {gated: plain for plain, gated in GATED.items()} | {"glu": "sigmoid"}


class Mlp(NamedTuple):
    """An MLP, down(f(up(x))) or down(f(gate(x)) * u(up(x))): names of its layers within it, and which formula.

    kind: a key of ACTIVATIONS.  One layer for both: gate_up holds the gate's rows first, up_gate those of up.
    activation: the module that computes f, if one does.  residual: the MLP takes a second argument and adds it.
    """

    kind: str
    down: str
    up: str = ""
    gate: str = ""
    gate_up: str = ""
    up_gate: str = ""
    activation: str = ""
    residual: bool = False

    def __str__(self) -> str:
        function = UNGATED.get(self.kind, self.kind)
        gate, up = f"{self.gate}(x)" if self.gate else "gate", f"{self.up}(x)" if self.up else "up"
        packed = {self.gate_up: ", [gate | up] = {}(x)", self.up_gate: ", [up | gate] = {}(x)", "": ""}
        product = f"{function}({gate}) * {up}" if self.kind in UNGATED else f"{self.kind}({up})"
        if self.kind == "clamped_swiglu":
            product = f"{self.kind}({gate}, {up})"
        where = packed[self.gate_up or self.up_gate].format(self.gate_up or self.up_gate)
        return f"{self.down}({product}){' + residual' * self.residual}{where}"


def activation(module: nn.Module) -> Callable | None:
    """A look at an activation, which tells its kind of PLAIN; None: the module cannot be one."""
    if any(True for _ in itertools.chain(module.parameters(), module.buffers(), module.children())):
        return None
    return functools.partial(_run_activation, module, PLAIN)


def _run_activation(module: nn.Module, functions: Mapping[str, Activation], modes: tuple[bool, ...]) -> str | None:
    """The name, of those in `functions`, of what a module without parameters computes."""
    x, twin = Draw().wide(2, 4, 128), twin_of(module)
    names = list(functions)
    for training in modes:
        given = x.clone()
        y = run(twin, training, given)
        in_place = not torch.equal(given, x)  # others may read it
        if type(y) is not torch.Tensor or y.shape != x.shape or y.dtype != x.dtype or in_place:
            return None
        names = [name for name in names if _near(y, functions[name], x)]
    return names[0] if names else None


def _near(y: torch.Tensor, act: Activation, gate: torch.Tensor, up: torch.Tensor | None = None) -> bool:
    """Whether y is f(gate), or f(gate) * u(up).  FP32 may lose the last bits of what 1 + erf or a sigmoid cancels."""
    of_gate = act.forward(gate)
    size = gate.abs() + of_gate.abs()
    of_up = torch.ones_like(gate) if up is None else act.up(up)
    return bool(((y - of_gate * of_up).abs() <= IN_FP32 * size * of_up.abs()).all())


def mlp(module: nn.Module) -> Callable | None:
    """A look at an MLP; None: the module cannot be one."""
    return _with_layers(module, linear_layers_of(module), whole=True)


def product(module: nn.Module) -> Callable | None:
    """A look at what may compute an MLP between other things, such as a norm and a residual."""
    return _with_layers(module, linear_layers_of(module, vectors=True), whole=False)


def _with_layers(module: nn.Module, layers: dict[str, nn.Module] | None, whole: bool) -> Callable | None:
    if layers is None or len(layers) not in (2, 3):
        return None
    first, *others = {name.partition(".")[0] for name in layers}
    if not others and type(module.get_submodule(first)).forward is not nn.Module.forward:  # a list has none
        return None
    return functools.partial(_run_mlp, module, layers, whole)


def _run_mlp(module: nn.Module, linear: dict[str, nn.Module], whole: bool, modes: tuple[bool, ...]) -> Mlp | None:
    layers = {name: StandIn(layer) for name, layer in linear.items()}
    twin, widths = twin_of(module, layers), dict.fromkeys(layer.in_features for layer in layers.values())
    in_each = []
    for training in modes:
        runs = (set(_mlps(twin, training, layers, width, whole)) for width in widths)
        in_each.append(next(filter(None, runs), set()))
    found = set.intersection(*in_each)
    if len(found) != 1:
        return None
    (mlp,) = found
    function = UNGATED.get(mlp.kind, mlp.kind)
    leaves = [name for name, part in parts_of(module) if name not in layers and not part._modules]
    acts = [name for name in leaves if _named(module.get_submodule(name), modes) == function]
    return mlp._replace(activation=acts[0] if len(acts) == 1 else "")


def _named(leaf: nn.Module, modes: tuple[bool, ...]) -> str | None:
    """The name of the function that a part of an MLP computes, if it does."""
    try:
        return _run_activation(leaf, FUNCTIONS, modes)
    except Exception:  # it takes another argument, or has a state
        return None


def _mlps(twin: nn.Module, training: bool, layers: dict[str, StandIn], width: int, whole: bool) -> Iterator[Mlp]:
    """The MLPs that a module may be, by a run of its twin on one input of that width, or on two.

    It yields none where both fail: the width is another layer's, or the module takes other arguments.
    whole: its first layers read x, and it returns what the last one wrote.
    """
    draw = Draw()
    rows = 2 + 256 // min(layer.out_features for layer in layers.values())  # enough to tell formulas apart
    x, residual = draw.wide(2, rows, width), draw(2, rows, width)
    for layer in layers.values():
        layer.wrote = draw.wide(2, rows, layer.out_features)
    for beside in ([], [residual]):
        for layer in layers.values():
            layer.read.clear()
        given = x.clone()
        try:
            y = run(twin, training, given, *(each.clone() for each in beside))
        except Exception:  # of the module's own code
            continue
        if any(len(layer.read) != 1 for layer in layers.values()) or not torch.equal(given, x):
            continue
        for down, last in layers.items() if type(y) is torch.Tensor else ():
            first = {name: layer for name, layer in layers.items() if name != down}
            if whole and not (_returns(y, last, beside) and all(_same(layer.read[0], x) for layer in first.values())):
                continue
            h = last.read[0].reshape(*x.shape[:-1], -1)
            yield from (Mlp(kind, down, **names, residual=bool(beside)) for kind, names in _formulas(h, first))
        return


def _same(read: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a layer has read the module's input, in any shape."""
    return read.dtype == x.dtype and torch.equal(read.reshape(-1, read.shape[-1]), x.flatten(0, 1))


def _returns(y: torch.Tensor, last: StandIn, beside: list[torch.Tensor]) -> bool:
    """Whether the result is what the last layer wrote, and the second argument is added to it if there is one."""
    if any(each.shape != last.wrote.shape for each in beside):
        return False
    want = sum(beside, last.wrote)
    return y.dtype == want.dtype and torch.equal(y, want)


def _formulas(h: torch.Tensor, first: dict[str, StandIn]) -> Iterator[tuple[str, dict[str, str]]]:
    """(kind, names of the layers) of each formula by which h is what the first layers' results make."""
    names, wrote = list(first), [layer.wrote for layer in first.values()]
    if len(names) == 2:
        tries = [({"gate": names[i], "up": names[1 - i]}, (wrote[i], wrote[1 - i])) for i in (0, 1)]
    elif wrote[0].shape[-1] == 2 * h.shape[-1]:
        one, two = wrote[0].chunk(2, -1)
        tries = [({"gate_up": names[0]}, (one, two)), ({"up_gate": names[0]}, (two, one))]
    else:
        tries = [({"up": names[0]}, (wrote[0],))]
    for (roles, halves), (kind, act) in itertools.product(tries, ACTIVATIONS.items()):
        alike = act.gated == (len(halves) == 2) and all(h.dtype == a.dtype and h.shape == a.shape for a in halves)
        if alike and _near(h, act, *halves):
            yield kind, roles
