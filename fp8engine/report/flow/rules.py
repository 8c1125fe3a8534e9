"""Rules by which an operation's result gets its origins from its operands'.

The first operation that is not view-like consumes a layer's output.  Three patterns need more than one operation:

    rotary       x cos + rotate(x) sin     a product with what no layer made is view-like, and so is a sum of two
                                           branches of one source: q and k keep their origins up to the attention
    norm         x rsqrt(mean(x^2))        a mean of x that x is then multiplied or divided by, or shifted with
    attention    softmax(q k^T + mask) v   products of two activations, and everything between them, are one thing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fp8engine.report.flow.origins import NOTHING, Origin, State

# What a loss is written with: the difference from a target, its size, a likelihood.
PARTS_OF_A_LOSS = ("sub", "rsub", "pow", "square", "abs", "log", "log1p", "exp", "softmax", "log_softmax")


class Operand(NamedTuple):
    """A tensor that an operation reads: its state and its size."""

    state: State
    size: int
    dims: int


class Rules:
    """Operands -> state of the result.  Makes an Origin where something new begins.

    where(kind) -> (name, where, call): the module that runs now, "" for the name if it has parts of its own or is more
    than one thing of that kind; the module around; which of its calls this is.
    layer(parameters) -> the name of the layer that these parameters belong to.
    """

    def __init__(self, where: Callable[[str], tuple[str, str, int]], layer: Callable[[Sequence[str]], str]):
        self.where, self.layer = where, layer
        self.made: list[Origin] = []
        # Calls of layers without a module, and which operand they read.
        self.layer_inputs: list[tuple[Origin, int]] = []

    def new(self, kind: str, name: str, operands: Sequence[Operand | State]) -> State:
        """A new origin that reads the operands."""
        module, where, call = self.where(kind)
        origin = Origin(kind, module or name, where, call=call, elementwise=kind == "activation")
        for operand in operands:
            origin.reads((operand if isinstance(operand, State) else operand.state).origins)
        self.made.append(origin)
        return State((origin,))

    def apply(self, group: str, name: str, operands: list[Operand]) -> State:
        """The result of an operation of a group of kinds.py."""
        known = [operand for operand in operands if operand.state is not NOTHING]
        if not known or group in ("ignore", "reset"):
            return NOTHING
        if group not in ("matmul", "embedding") and not any(operand.state.origins for operand in known):
            return _joined(known)  # made of parameters: constant
        match group:
            case "view_like":
                return _joined(known)
            case "add" | "mul":
                return self._binary(group, name, operands)
            case "matmul":
                return self._matmul(name, operands)
            case "unary":
                return self._unary(name, known)
            case "reduce":
                return self._reduce(name, known)
            case "softmax" | "log_softmax":
                return self._softmax(group, known)
            case "embedding":
                return self.new("embedding", name, [])
            case "attention":
                return self.new("softmax", "attention", known)
            case "convolution":
                made = self.new("matmul", name, known)
                made.origins[0].depends = True
                return made
            case _:  # norm, loss, unknown
                return self.new(group, name, known)

    def _unary(self, name: str, known: list[Operand]) -> State:
        state = _joined(known)
        if state.scores or state.elementwise or (state.reduced and not _is_norm(state)):
            return state
        return self.new("activation", name, [state])

    def _softmax(self, group: str, known: list[Operand]) -> State:
        state = _joined(known)
        if state.scores and group == "softmax":
            return state
        return self.new("softmax", group, [state])

    def _reduce(self, name: str, known: list[Operand]) -> State:
        state = _joined(known)
        if state.scores:
            return state
        made = self.new("unknown", name, [state])
        made.origins[0].reduced = True
        return made

    def _binary(self, group: str, name: str, operands: list[Operand]) -> State:
        if len(operands) == 1:
            return operands[0].state  # with a number
        a, b = operands[:2]
        if not a.state.origins or not b.state.origins:
            return _joined([operand for operand in (a, b) if operand.state.origins] or [a, b])
        for x, other in ((a, b), (b, a)):
            if other.state.reduced and other.size < x.size and (norm := self._norm(x.state, other.state)):
                return norm
            if (attention := x.state.scores) is not None:
                attention.reads(other.state.origins)
                return x.state
            function = x.state.elementwise
            if function and set(other.state.origins) <= {function, *function.roots()}:
                return x.state
            if other.size == 1 and x.size > 1:
                return x.state
        if set(a.state.origins) == set(b.state.origins):
            return a.state if group == "add" else self.new("activation", name, [a])
        if not (a.state.depends or b.state.depends):
            return _joined([a, b])
        if group == "add":
            return self.new("residual", name, [a, b])
        if not (a.state.depends and b.state.depends):
            return a.state if a.state.depends else b.state
        return self.new("activation", name, [a, b])

    def _norm(self, x: State, statistic: State) -> State | None:
        """x with a statistic of itself: a norm; None where it is one of something else."""
        of = [root for origin in statistic.origins for root in origin.roots()]
        if not set(x.origins) & {*of, *statistic.origins}:
            return None
        for origin in statistic.origins:
            origin.kind = "norm"
            origin.reads(x.origins)
            for square in origin.of:
                if square.elementwise and all(consumer is origin for consumer in square.consumers):
                    square.same_as = origin
        return statistic

    def _matmul(self, name: str, operands: list[Operand]) -> State:
        bias, (a, b, *_) = _bias(name, operands)
        if a.state.origins and b.state.origins:
            flat = max(a.dims, b.dims) <= 2 and name.rpartition(".")[2] in ("mm", "addmm", "mv", "addmv", "dot")
            return self.new("matmul", name, [a, b]) if flat else self._product(a.state, b.state)
        weight, x = (a, b) if a.state.parameters and (b.state.origins or not b.state.parameters) else (b, a)
        if not weight.state.parameters:
            return self.new("matmul", name, [x]) if x.state.origins else NOTHING
        if weight.state.origins or (x.state.parameters and not x.state.origins):
            return _joined([a, b])
        made = self.new("matmul", name, [x])
        call = made.origins[0]
        call.name, call.depends = self.layer(weight.state.parameters), True
        call.layer = call.name
        self.layer_inputs.append((call, operands.index(x)))
        if bias is not None and bias.state.origins:
            return self.new("residual", name, [bias, made])
        return made

    def _product(self, a: State, b: State) -> State:
        """Of two activations: an attention's scores, or its weights times its values."""
        for scores, values in ((a, b), (b, a)):
            if (attention := scores.scores) is not None:
                attention.reads(values.origins)
                attention.scores = False
                return scores
        made = self.new("softmax", "attention", [a, b])
        made.origins[0].scores = True
        return made


def settle(made: Sequence[Origin]) -> None:
    """Set the kinds that depend on the consumers: what only losses read is a part of the loss.

    A softmax read by a likelihood, a square read by a mean that is the whole result.
    """
    for origin in reversed(made):
        consumers = [consumer for consumer in origin.consumers if consumer.kind != "output"]
        may_be = origin.reduced or origin.name.rpartition(".")[2] in PARTS_OF_A_LOSS
        if may_be and origin.layer is None and consumers and all(consumer.kind == "loss" for consumer in consumers):
            origin.kind = "loss"
            if len(origin.consumers) == 1:
                origin.same_as = consumers[0]


def _bias(name: str, operands: list[Operand]) -> tuple[Operand | None, list[Operand]]:
    """(what is added, the two factors) of a matrix product."""
    base = name.rpartition(".")[2]
    if base in ("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation"):
        return operands[0], operands[1:]
    return None, operands if len(operands) > 1 else [*operands, Operand(NOTHING, 0, 0)]


def _is_norm(state: State) -> bool:
    return any(origin.kind == "norm" for origin in state.origins)


def _joined(operands: Sequence[Operand]) -> State:
    state = operands[0].state
    for operand in operands[1:]:
        state = state.joined(operand.state)
    return state


def floating(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are values, rather than indices or masks."""
    return tensor.is_floating_point() or tensor.is_complex()
