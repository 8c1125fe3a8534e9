"""Hooks on the modules of a model that record a training loop in a trace, and read each tensor once.

A module's input is read only where nothing that was watched made it: at the model's input, and between two modules
where a container's own forward computes.  So the first bad reading in time points to the forward that made it: an
output is bad first in the module that made it, an input is bad first where the forward around the module made it.

Inside a compiled graph nothing is recorded: hooks would be compiled into it.  A compiled region counts as one module,
and its parts are hooked only while a pass is watched op by op, which runs it eagerly.  A checkpointed forward runs
again during backward; that run is known by the graph task it is part of, reads nothing and opens no pass, but its
tensors do carry gradients where the first run had none (use_reentrant=True).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from fp8engine import _torch
from fp8engine._torch import plain_name
from fp8engine.amp.overflow.opwise import OpMode, watch_nodes
from fp8engine.amp.overflow.reading import Known, Reading, read, read_all
from fp8engine.amp.overflow.trace import Batch, Call, Trace
from fp8engine.amp.tensors import tensors

# Passes watched op by op until a backward comes: enough for a contrastive pair or two, and few where none comes.
SHARE_A_BACKWARD = 8


def _nothing(*_: Any) -> None:
    """What a hook does on a copy."""


class _Hook(functools.partial):
    """A function on a model or scaler, with arguments; a copy of these, or one in a file, has `instead` there.

    A training loop may copy or save its model while it is watched, and what it copies is not watched.
    """

    instead: tuple[Any, ...] = (_nothing,)

    def __reduce__(self) -> tuple:
        return functools.partial, self.instead


class Recorder:
    """Records what the model does.

    always: every pass op by op.  done: is given each batch before the pass after it begins.  layers: (name, module) of
    all that can be hooked, wrappers too.
    """

    def __init__(self, model: nn.Module, scaler: Any, always: bool, done: Callable[[Batch], None]):
        self.model, self.scaler, self.always = model, scaler, always
        self.passes = self.backwards = 0
        self.layers = list(named_layers(model))
        self.compiled: set[str] = set()  # names of the layers that run compiled, once attached
        self._parameters = [(plain_name(model, name), p) for name, p in model.named_parameters()]
        self.trace = Trace({id(p): name for name, p in self._parameters}, -1 if scaler is None else 0, done)
        self._roots: set[str] = set()  # outermost calls so far: parts of a model may be called by themselves
        self._rewatched: dict[str, int] = {}  # how many passes of an outermost call are still to be watched op by op
        self._known = Known()  # tensors of this pass
        self._inside_graphs: list[tuple[str, nn.Module]] = []
        self._followed: set[int] = set()  # ids of the parameters whose gradients are watched
        self._accumulated: list[torch.Tensor] = []  # parameters whose gradients this backward has added to
        # What is undone when the ops of a pass end, when a pass run eagerly ends, and when the watch ends.
        self._ops, self._eager, self._attached = ExitStack(), ExitStack(), ExitStack()

    def attach(self) -> None:
        """Hook the model; nothing of it changes otherwise."""
        self.trace.closed = False
        self.compiled.update(name for name, module in self.layers if _is_compiled(module))
        inside = {id(part) for _, m in self.layers if _is_compiled(m) for part in _compiled_parts(m)}
        self._inside_graphs = [(n, m) for n, m in self.layers if id(m) in inside and not _compiled_in_place(m)]
        for name, module in self.layers:
            if _compiled_in_place(module):
                self._wrap_compiled(name, module)
            elif id(module) not in inside:
                self._hook(self._attached, name, module)
        self._followed.clear()
        self._follow_weights()
        self._read_gradients()
        if self.scaler is not None:
            self._follow_scaler()

    def detach(self, failed: bool) -> None:
        """Unhook it and seal the last batch, whatever went wrong; if nothing has, read what the last step wrote."""
        self.trace.closed = True
        for undone in (self._ops, self._eager, self._attached):
            undone.close()
        self.trace.seal()
        if self.passes and not failed:
            self._read_weights()
            self.trace.seal()

    def rewatch(self, wanted: bool) -> None:
        """Watch the next passes of each outermost call op by op, until a backward has come; or no longer."""
        self._rewatched = dict.fromkeys(self._roots, SHARE_A_BACKWARD) if wanted else {}

    def _hook(self, undone: ExitStack, name: str, module: nn.Module) -> None:
        enter, leave = _Hook(self._enter, name), _Hook(self._leave, name)
        undone.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        undone.callback(module.register_forward_hook(leave, with_kwargs=True, always_call=True).remove)

    def _wrap_compiled(self, name: str, module: Any) -> None:
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

        self._replace(module, "_compiled_call_impl", call)

    def _follow_weights(self) -> None:
        """Hook the parameters that are trained by now: a layer may be unfrozen while it is watched."""
        for _, parameter in self._parameters:
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._followed:
                self._followed.add(id(parameter))
                self._attached.callback(parameter.register_post_accumulate_grad_hook(self._gradient).remove)

    def _follow_scaler(self) -> None:
        original = self.scaler.update

        def update(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.trace.step += 1
            self._read_scale()
            return result

        hook = _Hook(update)
        own = getattr(type(self.scaler), "update", None)  # None: an object that hands calls on to a scaler
        hook.instead = (original,) if own is None else (own, self.scaler)
        self._replace(self.scaler, "update", hook)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        """Give an object an attribute of its own until the watch ends."""
        own = vars(owner)
        undo = functools.partial(setattr, owner, name, own[name]) if name in own else lambda: delattr(owner, name)
        self._attached.callback(undo)
        setattr(owner, name, value)

    def _begin_pass(self, name: str) -> None:
        self._ops.close()
        self._eager.close()
        self.trace.seal()
        self._known = Known()
        self._accumulated.clear()
        self._roots.add(name)
        self.passes += 1
        self.trace.step += self.scaler is None
        left = self._rewatched.pop(name, 0)
        if left > 1:
            self._rewatched[name] = left - 1
        opwise = self.always or left > 0
        self.trace.batch = Batch(opwise)
        self._follow_weights()
        self._read_weights()
        self._read_gradients()
        self._read_scale()
        if opwise:
            if self.compiled:
                # until the next pass: a checkpoint's second forward must do what its first did
                self._eager.enter_context(torch.compiler.set_stance("force_eager"))
                for path, module in self._inside_graphs:
                    self._hook(self._eager, path, module)
            self._ops.enter_context(OpMode(self.trace))

    def _read_weights(self) -> None:
        """Every pass: a write of a weight through .data, as some optimizers do, changes no version."""
        self._read("weight", [(name, p) for name, p in self._parameters if p.requires_grad])
        for name, p in self._parameters:
            if not p.requires_grad:  # by themselves, because -Inf is a mask, which the reading of all does not tell
                self.trace.add("frozen", read(p), name=name)
        for path, module in self.layers:
            for key, buffer in module._buffers.items():
                if isinstance(buffer, torch.Tensor):
                    self.trace.add("buffer", read(buffer), name=f"{path}.{key}" if path else key)

    def _read_gradients(self) -> None:
        """What a backward pass will add to."""
        self._read("grad_before", [(name, p.grad) for name, p in self._parameters if p.is_leaf])

    def _read(self, kind: str, named: list[tuple[str, Any]]) -> None:
        """Read parameters or gradients, those that are there, and record them."""
        named = [(name, tensor) for name, tensor in named if tensor is not None]
        for (name, _), reading in zip(named, read_all([tensor for _, tensor in named]), strict=True):
            self.trace.add(kind, reading, name=name)

    def _read_scale(self) -> None:
        # the tensor, made by the first scale(loss); get_scale() would wait for it
        scale = getattr(self.scaler, "_scale", None)
        kept = scale.detach().clone() if isinstance(scale, torch.Tensor) else getattr(self.scaler, "_init_scale", None)
        if kept is not None:
            self.trace.scale = Reading(kept, kept)
            self.trace.add("scale", self.trace.scale)

    def _enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling():
            return
        trace, calls, recomputed = self.trace, self.trace.thread.calls, _torch.graph_task() >= 0
        if module is self.model and not recomputed:
            calls.clear()
        parent = calls[-1] if calls else None if recomputed else trace.outermost
        outermost = parent is None and not recomputed
        if outermost:
            self._begin_pass(name)
        opwise = trace.batch.opwise and _torch.dispatch_modes() > 0
        call = Call(name, module, parent, trace.step, recomputed, opwise)
        calls.append(call)
        if outermost:
            trace.outermost = call
        call.inputs += self._readings("input", (args, kwargs), call)
        call.sequence = _torch.sequence_number()

    def _leave(self, name: str, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        trace, calls = self.trace, self.trace.thread.calls
        if not any(call.name == name for call in calls):
            return
        while (call := calls.pop()).name != name:  # those above were left by an exception
            pass
        for reading in self._readings("output", output, call):
            reading.returned |= call.parent is None and not call.recomputed
        if trace.batch.opwise:
            watch_nodes(call, output, trace)
        if call is trace.outermost:
            trace.outermost = None
            self._ops.close()

    def _readings(self, kind: str, given: Any, call: Call) -> list[Reading]:
        """The readings of an "input" or "output" of a call; those not known yet are recorded, their gradients too."""
        found = []
        with self.trace.quiet():
            for tensor in tensors(given, objects=True):
                reading = self._known.find(tensor)
                # A tensor of inference mode counts no versions: the call may have written in place what it was given.
                unsure = kind == "output" and tensor.is_inference() and reading in call.inputs
                if reading is None or unsure:
                    reading = self._known.keep(tensor, Reading() if call.recomputed else read(tensor))
                    self.trace.add(kind, reading, call)
                    if tensor.requires_grad and (kind == "output" or not tensor.is_leaf):
                        self._follow_gradient(f"grad_{kind}", tensor, call, reading)
                found.append(reading)
        return found

    def _follow_gradient(self, kind: str, tensor: torch.Tensor, call: Call, source: Reading) -> None:
        def record(gradient: torch.Tensor) -> None:
            if not self.trace.closed:
                with self.trace.quiet():
                    self.trace.add(kind, read(gradient), call, source=source)

        handle = tensor.register_hook(record)
        if tensor.is_leaf:  # it outlives the pass
            self._attached.callback(handle.remove)

    def _gradient(self, parameter: torch.Tensor) -> None:
        if not self._accumulated:  # one reading of all when this backward ends; CUDA takes one launch for them
            _torch.after_backward(self._gradients)
        self._accumulated.append(parameter)

    def _gradients(self) -> None:
        named = [(self.trace.parameters[id(p)], p.grad) for p in self._accumulated if p.grad is not None]
        self._accumulated = []
        if named:
            self.backwards += 1
            self._rewatched = {name: left for name, left in self._rewatched.items() if left == SHARE_A_BACKWARD}
            with self.trace.quiet():
                self._read("grad_weight", named)


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that can be hooked, by its name in the model before it was wrapped."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield (plain_name(model, name), module)


def _is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs a compiled graph: torch.compile(module), or module.compile()."""
    return hasattr(module, "_orig_mod") or _compiled_in_place(module)


def _compiled_in_place(module: nn.Module) -> bool:
    """Whether module.compile() was called: its hooks are compiled with it."""
    return getattr(module, "_compiled_call_impl", None) is not None


def _compiled_parts(module: Any) -> Iterator[nn.Module]:
    """The modules whose hooks are part of the compiled graph."""
    return module._orig_mod.modules() if hasattr(module, "_orig_mod") else (m for m in module.modules() if m != module)
