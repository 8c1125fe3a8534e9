"""Recognition of norms, activations and MLPs by what they compute, not by their names.

A twin of the module (twin.py) runs on a small float64 input, in training and in evaluation, with gradients and without;
then in FP32, BF16 and FP16 as a training step and as inference run, with a NaN among the numbers; and an MLP in FP32
under autocast, which makes its layers return BF16.  Its result, and in float64 the gradients of its input and its
parameters, are compared with the formulas of ops/reference.  What differs anywhere is not recognised: dropout with
p > 0, a clamp, another scale or order, a detached factor, an eps that depends on the mode or the dtype, a filter of
NaN, checkpointing or another autocast round an MLP's layers; nor is a module whose code writes into attributes,
elements, globals or lists, or that changes what its attributes hold.  The model itself never runs, and nothing of it
or of torch's global state changes.  Hooks on the module are not seen: whoever replaces a forward asks for them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from fp8engine.convert.formulas import Mlp, activation, mlp, norm, product
from fp8engine.convert.twin import (
    SHAPES,
    TOLERANCES,
    Mode,
    adapted,
    is_linear,
    keeps,
    own_attributes,
    plain_class,
    quiet,
)
from fp8engine.ops.reference import Norm
from fp8engine.ops.reference.activations import ACTIVATIONS

MODES = (
    *(Mode(*each) for each in itertools.product((True, False), (False, True))),
    *(Mode(step, step, dtype) for dtype in TOLERANCES if dtype != torch.float64 for step in (True, False)),
    *(Mode(step, step, torch.float32, autocast=True) for step in (True, False)),
)
WITHOUT_AUTOCAST = tuple(mode for mode in MODES if not mode.autocast)
LOOKS = ((norm, WITHOUT_AUTOCAST), (activation, WITHOUT_AUTOCAST), (mlp, MODES))
Found = Norm | Mlp | str  # a str is an activation's kind


def survey(model: nn.Module, known: dict[tuple, Any] | None = None) -> dict[str, Found]:
    """Path -> what it is, of every norm, MLP and activation in `model`, and of none inside an MLP that is in it.

        norm          over its input's last dimension; its `weight` and `bias` are [K], or absent
        activation    one of ACTIVATIONS without a gate, computed by a module without parameters
        MLP           not a module that holds its layers in one child: the child is one

    known: what looks at modules that are alike have found, which `scope` takes as well.

    >>> survey(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.Dropout(), nn.ReLU()))
    {'0': Norm(kind='layer', eps=1e-05, zero_centered=False), '3': 'relu'}
    >>> survey(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)))[""]
    Mlp(kind='silu', down='2', up='0', gate='', gate_up='', up_gate='', activation='1', residual=False)
    """
    known = {} if known is None else known
    found, inside = {}, set()
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        looks = (_look(at, module, modes, known) for at, modes in LOOKS)
        if (what := next(filter(None, looks), None)) is not None:
            found[path] = what
            inside |= {id(part) for part in module.modules()}
    return found


def scope(module: nn.Module, known: dict[tuple, Any]) -> tuple[tuple[int, ...], bool]:
    """Where a norm, an activation or an MLP computes what `survey` found: (numbers of dimensions, whether in autocast).

    Of inputs of 2, 3 and 4 dimensions: code may branch on that, as norms over the channels of pictures do.  Norms may
    cast to autocast's dtype.

    >>> scope(nn.GELU(), {}), scope(nn.BatchNorm1d(32), {})
    (((2, 3, 4), True), ((), False))
    """
    for at, modes in LOOKS:
        if (what := _look(at, module, modes, known)) is not None:
            of_rank = {rank: tuple(mode._replace(rank=rank) for mode in modes) for rank in SHAPES}
            ranks = (rank for rank, looks in of_rank.items() if _look(at, module, looks, known) == what)
            return tuple(ranks), _look(at, module, MODES, known) == what
    return (), False


def gated_products(model: nn.Module) -> dict[str, Mlp]:
    """Path -> the gated product that a module's `down` reads, whatever the module does beside it.

    In evaluation alone, where dropout makes no difference.

    >>> list(gated_products(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))))
    []
    """
    known: dict[tuple, Any] = {}
    found = {path: _look(product, module, (Mode(training=False),), known) for path, module in model.named_modules()}
    return {path: what for path, what in found.items() if what is not None and ACTIVATIONS[what.kind].gated}


def _look(at: Callable, module: nn.Module, modes: tuple[Mode, ...], known: dict[tuple, Any]) -> Any:
    """What `at` finds in a module, or has found in one that is alike; None where anything was raised."""
    try:
        if (prepared := at(module)) is None:
            return None
        key = (at, modes, _identity(module))
        if key not in known:
            known[key] = None
            if at is product or not keeps(module):
                with quiet():
                    known[key] = prepared(modes)
        return known[key]
    except Exception:  # the module's own code may raise anything
        return None


def _identity(module: nn.Module) -> tuple:
    """What two modules have in common that compute the same, but for the values of their parameters."""
    if is_linear(module):
        layer: Any = adapted(module)
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
        return "partial", value.func, _value(value.args, owner), _value((*value.keywords.items(),), owner)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
