"""A model's scaling state by name: to look at, to save, to load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from fp8engine.controller import Alarm, Controller
from fp8engine.convert import RECORD
from fp8engine.errors import StateError, UnknownName
from fp8engine.functional import Numerics
from fp8engine.modules.linear import Float8Module
from fp8engine.scaling import ROLES, SlotView
from fp8engine.select import linear_layers, parameter_of

VERSION = 1
WRAPPED = ("_orig_mod", "_fsdp_wrapped_module")


def plain_name(model: nn.Module, name: str) -> str:
    """A part's name as before DDP, FSDP or torch.compile wrapped the model.

    `module`, which DDP puts before every name, is a name like any other inside what was converted.
    """
    kept, here = [], model
    for part in name.split("."):
        outer = part == "module" and not kept and len(here._modules) == 1 and not hasattr(here, RECORD)
        if part not in WRAPPED and not outer:
            kept.append(part)
        here = here._modules.get(part) or here
    return ".".join(kept)


def float8_layers(model: nn.Module) -> dict[str, Numerics]:
    """Name -> numerics, of every converted layer; names as before DDP, FSDP or torch.compile wrapped the model."""
    found = {}
    for name, module, _ in linear_layers(model):
        numerics = module.numerics_of(parameter_of(name, module)) if isinstance(module, Float8Module) else None
        if numerics is not None:
            found[plain_name(model, name)] = numerics
    return found


class StateView(Mapping[str, SlotView]):
    """Slots by name, `blocks.0.mlp.up.input`; each look-up copies the numbers out."""

    def __init__(self, model: nn.Module):
        self._layers = float8_layers(model)

    def __getitem__(self, name: str) -> SlotView:
        layer, _, role = name.rpartition(".")
        if layer not in self._layers or role not in ROLES:
            raise KeyError(str(UnknownName("slot", name, self)))
        numerics = self._layers[layer]
        return numerics.state.view(name, numerics.layer, role)

    def __iter__(self) -> Iterator[str]:
        return _names(self._layers)

    def __len__(self) -> int:
        return len(self._layers) * len(ROLES)

    def rescale_gradients(self, factor: float) -> None:
        """The loss scale was multiplied by `factor`: the gradients' histories and predicted scales follow.

        `fe.amp.GradScaler.on_scale_change` takes it: without, the first steps under a larger loss scale saturate and
        are cast twice.  Raises StateError for a factor that is not positive.

        >>> from fp8engine.amp import GradScaler
        >>> from fp8engine.modules import Linear
        >>> layer, scaler = Linear(16, 16, recipe="delayed"), GradScaler("cpu")
        >>> _ = scaler.on_scale_change(scaling_state(layer).rescale_gradients)
        """
        for state in {id(numerics.state): numerics.state for numerics in self._layers.values()}.values():
            state.rescale_gradients(factor)

    def state_dict(self) -> dict:
        """As `scaling_state_dict`: with these two methods, what saves optimizers saves this too.

        `accelerator.register_for_checkpointing(fe.scaling_state(model))` takes it.
        """
        return _saved(self._layers)

    def load_state_dict(self, state_dict: Mapping) -> None:
        """As `load_scaling_state_dict`, and raises as it does."""
        _load(self._layers, state_dict)

    def on_alarm(self, listener: Callable[[Alarm], object]) -> Callable[[], None]:
        """Call `listener` with every early warning from now on; the function returned ends that.

        An alarm has .step .slot .ratio .growth .steps, and is a line of text as str(alarm).  A copy of the model, or a
        saved one, has no listeners.  Raises StateError where no layer is under `auto`: nothing else is watched.

        >>> from fp8engine.modules import Linear
        >>> layer = Linear(16, 16, recipe="auto")
        >>> stop = scaling_state(layer).on_alarm(print)
        """
        histories = [controller.history for controller in _controllers(self._layers)]
        if not histories:
            raise StateError(
                'on_alarm: no layer is under "auto", and only those are watched; fe.convert(model, "auto")'
            )
        for history in histories:
            history.listeners.append(listener)

        def stop() -> None:
            for history in histories:
                if listener in history.listeners:
                    history.listeners.remove(listener)

        return stop


def _names(layers: Iterable[str]) -> Iterator[str]:
    return (f"{name}.{role}" if name else role for name in layers for role in ROLES)


def controllers_of(model: nn.Module) -> list[Controller]:
    """Who decides for the model's layers under `auto`, one for each scaling state."""
    return _controllers(float8_layers(model))


def _controllers(layers: Mapping[str, Numerics]) -> list[Controller]:
    states = {id(numerics.state): numerics.state for numerics in layers.values()}
    clocks = [getattr(state.clock, "__self__", None) for state in states.values()]
    return [clock for clock in clocks if isinstance(clock, Controller)]


def _load_auto(controllers: list[Controller], kept: Sequence[Mapping]) -> None:
    """Before the tables: a changed recipe forgets a predicted scale."""
    if len(kept) != len(controllers):
        raise StateError(
            f'{len(kept)} states of "auto" saved, {len(controllers)} wanted: convert with the recipe of then'
        )
    for controller, found in zip(controllers, kept, strict=True):
        controller.load_state_dict(found)


def scaling_state(model: nn.Module) -> StateView:
    """The slots of a model's converted layers: `fe.scaling_state(model)["blocks.0.mlp.up.input"].amax`.

    >>> from fp8engine.modules import Linear
    >>> layer = Linear(16, 16, recipe="current")
    >>> _ = layer(torch.full((2, 16), 3.0))
    >>> scaling_state(layer)["input"].amax
    tensor(3.)
    """
    return StateView(model)


def scaling_state_dict(model: nn.Module) -> dict:
    """Scales, histories and counters by slot name: tensors in plain dicts, as torch.load(weights_only=True) reads."""
    return _saved(float8_layers(model))


def _saved(layers: dict[str, Numerics]) -> dict:
    slots = {}
    for name, numerics in layers.items():
        for position, role in enumerate(ROLES):
            index, state = len(ROLES) * numerics.layer + position, numerics.state
            slots[f"{name}.{role}" if name else role] = {
                "history": state.history_HS[:, index].clone(),
                "live": state.live_2S[:, index].clone(),
                "counts": state.counts_CS[:, index].clone(),
            }
    found: dict = {"version": VERSION, "slots": slots}
    if kept := [controller.state_dict() for controller in _controllers(layers)]:
        found["auto"] = kept
    return found


def load_scaling_state_dict(model: nn.Module, state_dict: Mapping) -> None:
    """Put back what `scaling_state_dict` saved from the same model under the same recipes.

    Raises StateError, with nothing loaded, when it is not such a dict, slots are missing or unknown, or shapes differ.
    """
    _load(float8_layers(model), state_dict)


def _load(layers: dict[str, Numerics], state_dict: Mapping) -> None:
    if not isinstance(state_dict, Mapping) or state_dict.get("version") != VERSION:
        raise StateError(f"not a scaling state dict of version {VERSION}")
    slots = state_dict.get("slots")
    expected = set(_names(layers))
    if not isinstance(slots, Mapping) or set(slots) != expected:
        names = set(slots) if isinstance(slots, Mapping) else set()
        missing, unknown = sorted(expected - names), sorted(names - expected)
        raise StateError(
            f"scaling state of another model: {len(missing)} slots missing ({', '.join(missing[:3])}), "
            f"{len(unknown)} unknown ({', '.join(unknown[:3])})"
        )
    todo = []
    for name, numerics in layers.items():
        state = numerics.state
        for position, role in enumerate(ROLES):
            saved = slots[f"{name}.{role}" if name else role]
            index = len(ROLES) * numerics.layer + position
            columns = {
                "history": state.history_HS[:, index],
                "live": state.live_2S[:, index],
                "counts": state.counts_CS[:, index],
            }
            for key, target in columns.items():
                value = saved.get(key) if isinstance(saved, Mapping) else None
                if not isinstance(value, torch.Tensor) or value.shape != target.shape or value.dtype != target.dtype:
                    raise StateError(
                        f"{name}.{role}: {key} should be {target.dtype} of {list(target.shape)}; "
                        "was it saved under another recipe or history length?"
                    )
                todo.append((target, value))
    _load_auto(_controllers(layers), state_dict.get("auto", []))
    for target, value in todo:
        target.copy_(value)
    for state in {id(numerics.state): numerics.state for numerics in layers.values()}.values():
        state.backward_seen = bool((state.live_2S[0] >= 0).any())  # a step was recorded and waits to be entered
