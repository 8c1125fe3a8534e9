"""Recognition of norms, activations and MLPs by what they compute, not by their names.

A twin of the module (twin.py) runs on a small float64 input, in training and in evaluation, and its result is compared
with the formulas of ops/reference.  What differs anywhere is not recognised: dropout with p > 0, a clamp, another
scale or order, an eps that depends on the mode or the dtype.  The model itself never runs, and nothing of it or of
torch's global state changes.  Hooks on the module are not seen: whoever replaces a forward asks for them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8engine.convert.twin import (
    LEAVES,
    StandIn,
    is_linear,
    linear_layers_of,
    own_attributes,
    parts_of,
    plain_class,
    quiet,
    run,
    twin_of,
)
from fp8engine.ops.reference import Norm
from fp8engine.ops.reference.activations import ACTIVATIONS, GATED, Activation
from fp8engine.ops.reference.norm_quantize import KINDS

# Modules that compute in FP32 whatever they are given round each of a handful of steps to 2^-24 of the largest term.
IN_FP32 = 2.0**-20
IN_BF16 = 2.0**-5  # a handful of steps, each rounded to 2^-9: enough to see an eps that is the dtype's
PLAIN = {kind: act for kind, act in ACTIVATIONS.items() if not act.gated}
FUNCTIONS = PLAIN | {"sigmoid": ACTIVATIONS["glu"]._replace(gated=False)}
UNGATED = {gated: plain for plain, gated in GATED.items()} | {"glu": "sigmoid"}
MODES = (True, False)  # training, evaluation


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
        product = f"{function}({gate}) * {up}" if ACTIVATIONS[self.kind].gated else f"{function}({up})"
        where = packed[self.gate_up or self.up_gate].format(self.gate_up or self.up_gate)
        return f"{self.down}({product}){' + residual' * self.residual}{where}"


Found = Norm | Mlp | str  # a str is an activation's kind


def norm_of(module: nn.Module) -> Norm | None:
    """The norm over its input's last dimension that a module computes.  Its `weight` and `bias` are [K], or absent.

    >>> norm_of(nn.LayerNorm(32, eps=1e-6)), norm_of(nn.Linear(32, 32))
    (Norm(kind='layer', eps=1e-06, zero_centered=False), None)
    """
    return _Survey().look(_norm, module)


def activation_of(module: nn.Module) -> str | None:
    """The kind, of those in ACTIVATIONS that have no gate, of the function that a module without parameters computes.

    >>> activation_of(nn.GELU(approximate="tanh")), activation_of(nn.Tanh())
    ('gelu_tanh', None)
    """
    return _Survey().look(_activation, module)


def mlp_of(module: nn.Module, *, training: bool = True) -> Mlp | None:
    """The MLP that a module is.  training=False: in evaluation alone, where dropout makes no difference.

    A module that holds its layers in one child is none: the child is.

    >>> mlp_of(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)))
    Mlp(kind='silu', down='2', up='0', gate='', gate_up='', up_gate='', activation='1', residual=False)
    """
    return _Survey(MODES if training else (False,)).look(_mlp, module)


def survey(model: nn.Module, *, training: bool = True) -> dict[str, Found]:
    """Path -> what it is, of every norm, MLP and activation in `model`, and of none inside an MLP that is in it.

    >>> survey(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.Dropout(), nn.ReLU()))
    {'0': Norm(kind='layer', eps=1e-05, zero_centered=False), '3': 'relu'}
    """
    probe, found = _Survey(MODES if training else (False,)), {}
    inside: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        what = probe.look(_norm, module) or probe.look(_activation, module) or probe.look(_mlp, module)
        if what is not None:
            found[path] = what
            inside |= {id(part) for part in module.modules()}
    return found


@dataclass
class _Survey:
    """One call's modes, and what it has found: of modules that are alike, one is run."""

    modes: tuple[bool, ...] = MODES
    found: dict[tuple, Any] = field(default_factory=dict)

    def look(self, at: Callable, module: nn.Module) -> Any:
        """What `at` finds in a module, or has found in one that is alike; None where anything was raised."""
        try:
            if (prepared := at(module)) is None:
                return None
            key = (at, _identity(module))
            if key not in self.found:
                self.found[key] = None
                with quiet():
                    self.found[key] = prepared(self.modes)
            return self.found[key]
        except Exception:  # the module's own code may raise anything
            return None


def _width(module: nn.Module, own: dict[str, nn.Parameter]) -> int:
    """Features that a norm is over: of its weight, or as it says, or any; 0 if that cannot be."""
    if (weight := own.get("weight")) is not None:
        return weight.numel() if weight.dim() == 1 else 0
    said = vars(module).get("normalized_shape", (64,))
    return said[-1] if isinstance(said, tuple | list) and len(said) == 1 and isinstance(said[-1], int) else 0


class _Rows(NamedTuple):
    """What a norm was given, in float64: rows of ever larger scale, its weight and bias, or ones and zeros."""

    x_MK: torch.Tensor
    weight_K: torch.Tensor
    bias_K: torch.Tensor

    def gamma(self, norm: Norm) -> torch.Tensor:
        return self.weight_K + norm.zero_centered

    def centred(self, norm: Norm) -> torch.Tensor:
        return self.x_MK - self.x_MK.mean(-1, keepdim=True) if norm.kind == "layer" else self.x_MK

    def agree(self, norm: Norm, y_MK: torch.Tensor, tolerance: float) -> bool:
        """Whether y is the norm of x."""
        z = self.centred(norm)
        scaled = z * (z.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * self.gamma(norm)
        size = (scaled.abs() + self.bias_K.abs()).amax(-1, keepdim=True)
        return norm.eps >= 0 and bool(((scaled + self.bias_K - y_MK).abs() <= tolerance * size).all())

    def with_eps(self, norm: Norm, y_MK: torch.Tensor, said: list[float]) -> Norm:
        """The norm with the eps that the first row speaks for, whose eps is nearly all that is under the root.

        Said by an attribute, it is that number; else the number of two digits that is as near, or as it was measured.
        """
        z = self.centred(norm)[0]
        scaled, squares = z * self.gamma(norm), z.square().mean()
        eps = float(((scaled @ scaled) / (scaled @ (y_MK[0] - self.bias_K))).square() - squares)
        near = 1e-4 * (abs(eps) + float(squares))
        return norm._replace(eps=next((v for v in (*said, float(f"{eps:.2g}")) if abs(v - eps) <= near), eps))


def _norm(module: nn.Module) -> Callable | None:
    own = {key: value for key, value in module._parameters.items() if value is not None}
    width = _width(module, own)
    plain = own.keys() <= {"weight", "bias"} and all(value.shape == (width,) for value in own.values())
    if width < 2 or not plain or module._buffers or module._modules:
        return None
    return functools.partial(_run_norm, module, width, own.keys())


def _run_norm(module: nn.Module, width: int, own: Collection[str], modes: tuple[bool, ...]) -> Norm | None:
    draw, scale = _Draw(), [1e-6, 1e-4, 1e-2, 1, 30, 1e3]
    x = (2 * draw(6, width) + 0.5) * torch.tensor(scale, dtype=torch.float64, device="cpu")[:, None]
    affine = {"weight": draw(width).abs() + 0.5, "bias": 0.01 * draw(width)}
    said = [value for _, value in own_attributes(module) if isinstance(value, float)]
    twin, norms = twin_of(module), [Norm(*each) for each in itertools.product(KINDS, (0.0,), (False, True))]
    for dtype, tolerance in ((torch.float64, IN_FP32), (torch.bfloat16, IN_BF16)):
        for key in own:
            twin._parameters[key] = nn.Parameter(affine[key].to(dtype), requires_grad=False)
        weight, bias = (affine[key].to(dtype).double() if key in own else torch.zeros_like(x[0]) for key in affine)
        rows = _Rows(x.to(dtype).double(), weight if "weight" in own else weight + 1, bias)
        for training in modes:
            y = run(twin, training, x.to(dtype)[None])
            if y.dtype != dtype or y.shape != (1, *x.shape):
                return None
            if len(norms) > 1:
                norms = [rows.with_eps(norm, y[0], said) for norm in norms]
            norms = [norm for norm in norms if rows.agree(norm, y[0].double(), tolerance)]
            if not norms or (norms[0].kind == "rms" and "bias" in own):  # ours has none
                return None
    return norms[0]


def _activation(module: nn.Module) -> Callable | None:
    if any(True for _ in itertools.chain(module.parameters(), module.buffers(), module.children())):
        return None
    return functools.partial(_run_activation, module, PLAIN)


def _run_activation(module: nn.Module, functions: Mapping[str, Activation], modes: tuple[bool, ...]) -> str | None:
    """The name, of those in `functions`, of what a module without parameters computes."""
    x, twin = _Draw().wide(2, 4, 128), twin_of(module)
    names = list(functions)
    for training in modes:
        given = x.clone()
        y = run(twin, training, given)
        if y.shape != x.shape or y.dtype != x.dtype or not torch.equal(given, x):  # in place: others may read it
            return None
        names = [name for name in names if _near(y, functions[name], x)]
    return names[0] if names else None


def _near(y: torch.Tensor, act: Activation, gate: torch.Tensor, up: torch.Tensor | None = None) -> bool:
    """Whether y is f(gate), or f(gate) * u(up).  FP32 may lose the last bits of what 1 + erf or a sigmoid cancels."""
    of_gate = act.forward(gate)
    size = gate.abs() + of_gate.abs()
    of_up = torch.ones_like(gate) if up is None else act.up(up)
    return bool(((y - of_gate * of_up).abs() <= IN_FP32 * size * of_up.abs()).all())


def _mlp(module: nn.Module) -> Callable | None:
    layers = linear_layers_of(module)
    if layers is None or len(layers) not in (2, 3):
        return None
    first, *others = {name.partition(".")[0] for name in layers}
    if not others and type(module._modules[first]).forward is not nn.Module.forward:  # a list has none
        return None
    return functools.partial(_run_mlp, module, layers)


def _run_mlp(module: nn.Module, linear: dict[str, nn.Module], modes: tuple[bool, ...]) -> Mlp | None:
    layers = {name: StandIn(layer) for name, layer in linear.items()}
    twin, found = twin_of(module, layers), None
    for training in modes:
        widths = dict.fromkeys(layer.in_features for layer in layers.values())
        mlps = next(filter(None, (set(_seen(twin, training, layers, width)) for width in widths)), set())
        found = mlps if found is None else found & mlps
    if found is None or len(found) != 1:
        return None
    (mlp,) = found
    function = UNGATED.get(mlp.kind, mlp.kind)
    leaves = [name for name, part in parts_of(module) if name not in layers and not part._modules]
    acts = [name for name in leaves if _run_activation(module.get_submodule(name), FUNCTIONS, modes) == function]
    return mlp._replace(activation=acts[0] if len(acts) == 1 else "")


def _seen(twin: nn.Module, training: bool, layers: dict[str, StandIn], width: int) -> Iterator[Mlp]:
    """The MLPs that a twin is by what its stand-ins read and wrote, given an input of that width, or two."""
    draw = _Draw()
    rows = 2 + 256 // min(layer.out_features for layer in layers.values())  # enough numbers to tell formulas apart
    x, beside = draw.wide(2, rows, width), draw(2, rows, width)
    for layer in layers.values():
        layer.wrote = draw.wide(2, rows, layer.out_features)
    for inputs in ((x,), (x, beside)):
        for layer in layers.values():
            layer.read.clear()
        given = [each.clone() for each in inputs]
        try:
            y = run(twin, training, *given)
        except Exception:  # the width is another layer's, or an argument is missing
            continue
        if all(len(layer.read) == 1 for layer in layers.values()) and torch.equal(given[0], x):
            for down, last in layers.items():
                wrote = sum(inputs[1:], last.wrote) if last.wrote.shape == x.shape else last.wrote
                if torch.equal(y, wrote) and (len(inputs) == 1 or last.wrote.shape == x.shape):
                    yield from _between(x, layers, down, len(inputs) == 2)


def _between(x: torch.Tensor, layers: dict[str, StandIn], down: str, residual: bool) -> Iterator[Mlp]:
    """The MLPs whose `down` read what the formula makes of what the layers before it wrote; they have read x."""
    first = {name: layer for name, layer in layers.items() if name != down}
    if not all(torch.equal(layer.read[0].reshape(x.shape), x) for layer in first.values()):
        return
    h = layers[down].read[0]
    h = h.reshape(*x.shape[:-1], h.shape[-1])
    names, wrote = list(first), [layer.wrote for layer in first.values()]
    if len(names) == 2:
        tries = [({"gate": names[i], "up": names[1 - i]}, (wrote[i], wrote[1 - i])) for i in (0, 1)]
    elif wrote[0].shape[-1] == 2 * h.shape[-1]:
        one, two = wrote[0].chunk(2, -1)
        tries = [({"gate_up": names[0]}, (one, two)), ({"up_gate": names[0]}, (two, one))]
    else:
        tries = [({"up": names[0]}, (wrote[0],))]
    for (names_of, halves), (kind, act) in itertools.product(tries, ACTIVATIONS.items()):
        alike = act.gated == (len(halves) == 2) and h.dtype == x.dtype and all(half.shape == h.shape for half in halves)
        if alike and _near(h, act, *halves):
            yield Mlp(kind, down, **names_of, residual=residual)


def _identity(module: nn.Module) -> tuple:
    """What two modules have in common that compute the same, but for the values of their parameters."""
    if is_linear(module):
        layer: Any = getattr(module, "base_layer", module)
        return ("linear", layer.weight.shape, hasattr(layer, "nf"), layer.bias is None)
    kind = plain_class(module)
    own = tuple((key, _value(value, module)) for key, value in own_attributes(module))
    shapes = tuple((key, None if p is None else p.shape) for key, p in module._parameters.items())
    children = tuple((key, child and _identity(child)) for key, child in module._modules.items())
    return kind, kind.forward, "forward" in vars(module), own, shapes, tuple(module._buffers), children


def _value(value: Any, owner: nn.Module) -> Any:
    """Something that is equal for equal plain values, and for others only for the same object."""
    if isinstance(value, MethodType) and value.__self__ is owner:
        return value.__func__
    if isinstance(value, functools.partial):
        return ("partial", value.func, _value(value.args, owner), _value(tuple(value.keywords.items()), owner))
    if type(value) in (tuple, list):
        return (type(value), *(_value(each, owner) for each in value))
    return (type(value), value) if value is None or isinstance(value, LEAVES) else id(value)


class _Draw:
    """Random numbers of its own, the same in every look."""

    def __init__(self):
        self.generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64, device="cpu")

    def wide(self, *shape: int) -> torch.Tensor:
        """Of either sign, from 0.01 to 10,000: a clamp shows, and every formula differs somewhere."""
        size = torch.rand(*shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return self(*shape).sign() * 10 ** (6 * size - 2)
