"""Controller of `fe.auto`: samples training steps, decides on what they show, and changes the layers' recipes.

    step t      sampled: rows of every operand that a layer casts are kept on the device
    step t + 1  the casts are tried on them, and the copy of the results to the host is started, asynchronously
    later       at the first step that finds the copy complete: decide, change recipes, log the reasons

Sampled are step 0, one pseudo-random step of each later interval, and a layer whose amaxes move early (schedule.py).
A step is a forward of the model with gradients; decisions are made before its first layer runs, so that a step, with
the parts of it that are recomputed, has one recipe.  Sampling changes no number: a run under a plan repeats the losses
of the run that made it, bit for bit.

Without gradients, before any training, the first forward is sampled and decides the forward's casts before the second;
a training step that comes after it begins anew.  `calibrate` decides at conversion, and its decisions stay.

A step whose backward comes only after another forward (a pipeline, a GAN) is sampled until it has come, for four
forwards at most: of a model whose result has no gradient it never comes.  Several ranks decide on the first rank's
statistics at step t + 2: if each waited for its own copy, they would change recipes at different steps.  A model that
torch.compile has compiled as a whole never calls the controller: it computes in the formats it was compiled with.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fp8engine.auto import budget, saving
from fp8engine.auto.between import Between
from fp8engine.auto.failures import Failures, some
from fp8engine.auto.history import History
from fp8engine.auto.host_copy import PendingSample, amaxes_of, several_ranks, start_copy, start_look
from fp8engine.auto.log import Change, Plan, SlotChange
from fp8engine.auto.outputs import Outputs
from fp8engine.auto.policy import decide, needs_of, reasons, widen
from fp8engine.auto.reading import outcome_of, paid_for, read, remember, saturated, slot_change, slower_in_fp8
from fp8engine.auto.schedule import Moves, is_sampled, looks
from fp8engine.autograd.numerics import Numerics
from fp8engine.errors import InvalidRecipe, StrictError
from fp8engine.numerics.recipe import Auto, Cast, Recipe
from fp8engine.scaling.choice import Choice, SlotKey, in_16_bits, label, recipe_of
from fp8engine.scaling.prediction import Measured
from fp8engine.scaling.reads import READS, Reads
from fp8engine.scaling.sample import StepSamples, outside_of_autocast
from fp8engine.scaling.table import OUTPUT, ROLES, ScalingState

SAME_FOR_ALL = ("interval", "freeze_after", "plan", "objective", "budget")  # what recipes of one model have to agree on
MOST_WITHOUT_BACKWARD = 4  # forwards for which a sampled step waits for its backward
UNUSUAL = 32.0  # amax over rms: a normal distribution has 5, at a million elements


class Controller:
    """Decides for the layers of one scaling state whose recipes are `Auto`, at the interval of the first one.

    layers: their numerics, with those recipes.  shapes: of their weights, [N, K] or [E, N, K].
    log: every change so far.  history: the samples.  failures: what could not be sampled or decided.
    step: the training step under way, -1 before the first.
    plan: decisions to repeat.  choices: by a layer's place in `layers`; layers that are decided together share one.
    reads: what is remembered of each layer's casts.  loss: the latest that was seen, in nats; None for none.
    Raises InvalidRecipe for recipes that disagree on more than needs.
    """

    def __init__(self, layers: Sequence[Numerics], shapes: Sequence[tuple[int, ...]], plan: Plan | None = None):
        self.layers, self.shapes = list(layers), [tuple(shape) for shape in shapes]
        self.by_layer = {numerics.layer: i for i, numerics in enumerate(layers)}
        self.by_name = {numerics.name: numerics for numerics in layers}
        self.recipes = [numerics.recipe for numerics in self.layers if isinstance(numerics.recipe, Auto)]
        if fixed := [f"{each.name}: {each.recipe.name}" for each in self.layers if not isinstance(each.recipe, Auto)]:
            raise InvalidRecipe(f"{fixed[0]} is fixed; want fe.auto(...)")
        self.recipe = self.recipes[0]
        self.check(self.recipes)
        self.step = -1
        self.choices: dict[int, Choice] = {}
        self.reads: dict[int, Reads] = {}
        self.loss: float | None = None
        self.log: list[Change] = []
        self.history = History()
        self.failures, self.between = Failures(), Between()
        self.moves = Moves()
        self.watched: PendingSample | None = None  # amaxes that `moves` will be asked about
        self.pending: PendingSample | None = None
        self.counts: torch.Tensor | None = None  # the state's counters at the last sample
        self.steps_without_backward = 0  # forwards since the sampled one
        self.tentative = False  # this step began in a forward without gradients: of a checkpoint, or of an evaluation
        self.calibrated = False  # whether decisions made before the first training step stay
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
        gradients = torch.is_grad_enabled()
        # What is made here is written to in training, in the dtypes that are written here.
        with torch.inference_mode(False), outside_of_autocast(self.state.device):
            try:
                self._begin_step(backward, gradients)
                self.between.note(self.state, self.undecided)
            except Exception as error:  # nothing raises in a user's forward
                self.pending = self.watched = None
                self.state.sample(None)
                self.state.decides_next = False
                # A plan has to be followed; ranks have to decide alike.
                if isinstance(error, StrictError) or self.plan is not None or several_ranks(self.state):
                    raise
                why = f"{type(error).__name__}: {error}"
                self.failures.tell(f"step {self.step}: nothing could be decided or sampled", why)
        self.history.tell()

    def _begin_step(self, backward: bool, gradients: bool) -> None:
        if self.tentative and not backward:  # the last forward proves to have been an evaluation's
            self._after_evaluation(gradients)
            return
        self.tentative = not gradients
        self.state.decides_next = False
        self.step += 1
        self.state.outputs.widen = not self.frozen
        if self.plan is not None:
            self._repeat(self.plan)
        elif self.state.samples is not None and not backward and self.steps_without_backward < MOST_WITHOUT_BACKWARD:
            self.steps_without_backward += 1
        else:
            self._collect(backward=True, may=not self.undecided or self.between.opens(self.state, backward))
            self._begin_sampling(self._moved())
        # Of a model that has not trained, the next forward without gradients ends the sample.
        self.state.decides_next = self.tentative and self.step == 0 and self.state.samples is not None

    def see_loss(self, loss: torch.Tensor | float) -> None:
        """The loss of the step under way, a mean over its tokens in nats, for `fe.auto(budget=...)`."""
        if self.state.samples is not None:
            self.state.samples.see_loss(loss)

    def calibrate(self, loss: torch.Tensor | None) -> None:
        """Decide at once on what the state's samples hold; the decisions stay when training begins.

        loss: of the pass that was sampled; None where it had no backward.
        """
        if loss is not None:
            self.see_loss(loss)
        self.step = 0
        self._collect(backward=loss is not None, wait=True)
        self.history.tell()
        self.step, self.calibrated, self.counts = -1, True, None
        self.state.sample(None)

    def as_plan(self) -> Plan:
        """The decisions so far, to be repeated."""
        start = self.plan.start if self.plan is not None else replace(self.recipe, plan=None)
        shapes = {numerics.name: shape for numerics, shape in zip(self.layers, self.shapes, strict=True)}
        return Plan(shapes, start, tuple(self.log))

    def cost(self, numerics: Numerics, role: str) -> float | None:
        """Predicted cost in nats of a layer's cast of its "input" or "weight" for the forward; None where not known."""
        layer = self.by_layer.get(numerics.layer, -1)
        seen, choice = self.reads.get(layer), self.choices.get(layer)
        if seen is None or choice is None or role not in ("input", "weight"):
            return None
        known = seen.knows_cost(READS.index((role, "forward")))
        return budget.cost_of(seen, choice.used.get((layer, "forward")), role) if known else None

    def state_dict(self) -> dict[str, Any]:
        """Its decisions as JSON, and as tensors the statistics on which it has not decided yet."""
        return saving.state_dict(self)

    def load_state_dict(self, found: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.  Raises StateError for another controller's, with nothing loaded."""
        saving.load_state_dict(self, found)

    def sizes(self) -> dict[int, tuple[int, int, int] | None]:
        """M, N, K of each layer's latest matmul, by its index in the state."""
        return {numerics.layer: numerics.sizes for numerics in self.layers}

    def begin_sampling(self, only: Collection[int] | None = None) -> None:
        """Give the step that begins a table for the statistics of layers, by their index in the state; None: of all."""
        shapes = {layer: self.shapes[i] for layer, i in self.by_layer.items() if only is None or layer in only}
        count = len(self.state.layers)
        rows = (len(ROLES) + self.outputs.any) * count
        self.state.sample(StepSamples(rows, count, shapes, self.state.device))

    def _after_evaluation(self, gradients: bool) -> None:
        """A forward without gradients came before any training step, and now another forward begins."""
        if not gradients:
            if self.state.decides_next:
                self.state.decides_next = False
                self._collect(backward=False)
            return
        self.tentative, awaited = False, self.state.decides_next
        self.state.decides_next = False
        if self.step > 0:  # of a training whose blocks are recomputed: the step had begun with an evaluation's forward
            return
        if not self.calibrated and self.choices:  # training decides for itself
            self.choices, self.reads, self.log, self.history = {}, {}, [], self.history.emptied()
            self.outputs = Outputs(self.layers, self.recipes)
            for numerics, recipe in zip(self.layers, self.recipes, strict=True):
                numerics.adopt(recipe)
        if self.plan is None and (awaited or self.state.samples is None):
            self.pending = None
            self._begin_sampling()

    def _repeat(self, plan: Plan) -> None:
        if self.state.must_wait:
            return
        mine = [change for change in plan.changes if change.layer in self.by_name]
        due = [change for change in mine[len(self.log) :] if change.step <= self.step]
        self.state.reserve(self.by_name[change.layer].layer for change in due if change.recipe.stored is not None)
        for change in due:
            self.by_name[change.layer].adopt(change.recipe)
            self.log.append(change)

    def _begin_sampling(self, early: Collection[int] = ()) -> None:
        """Give the step that begins a table for its statistics, or none if it is not to be sampled.

        early: layers, by their index in the state, that are sampled whatever the step is.
        """
        self.steps_without_backward = 0
        if self.state.samples is not None:
            self.state.sample(None)
        whole, last = is_sampled(self.step, self.recipe.interval), self.recipe.freeze_after
        due = (whole or early) and (last is None or self.step < last)
        if due and self.plan is None and self.pending is None and self.state.device.type != "meta":
            self.begin_sampling(None if whole else early)

    def _moved(self) -> set[int]:
        """Layers whose amaxes have moved far since they were sampled, with their groups."""
        if self.plan is not None or self.frozen or self.pending is not None:
            return set()
        found, number, new = set(), max(self.step, 0) // self.recipe.interval, None
        if self.watched is None and looks(self.step, several_ranks(self.state)):
            self.watched = new = start_look(self.step, self.state)
        if self.watched is not None and self.watched.arrived(self.watched is new):
            moved = self.moves.moved(amaxes_of(self.watched.copy.tensors[0], len(self.state.layers)), number)
            at = [self.by_layer[layer] for layer in moved if layer in self.by_layer]
            groups = [self.choices[i].layers for i in at if i in self.choices]
            found, self.watched = {self.layers[i].layer for group in groups for i in group}, None
        return found

    @property
    def undecided(self) -> bool:
        """Whether a decision may be adopted at one of the next forwards."""
        return self.pending is not None or self.state.samples is not None

    def _collect(self, backward: bool, wait: bool = False, may: bool = True) -> None:
        """Start the copy of the last step's statistics; decide on a copy that is complete.

        may: whether a decision may be adopted now (between.py).
        """
        state = self.state
        new = None
        if state.samples is not None:
            failed = dict(sorted(state.samples.failed.items()))
            for why in set(failed.values()):
                names = [self._name(self._slot(row)) for row in failed if failed[row] == why]
                self.failures.tell(f"step {self.step - 1}: {some(names)} could not be sampled", why)
            self.pending = new = start_copy(max(self.step - 1, 0), state, state.samples.finish(self.sizes(), backward))
            state.sample(None)
        if self.pending is not None and may and (wait or self.pending.arrived(self.pending is new)):
            sample, self.pending = self.pending, None
            if wait:
                sample.copy.wait()
            if not self.frozen:
                self._decide(sample)
                self._decide_outputs(sample)

    def _decide(self, sample: PendingSample) -> None:
        """Enter the statistics of a step into the history, and decide on every group of layers."""
        found, counts = read(self, sample.tables.slots), sample.tables.counts
        usable = remember(self, found, sample)
        if math.isfinite(loss := float(sample.tables.loss)):
            self.loss = loss
        for slot, measured in found.items():
            choice = self.choices[slot[0]]
            outcome = outcome_of(self.reads.get(slot[0]), slot, choice, measured)
            self.history.enter(sample.step, self._name(slot), label(slot, choice), measured, outcome)
        before = list({id(choice): choice for choice in self.choices.values()}.values())  # of each group once
        after = []
        for choice in before:
            needs = {i: needs_of(self.recipes[i], loss=self.loss or 0.0) for i in choice.layers}
            if choice.changes == 0 and (slow := slower_in_fp8(self, choice, counts)):
                after.append(in_16_bits(choice, slow))
                continue
            seen = {i: self.reads[i] for i in choice.layers if i in usable}
            new = decide(seen, needs, choice) if seen else replace(choice, reasons=None)
            after.append(new if new.reasons else widen(new, saturated(self, choice, counts)))
        paid = self._spend(after)
        for old, new, final in zip(before, after, paid, strict=True):
            if final is not new:
                final = replace(final, reasons={**reasons(final, new, paid_for(self, final)), **(new.reasons or {})})
            self._adopt(old, final, found)
        self.counts = counts
        sampled = {self.layers[i].layer for i, _ in found}
        whole = is_sampled(sample.step, self.recipe.interval)
        self.moves.sampled(sampled, amaxes_of(sample.tables.amax_S, len(self.state.layers)), whole)

    def _spend(self, choices: Sequence[Choice]) -> list[Choice]:
        """The choices with the finer casts and the 16 bits that the budget of loss asks for."""
        if self.recipe.budget is None or self.loss is None:
            return list(choices)
        flops = {i: float(math.prod(shape[-2:])) for i, shape in enumerate(self.shapes)}
        return budget.spend(choices, self.reads, flops, self.recipe.budget * self.loss)

    def _adopt(self, old: Choice, new: Choice, found: Mapping[SlotKey, Measured]) -> None:
        """Give a group's layers the recipes of its new choice, and log the reasons."""
        for i in new.layers:
            self.choices[i] = new
            before, after = (recipe_of(self.recipes[i], choice, i) for choice in (old, new))
            if not new.reasons or after == before:
                continue
            slots = []
            for slot, why in new.reasons.items():
                if slot[0] == i:
                    measured = found.get(slot)
                    outcome = None if measured is None else outcome_of(self.reads.get(i), slot, new, measured)
                    if measured is not None and measured.crest >= UNUSUAL:
                        why = f"{why} (amax {measured.crest:.0f}x rms)"
                    slots.append(slot_change(self._name(slot), (label(slot, old), label(slot, new)), why, outcome))
            self._change(i, after, slots)

    def _decide_outputs(self, sample: PendingSample) -> None:
        """Decide on the storage of the layers' results, once their operands' casts are decided."""
        outputs = self.outputs
        changed, found = outputs.decide(sample.tables.slots, sample.tables.counts, sample.tables.rules)
        self.state.reserve(self.layers[i].layer for i, (_, after) in changed.items() if after.format.is_fp8)
        for i, measured in found.items():
            now = outputs.stored[i]
            outcome = measured.predict(Cast(now.format), now.margin)
            self.history.enter(sample.step, self._name((i, OUTPUT)), now.label, measured, outcome)
        for i, (before, after) in changed.items():
            outcome = found[i].predict(Cast(after.format), after.margin) if i in found else None
            slot = slot_change(self._name((i, OUTPUT)), (before.label, after.label), after.reason, outcome)
            self._change(i, recipe_of(self.recipes[i], self.choices[i], i), [slot])

    def _change(self, i: int, recipe: Recipe, slots: Sequence[SlotChange]) -> None:
        self.layers[i].adopt(self.outputs.with_output(i, recipe))
        self.log.append(Change(self.step, self.layers[i].name, self.layers[i].recipe, tuple(slots)))

    def _slot(self, row: int) -> SlotKey:
        """The slot that a row of the samples describes: outputs behind all operands."""
        layer, role = divmod(row, len(ROLES))
        if row >= (all_operands := len(ROLES) * len(self.state.layers)):
            return self.by_layer[row - all_operands], OUTPUT
        return self.by_layer[layer], ROLES[role]

    def _name(self, slot: SlotKey) -> str:
        return f"{self.layers[slot[0]].name}.{slot[1]}"

    def __getstate__(self) -> dict:
        # A copy to the host that is under way belongs to this process.
        return {**self.__dict__, "pending": None, "watched": None}
