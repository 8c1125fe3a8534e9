"""Forward on example inputs without side effects: modes, buffers, random states and scaling tables are restored."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fp8engine.autograd.numerics import Numerics

TABLES = ("history_HS", "live_2S", "counts_CS")
FLAGS = ("backward_seen", "begun", "on_step", "decides_next")


def arguments(example_inputs: object) -> tuple[tuple, dict]:
    """(args, kwargs) of a forward: a mapping has keywords, a tuple or list has arguments, all else is one argument.

    >>> arguments([1, 2]), arguments({"x": 1}), arguments(3)
    (((1, 2), {}), ((), {'x': 1}), ((3,), {}))
    """
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)), {}


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run what is inside in evaluation mode, without gradients and uncompiled; then put everything back.

    Torch's random states (of the CPU and of the devices that the model is on), Python's, the scaling states of a
    converted model, buffers that a forward writes in every mode, each module's mode.  torch.compile is told to step
    aside and so is torch's fused attention module, which would hide its matmuls.
    """
    training = [(module, module.training) for module in model.modules()]
    drawn = random.getstate()
    fused = torch.backends.mha.get_fastpath_enabled()
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    cards = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with (
        torch.random.fork_rng(cards),
        _scaling(model),
        _buffers(model),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
    ):
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            model.eval()
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            random.setstate(drawn)
            for module, mode in training:
                module.training = mode


@contextlib.contextmanager
def _buffers(model: nn.Module) -> Iterator[None]:
    """Then put back the buffers, and the values of those that were written, as where a router counts its tokens."""
    held = [(module, key, buffer) for module in model.modules() for key, buffer in module._buffers.items()]
    # One that was made in inference mode is written there alone.
    values = {id(b): (b, b._version, b.clone()) for b in model.buffers() if not b.is_inference()}
    try:
        yield
    finally:
        for module, key, buffer in held:
            module._buffers[key] = buffer
        with torch.no_grad():
            for buffer, version, value in values.values():
                if buffer._version != version:
                    buffer.copy_(value)


@contextlib.contextmanager
def _scaling(model: nn.Module) -> Iterator[None]:
    """Let no step begin; then put the scaling states back bit for bit, and the backend that each layer has noted.

    Copies of weights go: a step that read one would not record the weight's amax, which the tables have no more.
    """
    converted: list[Any] = [
        module for module in model.modules() if isinstance(getattr(module, "numerics", None), Numerics)
    ]
    found = [(module.numerics, *map(module.numerics_of, module._parameters)) for module in converted]
    layers = [numerics for of_module in found for numerics in of_module if numerics is not None]
    states = list({id(numerics.state): numerics.state for numerics in layers}.values())
    tables = [(getattr(state, name), getattr(state, name).clone()) for state in states for name in TABLES]
    flags: list[tuple[Any, str, Any]] = [(state, name, getattr(state, name)) for state in states for name in FLAGS]
    flags += [(numerics, "ran", numerics.ran) for numerics in layers]
    for state in states:
        state.backward_seen, state.begun = False, True
        state.on_step, state.decides_next = None, False  # no step begins here, nothing is sampled or decided
    try:
        yield
    finally:
        with torch.no_grad():
            for table, values in tables:
                table.copy_(values)
        for owner, name, value in flags:
            setattr(owner, name, value)
        for module in converted:
            module.forget_copies()
