"""Recording of one forward (`flow.record`) with a dispatch mode and module hooks.

The mode sees every operation, the hooks every module.  A layer, a norm or an activation is followed as a whole, not
inside.  Under the mode the model runs the same operations as without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fp8engine._torch import TorchDispatchMode
from fp8engine.auto.untouched import arguments, untouched
from fp8engine.errors import ConversionError
from fp8engine.report.flow.kinds import OVERWRITES, group_of, kind_of
from fp8engine.report.flow.origins import Origin, State, States, place
from fp8engine.report.flow.result import Flow, flow_of
from fp8engine.report.flow.rules import Operand, Rules, floating, settle


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
    if not isinstance(model, nn.Module):
        raise ConversionError(f"record takes an nn.Module, not {type(model).__name__}")
    if example_inputs is None:
        raise ConversionError(
            f"record runs {type(model).__name__} once: give example_inputs, a tuple of arguments, a dict of keywords, "
            "or one tensor"
        )
    args, kwargs = arguments(example_inputs)
    with untouched(model):  # reading a computed weight in training would move what it is computed from
        watch = _Watch(model)
        with _hooks(watch, model):
            for path, tensor in [*_tensors(args, ""), *_tensors(kwargs, "")]:
                watch.begins(tensor, path)
            with watch:
                result = model(*args, **kwargs)
    for path, tensor in _tensors(result, ""):
        watch.ends(tensor, path)
    settle(watch.rules.made)
    return flow_of(watch.names, watch.rules.made, watch.sharing.values())


class _Watch(TorchDispatchMode):
    """The recording so far.  stack: modules whose forward runs.  opaque: how many of them are followed as a whole."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module):
        super().__init__()
        self.states, self.rules = States(), Rules(self.where, self.owner)
        self.stack: list[tuple[str, nn.Module, int]] = []
        self.calls = 0
        self.opaque = 0
        self.sharing: dict[tuple, list[str]] = {}  # the numbers that layers read -> which
        self.names = [name for name, module in model.named_modules() if kind_of(module) == "layer"]
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.dim() > 1:
                self.states[parameter] = self.states[parameter].joined(State((), (name,)))

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
        tensors = [tensor for tensor in _flat(read) if floating(tensor)]
        places = [place(tensor) for tensor in tensors] if group == "matmul" else []
        operands = [Operand(self.states[tensor], tensor.numel(), tensor.dim()) for tensor in tensors]
        result = func(*args, **kwargs)
        state = self.rules.apply(group, name, operands)
        for call, index in self.rules.layer_inputs:
            self._share(places[index], call.name)
        self.rules.layer_inputs.clear()
        made = [tensor for tensor in _flat([result]) if floating(tensor)]
        if group == "reduce" and state.origins and made and made[0].numel() == 1 and operands[0].size > 1:
            state.origins[-1].kind = "loss"  # all of it in one number
        for tensor in made:
            if not any(tensor is target for target in written):
                self.states[tensor] = state
        for tensor in written:
            if floating(tensor):
                self.states.written(tensor, state)
        return result

    def _view(self, func, args, kwargs):
        """Views share their base's storage and thereby its state; one that does not (a subclass's) is given it."""
        result = func(*args, **kwargs)
        bases = list(_flat(args))
        for tensor in _flat([result]):
            if bases and not self.states.same_memory(tensor, bases[0]):
                self.states[tensor] = self.states[bases[0]]
        return result

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

    def begins(self, tensor: torch.Tensor, path: str) -> None:
        """An input of the model."""
        if floating(tensor):
            origin = Origin("input", path or "input", "")
            self.rules.made.append(origin)
            self.states[tensor] = State((origin,))

    def ends(self, tensor: torch.Tensor, path: str) -> None:
        """An output of the model."""
        if floating(tensor) and (state := self.states[tensor]).origins:
            self.rules.new("output", path or "output", [state])

    def enters(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A module's forward begins."""
        kind = None if self.opaque else kind_of(module)
        if kind:
            read = [tensor for tensor in _flat([args, kwargs]) if floating(tensor)]
            state = State()
            for tensor in read[: 1 if kind in ("layer", "fused") else None]:
                state = state.joined(self.states[tensor])
                if kind == "layer":
                    self._share(place(tensor), name)
            self.opened = self._one_thing(kind, name, module, state)
        self.calls += 1
        self.stack.append((name, module, self.calls))
        self.opaque += bool(self.opaque or kind)

    def leaves(self, name: str, result: object) -> None:
        """A module's forward ends, or has failed (result None), perhaps before it began."""
        if not self.stack or self.stack[-1][0] != name:
            return
        self.stack.pop()
        if self.opaque:
            self.opaque -= 1
            if not self.opaque:
                for tensor in _flat([result]):
                    if floating(tensor):
                        self.states[tensor] = self.opened

    def _one_thing(self, kind: str, name: str, module: nn.Module, state: State) -> State:
        """The state of the result of a module that is followed as a whole."""
        if kind != "fused":
            return self._made(kind, name, state)
        state = self._made("norm", f"{name}.norm", state)
        first, *more = [child for child, part in module.named_children() if kind_of(part) == "layer"]
        state = self._made("layer", f"{name}.{first}", state)
        for child in more:
            state = self._made("activation", f"{name}.{getattr(module, 'activation', 'activation')}", state)
            state = self._made("layer", f"{name}.{child}", state)
        return state

    def _made(self, kind: str, name: str, state: State) -> State:
        where, _, call = self.stack[-1] if self.stack else ("", None, 0)
        origin = Origin("matmul" if kind == "layer" else kind, name, where, call=call)
        origin.layer = name if kind == "layer" else None
        origin.elementwise, origin.depends = kind == "activation", kind == "layer"
        origin.reads(state.origins)
        self.rules.made.append(origin)
        return State((origin,))

    def _share(self, where: tuple, layer: str) -> None:
        self.sharing.setdefault(where, []).append(layer)


@contextlib.contextmanager
def _hooks(watch: _Watch, model: nn.Module) -> Iterator[None]:
    """Call `watch` before and after every module's forward."""
    handles = []
    try:
        for name, module in model.named_modules():
            before = lambda m, args, kwargs, name=name: watch.enters(name, m, args, kwargs)  # noqa: E731
            after = lambda m, args, result, name=name: watch.leaves(name, result)  # noqa: E731
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, prepend=True, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _written(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that an operation writes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _flat([args[index] if index < len(args) else kwargs.get(argument.name)])
    return found


def _flat(values: object) -> Iterator[torch.Tensor]:
    return (tensor for _, tensor in _tensors(values, ""))


def _tensors(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of every tensor in nested tuples, lists, mappings and dataclasses; other objects are left shut."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(part, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from _tensors(part, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from _tensors(getattr(value, part.name, None), f"{path}.{part.name}" if path else part.name)
