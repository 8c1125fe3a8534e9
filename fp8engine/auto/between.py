"""Detection of an optimizer step between two training forwards: only there may a decision be adopted.

A change between two forwards of one optimizer step (microbatches, a second forward before a backward) would give one
gradient parts in two formats, and a gathered weight two formats in one step.  An optimizer's step is seen by

    the version counters of the trained parameters, which it moves
    gradients that came and are gone                                   an optimizer that writes through `.data`
    the hook of torch's optimizers                                     foreach and fused ones move no DTensor's counter
    fe.weights_changed(model)                                          code of the user's own

Where none of them tells, a decision waits for PATIENCE forwards, and is then adopted after a backward; so is, at once,
that of layers without a root that is called.  Where fe.distributed.fsdp gathers weights, it counts the steps itself.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8engine._torch import outside_of_graphs
from fp8engine.scaling.table import ScalingState

PATIENCE = 1024  # forwards
SAME = -1  # in place of the counters of a state that was saved before the optimizer had stepped
WAITING: weakref.WeakSet[ScalingState] = weakref.WeakSet()  # whose next optimizer step is counted: it has DTensors


class Between:
    """The counters at the last training forward.

    seen: their sum; None: nothing ran before.  waited: forwards since something was to be decided.
    """

    def __init__(self):
        self.seen: int | None = None
        self.waited = 0

    def opens(self, state: ScalingState, backward: bool) -> bool:
        """Whether the training forward that begins may adopt a decision.  backward: one came since the last forward."""
        if state.trained >= 0:
            return not state.must_wait
        trained = _trained(state)
        if not trained:
            return backward
        gone = backward and all(p.grad is None and type(p) is nn.Parameter for p in trained)
        if gone or self._moved(state):
            self.waited = 0
            return True
        self.waited += 1
        return backward and self.waited > PATIENCE

    def note(self, state: ScalingState, undecided: bool) -> None:
        """A training forward begins.  undecided: whether anything waits to be decided; else no counter is read."""
        self.seen = _counters(state) if undecided else None
        if undecided and state.trained < 0 and any(type(p) is not nn.Parameter for p in _trained(state)):
            WAITING.add(state)
            _count_steps()

    def kept(self, state: ScalingState) -> list[int]:
        """As `load` takes it."""
        return [int(not self._moved(state)), self.waited]

    def load(self, same: int, waited: int) -> None:
        """Go on where `kept` was called, with parameters that have other counters."""
        self.seen, self.waited = SAME if same else None, waited

    def _moved(self, state: ScalingState) -> bool:
        return self.seen is None or self.seen not in (SAME, _counters(state))


def _trained(state: ScalingState) -> list[nn.Parameter]:
    """The trained parameters of the model whose forward began last; none of no model."""
    model = None if state.root is None else state.root()
    return [] if model is None else [p for p in model.parameters() if p.requires_grad and not p.is_inference()]


def _counters(state: ScalingState) -> int:
    return state.optimizer_steps + sum(p._version for p in _trained(state))


@contextlib.contextmanager
def unseen(states: Iterable[ScalingState]) -> Iterator[None]:
    """A step of an optimizer inside ends no step of the training: torch makes one to find an optimizer's state."""
    before = [(state, state.optimizer_steps, _counters(state), state in WAITING) for state in states]
    try:
        yield
    finally:
        for state, steps, counters, waits in before:
            state.optimizer_steps = steps
            between = state.controller and state.controller.between
            if between and between.seen not in (None, SAME):
                between.seen += _counters(state) - counters
            if waits:
                WAITING.add(state)


@functools.cache
def _count_steps() -> None:
    register_optimizer_step_post_hook(_stepped)


@outside_of_graphs
def _stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for state in list(WAITING):
        if any(id(p) in stepped for p in _trained(state)):
            state.optimizer_steps += 1
            WAITING.discard(state)
