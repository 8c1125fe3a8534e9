"""Formulas that a module may compute: norms, activations and MLPs, each compared with what the module's twin does.

    norm         y = (x [- mean(x)]) * rsqrt(mean((x [- mean(x)])^2) + eps) * w [+ b]     rows of several scales
    activation   y = f(x)
    MLP          x -> up -> h = f(up(x)), or f(gate(x)) * u(up(x)) -> down -> y

The smallest row of a norm shows its eps.  In the place of an MLP's layers stand-ins write fixed random tensors, so that
no matrix is needed, however wide it is: what they read is compared with what they wrote.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fp8engine.convert.twin import (
    IN_BACKWARD,
    TOLERANCES,
    Draw,
    Mode,
    StandIn,
    autocast,
    linear_layers_of,
    own_attributes,
    parts_of,
    pulled,
    run,
    surroundings,
    twin_of,
)
from fp8engine.ops.reference import Norm
from fp8engine.ops.reference.activations import ACTIVATIONS, GATED, Activation
from fp8engine.ops.reference.norm_quantize import KINDS

SCALES = (1e-6, 1e-4, 1e-2, 1, 30, 1e3, 1e7, 1)  # of the rows that a norm is given, the last perhaps with a NaN
Given = Mapping[str, torch.Tensor]  # x, weight and bias of a norm, in float64; or gradients
PLAIN = {kind: act for kind, act in ACTIVATIONS.items() if not act.gated}
FUNCTIONS = PLAIN | {"sigmoid": ACTIVATIONS["glu"]._replace(gated=False)}
UNGATED = {gated: plain for plain, gated in GATED.items()} | {"glu": "sigmoid"}


Comparison = tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]


def _alike(compared: Iterable[Comparison]) -> bool:
    """Whether tensors are the wanted ones.  Each: found, wanted, size of its terms, what part of that it may miss."""
    return all(
        bool((((found - want).abs() <= part * size) | (found.isnan() & want.isnan())).all())
        for found, want, size, part in compared
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN for NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, 0, 0, equal_nan=True)


def _width(module: nn.Module, own: dict[str, nn.Parameter]) -> int:
    """Features that a norm is over: of its weight, or as it says, or any; 0 if that cannot be."""
    if (weight := own.get("weight")) is not None:
        return weight.numel() if weight.dim() == 1 else 0
    said = vars(module).get("normalized_shape", (64,))
    return said[-1] if isinstance(said, tuple | list) and len(said) == 1 and isinstance(said[-1], int) else 0


def norm(module: nn.Module) -> Callable | None:
    """A look at a norm; None: the module cannot be one."""
    own = {key: value for key, value in module._parameters.items() if value is not None}
    width = _width(module, own)
    plain = own.keys() <= {"weight", "bias"} and all(value.shape == (width,) for value in own.values())
    if width < 2 or not plain or module._buffers or module._modules:
        return None
    return functools.partial(_run_norm, module, width, own.keys())


def _run_norm(module: nn.Module, width: int, own: Collection[str], modes: tuple[Mode, ...]) -> Norm | None:
    draw, like = Draw(), {"dtype": torch.float64, "device": "cpu"}
    x = (2 * draw(1, len(SCALES), width) + 0.5) * torch.tensor(SCALES, **like)[:, None]
    affine, dy = {"weight": draw(width).abs() + 0.5, "bias": 0.01 * draw(width)}, draw(*x.shape)
    neutral = {"weight": torch.ones(width, **like), "bias": torch.zeros(width, **like)}
    said = [value for _, value in own_attributes(module) if isinstance(value, float)]
    twin, norms = twin_of(module), [Norm(*each) for each in itertools.product(KINDS, (0.0,), (False, True))]
    for mode in modes:
        read = {"x": mode.given(x)}
        for key in own:
            read[key] = twin._parameters[key] = nn.Parameter(affine[key].to(mode.dtype), requires_grad=mode.grad)
        y = run(twin, mode, read["x"])
        if type(y) is not torch.Tensor or y.dtype != mode.dtype or y.shape != x.shape:
            return None
        grads = {}
        if mode.compares_gradients:
            grads = dict(zip(read, pulled([y], [dy], list(read.values())), strict=True))
        given = neutral | {key: value.detach().double() for key, value in read.items()}
        if len(norms) > 1:
            norms = [_with_eps(norm, given, y.double(), said) for norm in norms]
        norms = [norm for norm in norms if norm.eps >= 0 and _agrees(norm, given, y, grads, dy)]
        if not norms or (norms[0].kind == "rms" and "bias" in own):  # ours has none
            return None
    return norms[0]


def _factors(norm: Norm, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x centred, by what it is multiplied)."""
    centred = x - x.mean(-1, keepdim=True) if norm.kind == "layer" else x
    rstd = (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return centred, rstd * (weight + norm.zero_centered)


def _agrees(norm: Norm, given: Given, y: torch.Tensor, grads: Given, dy: torch.Tensor) -> bool:
    """Whether y is the norm of x, and these are the gradients, if any are given, of x and of parameters, by name."""
    leaves = {key: value.clone().requires_grad_() for key, value in given.items()}
    with torch.set_grad_enabled(bool(grads)):
        centred, factor = _factors(norm, leaves["x"], leaves["weight"])
        scaled = centred * factor
        want = scaled + leaves["bias"]
    compared = [(y.double(), want, scaled.abs() + leaves["bias"].abs(), TOLERANCES[y.dtype])]
    wanted = torch.autograd.grad(want, [leaves[key] for key in grads], dy) if grads else ()
    for (key, grad), expected in zip(grads.items(), wanted, strict=True):
        terms = dy * factor if key == "x" else expected  # from which dx takes their means
        compared.append((grad, expected, expected.abs() + terms.abs(), IN_BACKWARD))
    return _alike((found, want, size.amax(-1, keepdim=True), part) for found, want, size, part in compared)


def _with_eps(norm: Norm, given: Given, y: torch.Tensor, said: list[float]) -> Norm:
    """The norm with the eps that the first row speaks for, whose eps is nearly all that is under the root.

    Said by an attribute, it is that number; else the number of two digits that is as near, or as it was measured.
    """
    z = _factors(norm, given["x"], given["weight"])[0][0, 0]
    scaled, squares = z * (given["weight"] + norm.zero_centered), z.square().mean()
    eps = float(((scaled @ scaled) / (scaled @ (y[0, 0] - given["bias"]))).square() - squares)
    near = 1e-4 * (abs(eps) + float(squares))
    return norm._replace(eps=next((v for v in (*said, float(f"{eps:.2g}")) if abs(v - eps) <= near), eps))


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
        in_place = not _equal(given, mode.given(x))  # others may read it
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
    compared = [(torch.where(untold | (y == want.to(y.dtype)), want, y), want, size, TOLERANCES[y.dtype])]
    wanted = torch.autograd.grad(want, leaves, dy) if grads else ()
    for grad, expected, terms in zip(grads, wanted, (of_up * dy, gate * dy), strict=False):
        compared.append((grad, expected, expected.abs() + terms.abs(), IN_BACKWARD))
    return _alike(compared)


def mlp(module: nn.Module) -> Callable | None:
    """A look at an MLP; None: the module cannot be one."""
    return _with_layers(module, whole=True)


def product(module: nn.Module) -> Callable | None:
    """A look at what may compute an MLP between other things, such as a norm and a residual."""
    return _with_layers(module, whole=False)


def _with_layers(module: nn.Module, whole: bool) -> Callable | None:
    layers = linear_layers_of(module, vectors=not whole)
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
    # Of a gated one its name is told, and nothing takes its place.
    looks = modes[:1] if ACTIVATIONS[mlp.kind].gated else tuple(mode for mode in modes if not mode.autocast)
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
    rows = 2 + 128 // min(layer.out_features for layer in layers.values()) * 2  # enough to tell formulas apart
    x, residual = mode.given(draw.wide(2, rows, width)), mode.given(draw(2, rows, width))
    nn.Module.to(twin, mode.dtype)  # its code may look at the weights' dtype
    for layer in layers.values():
        wrote = mode.given(draw.wide(2, rows, layer.out_features))
        layer.wrote = wrote.bfloat16() if mode.autocast else wrote
    for beside in ([], [residual]):
        for layer in layers.values():
            layer.read.clear()
        given = [mode.given(each) for each in (x, *beside)]
        try:
            with autocast(mode.autocast):
                around, y = surroundings(), run(twin, mode, *given)
        except Exception:  # of the module's own code
            continue
        if any(len(layer.read) != 1 for layer in layers.values()) or not _equal(given[0], x):
            continue
        if whole and any(layer.around != around for layer in layers.values()):
            continue
        for down, last in layers.items() if type(y) is torch.Tensor else ():
            first = {name: layer for name, layer in layers.items() if name != down}
            if whole and not (_returns(y, last, beside) and all(_same(layer.read[0], x) for layer in first.values())):
                continue
            if whole and mode.compares_gradients and not _passes(y, last, [*first.values()], given):
                continue
            h = last.read[0].reshape(*x.shape[:-1], -1)
            h = h.bfloat16() if mode.autocast else h  # as the layer casts it
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
    return _equal(read.reshape(-1, read.shape[-1]), x.flatten(0, 1))


def _returns(y: torch.Tensor, last: StandIn, beside: list[torch.Tensor]) -> bool:
    """Whether the result is what the last layer wrote, and the second argument is added to it if there is one."""
    if any(each.shape != last.wrote.shape for each in beside):
        return False
    return _equal(y, sum(beside, last.wrote))


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
