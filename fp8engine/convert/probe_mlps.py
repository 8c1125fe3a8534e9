"""Activations and MLPs by what they compute: what the layers of an MLP's twin read is compared with what they wrote.

    activation   y = f(x)
    MLP          x -> up -> h = f(up(x)), or f(gate(x)) * u(up(x)) -> down -> y

Stand-ins write fixed random tensors, so that no matrix is needed, however wide the MLP is.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fp8engine.convert.twin import (
    IN_BACKWARD,
    TOLERANCES,
    Draw,
    Mode,
    StandIn,
    linear_layers_of,
    parts_of,
    pulled,
    run,
    twin_of,
)
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


def _run_activation(module: nn.Module, functions: Mapping[str, Activation], modes: tuple[Mode, ...]) -> str | None:
    """The name, of those in `functions`, of what a module without parameters computes."""
    draw, twin = Draw(), twin_of(module)
    x, dy, names = draw.wide(2, 4, 128), draw(2, 4, 128), list(functions)
    for mode in modes:
        given = mode.given(x)
        y = run(twin, mode, given)
        in_place = not torch.equal(given, mode.given(x))  # others may read it
        if type(y) is not torch.Tensor or y.shape != x.shape or y.dtype != mode.dtype or in_place:
            return None
        grads = pulled([y], [dy], [given]) if mode.compares_gradients else ()
        names = [name for name in names if _near(y, functions[name], [given], grads, dy)]
    return names[0] if names else None


def _near(
    y: torch.Tensor,
    act: Activation,
    halves: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    dy: torch.Tensor,
) -> bool:
    """Whether y is f(gate), or f(gate) * u(up), of these halves, and these are their gradients, if any are given.

    FP32 may lose the last bits of what 1 + erf or a sigmoid cancels.  Where factors overflow and the product does not,
    y tells nothing.
    """
    leaves = [half.detach().double().requires_grad_() for half in halves]
    with torch.set_grad_enabled(bool(grads)):
        of_gate, of_up = act.forward(leaves[0]), act.up(leaves[1]) if act.gated else torch.ones_like(leaves[0])
        want = of_gate * of_up
    gate, top = leaves[0].abs(), torch.finfo(y.dtype).max
    size = (gate + of_gate.abs()) * of_up.abs()
    untold = (torch.maximum(size, of_gate.abs()) > top / 2) & (want.abs() <= 2 * top)
    alike = (y == want.to(y.dtype)) | ((y - want).abs() <= TOLERANCES[y.dtype] * size) | untold
    wanted = torch.autograd.grad(want, leaves, dy) if grads else ()
    for grad, want, size in zip(grads, wanted, (of_up * dy, gate * dy), strict=False):
        alike &= (grad - want).abs() <= IN_BACKWARD * (want.abs() + size.abs())
    return bool(alike.all())


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


def _run_mlp(module: nn.Module, linear: dict[str, nn.Module], whole: bool, modes: tuple[Mode, ...]) -> Mlp | None:
    layers = {name: StandIn(layer) for name, layer in linear.items()}
    twin, widths = twin_of(module, layers), dict.fromkeys(layer.in_features for layer in layers.values())
    found, kinds = set(), set(ACTIVATIONS)
    for mode in modes:
        runs = (set(_mlps(twin, mode, layers, (width, whole, kinds))) for width in widths)
        here = next(filter(None, runs), set())
        found = here & (found or here)
        kinds = {mlp.kind for mlp in found}
        if not found:
            return None
    if len(found) != 1:
        return None
    (mlp,) = found
    function = UNGATED.get(mlp.kind, mlp.kind)
    leaves = [name for name, part in parts_of(module) if name not in layers and not part._modules]
    looks = modes[:1] if ACTIVATIONS[mlp.kind].gated else modes  # its name is told, and nothing takes its place
    acts = [name for name in leaves if _named(module.get_submodule(name), looks) == function]
    return mlp._replace(activation=acts[0] if len(acts) == 1 else "")


def _named(leaf: nn.Module, modes: tuple[Mode, ...]) -> str | None:
    """The name of the function that a part of an MLP computes, if it does."""
    try:
        return _run_activation(leaf, FUNCTIONS, modes)
    except Exception:  # it takes another argument, or has a state
        return None


def _mlps(twin: nn.Module, mode: Mode, layers: dict[str, StandIn], asked: tuple[int, bool, set[str]]) -> Iterator[Mlp]:
    """The MLPs that a module may be, by a run of its twin on one input of that width, or on two.

    It yields none where both fail: the width is another layer's, or the module takes other arguments.
    asked: the input's width; whether its first layers read x, and it returns what the last one wrote; which kinds.
    """
    (width, whole, kinds), draw = asked, Draw()
    rows = 2 + 256 // min(layer.out_features for layer in layers.values())  # enough to tell formulas apart
    x, residual = mode.given(draw.wide(2, rows, width)), mode.given(draw(2, rows, width))
    nn.Module.to(twin, mode.dtype)  # its code may look at the weights' dtype
    for layer in layers.values():
        layer.wrote = mode.given(draw.wide(2, rows, layer.out_features))
    for beside in ([], [residual]):
        for layer in layers.values():
            layer.read.clear()
        given = [mode.given(each) for each in (x, *beside)]
        try:
            y = run(twin, mode, *given)
        except Exception:  # of the module's own code
            continue
        if any(len(layer.read) != 1 for layer in layers.values()) or not torch.equal(given[0], x):
            continue
        for down, last in layers.items() if type(y) is torch.Tensor else ():
            first = {name: layer for name, layer in layers.items() if name != down}
            if whole and not (_returns(y, last, beside) and all(_same(layer.read[0], x) for layer in first.values())):
                continue
            if whole and mode.compares_gradients and not _passes(y, last, [*first.values()], given):
                continue
            h = last.read[0].reshape(*x.shape[:-1], -1)
            dh = draw(*h.shape)
            grads = (
                pulled(last.read, [dh.view_as(*last.read)], [each.wrote for each in first.values()])
                if mode.compares_gradients
                else ()
            )
            for kind, names in _formulas(h, first, kinds, grads, dh):
                yield Mlp(kind, down, **names, residual=bool(beside))
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


def _passes(y: torch.Tensor, last: StandIn, first: list[StandIn], given: list[torch.Tensor]) -> bool:
    """Whether gradients pass from the result to the last layer and a residual, and from the first layers to x."""
    x, *beside = given
    from_layers = pulled([layer.read[0] for layer in first], [layer.read[0].detach() for layer in first], [x])
    to_layers = pulled([y], [y.detach()], [last.wrote, *beside])
    return torch.equal(from_layers[0], len(first) * x) and all(torch.equal(each, y) for each in to_layers)


def _formulas(
    h: torch.Tensor, first: dict[str, StandIn], kinds: set[str], grads: Sequence[torch.Tensor], dh: torch.Tensor
) -> Iterator[tuple[str, dict[str, str]]]:
    """(kind, names of the layers) of each formula by which h, and these gradients, are what the first layers wrote."""
    names, wrote = list(first), [layer.wrote for layer in first.values()]
    roles = [{"up": names[0]}]
    if len(names) == 2:
        roles = [{"gate": names[0], "up": names[1]}, {"gate": names[1], "up": names[0]}]
    elif wrote[0].shape[-1] == 2 * h.shape[-1]:
        roles = [{"gate_up": names[0]}, {"up_gate": names[0]}]
        wrote, grads = ([half for each in them for half in each.chunk(2, -1)] for them in (wrote, grads))
    for (role, order), kind in itertools.product(zip(roles, (1, -1), strict=False), kinds):
        act, halves = ACTIVATIONS[kind], wrote[::order]
        alike = act.gated == (len(halves) == 2) and all(h.dtype == a.dtype and h.shape == a.shape for a in halves)
        if alike and _near(h, act, halves, grads[::order], dh):
            yield kind, role
