"""Comparison of a model in two precisions, layer by layer (fe.amp.compare).

The model runs twice on the same inputs, in `high` and in `low`, and each module's output y is compared:

    error = ||y_low - y_high||_2 / ||y_high||_2        SQNR = -20 log10(error) dB        in FP64, over finite elements

A 16-bit `low` runs under autocast, the parameters as they are (a decorated model under its own autocast and lists); any
other dtype runs with parameters, buffers and inputs cast to it and autocast off, in decorated models too.  Errors add
up from layer to layer, so the layer to examine is the first whose error passes the threshold, or whose output is not
finite where the other's is.  Modules are listed in the order they finish, inner ones before the one that holds them.

The model is left as it was.  Buffers are swapped for copies, parameters' data put back, attributes of every module
restored; torch's and Python's random numbers start from the same state in both runs and end where they were.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fp8engine._torch import tree_leaves, tree_map
from fp8engine.amp.autocast import autocast
from fp8engine.amp.difference import Call, Difference, Key, Side, call, run_both
from fp8engine.amp.lists import UNCHANGED, OpLists
from fp8engine.amp.tensors import SIXTEEN_BIT
from fp8engine.amp.text import FOLD, RIGHT, as_text, precision
from fp8engine.errors import ConversionError, StateError, UnsupportedDtype

# One rounding errs by up to u = eps / 2; a thousand of them, one after another and random, by sqrt(1000) u = 32 u.
ROUNDINGS = 32

# CUDA draws a dropout's mask in vectors as wide as the dtype allows: the same seed gives other masks in other dtypes.
DROPOUTS = ("alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout",
            "feature_dropout", "native_dropout")  # fmt: skip


@dataclass(frozen=True)
class LayerError:
    """One call of one module, in both precisions.

    name: its path; "" is the model.  call: 0 for its first call.  dtypes: of its output, low and high.
    error: relative, inf where y_high is 0 and y_low not; sqnr_db: the same in decibels; None where nothing compares or
    no element is finite in both.
    nonfinite_low, nonfinite_high: NaN and Inf elements.  note: why nothing could be compared, or "".
    """

    name: str
    kind: str
    call: int
    dtypes: tuple[str, str]
    error: float | None = None
    nonfinite_low: int = 0
    nonfinite_high: int = 0
    note: str = ""

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantisation noise in dB: inf for equal outputs."""
        if self.error is None or math.isinf(self.error):
            return None if self.error is None else -math.inf
        return math.inf if self.error == 0 else -20 * math.log10(self.error)


@dataclass(frozen=True)
class Comparison:
    """Every module call of a model in two precisions, in the order of finishing; print it, or take first()."""

    layers: list[LayerError]
    low: str
    high: str
    threshold: float

    def diverges(self, layer: LayerError) -> bool:
        """Whether the layer's error is over the threshold, or only one precision is finite, or only one ran it."""
        over = layer.error is not None and layer.error > self.threshold
        return over or (layer.nonfinite_low > 0) != (layer.nonfinite_high > 0) or bool(layer.note)

    def first(self) -> LayerError | None:
        """The first layer to finish that diverges; None where none does."""
        return next((layer for layer in self.layers if self.diverges(layer)), None)

    def to_dict(self) -> dict:
        """Everything, in types that JSON knows (inf as a float)."""
        first = self.first()
        layers = [
            asdict(layer) | {"dtypes": list(layer.dtypes), "sqnr_db": layer.sqnr_db, "diverges": self.diverges(layer)}
            for layer in self.layers
        ]
        return vars(self) | {"first": None if first is None else first.name, "layers": layers}

    def table(self, width: int = 120) -> str:
        """The layers as text, `width` columns wide; the first divergence below."""
        names, numbers = ("layer", "kind", "output"), ("error", "SQNR dB", f"not finite {self.low} / {self.high}")
        columns = [*((name, FOLD) for name in names), *((name, RIGHT) for name in numbers), ("note", FOLD)]
        first, rows = self.first(), []
        for layer in self.layers:
            bad = f"{layer.nonfinite_low} / {layer.nonfinite_high}"
            note = "first to diverge" if layer is first else "diverges" if self.diverges(layer) else ""
            rows.append(
                [
                    _called(layer),
                    layer.kind,
                    " / ".join(dict.fromkeys(layer.dtypes)),
                    "-" if layer.error is None else f"{layer.error:.2e}",
                    "-" if layer.sqnr_db is None else f"{layer.sqnr_db:.1f}",
                    bad if layer.nonfinite_low or layer.nonfinite_high else "",
                    ", ".join(filter(None, (note, layer.note))),
                ]
            )
        found = f"first divergence: {_called(first)} ({first.kind})" if first else "no layer diverges"
        title = f"{self.low} against {self.high}, layer by layer"
        return as_text(title, columns, rows, [f"{found}; threshold {self.threshold:.2e}"], width)

    def __str__(self) -> str:
        return self.table()


def compare(
    model: nn.Module,
    inputs: Any,
    low: torch.dtype = torch.float16,
    high: torch.dtype = torch.float32,
    *,
    lists: OpLists = UNCHANGED,
    threshold: float | None = None,
) -> Comparison:
    """Run `model` on `inputs` in two precisions and compare every module's output.

    inputs: a tuple of arguments, a dict of keywords, or one argument.  low, high: floating dtypes.
    lists: for autocast in a 16-bit run.  threshold: relative error from which a layer diverges; by default 32
    roundings of `low`, 16 eps: 1.6e-2 for FP16, 0.125 for BF16.
    The model stays in its mode, training or not, without gradients.  Outputs of the high run are kept until the low
    run has passed: one forward's activations.  An attention kernel's own dropout may draw other numbers on CUDA.  What
    a forward writes into a list, a dict or a tensor that is a plain attribute of a module, no buffer, stays there.

    Raises UnsupportedDtype (low or high is no floating dtype that runs), StateError (CPU and CUDA in one model),
    ConversionError (no nn.Module).

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    >>> with torch.no_grad():
    ...     _ = model[0].weight.mul_(1e6)
    >>> compare(model, torch.ones(2, 8)).first().name
    '0'
    """
    ConversionError.unless(model, nn.Module, "compare takes an nn.Module")
    for name, dtype in (("low", low), ("high", high)):
        if dtype not in (*SIXTEEN_BIT, torch.float32, torch.float64):
            raise UnsupportedDtype(f"compare({name}={dtype}): give torch.float16, bfloat16, float32 or float64")
    modules, layers = dict(model.named_modules()), []

    def keep(call: Call) -> list[torch.Tensor]:
        return [output.clone() for output in call.tensors()]

    def match(call: Call, kept: list[torch.Tensor] | None) -> None:
        layers.append(_layer(call.key, call.module, call.tensors(), kept))

    def side(dtype: torch.dtype) -> Side:
        drawn_in = high if dtype in SIXTEEN_BIT else dtype
        return modules, functools.partial(_run, model, inputs, dtype, lists, drawn_in)

    _, _, only_high = run_both(side(high), side(low), keep, match)
    layers += [_layer(key, modules[key[0]], None, kept) for key, kept in only_high.items()]
    limit = ROUNDINGS * torch.finfo(low).eps / 2 if threshold is None else threshold
    return Comparison(layers, precision(low), precision(high), limit)


def _run(model: nn.Module, inputs: Any, dtype: torch.dtype, lists: OpLists, drawn_in: torch.dtype) -> None:
    """One forward in `dtype`.  lists: autocast's.  drawn_in: the dtype of dropout."""
    half = dtype in SIXTEEN_BIT
    device_type = _device_type(model, inputs)
    with _as_it_was(model, None if half else dtype), torch.no_grad():
        given = tree_map(lambda value: _copy(value, None if half else dtype), inputs)
        # No cache: a cast made here without gradients must not serve a surrounding autocast (torch 2.13 sees to that
        # itself; older ones were not tried).
        casting = autocast(device_type, dtype if half else torch.float32, half, cache_enabled=False, lists=lists)
        with casting, _DropoutIn(drawn_in):
            call(model, given)


class _DropoutIn(TorchFunctionMode):
    """Dropout computed in one dtype and rounded back: the same mask in both runs."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in DROPOUTS or not args:
            return func(*args, **kwargs)
        given = args[0]
        result = func(given.to(self.dtype), *args[1:], **kwargs)
        return tree_map(lambda value: value.to(given.dtype) if value.dtype == self.dtype else value, result)


@contextlib.contextmanager
def _as_it_was(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """The model with copies of its buffers, in `dtype` if one is given; afterwards everything is as it was."""
    tables: list[dict | set] = []
    for module in model.modules():
        tables += [vars(module), module._parameters, module._buffers, module._non_persistent_buffers_set]
    kept: list[tuple[Any, Any]] = [(table, table.copy()) for table in tables]
    data = [(parameter, parameter.data) for parameter in model.parameters()]
    devices = {value.device for value in (*model.parameters(), *model.buffers()) if value.device.type == "cuda"}
    python_random = random.getstate()
    with torch.random.fork_rng(devices=[device.index for device in devices]):
        try:
            for parameter, values in data:
                parameter.data = _copy(values, dtype, always=False)
            copies: dict[int, torch.Tensor] = {}  # by id: a buffer under two names stays one
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = copies.setdefault(id(buffer), _copy(buffer, dtype))
            yield
        finally:
            for parameter, values in data:
                parameter.data = values
            for table, before in kept:
                table.clear()
                table.update(before)
            random.setstate(python_random)


def _copy(value: Any, dtype: torch.dtype | None, always: bool = True) -> Any:
    """A copy of a tensor, cast to `dtype` if that is given and the tensor is floating."""
    if not isinstance(value, torch.Tensor):
        return value
    target = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
    return value.detach().to(target, copy=always)


def _layer(key: Key, module: nn.Module, low: list[torch.Tensor] | None, high: list[torch.Tensor] | None) -> LayerError:
    """One call of a module; None for the run that has no such call."""
    dtypes = (_precisions(low or []), _precisions(high or []))
    start = (key[0], type(module).__name__, key[1], dtypes)
    if low is None or high is None:
        return LayerError(*start, note=f"ran in {'high' if low is None else 'low'} only")
    if [value.shape for value in low] != [value.shape for value in high]:
        return LayerError(*start, note="outputs of other shapes")
    if not low:
        return LayerError(*start)
    difference = Difference()
    for ours, theirs in zip(low, high, strict=True):
        difference.add(ours, theirs)
    bad = difference.nonfinite_low, difference.nonfinite_high
    return LayerError(*start, difference.error if difference.finite or not any(bad) else None, *bad)


def _device_type(model: nn.Module, inputs: Any) -> str:
    tensors = [*model.parameters(), *model.buffers(), *(v for v in tree_leaves(inputs) if isinstance(v, torch.Tensor))]
    kinds = {tensor.device.type for tensor in tensors}
    if len(kinds) > 1:
        raise StateError(f"compare: the model and its inputs lie on {' and '.join(sorted(kinds))}; move them to one")
    return kinds.pop() if kinds else "cpu"


def _precisions(values: list[torch.Tensor]) -> str:
    return "+".join(dict.fromkeys(precision(value.dtype) for value in values)) or "-"


def _called(layer: LayerError) -> str:
    return (layer.name or "(model)") + (f" call {layer.call + 1}" if layer.call else "")
