"""Origins of tensors' values, kept by storage, and the rules by which an operation's result gets those of its operands.

An Origin is one thing that made values: one call of a layer, a norm, a residual addition, the model's input.  The
result of a view-like operation keeps its input's origins; a view shares those of its base, since both are one storage.
A storage is referenced weakly: its memory is freed as usual, but its key is not given to another one while recording.

The first operation that is not view-like consumes a layer's output.  Three patterns need more than one operation:

    rotary       x cos + rotate(x) sin     a product with what no layer made is view-like, and so is a sum of two
                                           branches of one source: q and k keep their origins up to the attention
    norm         x rsqrt(mean(x^2))        a mean of x that x is then multiplied or divided by, or shifted with
    attention    softmax(q k^T + mask) v   products of two activations, and everything between them, are one thing
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdRef

Form = Literal["", "elementwise", "reduced", "scores"]
# Of what a new origin is made for: its form, and its kind where that has another name.
FORMS: dict[str, Form] = {"activation": "elementwise", "reduce": "reduced", "scores": "scores"}
KINDS = {"layer": "matmul", "convolution": "matmul", "scores": "softmax", "reduce": "unknown"}
# What a loss is written with: the difference from a target, its size, a likelihood.
PARTS_OF_A_LOSS = ("sub", "rsub", "pow", "square", "abs", "log", "log1p", "exp", "softmax", "log_softmax")
BIAS_FIRST = ("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation")
FLAT = ("mm", "addmm", "mv", "addmv", "dot")


@dataclass(eq=False)
class Origin:
    """One call that made values, and its consumers.

    kind, name, where: as a Consumer has them.  call: which call of the module `where` it happened in.
    form: "elementwise", a function of single elements of `of`; "reduced", a sum, mean or maximum over elements of `of`,
    from which a norm may come; "scores", attention's, before its values have been weighed; "" for all else.
    of: what it read.  consumers: what read it.  layer: of which layer it is a call.
    depends: whether a layer's output is in it.  same_as: another origin that this one is a part of.
    """

    kind: str
    name: str
    where: str
    call: int = 0
    form: Form = ""
    of: list[Origin] = field(default_factory=list)
    consumers: list[Origin] = field(default_factory=list)
    layer: str | None = None
    depends: bool = False
    same_as: Origin | None = None

    def reads(self, origins: Iterable[Origin]) -> None:
        """Note that it reads what these made."""
        for origin in origins:
            if origin is not self and origin not in self.of:
                self.of.append(origin)
                origin.consumers.append(self)
                self.depends = self.depends or origin.depends

    def resolved(self) -> Origin:
        """Itself, or what it is a part of."""
        return self if self.same_as is None else self.same_as.resolved()

    def roots(self) -> list[Origin]:
        """What it is a function of, through elementwise functions: a mean of squares is one of x."""
        return [*self.of, *(root for origin in self.of if origin.form == "elementwise" for root in origin.roots())]


class State(NamedTuple):
    """Origins of a tensor's values; where it has none, the parameters that it was made of."""

    origins: tuple[Origin, ...] = ()
    parameters: tuple[str, ...] = ()

    @property
    def depends(self) -> bool:
        """Whether a layer's output is in it."""
        return any(origin.depends for origin in self.origins)

    def one(self, form: Form) -> Origin | None:
        """Its origin if that is the only one and has this form: the elementwise function, or the attention, it is."""
        return self.origins[0] if len(self.origins) == 1 and self.origins[0].form == form else None

    @property
    def reduced(self) -> bool:
        """Whether it is nothing but sums, means or maxima of something."""
        return bool(self.origins) and all(origin.form == "reduced" for origin in self.origins)


NOTHING = State()


def joined(*states: State) -> State:
    """All of them in one."""
    origins = dict.fromkeys(origin for state in states for origin in state.origins)
    return State(tuple(origins), tuple(dict.fromkeys(name for state in states for name in state.parameters)))


class States:
    """The State of every tensor, by its storage; a tensor never seen is a constant: NOTHING."""

    def __init__(self):
        self._of: dict[object, State] = {}

    def __getitem__(self, tensor: torch.Tensor) -> State:
        return self._of.get(storage(tensor)[0], NOTHING)

    def __setitem__(self, tensor: torch.Tensor, state: State) -> None:
        key, _ = storage(tensor)
        if state != NOTHING or key in self._of:
            self._of[key] = state

    def written(self, tensor: torch.Tensor, state: State) -> None:
        """Note that `tensor` was written in place: a part of its storage, or all of it."""
        whole = tensor.numel() * tensor.element_size() >= storage(tensor)[1]
        self[tensor] = state if whole else joined(self[tensor], state)


def storage(tensor: torch.Tensor) -> tuple[object, int]:
    """(key of the memory that a tensor lies in, its bytes); of a subclass that has no storage the tensor, and 0."""
    try:
        memory = tensor.untyped_storage()
        return StorageWeakRef(memory), memory.nbytes()
    except RuntimeError:
        return WeakIdRef(tensor), 0


def place(tensor: torch.Tensor) -> tuple:
    """A key that two tensors share if they are the same values in the same memory, whatever their shapes."""
    version = 0 if tensor.is_inference() else tensor._version
    return storage(tensor)[0], tensor.storage_offset(), tensor.numel(), tensor.dtype, version


class Operand(NamedTuple):
    """A tensor that an operation reads, and its state."""

    state: State
    tensor: torch.Tensor


class Rules:
    """Operands -> state of the result.  Makes an Origin where something new begins.

    stack: (name, module, which of all calls) of the modules whose forward runs.  made: every origin, in order.
    sharing: the numbers that layers read -> which layers.
    """

    def __init__(self):
        self.stack: list[tuple[str, nn.Module, int]] = []
        self.made: list[Origin] = []
        self.sharing: dict[tuple, list[str]] = {}

    def new(self, sort: str, name: str, *read: State, at: tuple[str, str, int] | None = None) -> State:
        """A new origin that reads these.  at: as `where` gives it, where that is known.

        sort: the kind of a consumer, a group of kinds.py, "scores" or "layer", whose name is the layer's.
        """
        kind, is_layer = KINDS.get(sort, sort), sort == "layer"
        module, where, call = at or self.where(kind)
        layer, depends = name if is_layer else None, is_layer or sort == "convolution"
        origin = Origin(kind, layer or module or name, where, call, FORMS.get(sort, ""), layer=layer, depends=depends)
        for state in read:
            origin.reads(state.origins)
        self.made.append(origin)
        return State((origin,))

    def where(self, kind: str) -> tuple[str, str, int]:
        """(the running module's name if it is one thing of this kind, the module around, which of its calls).

        One thing: it is not the model, has no parts, and no matrix of its own that it multiplies by, too.
        """
        if not self.stack:
            return "", "", 0
        name, module, call = self.stack[-1]
        has_matrix = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        one = next(module.children(), None) is None and (kind in ("matmul", "embedding") or not has_matrix)
        if len(self.stack) > 1 and one:
            around, _, call = self.stack[-2]
            return name, around, call
        return "", name, call

    def owner(self, parameters: Sequence[str]) -> str:
        """The layer of a weight: the module that runs now if one of its names is there, else by the first name."""
        inside = [module_name for module_name, *_ in self.stack]
        named = [parameter.rpartition(".") for parameter in parameters]
        named.sort(key=lambda parts: -max([i for i, name in enumerate(inside) if name == parts[0]], default=-1))
        module, _, key = named[0]
        return module if key == "weight" and module else f"{module}.{key}" if module else key

    def apply(self, group: str, name: str, operands: list[Operand]) -> State:
        """The result of an operation of a group of kinds.py."""
        known = [operand.state for operand in operands if operand.state != NOTHING]
        if not known or group in ("ignore", "reset"):
            return NOTHING
        state = joined(*known)
        if group not in ("matmul", "embedding") and not state.origins:
            return state  # made of parameters: constant
        scores = state.one("scores")
        match group:
            case "view_like":
                return state
            case "add" | "mul":
                return self._binary(group, name, operands)
            case "matmul":
                return self._matmul(name, operands)
            case "embedding":
                return self.new("embedding", name)
            case "unary" | "reduce" | "softmax" if scores:
                return state
            case "unary":
                of_a_norm = any(origin.kind == "norm" for origin in state.origins)
                is_part = state.one("elementwise") or (state.reduced and not of_a_norm)
                return state if is_part else self.new("activation", name, state)
            case "softmax" | "log_softmax":
                return self.new("softmax", group, state)
            case "attention":
                return self.new("softmax", "attention", state)
        return self.new(group, name, state)  # of a norm, a loss, or what is unknown too

    def _binary(self, group: str, name: str, operands: list[Operand]) -> State:
        if len(operands) == 1:
            return operands[0].state  # with a number
        a, b = operands[:2]
        if not a.state.origins or not b.state.origins:
            return a.state if a.state.origins else b.state if b.state.origins else joined(a.state, b.state)
        for x, other in ((a, b), (b, a)):
            size, other_size = x.tensor.numel(), other.tensor.numel()
            if other.state.reduced and other_size < size and (norm := self._norm(x.state, other.state)):
                return norm
            if (attention := x.state.one("scores")) is not None:
                attention.reads(other.state.origins)
                return x.state
            function = x.state.one("elementwise")
            if function and set(other.state.origins) <= {function, *function.roots()}:
                return x.state
            if other_size == 1 and size > 1:
                return x.state
        if set(a.state.origins) == set(b.state.origins):
            return a.state if group == "add" else self.new("activation", name, a.state)
        if not (a.state.depends or b.state.depends):
            return joined(a.state, b.state)
        if group == "add":
            return self.new("residual", name, a.state, b.state)
        if not (a.state.depends and b.state.depends):
            return a.state if a.state.depends else b.state
        return self.new("activation", name, a.state, b.state)

    def _norm(self, x: State, statistic: State) -> State | None:
        """x with a statistic of itself: a norm; None where it is one of something else."""
        of = [root for origin in statistic.origins for root in origin.roots()]
        if not set(x.origins) & {*of, *statistic.origins}:
            return None
        for origin in statistic.origins:
            origin.kind = "norm"
            origin.reads(x.origins)
            for square in origin.of:
                if square.form == "elementwise" and all(consumer is origin for consumer in square.consumers):
                    square.same_as = origin
        return statistic

    def _matmul(self, name: str, operands: list[Operand]) -> State:
        base = name.rpartition(".")[2]
        bias = operands[0].state if base in BIAS_FIRST else NOTHING
        a, b, *_ = [*operands[base in BIAS_FIRST :], Operand(NOTHING, operands[0].tensor)]
        if a.state.origins and b.state.origins:
            flat = max(a.tensor.dim(), b.tensor.dim()) <= 2 and base in FLAT
            return self.new("matmul", name, a.state, b.state) if flat else self._product(a.state, b.state)
        weight, x = (a, b) if a.state.parameters and (b.state.origins or not b.state.parameters) else (b, a)
        if not weight.state.parameters:
            return self.new("matmul", name, x.state) if x.state.origins else NOTHING
        if weight.state.origins or (x.state.parameters and not x.state.origins):
            return joined(a.state, b.state)
        layer = self.owner(weight.state.parameters)
        made = self.new("layer", layer, x.state)
        self.sharing.setdefault(place(x.tensor), []).append(layer)
        return self.new("residual", name, bias, made) if bias.origins else made

    def _product(self, a: State, b: State) -> State:
        """Of two activations: an attention's scores, or its weights times its values."""
        for scores, values in ((a, b), (b, a)):
            if (attention := scores.one("scores")) is not None:
                attention.reads(values.origins)
                attention.form = ""
                return scores
        return self.new("scores", "attention", a, b)


def settle(made: Sequence[Origin]) -> None:
    """Set the kinds that depend on the consumers: what only losses read is a part of the loss.

    A softmax read by a likelihood, a square read by a mean that is the whole result.
    """
    for origin in reversed(made):
        consumers = [consumer for consumer in origin.consumers if consumer.kind != "output"]
        may_be = origin.form == "reduced" or origin.name.rpartition(".")[2] in PARTS_OF_A_LOSS
        if may_be and origin.layer is None and consumers and all(consumer.kind == "loss" for consumer in consumers):
            origin.kind = "loss"
            if len(origin.consumers) == 1:
                origin.same_as = consumers[0]
