"""The warning of a resumed run whose scaling state was not loaded with its weights and its optimizer.

A state_dict has no scaling state, on purpose: it is that of the plain model.  So a trainer that saves the model and the
optimizer (transformers' Trainer, without a callback) forgets what `auto` has decided, and the windows of delayed
scaling.  No trainer tells the model from which folder it resumes.  Two things are seen, and only both together mean it:

    weights were loaded into the converted model, before its first training step          a hook of the root
    the first optimizer that then steps on its parameters has a state already             a hook of torch's optimizers

The second hook exists from the first of these events to the second, or as long as the model lives.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fp8engine._torch import model_parameter, outside_of_graphs
from fp8engine.errors import ResumeWarning
from fp8engine.scaling.table import ScalingState


class Resumed:
    """A hook of a converted root that sees weights loaded, and then awaits the first step of an optimizer."""

    def __init__(self, model: nn.Module, states: Iterable[ScalingState]):
        self.states = list(states)
        self.awaits = False
        model.register_load_state_dict_post_hook(self.weights_loaded)

    def weights_loaded(self, model: nn.Module, _: object) -> None:
        """Await the first step of an optimizer of this model, if a scaling state should be loaded too."""
        if self.awaits or not any(map(_lacks_a_state, self.states)):
            return
        self.awaits = True
        me, root = weakref.ref(self), weakref.ref(model)

        @outside_of_graphs
        def steps(optimizer: torch.optim.Optimizer, *_: object) -> None:
            resumed, model = me(), root()
            if resumed is None or model is None:
                return
            held = {id(p) for p in model.parameters()}
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            mine = [p for p in stepped if id(model_parameter(p)) in held]
            if not mine or not any(map(_trained, resumed.states)):
                return  # torch.distributed.checkpoint steps a fresh optimizer before it loads its state
            handle.remove()
            resumed.awaits = False
            if any(of and of.get("step", 1) > 0 for of in map(optimizer.state.get, mine)):  # Adagrad begins with a 0
                resumed.warn(type(model).__name__)

        handle = register_optimizer_step_pre_hook(steps)
        weakref.finalize(self, handle.remove)

    def warn(self, name: str) -> None:
        """Warn of the states that are still to be loaded."""
        forgotten = [state for state in self.states if not state.loaded]
        decided = sum(len(state.controller.layers) for state in forgotten if state.controller is not None)
        predicted = sum(state.delayed for state in forgotten if state.controller is None)
        lost = [f"the decisions of auto for {decided} layers"] * (decided > 0)
        lost += [f"the windows of amaxes of {predicted} layers"] * (predicted > 0)
        if lost:
            warnings.warn(
                f"{name}: weights were loaded and the optimizer goes on from another run, but no scaling state was "
                f"loaded: {' and '.join(lost)} begin anew, and this run is not the one that was interrupted. Save "
                "fe.scaling_state_dict(model) with each checkpoint and load it before training; for transformers' "
                "Trainer, callbacks=[fp8engine.report.trainer.ScalingStateCallback()] does both",
                ResumeWarning,
                stacklevel=2,
            )


def _trained(state: ScalingState) -> bool:
    """Whether a training step has come to its amaxes."""
    return state.device.type != "meta" and bool((state.live_2S[0] >= 0).any())


def _lacks_a_state(state: ScalingState) -> bool:
    """Whether steps of another run would have left something in this state, and nothing is there."""
    if state.loaded or state.device.type == "meta":
        return not state.loaded
    if state.controller is not None:
        return state.controller.step < 0 or state.controller.tentative
    return state.delayed > 0 and not bool((state.history_HS > 0).any())
