"""Recording of one forward (`flow.record`) with a dispatch mode and module hooks.

The mode sees every operation, the hooks every module.  A layer, a norm or an activation is followed as a whole, not
inside.  Under the mode the model runs the same operations as without it.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch import nn

from fp8engine._torch import TorchDispatchMode
from fp8engine.amp.tensors import named_tensors, tensors
from fp8engine.auto.untouched import arguments, untouched
from fp8engine.errors import ConversionError
from fp8engine.report.flow.kinds import OVERWRITES, group_of, kind_of
from fp8engine.report.flow.origins import Operand, Rules, State, States, joined, place, settle, storage
from fp8engine.report.flow.result import Flow, flow_of


def record(model: nn.Module, example_inputs: object) -> Flow:
    """Consumers of each linear layer's output and the producer of its input, from one forward of the model.

    example_inputs: arguments of that forward: a tuple or list, a dict of keywords, or one tensor.  It runs in
    evaluation mode, without gradients; modes, random states, scaling tables and hooks are afterwards as they were.
    Raises ConversionError for a model that is no nn.Module and for missing inputs; what the forward raises passes
    through.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    >>> flow = record(model, torch.ones(2, 4))
    >>> flow.layers["0"].consumers, flow.layers["2"].producer
    ((Consumer(kind='activation', name='1'),), (Consumer(kind='activation', name='1'),))
    """
    ConversionError.unless(model, nn.Module, "record takes an nn.Module")
    if example_inputs is None:
        raise ConversionError(
            f"record runs {type(model).__name__} once: give example_inputs, a tuple of arguments, a dict of keywords, "
            "or one tensor"
        )
    args, kwargs = arguments(example_inputs)
    # Reading a computed weight in training would move what it is computed from.
    with untouched(model), contextlib.ExitStack() as hooks:
        watch = _Watch(model)
        for name, module in model.named_modules():
            before = lambda m, args, kwargs, name=name: watch.enters(name, m, args, kwargs)  # noqa: E731
            after = lambda m, args, result, name=name: watch.leaves(name, result)  # noqa: E731
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after, prepend=True, always_call=True))
        watch.begins(args)
        watch.begins(kwargs)
        with watch:
            result = model(*args, **kwargs)
    watch.ends(result)
    settle(watch.rules.made)
    return flow_of(watch.names, watch.rules.made, watch.rules.sharing.values())


class _Watch(TorchDispatchMode):
    """The recording so far.  opened: the state of what the module makes that is followed as a whole and runs now.

    opaque: how many modules run inside it, itself among them.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module):
        super().__init__()
        self.states, self.rules = States(), Rules()
        self.calls = self.opaque = 0
        self.names = [name for name, module in model.named_modules() if kind_of(module) == "layer"]
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.dim() > 1:
                self.states[parameter] = joined(self.states[parameter], State((), (name,)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.opaque:
            return func(*args, **kwargs)
        group, name = group_of(func)
        if group == "view":
            return self._view(func, args, kwargs)
        written = _written(func, args, kwargs)
        read = [*args, *kwargs.values()]
        if written and (name.rpartition(".")[2] in OVERWRITES or "out" in func._overloadname):
            read = [value for value in read if not any(value is target for target in written)]
        operands = [Operand(self.states[tensor], tensor) for tensor in _floating(read)]
        state = self.rules.apply(group, name, operands)
        result = func(*args, **kwargs)
        made = _floating(result)
        if group == "reduce" and state.origins and made and made[0].numel() == 1 and operands[0].tensor.numel() > 1:
            state.origins[-1].kind = "loss"  # all of it in one number
        for tensor in made:
            if not any(tensor is target for target in written):
                self.states[tensor] = state
        for tensor in _floating(written):
            self.states.written(tensor, state)
        return result

    def _view(self, func, args, kwargs):
        """Views share their base's storage and thereby its state; one that does not (a subclass's) is given it."""
        result = func(*args, **kwargs)
        base = next(tensors(args), None)
        for tensor in tensors(result):
            if base is not None and storage(tensor)[0] != storage(base)[0]:
                self.states[tensor] = self.states[base]
        return result

    def begins(self, inputs: object) -> None:
        """The model's inputs."""
        for path, tensor in named_tensors(inputs):
            if _is_value(tensor):
                self.states[tensor] = self.rules.new("input", path or "input")

    def ends(self, outputs: object) -> None:
        """The model's outputs."""
        for path, tensor in named_tensors(outputs):
            if _is_value(tensor) and (state := self.states[tensor]).origins:
                self.rules.new("output", path or "output", state)

    def enters(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A module's forward begins."""
        kind = None if self.opaque else kind_of(module)
        if kind:
            read = _floating([args, kwargs])[: 1 if kind in ("layer", "fused") else None]
            if kind == "layer" and read:
                self.rules.sharing.setdefault(place(read[0]), []).append(name)
            self.opened = self._one_thing(kind, name, module, joined(*(self.states[tensor] for tensor in read)))
        self.calls += 1
        self.rules.stack.append((name, module, self.calls))
        self.opaque += bool(self.opaque or kind)

    def leaves(self, name: str, result: object) -> None:
        """A module's forward ends, or has failed (result None), perhaps before it began."""
        if not self.rules.stack or self.rules.stack[-1][0] != name:
            return
        self.rules.stack.pop()
        if self.opaque:
            self.opaque -= 1
            for tensor in [] if self.opaque else _floating(result):
                self.states[tensor] = self.opened

    def _one_thing(self, kind: str, name: str, module: nn.Module, state: State) -> State:
        """The state of the result of a module that is followed as a whole."""
        parts = [(kind, name)]
        if kind == "fused":
            first, *more = [child for child, part in module.named_children() if kind_of(part) == "layer"]
            parts = [("norm", f"{name}.norm"), ("layer", f"{name}.{first}")]
            for child in more:
                activation = getattr(module, "activation", "activation")
                parts += [("activation", f"{name}.{activation}"), ("layer", f"{name}.{child}")]
        where, _, call = self.rules.stack[-1] if self.rules.stack else ("", None, 0)
        for sort, part in parts:
            state = self.rules.new(sort, part, state, at=(part, where, call))
        return state


def _written(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that an operation writes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    values = [*args, *(kwargs.get(argument.name) for argument in schema.arguments[len(args) :])]
    return list(tensors(list(itertools.compress(values, written))))


def _floating(values: object) -> list[torch.Tensor]:
    """The tensors in them whose elements are values."""
    return [tensor for tensor in tensors(values) if _is_value(tensor)]


def _is_value(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are values, rather than indices or masks."""
    return tensor.is_floating_point() or tensor.is_complex()
