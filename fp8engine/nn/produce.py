"""Norms, activations and MLPs that write the FP8 codes which the layers behind them read (autograd/produce.py).

    normed, activated         of our own modules, which know the layer that reads the result
    ProducingNorm             fe.convert's, for a norm, an activation and an MLP of any model that the probe has
    ProducingActivation       recognised by what they compute: the same object under another forward, hooks and all
    ProducingMlp

An MLP calls its layers as modules, so that their hooks and adapters run.  Where what was recognised is not what is
there any more, the module's own forward runs: another eps is followed; a tensor of another class or dtype, of a number
of dimensions of which it computes something else, or in forward-mode AD, autocast that it follows, another value of an
attribute, another module in the activation's place or one more, or a hook on it, are the own forward's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from fp8engine import _torch
from fp8engine.autograd.linear import check
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.produce import KEEP, Memory, NormOf, activation, norm, norm_in_16_bits
from fp8engine.nn.class_swap import Mixin, replaced
from fp8engine.nn.linear import leaf
from fp8engine.numerics.formats import FLOATS
from fp8engine.ops.library import PLAIN
from fp8engine.ops.reference.activations import ACTIVATIONS
from fp8engine.scaling.operands import Producer

KNOWN = (*PLAIN, _torch.FakeTensor)  # classes of tensors that a producer takes; fake ones where a step is planned

VALUES = (bool, int, float, str, tuple, list, type(None))
Told = tuple[tuple[str, Any], ...]  # names and values of attributes

SMALL = {"relu": Memory(recompute_activation=True)}  # torch keeps a ReLU's result alone; codes beside it are more


def numerics_of(layer: Any) -> Numerics | None:
    """The numerics of a layer, or of the one inside an adapter; None: it has none."""
    return getattr(getattr(layer, "base_layer", layer), "numerics", None)


def normed(
    x: torch.Tensor,
    of: NormOf,
    layer: nn.Module,
    producer: Producer,
    memory: Memory = KEEP,
    reads: bool = True,
) -> torch.Tensor:
    """norm(x) for a layer that reads it; as torch computes it where the layer's recipe has no FP8.

    reads: False where another layer will, with a recipe like this one's.
    Raises as the layer does for x, naming it.
    """
    reader = numerics_of(layer)
    if reader is not None and reader.shard is None:
        own: Any = getattr(layer, "base_layer", layer)
        check(x, own.weight, own.bias, reader.name)
    if reader is None or not reader.recipe.is_fp8 or _transformed():
        return norm_in_16_bits(x, of)
    if reader.shard is not None:
        return reader.shard.normed(x, of, lambda part, own: norm(part, own, producer, memory, reader))
    return norm(x, of, producer, memory, reader if reads else None)


def activated(
    x: torch.Tensor,
    kind: str,
    layer: nn.Module,
    producer: Producer,
    memory: Memory = KEEP,
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    """act(x), or act(x) * up, for a layer that reads it; as torch computes it where the layer's recipe has no FP8."""
    reader = numerics_of(layer)
    if reader is None or not reader.recipe.is_fp8 or _transformed():
        return ACTIVATIONS[kind](x) if up is None else ACTIVATIONS[kind].of(x, up)
    return activation(x, kind, producer, memory, up, reader)


def begin_in_graph(layer: nn.Module) -> None:
    """A step begins with the forward of a module of ours, in a compiled graph; in eager code its layers begin it.

    layer: any of those that share its scaling state.
    """
    if torch.compiler.is_compiling() and (numerics := numerics_of(layer)) is not None:
        numerics.state.begin_in_graph()


@contextlib.contextmanager
def sharing(layer: nn.Module) -> Iterator[None]:
    """Layers of a module of ours share the casts of what they read within its forward, as in one of a converted root.

    layer: any of those that share its scaling state.
    """
    numerics = None if torch.compiler.is_compiling() else numerics_of(layer)
    if numerics is None or numerics.state.forward.number is not None:  # in a graph what the module makes is shared
        yield
        return
    numerics.state.forward.begin()
    try:
        yield
    finally:
        numerics.state.forward.end()


def alone(x: torch.Tensor, of: NormOf, run: Callable[[torch.Tensor, NormOf], torch.Tensor]) -> torch.Tensor:
    """A norm that nothing runs round."""
    return run(x, of)


@dataclass(eq=False)
class Recognised:
    """What a module computes.  what: a norm, or an activation's kind.  eps: the name of the norm's own eps, or "".

    own: the attributes that this depends on, but eps.  ranks: numbers of dimensions of inputs of which it computes
    that.  in_autocast: whether it does under autocast.
    layers: of an MLP, the paths of its gate and up, or of one layer for both, and of its down.
    others: its other parts, their paths and attributes: the activation, dropout with p = 0; their forwards do not run.
    around: of a norm, run in its place with what it runs: where it has this rank's tokens alone, it sums its
    parameters' gradients over ranks.
    """

    what: Any
    eps: str = ""
    layers: tuple[tuple[str, ...], ...] = ()
    others: tuple[tuple[tuple[str, ...], nn.Module, Told], ...] = ()
    gate_last: bool = False
    own: Told = ()
    ranks: tuple[int, ...] = ()
    in_autocast: bool = True
    producer: Producer = field(default_factory=Producer)
    around: Callable = alone


NOTHING = Recognised(None)  # of an instance that other code makes with a module's class, as torch makes slices


def _plain(x: Any) -> bool:
    dense = type(x) in KNOWN and x.dtype in FLOATS and x.layout == torch.strided and not x.is_nested
    return dense and not _transformed()


def _transformed() -> bool:
    """Whether a transform of torch.func or forward-mode AD is active: a layer in FP8 refuses those by name."""
    return _torch.transforms_active() or _torch.forward_ad._current_level >= 0


def _unchanged(module: Any, own: Told) -> bool:
    """Whether attributes are what they were: equal, if they are plain values, or the same objects."""
    return all(_same(getattr(module, key, None), then) for key, then in own)


def _same(now: Any, then: Any) -> bool:
    if type(now) is type(then) is functools.partial:  # in a graph it is not the same object as itself, nor is a tuple
        return now.func is then.func and now.args == then.args and now.keywords == then.keywords
    return now == then if type(now) in VALUES and type(then) in VALUES else now is then


def _found(module: Mixin, known: Recognised, x: torch.Tensor) -> bool:
    """Whether a module is what it was recognised as, for x."""
    if known is NOTHING or x.dim() not in known.ranks or (_autocast(x) and not known.in_autocast):
        return False
    return not replaced(module) and _unchanged(module, known.own)


def _in_order(x: torch.Tensor) -> bool:
    """Whether x's dimensions are in the order of its memory, as those of a producer's result are."""
    return x.is_contiguous() or list(x.stride()) == sorted(x.stride(), reverse=True)


class Producing(Mixin):
    """A module of any model whose result takes codes along, while it is what it was recognised as."""

    prefix = "Producing"
    recognised = NOTHING
    _is_leaf = True  # of the graph that torch.fx traces

    def forward(self, *args, **kwargs):
        x: Any = args[0] if args else None
        if isinstance(x, Proxy):
            return leaf(self, x) if self._is_leaf else super().forward(*args, **kwargs)
        as_found = len(args) == 1 and not kwargs and _plain(x) and _found(self, self.recognised, x)
        y = self._produced(x, self.recognised) if as_found else None
        return super().forward(*args, **kwargs) if y is None else y

    def _produced(self, x: torch.Tensor, known: Recognised) -> torch.Tensor | None:
        """The result with codes; None where the module's own forward computes it."""


class ProducingNorm(Producing):
    """A norm."""

    def _produced(self, x, known):
        which = known.what
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)  # a parametrization's too
        own = _widened(x) if which.kind == "layer" else not _in_order(x)
        if own or not (_fits(weight, x) and _fits(bias, x)):
            return None
        if known.eps:  # it may be set by now
            which = which._replace(eps=getattr(self, known.eps))
        of = NormOf(which, weight, bias)
        return known.around(x, of, lambda part, own: norm(part, own, known.producer))


def _fits(parameter: torch.Tensor | None, x: torch.Tensor) -> bool:
    """Whether a norm with this parameter gives a result in x's dtype."""
    return parameter is None or (type(parameter) in KNOWN and parameter.dtype == x.dtype)


def _widened(x: torch.Tensor) -> bool:
    """Whether autocast gives a LayerNorm's result another dtype than x's."""
    return x.dtype.itemsize == 2 and _autocast(x)


def _autocast(x: torch.Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


class ProducingActivation(Producing):
    """An activation."""

    def _produced(self, x, known):
        if not _in_order(x):
            return None
        return activation(x, known.what, known.producer, SMALL.get(known.what, KEEP))


class ProducingMlp(Producing):
    """An MLP, down(act(gate(x)) * up(x)) or down(act(up(x))), whose product takes codes along."""

    _is_leaf = False

    def _produced(self, x, known):
        layers = [_part(self, path) for path in known.layers]
        dtypes = {getattr(getattr(layer, "weight", None), "dtype", None) for layer in layers}
        as_found = len(dtypes - {None}) == len(dtypes) == 1  # T5 keeps one weight in FP32, and casts what it reads
        as_found = as_found and all(_passive(_part(self, path), part, own) for path, part, own in known.others)
        as_found = as_found and _parts(self, known) == len(known.layers) + len(known.others)
        if not (as_found and (x.dtype in dtypes or _autocast(x))):  # else it casts x, or an error is due
            return None
        *firsts, down = layers
        made = [layer(x) for layer in firsts]
        if known.gate_last:
            made = [*reversed(made[0].chunk(2, -1))]
        if not all(map(_plain, made)) or len({y.dtype for y in made}) > 1:  # as a layer of another library gives
            kind = ACTIVATIONS[known.what]
            return down(kind(*made) if len(made) == 1 else kind.of(*made))
        y, *up = made
        return down(activated(y, known.what, down, known.producer, SMALL.get(known.what, KEEP), *up))


def _part(module: Any, path: tuple[str, ...]) -> Any:
    """The module at a path within another; None where there is none any more."""
    for key in path:
        module = module and module._modules.get(key)
    return module


def _parts(module: Any, known: Recognised) -> int:
    """How many parts an MLP has now, without those in its layers."""
    holders = (module, *(part for _, part, _ in known.others))
    return sum(child is not None for each in holders for child in each._modules.values())


def _passive(part: Any, found: nn.Module, own: Told) -> bool:
    """Whether a part is the one that was found and as it was, and nobody looks on."""
    if part is not found:
        return False
    hooks = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
    return not hooks and "forward" not in vars(part) and _unchanged(part, own)
