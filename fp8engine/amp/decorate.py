"""Mixed precision for a plain FP32 training script, in one call and one changed word (fe.amp.decorate).

    model, optimizer = fe.amp.decorate(model, optimizer)
    optimizer.backward(loss)                                    for loss.backward(), where the dtype is FP16

O1: the weights stay FP32, the forward runs under autocast.  O2: the weights are cast too, and stepped through FP32
masters; norms stay FP32.  In FP16 the loss is scaled (BF16 has FP32's range and needs no scale: there loss.backward()
may stay).

The scale enters at the loss, as with torch.amp, and nowhere else: a scale that entered where the loss's gradient
reaches the model's outputs would miss every term of the loss that goes past these (a penalty on the weights, an
auxiliary loss kept inside the model, a gradient penalty), and step() would divide such a term by the scale all the
same.  step() refuses gradients that did not come through optimizer.backward: fp8engine/amp/scaled.py.

Outputs in 16 bits are returned in FP32, so the loss is computed in FP32 and its gradient enters the model in FP32.
The class of the module itself is changed (to a subclass), so names, hooks, ties, state_dict and isinstance stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fp8engine import _torch
from fp8engine.amp.autocast import autocast, check_bf16
from fp8engine.amp.lists import UNCHANGED, OpLists
from fp8engine.amp.master import MasterWeights
from fp8engine.amp.mixed import in_fp32, mixed, reduced
from fp8engine.amp.pin import CONTAINERS, check_own_forward, is_pinned, pin_fp32
from fp8engine.amp.scaled import ScaledOptimizer
from fp8engine.amp.scaler import GradScaler
from fp8engine.amp.tensors import NARROW, SIXTEEN_BIT, Lent, cast_all, device_type
from fp8engine.amp.wrapped import is_wrapped, parameters_of
from fp8engine.errors import ConversionError, LossScaleError, OpListError, OptimizerError, UnknownName, UnsupportedDtype

LEVELS = ("O1", "O2")
NORMS = (_torch.norm_base, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
Layers = str | type[nn.Module] | nn.Module
M = TypeVar("M", bound=nn.Module | list[nn.Module])
Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]


@dataclass(frozen=True)
class Precision:
    """Level, dtype and lists of a decorated model."""

    level: str
    dtype: torch.dtype
    lists: OpLists


class Decorated:
    """Mixed into the class of a decorated model."""

    _fp8engine_amp: Precision

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward in mixed precision; an output in 16 bits is returned in FP32."""
        how, where = self._fp8engine_amp, device_type(self, (args, kwargs))
        dtype = torch.float32 if in_fp32(where) else how.dtype
        lent: list[Lent] = []
        if how.level == "O2":  # as the weights take it
            args, kwargs = cast_all((args, kwargs), NARROW, dtype, lent)
        with autocast(where, dtype, dtype in SIXTEEN_BIT, lists=how.lists):
            output = super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        for one in lent:
            one.write_back()
        return cast_all(output, SIXTEEN_BIT, torch.float32)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(Decorated, self, protocol)


class Options(TypedDict, total=False):
    """Keywords of `decorate` behind its level, which it explains."""

    dtype: torch.dtype
    lists: OpLists | None
    master_weights: bool | None
    excluded_layers: Layers | Iterable[Layers] | None
    scaler: bool | torch.amp.GradScaler | None


@overload
def decorate(model: M, optimizer: None = None, level: str = "O1", **options: Unpack[Options]) -> M: ...
@overload
def decorate(model: M, optimizer: Optimizers, level: str = "O1", **options: Unpack[Options]) -> tuple[M, Any]: ...
@overload
def decorate(model: Any = None, optimizer: Any = None, level: str = "O1", **options: Unpack[Options]) -> Any: ...
def decorate(
    model: Any = None,
    optimizer: Any = None,
    level: str = "O1",
    dtype: torch.dtype = torch.float16,
    lists: OpLists | None = None,
    master_weights: bool | None = None,
    excluded_layers: Layers | Iterable[Layers] | None = None,
    scaler: bool | torch.amp.GradScaler | None = None,
) -> Any:
    """The model and optimizer (or lists of them) in mixed precision; returns what was given, in that shape.

    level: "O1" autocast; "O2" weights cast to `dtype` too, norms kept FP32, floating inputs cast.  dtype: torch.float16
    or bfloat16.  lists: changes to autocast's lists.  master_weights: None where the optimizer has 16-bit parameters.
    excluded_layers: types, modules or globs over their names, kept and computed in FP32.
    scaler: None a GradScaler inside the optimizer for FP16; False none, for scripts that keep their own; True, or a
    GradScaler of yours.  One scaler for all that is decorated in one call.

    The optimizer has `backward(loss)`, to write for `loss.backward()`; after a plain loss.backward() its step() refuses
    where the loss is scaled.  With an optimizer alone the forward is yours to put under fe.amp.autocast.
    Wrap for several devices and compile afterwards.

    Raises ConversionError (no parameters, decorated or wrapped already, layers that are not there, a scaler that is
    none), OpListError (lists that are no OpLists), OptimizerError (wrapped already, of another model, two of one
    parameter), UnknownName (level, glob), UnsupportedDtype, BackendError (BF16 on a card without it), LossScaleError
    (FP16 gradients and no masters); nothing has been changed then.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = decorate(model, optimizer, level="O2")
    >>> loss = model(torch.ones(2, 4)).square().mean()
    >>> optimizer.backward(loss)
    >>> optimizer.step()
    >>> loss.dtype, model[0].weight.dtype, model[1].weight.dtype, isinstance(model, nn.Sequential)
    (torch.float32, torch.float16, torch.float32, True)
    """
    if optimizer is None and all(isinstance(one, torch.optim.Optimizer) for one in _listed(model)):
        model, optimizer = None, model
    models, optimizers = _listed(model), _listed(optimizer)
    parameters = _check_models(models) or [p for one in optimizers for p in _parameters(one)]
    _check_precision(level, dtype, {p.device for p in parameters})
    OpListError.unless(lists, OpLists | None, "decorate(lists=) takes fe.amp.OpLists(white=[...], ...)")
    excluded = _chosen(models, excluded_layers)
    norms = [module for one in models for module in _kept_by_o2(one)] if level == "O2" else []
    cast = _to_cast(models, [*excluded, *norms]) if level == "O2" else {}
    low = [any(p in cast or p.dtype in SIXTEEN_BIT for p in _parameters(one)) for one in optimizers]
    masters = low if master_weights is None else [master_weights] * len(low)
    _check_optimizers(optimizers, set(parameters), low, masters)
    loss_scaler = _loss_scaler(scaler, dtype, bool(optimizers), parameters[0].device)
    scales = loss_scaler is not None and loss_scaler.is_enabled()
    if scales and dtype == torch.float16 and any(low) and not all(masters):
        raise LossScaleError(
            "16-bit parameters without FP32 masters have gradients that no scaler can unscale:"
            " leave master_weights out, or say scaler=False"
        )
    _pin(norms, excluded, roots=models)
    originals = {p: _cast(p, dtype) for p in cast}
    for one in models:
        for module in one.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
        one._fp8engine_amp = Precision(level, dtype, lists or UNCHANGED)
        one.__class__ = mixed(Decorated, type(one))
    wrapped = [
        MasterWeights(one, originals=originals) if needed else _with_state_cast(one)
        for one, needed in zip(optimizers, masters, strict=True)
    ]
    if loss_scaler is not None:
        together: list[ScaledOptimizer] = []
        wrapped = [ScaledOptimizer(one, loss_scaler, together) for one in wrapped]
    given = [(model, models), (optimizer, wrapped)]
    made = [done if isinstance(one, (list, tuple)) else done[0] for one, done in given if one is not None]
    return made[0] if len(made) == 1 else tuple(made)


def is_norm(module: nn.Module) -> bool:
    """torch's norms, and by structure others': "norm" in its name, nothing inside it, every weight one row.

    >>> is_norm(nn.GroupNorm(2, 4)), is_norm(nn.Linear(4, 4))
    (True, False)
    """
    if isinstance(module, NORMS):
        return True
    own = list(module.parameters())
    is_leaf = not any(True for _ in module.children()) and bool(own)
    return is_leaf and "norm" in type(module).__name__.lower() and all(p.dim() <= 1 for p in own)


def _kept_by_o2(model: nn.Module) -> Iterator[nn.Module]:
    """Norms, and what computes a weight from parameters (torch's spectral_norm, which has FP32 buffers)."""
    for module in model.modules():
        if is_norm(module):
            yield module
        elif isinstance(module, ParametrizationList):
            yield from module


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(f"decorate takes torch.optim optimizers, not {type(optimizer).__name__}")
    return parameters_of(optimizer)


def _check_models(models: list[nn.Module]) -> list[nn.Parameter]:
    """Their parameters."""
    for model in models:
        ConversionError.unless(model, nn.Module, "decorate takes an nn.Module")
        if next(model.parameters(), None) is None:
            raise ConversionError(f"{type(model).__name__} has no parameters: nothing to train in mixed precision")
        for name, module in model.named_modules():
            where = f"its part {name!r}" if name else f"this {type(model).__name__}"
            if found := _torch.wrapper_of(module):
                raise ConversionError(f"{where} is under {found} already: decorate first, then wrap or compile")
            if isinstance(module, Decorated):
                raise ConversionError(f"{where} is decorated already: decorate a model once, as a whole")
            if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters(recurse=False)):
                raise ConversionError(f"{where} has no shapes yet (a lazy module): run one forward first")
        check_own_forward(model, "decorate")
    return [p for model in models for p in model.parameters()]


def _check_precision(level: str, dtype: torch.dtype, devices: set[torch.device]) -> None:
    if level not in LEVELS:
        raise UnknownName("level", level, LEVELS)
    if dtype not in SIXTEEN_BIT:
        raise UnsupportedDtype(f"decorate(dtype={dtype}): mixed precision is in torch.float16 or torch.bfloat16")
    if not devices:
        raise ConversionError("decorate() was given neither a model nor an optimizer")
    for where in devices:
        if dtype == torch.bfloat16 and where.type == "cuda":
            check_bf16("decorate", where, "(decorate builds its loss scaler in)")


def _check_optimizers(optimizers: list, known: set[nn.Parameter], low: list[bool], masters: list[bool]) -> None:
    taken: set[nn.Parameter] = set()
    for optimizer, has_low, needed in zip(optimizers, low, masters, strict=True):
        kind, own = type(optimizer).__name__, set(_parameters(optimizer))
        if is_wrapped(optimizer):
            raise OptimizerError(f"this {kind} is wrapped already: decorate the plain optimizer, once")
        if known.isdisjoint(own):
            raise OptimizerError(f"this {kind} holds none of the model's parameters: make it from model.parameters()")
        if not taken.isdisjoint(own):
            raise OptimizerError(f"this {kind} and another would both unscale a parameter's gradient: give it to one")
        taken |= own
        if needed and not has_low:
            raise OptimizerError(f"master_weights=True, and this {kind} holds no 16-bit parameters: take level='O2'")


def _chosen(models: list[nn.Module], excluded: Layers | Iterable[Layers] | None) -> list[nn.Module]:
    """The modules to keep in FP32."""
    wanted = [excluded] if isinstance(excluded, (str, type, nn.Module)) else list(excluded or ())
    named = {name: module for model in models for name, module in model.named_modules() if name}
    chosen: list[nn.Module] = []
    for want in wanted:
        if isinstance(want, str):
            found = [module for name, module in named.items() if fnmatchcase(name, want)]
            if not found:
                raise UnknownName("layer", want, named)
        else:
            found = [m for m in named.values() if m is want or (isinstance(want, type) and isinstance(m, want))]
            if not found:
                kind = want.__name__ if isinstance(want, type) else f"this {type(want).__name__}"
                raise ConversionError(f"excluded_layers: {kind} is not in the model")
        chosen += [part for module in found for part in _callable(module)]
    for module in chosen:
        check_own_forward(module, "decorate")
    return chosen


def _callable(module: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(module, CONTAINERS):
        yield module
        return
    for child in module.children():
        yield from _callable(child)


def _to_cast(models: list[nn.Module], kept: list[nn.Module]) -> dict[nn.Parameter, None]:
    """The parameters that O2 casts: not the kept modules', not even where another module shares them."""
    pinned = [module for model in models for module in model.modules() if is_pinned(module)]
    stay = {p for module in [*kept, *pinned] for p in module.parameters()}
    every = (p for model in models for p in model.parameters())
    return {p: None for p in every if p not in stay and p.dtype in NARROW}


@torch.no_grad()
def _cast(p: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """Cast in place; returns the values that it had."""
    original, grad, p.grad = p.data, p.grad, None
    p.data = original.to(dtype)
    if grad is not None:
        p.grad = grad.to(dtype)
    return original


def _pin(norms: list[nn.Module], excluded: list[nn.Module], roots: list[nn.Module]) -> None:
    for module in norms:
        if not any(module is root for root in roots):
            pin_fp32(module, output="input")
    for module in excluded:
        pin_fp32(module, output="fp32")


def _with_state_cast(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Without masters: state gathered so far takes the parameters' new dtype."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


def _loss_scaler(
    scaler: bool | torch.amp.GradScaler | None, dtype: torch.dtype, steps: bool, device: torch.device
) -> torch.amp.GradScaler | None:
    if scaler is False or not steps:
        if scaler:
            raise ConversionError("decorate(scaler=): a model alone has no step to unscale in; give the optimizer too")
        return None
    if isinstance(scaler, torch.amp.GradScaler):
        return scaler
    ConversionError.unless(scaler, bool | None, "decorate(scaler=) takes True, False, None or a GradScaler")
    return GradScaler(device, enabled=dtype == torch.float16 or scaler is True)
