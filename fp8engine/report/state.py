"""Scaling state of a whole model by slot name: read, saved and loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fp8engine._torch import plain_name
from fp8engine.auto import Alarm, Controller
from fp8engine.auto.calibration import number
from fp8engine.autograd import Numerics
from fp8engine.convert.select import linear_layers, parameter_of
from fp8engine.errors import ConversionError, ParallelWarning, ShapeError, StateError, UnknownName
from fp8engine.nn.linear import Float8Module
from fp8engine.ops import ranks
from fp8engine.scaling.slot_view import SlotView
from fp8engine.scaling.table import OUTPUT, ScalingState

READS = (1, 2, 3)  # 2 where there are slots of outputs, 3 of `auto`


def float8_layers(model: nn.Module, caller: str) -> dict[str, Numerics]:
    """Name -> numerics, of every converted layer; names as before the model was wrapped."""
    ConversionError.unless(model, nn.Module, f"{caller} takes an nn.Module, the model itself")
    found = {}
    for name, module, _ in linear_layers(model):
        numerics = module.numerics_of(parameter_of(name, module)) if isinstance(module, Float8Module) else None
        if numerics is not None:
            found[plain_name(model, name)] = numerics
    return found


def slot_name(layer: str, role: str) -> str:
    """The name of a slot: the layer's and the role's."""
    return f"{layer}.{role}" if layer else role


def _is_output(slot: str) -> bool:
    return slot.rpartition(".")[2] == OUTPUT


class StateView(Mapping[str, SlotView]):
    """Slots by name, `blocks.0.mlp.up.input`; each look-up copies the numbers out.

    layers: name -> numerics, of every converted layer.  states: their scaling states, each once.
    controllers: those of the states under `auto`.
    """

    def __init__(self, model: nn.Module, caller: str = "scaling_state"):
        self.layers = float8_layers(model, caller)
        self.states = list({id(numerics.state): numerics.state for numerics in self.layers.values()}.values())
        self.controllers = [state.controller for state in self.states if state.controller is not None]

    def slots(self) -> dict[str, tuple[Numerics, str]]:
        """Name -> (numerics of the layer, role), of every slot that there is now."""
        each = ((name, numerics, numerics.state.roles(numerics.layer)) for name, numerics in self.layers.items())
        return {slot_name(name, role): (numerics, role) for name, numerics, roles in each for role in roles}

    def __getitem__(self, name: str) -> SlotView:
        layer, _, role = name.rpartition(".")
        numerics = self.layers.get(layer)
        if numerics is None or role not in numerics.state.roles(numerics.layer):
            raise KeyError(str(UnknownName("slot", name, self)))
        return numerics.state.view(name, numerics.layer, role)

    def __iter__(self) -> Iterator[str]:
        return iter(self.slots())

    def __len__(self) -> int:
        return len(self.slots())

    def rescale_gradients(self, factor: float) -> None:
        """Multiply the gradients' histories and predicted scales by `factor`, as the loss scale was.

        `fe.amp.GradScaler.on_scale_change` takes it.  Without it the first steps under a larger loss scale saturate and
        are cast twice.  Raises StateError for a factor that is not positive.

        >>> from fp8engine.amp import GradScaler
        >>> from fp8engine.nn import Linear
        >>> layer, scaler = Linear(16, 16, recipe="delayed"), GradScaler("cpu")
        >>> _ = scaler.on_scale_change(scaling_state(layer).rescale_gradients)
        """
        for state in self.states:
            state.rescale_gradients(factor)

    def see_loss(self, loss: torch.Tensor | float) -> None:
        """Tell `fe.auto(budget=...)` the loss of the step under way: the mean over its tokens, in nats.

        Call it between forward and backward, with the loss before any loss scale.  Nothing waits for the device, and
        in a step that is not sampled nothing happens.  A model that returns its loss (`.loss`) needs no call.
        Raises ShapeError for what is not one number.

        >>> from fp8engine.nn import Linear
        >>> layer = Linear(16, 16, recipe="auto")
        >>> scaling_state(layer).see_loss(layer(torch.randn(4, 16)).square().mean())
        """
        seen = number(loss, "see_loss", ShapeError)
        for controller in self.controllers:
            controller.see_loss(seen)

    def state_dict(self) -> dict:
        """As `scaling_state_dict`: with these two methods, what saves optimizers saves this too.

        `accelerator.register_for_checkpointing(fe.scaling_state(model))` takes it.
        """
        saved = self.saved()
        if not ranks.first():  # scales (>= 0) get a negative sign: a load sees whose amaxes stand beside them
            for slot in saved["slots"].values():
                slot["live"][1:].neg_()
        return saved

    def saved(self) -> dict:
        """`state_dict` without a mark on the amaxes of other ranks than the first."""
        for state in self.states:
            state.saved_1.fill_(1)
        slots = {name: {key: t.clone() for key, t in _columns(*slot).items()} for name, slot in self.slots().items()}
        version = 3 if self.controllers else 2 if any(map(_is_output, slots)) else 1
        backward_seen = [state.backward_seen for state in self.states]  # else amaxes are a forward's
        found: dict = {"version": version, "slots": slots, "backward_seen": backward_seen}
        if self.controllers:
            found["auto"] = [controller.state_dict() for controller in self.controllers]
        return found

    def load_state_dict(self, state_dict: Mapping) -> None:
        """As `load_scaling_state_dict`, and raises as it does."""
        self.put_back(state_dict)

    def put_back(self, state_dict: Mapping) -> None:
        """`load_state_dict`; its warning names the line that called its caller."""
        slots, kept = self._checked(state_dict)
        loads = [controller.loading(found) for controller, found in zip(self.controllers, kept, strict=True)]
        if any(state.delayed for state in self.states):
            _warn_of_marks(slots)
        for numerics in self.layers.values():  # the file may lack a result's slot, or hold a shorter history
            numerics.state.forget(numerics.layer)
        for load in loads:  # before the tables: a recipe clears a scale
            load()
        for name, slot in self.slots().items():
            for key, target in _columns(*slot).items() if name in slots else ():
                target[: slots[name][key].numel()] = slots[name][key][: target.numel()]
        # Whether a step was recorded and waits to be entered.  A file that does not say so has its amaxes tell.
        recorded = [bool((state.live_2S[0] >= 0).any()) for state in self.states]
        backward_seen = _of_each(state_dict.get("backward_seen", recorded), len(self.states))
        for state, came in zip(self.states, backward_seen, strict=True):
            state.live_2S[1].abs_()
            state.outputs.loaded(state.live_2S)
            state.saved_1.fill_(1)
            state.loaded, state.backward_seen = True, came

    def _checked(self, state_dict: Mapping) -> tuple[Mapping, Sequence]:
        """(saved slots, states of "auto").  Raises StateError unless they are of this model under these recipes.

        Under auto a history of another length may be cut or padded.
        """
        if not isinstance(state_dict, Mapping) or state_dict.get("version") not in READS:
            raise StateError(f"not a scaling state dict of version {' or '.join(map(str, READS))}")
        slots, expected = state_dict.get("slots"), self.slots()
        names = set(slots) if isinstance(slots, Mapping) else set()
        # The slot of an output may be missing: its scale is predicted again; under auto the log says which are stored.
        missing = sorted(name for name in expected.keys() - names if not _is_output(name))
        unknown = sorted(name for name in names - expected.keys() if not (self.controllers and _is_output(name)))
        if not isinstance(slots, Mapping) or missing or unknown:
            raise StateError(
                f"scaling state of another model: {len(missing)} slots missing ({', '.join(missing[:3])}), "
                f"{len(unknown)} unknown ({', '.join(unknown[:3])})"
            )
        for name, slot in expected.items():
            for key, target in _columns(*slot).items() if name in names else ():
                value: Any = slots[name].get(key) if isinstance(slots[name], Mapping) else None
                like = isinstance(value, torch.Tensor) and (value.dtype, value.dim()) == (target.dtype, 1)
                if not like or (value.shape != target.shape and not (self.controllers and key == "history")):
                    raise StateError(
                        f"{name}: {key} should be {target.dtype} of {list(target.shape)}; "
                        "was it saved under another recipe or history length?"
                    )
        if len(kept := state_dict.get("auto", [])) != len(self.controllers):
            raise StateError(
                f'{len(kept)} states of "auto" saved, {len(self.controllers)} wanted: convert, and copy parts, as then'
            )
        if kept and state_dict["version"] < 3:
            raise StateError('its state of "auto" is of an older fp8engine: without it `auto` decides anew')
        return slots, kept

    def on_alarm(self, listener: Callable[[Alarm], object]) -> Callable[[], None]:
        """Call `listener` with every early warning from now on; the function returned ends that.

        An alarm has .step .slot .ratio .growth .steps, and is a line of text as str(alarm).  A copy of the model, or a
        saved one, has no listeners.  Raises StateError where no layer is under `auto`, and nothing is watched, and for
        what cannot be called.

        >>> from fp8engine.nn import Linear
        >>> layer = Linear(16, 16, recipe="auto")
        >>> stop = scaling_state(layer).on_alarm(print)
        """
        histories = [controller.history for controller in self.controllers]
        if not histories:
            raise StateError(
                'on_alarm: no layer is under "auto", and only those are watched; fe.convert(model, "auto")'
            )
        if not callable(listener):
            raise StateError(f"on_alarm({listener!r}): want a function of one argument, the alarm")
        for history in histories:
            history.listeners.append(listener)

        def stop() -> None:
            for history in histories:
                if listener in history.listeners:
                    history.listeners.remove(listener)

        return stop


def controllers_of(model: nn.Module) -> list[Controller]:
    """The controllers of the model's layers under `auto`, one for each scaling state."""
    return StateView(model, "controllers_of").controllers


def scaling_state(model: nn.Module) -> StateView:
    """The slots of a model's converted layers: `fe.scaling_state(model)["blocks.0.mlp.up.input"].amax`.

    >>> from fp8engine.nn import Linear
    >>> layer = Linear(16, 16, recipe="current")
    >>> _ = layer(torch.full((2, 16), 3.0))
    >>> scaling_state(layer)["input"].amax
    tensor(3.)
    """
    return StateView(model)


def scaling_state_dict(model: nn.Module) -> dict:
    """Scales, histories and counters by slot name: tensors in plain dicts, as torch.load(weights_only=True) reads.

    One rank of several may call it without the others: a run resumed on all ranks from its file repeats the run that
    goes on.  For that, all ranks take this step's amaxes from the first rank that saved, not the largest of all ranks.
    """
    return StateView(model, "scaling_state_dict").state_dict()


def joined_state_dict(model: nn.Module) -> dict:
    """`scaling_state_dict` where this step's amaxes have been joined before: those of any rank are all ranks'."""
    return StateView(model, "scaling_state_dict").saved()


def load_scaling_state_dict(model: nn.Module, state_dict: Mapping) -> None:
    """Put back what `scaling_state_dict` saved from the same model under the same recipes.

    Raises StateError, with nothing loaded, when it is not such a dict, slots are missing or unknown, or shapes differ.
    Warns (ParallelWarning), on the first rank, where it has other ranks' amaxes that the run did not go on with.
    """
    StateView(model, "load_scaling_state_dict").put_back(state_dict)


def without_state(model: nn.Module) -> None:
    """Go on from a checkpoint with fresh scales, as wanted: no ResumeWarning."""
    for state in StateView(model, "without_state").states:
        state.loaded = True


def _warn_of_marks(slots: Mapping) -> None:
    """torch.distributed.checkpoint keeps any one rank's tensor of a name; the run goes on with the first rank's."""
    signs = torch.stack([slot["live"][1] for slot in slots.values()]).signbit().tolist()
    if ranks.first() and (marked := [name for name, sign in zip(slots, signs, strict=True) if sign]):
        warnings.warn(
            f"the scaling state has the amaxes of other ranks than the first in {len(marked)} slots, {marked[0]} the "
            "first, as torch.distributed.checkpoint keeps one rank's tensor of each name: under predicted scales the "
            "run will not repeat the one that went on bit for bit; save with fe.distributed.save, or the first rank's",
            ParallelWarning,
            stacklevel=4,
        )


def _of_each(saved: bool | Sequence[bool], states: int) -> Sequence[bool]:
    """A saved flag of each scaling state; one flag, or those of layers that were put together otherwise, is all's."""
    each = [saved] if isinstance(saved, bool) else saved
    return each if len(each) == states else [any(each)] * states


def _columns(numerics: Numerics, role: str) -> dict[str, torch.Tensor]:
    """The saved tensors of a slot, as views of the tables."""
    state: ScalingState = numerics.state
    index = state.column(numerics.layer, role)
    state.outputs.settle(state.counts_CS)
    tables = {"history": state.history_HS, "live": state.live_2S, "counts": state.counts_CS}
    found = {key: table[:, index] for key, table in tables.items()}
    if role == OUTPUT:
        layer = numerics.layer
        found |= {"rule": state.rules_3S[:1, index], "scale": state.outputs.scale_L[layer : layer + 1]}
    return found
