"""Log of `auto`'s decisions with their reasons, and the plan that a later run repeats step by step.

{"version": 1, "layers": {"blocks.0.up": [512, 128], ...}, "start": {...recipe...},
 "changes": [{"step": 1, "layer": "blocks.0.up", "recipe": {...}, "slots": [{"slot": ..., "why": ...}, ...]}, ...]}
"""

from __future__ import annotations

import json
import operator
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8engine.auto.failures import some
from fp8engine.errors import InvalidRecipe, StateError
from fp8engine.numerics.recipe import Recipe

VERSION = 1


@dataclass(frozen=True)
class SlotChange:
    """One slot's part.  before, after: as "E4M3/tensor", "BF16".  dB and share are predictions of `after`."""

    slot: str
    before: str
    after: str
    why: str
    sqnr_db: float | None = None
    flushed: float | None = None


@dataclass(frozen=True)
class Change:
    """A layer's new recipe from a training step on, and why each of its slots changed."""

    step: int
    layer: str
    recipe: Recipe
    slots: tuple[SlotChange, ...]

    def lines(self) -> list[str]:
        """A line of text for each slot.

        >>> from fp8engine.numerics.recipe import rowwise
        >>> why = "predicted SQNR 19.1 dB < 22 dB (amax 61x rms)"
        >>> slot = SlotChange("blocks.3.down.input", "E4M3/tensor", "E4M3/row", why)
        >>> print(*Change(320, "blocks.3.down", rowwise(), (slot,)).lines())
        step 320 blocks.3.down.input E4M3/tensor -> E4M3/row: predicted SQNR 19.1 dB < 22 dB (amax 61x rms)
        """
        return [f"step {self.step} {s.slot} {s.before} -> {s.after}: {s.why}" for s in self.slots]

    def decisions(self) -> list[dict]:
        """A dict for each slot, in types that JSON knows."""
        return [{"step": self.step, "layer": self.layer, **vars(slot)} for slot in self.slots]

    def to_dict(self) -> dict:
        """The change as a plan holds it."""
        recipe = json.loads(self.recipe.to_json())
        return {"step": self.step, "layer": self.layer, "recipe": recipe, "slots": [vars(s) for s in self.slots]}

    @staticmethod
    def from_dict(found: Mapping) -> Change:
        """The inverse of `to_dict`."""
        if (step := operator.index(found["step"])) < 0:
            raise StateError(f"a change at step {step}: steps are counted from 0")
        recipe = Recipe.from_json(json.dumps(found["recipe"]))
        slots = tuple(SlotChange(**slot) for slot in found["slots"])
        return Change(**{**found, "step": step, "recipe": recipe, "slots": slots})  # TypeError for a key that is none


@dataclass(frozen=True)
class Plan:
    """Decisions to repeat: the layers they are for with their shapes, what those begin with, and every change."""

    layers: dict[str, tuple[int, ...]]
    start: Recipe
    changes: tuple[Change, ...]

    def to_json(self) -> str:
        """The plan as a file holds it."""
        whole = {
            "version": VERSION,
            "layers": {name: list(shape) for name, shape in self.layers.items()},
            "start": json.loads(self.start.to_json()),
            "changes": [change.to_dict() for change in self.changes],
        }
        return json.dumps(whole, indent=1)

    @staticmethod
    def load(path: str | os.PathLike) -> Plan:
        """The plan of a file.  Raises StateError, naming it, for a file that is not there or is no plan."""
        try:
            with open(path, encoding="utf-8") as file:
                whole = json.load(file)
            if (version := whole.pop("version")) != VERSION:
                raise ValueError(f"version {version!r}; this engine reads {VERSION}")
            layers = {name: tuple(shape) for name, shape in whole["layers"].items()}
            changes = tuple(sorted(map(Change.from_dict, whole["changes"]), key=lambda change: change.step))
            if strange := {change.layer for change in changes} - layers.keys():
                raise KeyError(f"changes of {min(strange)!r}, which is none of its layers")
            start = Recipe.from_json(json.dumps(whole["start"]))
            return Plan(**{**whole, "layers": layers, "start": start, "changes": changes})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, InvalidRecipe) as error:
            raise StateError(
                f"plan {os.fspath(path)} cannot be used ({type(error).__name__}: {error}); "
                "fe.inspect(model).save_plan(path) writes one"
            ) from error

    def check(self, layers: Mapping[str, tuple[int, ...]], path: str, part: bool = False) -> None:
        """Raise StateError unless it was made for these very layers, or, of a part of a model, for them too."""
        if dict(layers) == self.layers or (part and layers.items() <= self.layers.items()):
            return
        missing, unknown = _unlike(self.layers, layers), _unlike(layers, self.layers)
        raise StateError(
            f"plan {path} is of another model: it decides for {some(missing) or 'no layer'}, which this one has not "
            f"so, and knows nothing of {some(unknown) or 'no other'}; make a plan with this model, or leave plan= out"
        )


def merge(plans: Sequence[Plan]) -> Plan:
    """One plan of the plans of a model's scaling states: one for each device, each part made by hand, each copied one.

    Raises StateError where two of them have a layer of one name.
    """
    names = [name for plan in plans for name in plan.layers]
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise StateError(
            f"several layers, made by hand or copied after fe.convert, are called {', '.join(twice)}, and a plan knows "
            "layers by their names; save one of each part (fe.inspect(part).save_plan(path)), or copy before fe.convert"
        )
    layers = {name: shape for plan in plans for name, shape in plan.layers.items()}
    changes = sorted((change for plan in plans for change in plan.changes), key=lambda change: change.step)
    return Plan(layers, plans[0].start, tuple(changes))


def _unlike(these: Mapping, those: Mapping) -> list[str]:
    return [f"{name} {list(shape)}" for name, shape in these.items() if those.get(name) != shape]
