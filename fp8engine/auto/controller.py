"""Controller of `fe.auto`: samples training steps, decides on what they show, and changes the layers' recipes.

    step t      sampled: every tensor that a layer casts is described in a row of a table on the device
    step t + 1  the table's copy to the host is started, asynchronously
    later       at the first step that finds the copy complete: decide, change recipes, log the reasons

Sampled are step 0 and every `interval`-th after it.  A step is a forward of the model with gradients; decisions are
made before its first layer runs, so that a step, with the parts of it that are recomputed, has one recipe.  Sampling
changes no number: a run under a plan repeats the losses of the run that made it, bit for bit.

A step whose backward comes only after another forward (a pipeline, a GAN) is sampled until it has come, for four
forwards at most: backward passes of compiled blocks are not reported.  Several ranks decide on the first rank's
statistics at step t + 2: if each waited for its own copy, they would change recipes at different steps.  A model that
torch.compile has compiled as a whole never calls the controller: it computes in the formats it was compiled with.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fp8engine._moved import renamed
from fp8engine.auto import saving
from fp8engine.auto.history import History
from fp8engine.auto.host_copy import PendingSample, start_copy
from fp8engine.auto.log import Change, Plan, SlotChange
from fp8engine.auto.outputs import Outputs
from fp8engine.auto.policy import MOST_CHANGES, decide, enough, needs_of, per_tensor, widen
from fp8engine.autograd.numerics import Numerics
from fp8engine.errors import InvalidRecipe
from fp8engine.numerics.cards import card_of
from fp8engine.numerics.cost import speedup
from fp8engine.numerics.recipe import Auto, Cast, Recipe
from fp8engine.ops import device
from fp8engine.ops.reference.operand import COUNTERS
from fp8engine.scaling.choice import Choice, SlotKey, begin, in_16_bits, label, predicted, recipe_of
from fp8engine.scaling.prediction import Measured, Prediction
from fp8engine.scaling.sample import read_row, width
from fp8engine.scaling.table import OUTPUT, ROLES, ScalingState

CALLS, ELEMENTS, SATURATED = (COUNTERS.index(name) for name in ("calls", "elements", "saturated"))
SAME_FOR_ALL = ("interval", "freeze_after", "plan", "objective")  # what the recipes of one model have to agree on
MOST_WITHOUT_BACKWARD = 4  # forwards for which a sampled step waits for its backward
RENAMED = {"again": "resample", "late": "steps_without_backward"}  # attributes of 0.1's pickles


class Controller:
    """Decides for the layers of one scaling state whose recipes are `Auto`, at the interval of the first one.

    layers: their numerics, with those recipes.  shapes: of their weights, [N, K] or [E, N, K].
    log: every change so far.  history: the samples.  step: the training step under way, -1 before the first.
    plan: decisions to repeat.  choices: by a layer's place in `layers`; layers that are decided together share one.
    Raises InvalidRecipe for recipes that disagree on more than needs.
    """

    def __init__(self, layers: Sequence[Numerics], shapes: Sequence[tuple[int, ...]], plan: Plan | None = None):
        self.layers, self.shapes = list(layers), [tuple(shape) for shape in shapes]
        self.by_name = {numerics.name: numerics for numerics in layers}
        self.recipes = [_auto(numerics) for numerics in self.layers]
        self.recipe = self.recipes[0]
        self.check(self.recipes)
        self.step = -1
        self.choices: dict[int, Choice] = {}
        self.log: list[Change] = []
        self.history = History()
        self.resample = False  # whether the last sample left layers undecided that need statistics at every granularity
        self.pending: PendingSample | None = None
        self.counts: torch.Tensor | None = None  # the state's counters at the last sample
        self.steps_without_backward = 0  # forwards since the sampled one
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
        for key in SAME_FOR_ALL:
            if len(found := {getattr(each, key) for each in recipes}) > 1:
                found = ", ".join(sorted(map(str, found)))
                raise InvalidRecipe(f"auto recipes of one model have {key} {found}: give all of them the same")

    @property
    def state(self) -> ScalingState:
        """The tables of its layers."""
        return self.layers[0].state

    @property
    def frozen(self) -> bool:
        """Whether no decision is made any more, also in the run that a plan repeats."""
        recipe = self.recipe if self.plan is None else self.plan.start
        last = recipe.freeze_after if isinstance(recipe, Auto) else None
        return last is not None and self.step > last

    def follow(self, flow: object) -> None:
        """Take the consumers of each layer's result, before the first step: a Flow, or {layer: kinds of its consumers}.

        Without them every result is stored in 16 bits.
        """
        self.outputs.follow(flow)
        self._begin_sampling()

    def begin_step(self, backward: bool) -> None:
        """A training step begins.  backward: whether a backward pass came since the last one began."""
        begun = self.tentative and not backward  # by a forward that proves to have been an evaluation's
        self.tentative = not torch.is_grad_enabled()
        if begun:
            return
        with torch.inference_mode(False):  # what is made here is written to in training
            self.step += 1
            self.state.outputs.widen = not self.frozen
            if self.plan is not None:
                self._repeat(self.plan)
            elif self.state.samples is not None and not backward and self._may_wait():
                self.steps_without_backward += 1
            else:
                self._collect()
                self._begin_sampling()

    def as_plan(self) -> Plan:
        """The decisions so far, to be repeated."""
        start = self.plan.start if self.plan is not None else replace(self.recipe, plan=None)
        shapes = {numerics.name: shape for numerics, shape in zip(self.layers, self.shapes, strict=True)}
        return Plan(shapes, start, tuple(self.log))

    def state_dict(self) -> dict[str, Any]:
        """Its decisions as JSON, and as tensors the statistics on which it has not decided yet."""
        return saving.state_dict(self)

    def load_state_dict(self, found: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.  Raises StateError for another controller's, with nothing loaded."""
        saving.load_state_dict(self, found)

    def _may_wait(self) -> bool:
        return self.steps_without_backward < MOST_WITHOUT_BACKWARD

    def _repeat(self, plan: Plan) -> None:
        due = [change for change in plan.changes if change.step == self.step and change.layer in self.by_name]
        self.state.reserve(self.by_name[change.layer].layer for change in due if change.recipe.stored is not None)
        for change in due:
            self.by_name[change.layer].adopt(change.recipe)
            self.log.append(change)

    def _begin_sampling(self) -> None:
        """Give the step that begins a table for its statistics, or none if it is not to be sampled."""
        state, last = self.state, self.recipe.freeze_after
        state.samples, self.steps_without_backward = None, 0
        state.sample_all = max(self.step, 0) % self.recipe.interval == 0  # else only `state.detailed_layers`
        due = (self.resample or state.sample_all) and (last is None or self.step < last)
        if due and self.plan is None and self.pending is None and state.device.type != "meta":
            rows = (len(ROLES) + self.outputs.any) * len(state.layers)
            state.samples = torch.zeros(rows, width(), dtype=torch.float32, device=state.device)

    def _collect(self) -> None:
        """Start the copy of the last step's statistics; decide on a copy that is complete."""
        state = self.state
        new = None
        if state.samples is not None:
            self.pending = new = start_copy(self.step - 1, state)
        if self.pending is not None and self.pending.arrived(self.pending is new):
            sample, self.pending = self.pending, None
            if not self.frozen:
                self._decide(sample.step, self._read(sample.samples, sample.detailed_layers), sample.counts)
                self._decide_outputs(sample)

    def _read(self, samples: torch.Tensor, detailed_layers: Container[int]) -> dict[SlotKey, Measured]:
        """Statistics of this controller's layers; layers whose inputs are the same tensor become a group."""
        found: dict[SlotKey, Measured] = {}
        consumers: dict[bytes, int] = {}
        for i, numerics in enumerate(self.layers):
            for j, role in enumerate(ROLES):
                row = samples[len(ROLES) * numerics.layer + j]
                if measured := read_row(row, role if numerics.layer in detailed_layers else ""):
                    found[i, role] = measured
                if measured and role == "input" and i not in self.choices and measured.amax > 0:
                    self._join(i, consumers.setdefault(row.numpy().tobytes(), i))
        return {slot: measured for slot, measured in found.items() if slot[0] in self.choices}

    def _join(self, layer: int, first: int) -> None:
        """Begin with a layer that is sampled for the first time: alone, or with the first layer that has its input."""
        mine = begin([layer], self.recipes[layer])
        if first != layer and self.choices[first].changes == 0:
            group = self.choices[first]
            mine = replace(group, formats={**group.formats, **mine.formats}, fp8=group.fp8 | mine.fp8)
        for i in {i for i, _ in mine.formats}:
            self.choices[i] = mine

    def _decide(self, step: int, found: Mapping[SlotKey, Measured], counts: torch.Tensor) -> None:
        """Enter the statistics of a step into the history, and decide on every group of layers."""
        for slot, measured in found.items():
            choice = self.choices[slot[0]]
            self.history.enter(step, self._name(slot), label(slot, choice), measured, predicted(measured, slot, choice))
        needs = {slot: needs_of(self.recipes[slot[0]]) for slot in found}
        detailed: set[int] = set()
        self.resample = False
        for choice in list({id(choice): choice for choice in self.choices.values()}.values()):
            inside = {slot: found[slot] for slot in choice.formats if slot in found and _is_usable(found[slot])}
            layers = {self.layers[i].layer for i, _ in choice.formats}
            if choice.changes == 0 and (slow := self._slower_in_fp8(choice, counts)):
                new = in_16_bits(choice, slow)
            elif not enough(inside, needs, choice):
                detailed |= layers
                self.resample, new = True, choice
            else:
                if not inside or not per_tensor(inside, needs, choice):  # detailed now, so detailed next time too
                    detailed |= layers & self.state.detailed_layers
                new = decide(inside, needs, choice)
                new = new if new.reasons else widen(new, self._saturated(choice, counts))
            self._adopt(choice, new, inside)
        self.counts = counts
        # What is not per tensor can be judged by detailed statistics only; but what is in 16 bits for good needs none.
        self.state.detailed_layers = frozenset(detailed) | {
            self.layers[i].layer
            for i, choice in self.choices.items()
            if choice.granularity != "tensor" and (choice.granularity or choice.changes < MOST_CHANGES)
        }

    def _adopt(self, old: Choice, new: Choice, inside: Mapping[SlotKey, Measured]) -> None:
        """Give a group's layers the recipes of its new choice, and log the reasons."""
        for i in sorted({i for i, _ in new.formats}):
            self.choices[i] = new
            before, after = (recipe_of(self.recipes[i], choice, i) for choice in (old, new))
            if not new.reasons or after == before:
                continue
            slots = []
            for slot, why in new.reasons.items():
                if slot[0] == i:
                    outcome = predicted(inside[slot], slot, new) if slot in inside else None
                    slots.append(_slot_change(self._name(slot), (label(slot, old), label(slot, new)), why, outcome))
            self._change(i, after, slots)

    def _decide_outputs(self, sample: PendingSample) -> None:
        """Decide on the storage of the layers' results, once their operands' casts are decided."""
        outputs = self.outputs
        changed, found = outputs.decide(sample.samples, sample.counts, sample.rules)
        self.state.reserve(self.layers[i].layer for i, (_, after) in changed.items() if after.format.is_fp8)
        for i, measured in found.items():
            now = outputs.stored[i]
            outcome = measured.predict(Cast(now.format), now.margin)
            self.history.enter(sample.step, self._name((i, OUTPUT)), now.label, measured, outcome)
        for i, (before, after) in changed.items():
            outcome = found[i].predict(Cast(after.format), after.margin) if i in found else None
            slot = _slot_change(self._name((i, OUTPUT)), (before.label, after.label), after.reason, outcome)
            self._change(i, recipe_of(self.recipes[i], self.choices[i], i), [slot])

    def _change(self, i: int, recipe: Recipe, slots: Sequence[SlotChange]) -> None:
        self.layers[i].adopt(self.outputs.with_output(i, recipe))
        self.log.append(Change(self.step, self.layers[i].name, self.layers[i].recipe, tuple(slots)))

    def _name(self, slot: SlotKey) -> str:
        return f"{self.layers[slot[0]].name}.{slot[1]}"

    def _slower_in_fp8(self, choice: Choice, counts: torch.Tensor) -> str:
        """Why a group stays in 16 bits whatever its statistics: FP8 is predicted to take longer here; "" if not."""
        where = self.state.device
        if where.type != "cuda" or device.capability(where) < (8, 9):
            return ""
        card = card_of(device.name(where), device.processors(where))
        took, flops = 0.0, 0.0
        for i in {i for i, _ in choice.formats}:
            n, k = self.shapes[i][-2:]
            calls, elements = (int(counts[row, len(ROLES) * self.layers[i].layer]) for row in (CALLS, ELEMENTS))
            m = elements // max(calls * k, 1)
            flops += m * n * k
            took += m * n * k / speedup(recipe_of(self.recipes[i], choice, i), m, n, k, card) if m else 0.0
        if took <= flops:
            return ""
        return (
            f"in FP8 it is predicted to take {took / flops:.2f}x its time in 16 bits on this card "
            "(fp8engine/numerics/cost.py)"
        )

    def _saturated(self, choice: Choice, counts: torch.Tensor) -> float:
        """Share of a group's elements that saturated under predicted scales since the last sample."""
        columns = [len(ROLES) * self.layers[i].layer + ROLES.index(role) for i, role in choice.formats]
        since = counts[:, columns].sum(1)
        if self.counts is not None:
            since = since - self.counts[:, columns].sum(1)
        return float(since[SATURATED]) / max(float(since[ELEMENTS]), 1.0)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "pending": None}  # a copy to the host that is under way belongs to this process

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(renamed(state, RENAMED))


def attach(layers: Sequence[Numerics], shapes: Sequence[tuple[int, ...]]) -> None:
    """Give layers made by hand, in one scaling state, a controller if their recipe is an `Auto`.

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


def _is_usable(measured: Measured) -> bool:
    """Whether a decision may follow from these statistics: not those of zeros, nor of a step that overflowed."""
    return measured.amax > 0 and not measured.nonfinite


def _slot_change(name: str, labels: tuple[str, str], why: str, outcome: Prediction | None) -> SlotChange:
    """A change as the log holds it.  outcome: predicted of the new cast; an infinite SQNR is None, for JSON's sake."""
    if outcome is None:
        return SlotChange(name, *labels, why)
    sqnr_db = round(float(outcome.sqnr_db), 2) if math.isfinite(outcome.sqnr_db) else None
    return SlotChange(name, *labels, why, sqnr_db, round(float(outcome.flushed), 6))
