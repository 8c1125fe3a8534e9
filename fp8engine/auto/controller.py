"""The clock of `fe.auto`: which training steps are looked at, when a look is read, and what follows from it.

    step t      watched: every tensor that a layer casts is described in a row of a table on the device
    step t + 1  the table's copy to the host is started; nobody waits for it
    then        at the first step that finds it arrived: decide, change recipes, write down why

A step whose backward comes only after another forward (a pipeline, a GAN) is watched until it came, for four forwards
at most: blocks under torch.compile tell nobody of theirs.  Several ranks decide on the first one's numbers, at step
t + 2: were each to wait for its own copy, they would change at different steps.

Watched are step 0 and every `interval`-th after.  A step is a forward of the model with gradients; all of this happens
before its first layer runs, so that a step, its recomputed parts too, has one recipe.  Looking changes no number: a run
under a plan repeats the losses of the run that made it, bit for bit.  A graph that torch.compile made of the whole
model does not come by here: it computes in the formats that it was compiled with.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fp8engine.auto.history import History, trends_from_dict
from fp8engine.auto.host_copy import PendingSample, start_copy
from fp8engine.auto.log import Change, Plan, SlotChange
from fp8engine.auto.outputs import Outputs, decide_outputs, rounded
from fp8engine.auto.policy import MOST_CHANGES, decide, enough, needs_of, per_tensor, widen
from fp8engine.auto.saving import choices_from_list, choices_to_list
from fp8engine.autograd.numerics import Numerics
from fp8engine.errors import InvalidRecipe, StateError
from fp8engine.files import HostCopy
from fp8engine.numerics.cost import speedup
from fp8engine.numerics.recipe import Auto
from fp8engine.ops import device
from fp8engine.scaling.choice import Choice, Slot, begin, in_16_bits, label, predicted, recipe_of
from fp8engine.scaling.prediction import Measured
from fp8engine.scaling.sample import seen, width
from fp8engine.scaling.table import ROLES, ScalingState

TABLES = ("counts", "samples", "pending_counts", "pending_rules")  # of a saved state
CALLS, ELEMENTS, SATURATED = 0, 1, 3  # rows of the counters
CLOCK = ("interval", "freeze_after", "plan", "objective")
PATIENCE = 4  # forwards that a watched step's backward may be late by


class Controller:
    """Decides for the layers of one scaling state whose recipes are `Auto`; the first one's clock is everybody's.

    layers: their numerics, with those recipes.  shapes: of their weights, [N, K] or [E, N, K].
    log: every change so far.  history: what was seen.  step: the training step under way, -1 before the first.
    plan: decisions to repeat.  Raises InvalidRecipe for recipes that disagree on more than needs.
    """

    def __init__(self, layers: Sequence[Numerics], shapes: Sequence[tuple[int, ...]], plan: Plan | None = None):
        self.layers, self.shapes = list(layers), [tuple(shape) for shape in shapes]
        self.by_name = {numerics.name: numerics for numerics in layers}
        self.recipes = [_auto(numerics) for numerics in self.layers]
        self.recipe = self.recipes[0]
        self.check(self.recipes)
        self.step = -1
        self.choices: dict[int, Choice] = {}  # by a layer's place in `layers`; layers of a group share one
        self.log: list[Change] = []
        self.history = History()
        self.again = False  # whether the last look left a question that only a closer one can answer
        self.pending: PendingSample | None = None
        self.counts: torch.Tensor | None = None  # at the last look
        self.late = 0  # forwards since the watched one, without a backward
        self.tentative = False  # this step began in a forward without gradients: of a checkpoint, or of an evaluation
        self.plan = plan
        self.outputs = Outputs(self.layers, self.recipes)
        if plan is not None:
            for numerics in self.layers:
                numerics.adopt(plan.start)
        self.state.controller, self.state.on_step = self, self.begin_step

    @staticmethod
    def check(recipes: Sequence[Auto]) -> None:
        """Raise InvalidRecipe for recipes that cannot be one model's: only what layers need may differ."""
        for key in CLOCK:
            if len(found := {getattr(each, key) for each in recipes}) > 1:
                found = ", ".join(sorted(map(str, found)))
                raise InvalidRecipe(f"auto recipes of one model have {key} {found}: give all of them the same")

    @property
    def state(self) -> ScalingState:
        """The tables of its layers."""
        return self.layers[0].state

    @property
    def frozen(self) -> bool:
        """Whether nothing is decided any more, in the run that a plan repeats too."""
        recipe = self.recipe if self.plan is None else self.plan.start
        last = recipe.freeze_after if isinstance(recipe, Auto) else None
        return last is not None and self.step > last

    def follow(self, flow: object) -> None:
        """Who reads each layer's result, before the first step: a Flow, or {layer: kinds of its consumers}.

        Without it every result is stored in 16 bits.
        """
        self.outputs.follow(flow)
        self._watch()

    def begin_step(self, backward: bool) -> None:
        """A training step begins.  backward: whether a backward pass came since the last one began."""
        begun = self.tentative and not backward  # in an evaluation, as it turns out
        self.tentative = not torch.is_grad_enabled()
        if not begun:
            with torch.inference_mode(False):  # what is made here is written to in training
                self._begin(backward)

    def _begin(self, backward: bool) -> None:
        self.step += 1
        self.state.outputs.widen = not self.frozen
        if self.plan is not None:
            self._repeat(self.plan)
            return
        if self.state.samples is not None and not backward and self.late < PATIENCE:
            self.late += 1
            return
        self._collect()
        self._watch()

    def as_plan(self) -> Plan:
        """The decisions so far, to be repeated."""
        start = self.plan.start if self.plan is not None else replace(self.recipe, plan=None)
        return Plan(self._names(), start, tuple(self.log))

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: its decisions as JSON, and as tensors what was seen and not yet decided on."""
        state, pending = self.state, self.pending
        if pending is not None:
            pending.copy.wait()
        kept = {
            "step": self.step,
            "again": self.again,
            "late": self.late,
            "tentative": self.tentative,
            "closely": sorted(state.detailed_layers),
            "pending": None if pending is None else [pending.step, sorted(pending.detailed_layers)],
            "choices": choices_to_list(self.choices),
            "log": [change.to_dict() for change in self.log],
            "trends": self.history.trends_to_dict(),
            "outputs": self.outputs.state_dict(),
        }
        seen = state.samples if pending is None else pending.samples
        tables = {"counts": self.counts, "samples": seen}
        tables |= {f"pending_{key}": None if pending is None else getattr(pending, key) for key in ("counts", "rules")}
        nothing = torch.empty(0)
        return {"decided": json.dumps(kept)} | {
            key: nothing if table is None else table.detach().cpu().clone() for key, table in tables.items()
        }

    def load_state_dict(self, found: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.  Raises StateError for another controller's, with nothing loaded."""
        try:
            kept = json.loads(found["decided"])
            choices = choices_from_list(kept["choices"])
            log = [Change.from_dict(change) for change in kept["log"]]
            step, again, late, tentative = (int(kept[key]) for key in ("step", "again", "late", "tentative"))
            closely, trends = frozenset(map(int, kept["closely"])), trends_from_dict(kept["trends"])
            tables = {key: table if len(table := found[key]) else None for key in TABLES}
            pending = None
            if kept["pending"] is not None:
                at, near = kept["pending"]
                copy = HostCopy(found[key] for key in ("samples", "pending_counts", "pending_rules"))
                pending = PendingSample(int(at), copy, frozenset(map(int, near)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(f"not the state of an auto recipe ({type(error).__name__}: {error})") from error
        if {change.layer for change in log} - self.by_name.keys() or set(choices) - set(range(len(self.layers))):
            raise StateError("the state of an auto recipe for another model: its layers are not these")
        self.step, self.again, self.late, self.tentative = step, bool(again), late, bool(tentative)
        self.choices, self.log, self.pending, self.counts = choices, log, pending, tables["counts"]
        self.history.trends = trends
        for numerics, recipe in zip(self.layers, self.recipes, strict=True):
            numerics.adopt(recipe if self.plan is None else self.plan.start)
        self.outputs.load_state_dict(kept["outputs"])
        for change in log:
            self.by_name[change.layer].adopt(change.recipe)
        self.state.detailed_layers = closely
        waiting = None if pending is not None else tables["samples"]
        self.state.samples = None if waiting is None else waiting.to(self.state.device, copy=True)

    def _names(self) -> dict[str, tuple[int, ...]]:
        return {numerics.name: shape for numerics, shape in zip(self.layers, self.shapes, strict=True)}

    def _repeat(self, plan: Plan) -> None:
        due = [change for change in plan.changes if change.step == self.step and change.layer in self.by_name]
        self.state.reserve(self.by_name[change.layer].layer for change in due if change.recipe.stored is not None)
        for change in due:
            self.by_name[change.layer].adopt(change.recipe)
            self.log.append(change)

    def _watch(self) -> None:
        """Begin or end watching, by the number of the step that begins."""
        state = self.state
        state.samples, self.late = None, 0
        state.sample_all = max(self.step, 0) % self.recipe.interval == 0  # else closer looks are all that is wanted
        due = (self.again or state.sample_all) and not self._ending()
        if due and self.plan is None and self.pending is None and state.device.type != "meta":
            rows = (len(ROLES) + self.outputs.any) * len(state.layers)
            state.samples = torch.zeros(rows, width(), dtype=torch.float32, device=state.device)

    def _ending(self) -> bool:
        """Whether what this step shows would come too late to be decided on."""
        return self.recipe.freeze_after is not None and self.step >= self.recipe.freeze_after

    def _collect(self) -> None:
        """Start the copy of what the last step left; decide on what has arrived."""
        state = self.state
        new = None
        if state.samples is not None:
            self.pending = new = start_copy(self.step - 1, state)
        if self.pending is not None and self.pending.arrived(self.pending is new):
            look, self.pending = self.pending, None
            if not self.frozen:
                self._decide(look.step, self._read(look.samples, look.detailed_layers), look.counts)
                decide_outputs(self, look)

    def _read(self, samples: torch.Tensor, closely: Container[int]) -> dict[Slot, Measured]:
        """What the rows of this controller's layers say; layers that read one tensor become a group."""
        found: dict[Slot, Measured] = {}
        readers: dict[bytes, int] = {}
        for i, numerics in enumerate(self.layers):
            for j, role in enumerate(ROLES):
                row = samples[len(ROLES) * numerics.layer + j]
                if measured := seen(row, role if numerics.layer in closely else ""):
                    found[i, role] = measured
                if measured and role == "input" and i not in self.choices and measured.amax > 0:
                    self._join(i, readers.setdefault(row.numpy().tobytes(), i))
        return {slot: measured for slot, measured in found.items() if slot[0] in self.choices}

    def _join(self, layer: int, first: int) -> None:
        """A layer that is seen for the first time: on its own, or with the first that read the same tensor."""
        mine = begin([layer], self.recipes[layer])
        if first != layer and self.choices[first].changes == 0:
            group = self.choices[first]
            mine = replace(group, formats={**group.formats, **mine.formats}, fp8=group.fp8 | mine.fp8)
        for i in {i for i, _ in mine.formats}:
            self.choices[i] = mine

    def _decide(self, step: int, found: Mapping[Slot, Measured], counts: torch.Tensor) -> None:
        for slot, measured in found.items():
            choice = self.choices[slot[0]]
            outcome = predicted(measured, slot, choice)
            self.history.enter(step, self._name(slot), label(slot, choice), measured, outcome)
        needs = {slot: needs_of(self.recipes[slot[0]]) for slot in found}
        closely: set[int] = set()
        self.again = False
        for choice in list({id(choice): choice for choice in self.choices.values()}.values()):
            inside = {slot: found[slot] for slot in choice.formats if slot in found and _says_something(found[slot])}
            places = {self.layers[i].layer for i, _ in choice.formats}
            if choice.changes == 0 and (slow := self._slow(choice, counts)):
                new = in_16_bits(choice, slow)
            elif not enough(inside, needs, choice):
                closely |= places
                self.again, new = True, choice
            else:
                if not inside or not per_tensor(inside, needs, choice):  # seen closely now, and next time at once
                    closely |= places & self.state.detailed_layers
                new = decide(inside, needs, choice)
                new = new if new.reasons else widen(new, self._saturated(choice, counts))
            self._adopt(choice, new, inside)
        self.counts = counts
        self._look_closely_at(closely)

    def _look_closely_at(self, layers: set[int]) -> None:
        """These, and what is not per tensor, which can be judged no other way; but not what is in 16 bits for good."""
        others = {
            self.layers[i].layer
            for i, choice in self.choices.items()
            if choice.grain != "tensor" and (choice.grain or choice.changes < MOST_CHANGES)
        }
        self.state.detailed_layers = frozenset(layers | others)

    def _adopt(self, old: Choice, new: Choice, inside: Mapping[Slot, Measured]) -> None:
        for i in sorted({i for i, _ in new.formats}):
            self.choices[i] = new
            reasons = {slot: why for slot, why in (new.reasons or {}).items() if slot[0] == i}
            before, after = (recipe_of(self.recipes[i], choice, i) for choice in (old, new))
            if new.reasons and after != before:
                slots = [self._explain(slot, why, (old, new), inside.get(slot)) for slot, why in reasons.items()]
                self.layers[i].adopt(self.outputs.with_output(i, after))
                self.log.append(Change(self.step, self.layers[i].name, self.layers[i].recipe, tuple(slots)))

    def _explain(self, slot: Slot, why: str, choices: tuple[Choice, Choice], measured: Measured | None) -> SlotChange:
        before, after = (label(slot, choice) for choice in choices)
        if measured is None:
            return SlotChange(self._name(slot), before, after, why)
        return SlotChange(self._name(slot), before, after, why, *rounded(predicted(measured, slot, choices[1])))

    def _name(self, slot: Slot) -> str:
        return f"{self.layers[slot[0]].name}.{slot[1]}"

    def _slow(self, choice: Choice, counts: torch.Tensor) -> str:
        """Why a group is left in 16 bits whatever its numbers say: FP8 would take longer on this card; "" if not."""
        where = self.state.device
        if where.type != "cuda" or device.capability(where) < (8, 9):
            return ""
        took, flops = 0.0, 0.0
        for i in {i for i, _ in choice.formats}:
            n, k = self.shapes[i][-2:]
            calls, elements = (int(counts[row, len(ROLES) * self.layers[i].layer]) for row in (CALLS, ELEMENTS))
            m = elements // max(calls * k, 1)
            flops += m * n * k
            took += m * n * k / speedup(m, n, k, "amax pass") if m else 0.0
        if took <= flops:
            return ""
        return (
            f"in FP8 it would take {took / flops:.2f}x its time in 16 bits on this card (by fp8engine/numerics/cost.py)"
        )

    def _saturated(self, choice: Choice, counts: torch.Tensor) -> float:
        """Share of a group's elements that saturated under predicted scales since the last look."""
        columns = [len(ROLES) * self.layers[i].layer + ROLES.index(role) for i, role in choice.formats]
        since = counts[:, columns].sum(1)
        if self.counts is not None:
            since = since - self.counts[:, columns].sum(1)
        return float(since[SATURATED]) / max(float(since[ELEMENTS]), 1.0)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "pending": None}  # a copy to the host that is under way belongs to this process


def attach(layers: Sequence[Numerics], shapes: Sequence[tuple[int, ...]]) -> None:
    """Give layers made by hand, in one scaling state, who decides for them, if their recipe is an `Auto`.

    Raises StateError for a plan that is none, or is of other layers.
    """
    recipe = layers[0].recipe
    if not isinstance(recipe, Auto):
        return
    plan = None
    if recipe.plan is not None:
        plan = Plan.load(recipe.plan)
        plan.check(
            {numerics.name: tuple(s) for numerics, s in zip(layers, shapes, strict=True)}, recipe.plan, part=True
        )
    Controller(layers, shapes, plan)


def _auto(numerics: Numerics) -> Auto:
    if not isinstance(numerics.recipe, Auto):
        raise InvalidRecipe(f"{numerics.name}: {numerics.recipe.name} is fixed; want fe.auto(...)")
    return numerics.recipe


def _says_something(measured: Measured) -> bool:
    """Whether a look may change a decision: not one at zeros, nor one at a step that overflowed or diverged."""
    return measured.amax > 0 and not measured.nonfinite
