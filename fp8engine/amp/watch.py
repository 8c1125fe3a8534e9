"""What happens in a training loop, in order of time: hooks on the modules of a model write it down.

    pass = one outermost call of the model; its gradients come later and are events too
    event = (what, whose, reading): a tensor at its first sight, so that no tensor is read twice

A module's input is read only where nothing that was watched made it: at the model's door, and between two modules where
a container's own forward computes.  So of all bad readings the first in time tells whose forward it was: an output is
bad first in the module that made it, an input is bad first where the forward around the module made it.

Inside a compiled graph nothing is written down: hooks would be compiled into it.  A compiled region counts as one
module, and its parts are hooked only while a pass is watched op by op, which runs it eagerly.  A checkpointed forward
runs again during backward; that run is known by the graph task it is part of, reads nothing and opens no pass, but
its tensors do carry gradients where the first run had none (use_reentrant=True).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from fp8engine import _torch
from fp8engine.amp.events import (
    Batch,
    Call,
    Creation,
    Event,
    compiled_in_place,
    compiled_parts,
    is_compiled,
    named,
    named_layers,
)
from fp8engine.amp.opwise import OpMode, tag
from fp8engine.amp.readings import Reading, read, read_all, tensors

# Passes watched op by op in wait of a backward: enough for a contrastive pair or two, and few where none comes.
SHARE_A_BACKWARD = 8


class Recorder:
    """Writes down what the model does.  Its owner takes the batches from `sealed`.

    look: outermost calls whose next pass is to be watched op by op, and the (backwards, passes) when that began.
    always: every pass op by op.  poll: called before each pass, after the batch before it was sealed.
    """

    def __init__(self, model: nn.Module, scaler: Any, always: bool, poll: Callable[[], None]):
        self.model, self.scaler, self.always, self.poll = model, scaler, always, poll
        self.look: dict[str, tuple[int, int] | None] = {}
        self.roots: set[str] = set()  # what was called from outside: parts may be called by themselves
        self.step = -1
        self.passes = self.backwards = 0
        self.sealed: list[Batch] = []
        self.closed = True
        self.quiet = threading.local()
        self.layers = list(named_layers(model))
        self.parameters = {id(p): name for name, p in named(model, model.named_parameters())}
        self._held = list(named(model, model.named_parameters()))
        self._buffers = [
            (f"{name}.{key}" if name else key, module._buffers, key)
            for name, module in self.layers
            for key in module._buffers
        ]
        self._batch = Batch(always)
        self._known: dict[int, tuple[weakref.ref, int, Reading]] = {}
        self._stacks = threading.local()
        self._open: Call | None = None
        self._inner: list[tuple[str, nn.Module]] = []  # inside compiled graphs
        self._pass, self._eager, self._attached, self._leaves = ExitStack(), ExitStack(), ExitStack(), ExitStack()
        self._arrived: list[torch.Tensor] = []
        self._updates = 0

    def attach(self) -> None:
        """Hook the model; nothing of it changes otherwise."""
        self.closed = False
        self._inner = []
        inside = {id(part) for _, m in self.layers if is_compiled(m) for part in compiled_parts(m)}
        for name, module in self.layers:
            if compiled_in_place(module):
                self._around(self._attached, name, module)
            elif id(module) in inside:
                self._inner.append((name, module))
            else:
                self._hook(self._attached, name, module)
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                handle = parameter.register_post_accumulate_grad_hook(self._gradient)
                self._attached.callback(handle.remove)
        before = [(name, p.grad) for name, p in self._held if p.is_leaf and p.grad is not None]
        for (name, _), reading in zip(before, read_all([g for _, g in before]), strict=True):
            self._add(Event("grad_before", name, reading, 0))
        if self.scaler is not None:
            self._follow_scaler()

    def detach(self) -> None:
        """Unhook it, whatever went wrong in between, and seal the last batch."""
        self.closed = True
        self.seal()
        for stack in (self._pass, self._eager, self._leaves, self._attached):
            stack.close()

    def _hook(self, keep: ExitStack, name: str, module: nn.Module) -> None:
        enter, leave = functools.partial(self._enter, name), functools.partial(self._leave, name)
        keep.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        keep.callback(module.register_forward_hook(leave, with_kwargs=True, always_call=True).remove)

    def _around(self, keep: ExitStack, name: str, module: Any) -> None:
        """module.compile() compiles the hooks of the module with it, so what it calls is wrapped instead."""
        compiled = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter(name, module, args, kwargs)
            output = None
            try:
                output = compiled(*args, **kwargs)
                return output
            finally:
                self._leave(name, module, args, kwargs, output)

        module._compiled_call_impl = call
        keep.callback(setattr, module, "_compiled_call_impl", compiled)

    def _follow_scaler(self) -> None:
        had, original = self.scaler.__dict__.get("update"), self.scaler.update

        def update(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._updates += 1
            self._scale(self._updates)
            return result

        self.scaler.update = update
        restore = functools.partial(setattr, self.scaler, "update", had) if had else None
        self._attached.callback(restore or functools.partial(delattr, self.scaler, "update"))

    def seal(self) -> None:
        """Close the batch, so that it can be judged; events that follow go to a new one."""
        if self._batch.events or self._batch.creations:
            self.sealed.append(self._batch)
        self._batch = Batch(self._batch.opwise)

    def _begin(self, name: str) -> None:
        self._pass.close()
        self._eager.close()
        self.seal()
        self.poll()
        self._known.clear()
        self._arrived.clear()
        self.passes += 1
        self.step = self._updates if self.scaler is not None else self.passes - 1
        opwise = self._opwise(name)
        self.roots.add(name)
        self._batch = Batch(opwise, {name for name, p in self._held if p.grad is None})
        self._weights()
        self._scale(self.step)
        if opwise:
            if any(is_compiled(m) for _, m in self.layers):
                # until the next pass: a checkpoint's second forward must do what its first did
                self._eager.enter_context(torch.compiler.set_stance("force_eager"))
                for name, module in self._inner:
                    self._hook(self._eager, name, module)
            self._pass.enter_context(OpMode(self))

    def _opwise(self, name: str) -> bool:
        """Whether to watch this pass op by op: until a backward has come, which several passes may share."""
        if name in self.look:
            backwards, passes = self.look[name] or (self.backwards, self.passes)
            self.look[name] = backwards, passes
            if self.backwards > backwards or self.passes - passes >= SHARE_A_BACKWARD:
                del self.look[name]
        return self.always or name in self.look

    def _weights(self) -> None:
        # every pass: an optimizer that writes through .data leaves no version to tell that a weight has changed
        for (name, _), reading in zip(self._held, read_all([p for _, p in self._held]), strict=True):
            self._add(Event("weight", name, reading, self.step))
        for name, holder, key in self._buffers:
            if isinstance(buffer := holder.get(key), torch.Tensor):  # looked up: modules put new ones in their place
                self._add(Event("buffer", name, read(buffer), self.step))

    def _scale(self, step: int) -> None:
        # the tensor, made by the first scale(loss); get_scale() would wait for it
        scale = getattr(self.scaler, "_scale", None)
        kept = scale.detach().clone() if isinstance(scale, torch.Tensor) else getattr(self.scaler, "_init_scale", None)
        self._add(Event("scale", "", Reading(kept, kept), step))

    def _add(self, event: Event) -> None:
        if event.reading.taken:
            self._batch.events.append(event)

    def created(self, creation: Creation) -> None:
        """An op, or a node of the autograd graph, made something bad out of what was good."""
        if creation.backward:
            known = Reading(creation.amax, creation.amax)
            step = creation.call.step if creation.call else self.step
            self._batch.events.append(Event("node", creation.layer, known, step, creation.call, creation=creation))
        else:
            self._batch.creations.append(creation)

    def asked(self) -> None:
        """An op put in an Inf that was among its arguments: a mask."""
        call = self.current()
        if call is not None and (not self._batch.asked or self._batch.asked[-1] is not call):
            self._batch.asked.append(call)

    def current(self) -> Call | None:
        """The innermost call that is running in this thread."""
        stack = self._stack()
        return stack[-1] if stack else self._open

    def _stack(self) -> list[Call]:
        if not hasattr(self._stacks, "calls"):
            self._stacks.calls = []
        return self._stacks.calls

    def _enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling():
            return
        recomputed = _torch.graph_task() >= 0
        stack = self._stack()
        if module is self.model and not recomputed:
            stack.clear()
        parent = stack[-1] if stack else None if recomputed else self._open
        outermost = parent is None and not recomputed
        if outermost:
            self._begin(name)
        call = Call(name, module, parent, self.step)
        call.recomputed = recomputed
        call.watched = self._batch.opwise and _torch.dispatch_modes() > 0
        stack.append(call)
        if outermost:
            self._open = call
        with _Quiet(self.quiet):
            for tensor in tensors((args, kwargs)):
                reading = self._find(tensor)
                if reading is None:
                    reading = self._new("input", tensor, call)
                    if not tensor.is_leaf:
                        self._follow_gradient("grad_input", tensor, call, reading)
                reading.consumers.append(call)
                call.inputs.append(reading)
        call.sequence = _torch.sequence_number()

    def _leave(self, name: str, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._stack()
        if not any(call.name == name for call in stack):
            return
        while (call := stack.pop()).name != name:  # those above were left by an exception
            pass
        with _Quiet(self.quiet):
            for tensor in tensors(output):
                reading = self._find(tensor)
                if reading is None:
                    reading = self._new("output", tensor, call)
                    self._follow_gradient("grad_output", tensor, call, reading)
                call.outputs.append(reading)
                reading.leaves |= call.parent is None and not call.recomputed
            if self._batch.opwise:
                tag(call, output, self)
        if call is self._open:
            self._open = None
            self._pass.close()

    def _find(self, tensor: torch.Tensor) -> Reading | None:
        held = self._known.get(id(tensor))
        return held[2] if held and held[0]() is tensor and held[1] == _version(tensor) else None

    def _new(self, kind: str, tensor: torch.Tensor, call: Call) -> Reading:
        reading = Reading() if call.recomputed else read(tensor)
        self._known[id(tensor)] = weakref.ref(tensor), _version(tensor), reading
        self._add(Event(kind, call.name, reading, call.step, call))
        return reading

    def _follow_gradient(self, kind: str, tensor: torch.Tensor, call: Call, source: Reading) -> None:
        if not tensor.requires_grad:
            return

        def look(gradient: torch.Tensor) -> None:
            if not self.closed:
                with _Quiet(self.quiet):
                    self._add(Event(kind, call.name, read(gradient), call.step, call, source))

        handle = tensor.register_hook(look)
        if tensor.is_leaf:  # it outlives the pass
            self._leaves.callback(handle.remove)

    def _gradient(self, parameter: torch.Tensor) -> None:
        if not self._arrived:  # one reading of all when this backward ends; CUDA takes one launch for them
            _torch.after_backward(self._gradients)
        self._arrived.append(parameter)

    def _gradients(self) -> None:
        arrived, self._arrived = self._arrived, []
        held = [(self.parameters[id(p)], p.grad) for p in arrived if p.grad is not None]
        if not held:
            return
        self.backwards += 1
        with _Quiet(self.quiet):
            for (name, _), reading in zip(held, read_all([g for _, g in held]), strict=True):
                self._add(Event("grad_weight", name, reading, self.step))


class _Quiet:
    """While the recorder reads, its own ops are not watched."""

    def __init__(self, local: threading.local):
        self._local = local

    def __enter__(self) -> None:
        self._local.depth = getattr(self._local, "depth", 0) + 1

    def __exit__(self, *exc: object) -> None:
        self._local.depth -= 1


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
