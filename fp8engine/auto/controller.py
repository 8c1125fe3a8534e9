"""Controller of `fe.auto`: samples training steps, decides on what they show, and changes the layers' recipes.

    step t      sampled: rows of every operand that a layer casts are kept on the device
    step t + 1  the casts are tried on them, and the copy of the results to the host is started, asynchronously
    later       at the first step that finds the copy complete: decide, change recipes, log the reasons

Sampled are step 0, one pseudo-random step of each later interval, and a layer whose amaxes move early (schedule.py).
A step is a forward of the model with gradients; decisions are made before its first layer runs, so that a step, with
the parts of it that are recomputed, has one recipe.  Sampling changes no number: a run under a plan repeats the losses
of the run that made it, bit for bit.

Without gradients, before any training, the first forward is sampled and decides the forward's casts before the second;
a training step that comes after it begins anew.  Of replicas one may evaluate alone: they decide nothing then.
`calibrate` decides at conversion, and its decisions stay.

A step whose backward comes only after another forward (a pipeline, a GAN) is sampled until it has come, for four
forwards at most: of a model whose result has no gradient it never comes.  Several ranks decide on the first rank's
statistics at step t + 2: if each waited for its own copy, they would change recipes at different steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from fp8engine._torch import divided_parameter, runs_again
from fp8engine.auto import budget
from fp8engine.auto.failures import some
from fp8engine.auto.host_copy import PendingSample, several_ranks, start_copy
from fp8engine.auto.known import Known
from fp8engine.auto.log import Change, Plan, SlotChange
from fp8engine.auto.outputs import Outputs
from fp8engine.auto.policy import decide, needs_of, reasons, widen
from fp8engine.auto.reading import outcome_of, paid_for, read, remember, saturated, slot_change, slower_in_fp8
from fp8engine.auto.schedule import is_sampled, looks
from fp8engine.autograd.numerics import Numerics
from fp8engine.errors import StrictError
from fp8engine.numerics.recipe import ROLES, Auto, Cast
from fp8engine.scaling.choice import Choice, SlotKey, in_16_bits, label
from fp8engine.scaling.prediction import Measured
from fp8engine.scaling.sample import outside_of_autocast
from fp8engine.scaling.table import OUTPUT
from fp8engine.scaling.whole_graph import most_decisions

MOST_WITHOUT_BACKWARD = 4  # forwards for which a sampled step waits for its backward
OUT_OF_GRAPHS = (
    "each decision takes two more graphs of a model that is compiled as a whole; raise "
    "torch._dynamo.config.recompile_limit, of which decisions take half, to let them go on"
)
UNUSUAL = 32.0  # amax over rms: a normal distribution has 5, at a million elements


class Controller(Known):
    """Decides for the layers of one scaling state whose recipes are `Auto`, at the interval of the first one."""

    def __init__(self, layers: Sequence[tuple[Numerics, tuple[int, ...], Auto]], plan: Plan | None = None):
        super().__init__(layers, plan)
        if plan is not None:
            for numerics in self.layers:
                numerics.adopt(plan.start)
        self.state.controller, self.state.on_step = self, self.begin_step

    def follow(self, flow: object) -> None:
        """Take the consumers of each layer's result, before the first step: a Flow, or {layer: kinds of its consumers}.

        Without them every result is stored in 16 bits.
        """
        self.outputs.follow(flow)
        self._begin_sampling()

    def begin_step(self, backward: bool) -> None:
        """A training step begins.  backward: whether a backward pass came since the last one began."""
        gradients = torch.is_grad_enabled() or runs_again()
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
            self.state.samples.calls.clear()  # this forward's take the place of the last one's
        else:
            self._collect(backward=True, may=not self.undecided or self.between.opens(self.state, backward))
            self._begin_sampling(self._moved())
        # Of a model that has not trained, the next forward without gradients ends the sample.
        self.state.decides_next = self.tentative and self.step == 0 and self.state.samples is not None

    def see_loss(self, loss: torch.Tensor) -> None:
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

    def _after_evaluation(self, gradients: bool) -> None:
        """A forward without gradients came before any training step, and now another forward begins."""
        if not gradients:
            if self.state.decides_next:
                self.state.decides_next = False
                if self._may_be_alone():
                    self.state.sample(None)
                else:
                    self._collect(backward=False, wait=True)  # no later forward looks again
            return
        self.tentative, awaited = False, self.state.decides_next
        self.state.decides_next = False
        if self.step > 0:  # of a training whose blocks are recomputed: the step had begun with an evaluation's forward
            return
        self.counts = None
        if not self.calibrated and self.choices:  # training decides for itself
            self.choices, self.reads, self.log, self.history = {}, {}, [], self.history.emptied()
            self.outputs = Outputs(self.layers, self.recipes)
            for numerics, recipe in zip(self.layers, self.recipes, strict=True):
                numerics.adopt(recipe)
        if self.plan is None and (awaited or self.state.samples is None):
            self.pending = None
            self._begin_sampling()

    def _may_be_alone(self) -> bool:
        """Whether a forward may be one of this rank only, though others decide with it: each holds the whole model."""
        model = None if self.state.root is None else self.state.root()
        whole = model is None or not any(map(divided_parameter, model.modules()))
        return whole and several_ranks(self.state)

    def _repeat(self, plan: Plan) -> None:
        if self.state.must_wait:
            return
        mine = [change for change in plan.changes if change.layer in self.by_name]
        due = [change for change in mine[len(self.log) :] if change.step <= self.step]
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
            if self.compiled_whole and len({change.step for change in self.log if change.step}) >= most_decisions():
                self.failures.tell(f"from step {self.step} on formats stay", OUT_OF_GRAPHS)
            else:
                self.begin_sampling(None if whole else early)

    def _moved(self) -> set[int]:
        """Layers whose amaxes have moved far since they were sampled, with their groups."""
        if self.plan is not None or self.frozen or self.pending is not None:
            return set()
        found, number = set(), max(self.step, 0) // self.recipe.interval
        amax_S = self.state.step_amax_S
        if self.watched is None and amax_S is not None and looks(self.step, several_ranks(self.state)):
            self.watched = start_copy(self.step - 1, self.state, [amax_S])
        if self.watched is not None and self.watched.arrived(self.step):
            moved = self.moves.moved(self.amaxes(self.watched.copy.tensors[0]), number)
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
        if state.samples is not None:
            failed = dict(sorted(state.samples.failed.items()))
            for why in set(failed.values()):
                names = [self._name(self._slot(row)) for row in failed if failed[row] == why]
                self.failures.tell(f"step {self.step - 1}: {some(names)} could not be sampled", why)
            amax_S = state.live_2S[0].clone() if state.step_amax_S is None else state.step_amax_S
            counts_CS = state.counts_CS.clone()
            if backward:  # an evaluation between two steps decides nothing
                counts_CS -= state.evals_CS
            tables = [*state.samples.finish(self.sizes(), backward), counts_CS, amax_S]
            self.pending = start_copy(max(self.step - 1, 0), state, tables, alike=[state.rules_3S])
            state.sample(None)
        if self.pending is not None and may and (wait or self.pending.arrived(self.step)):
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
        before = self.groups()
        after = []
        for choice in before:
            needs = {i: needs_of(self.recipes[i], loss=self.loss or 0.0) for i in choice.layers}
            if choice.changes == 0 and (slow := slower_in_fp8(self, choice, counts)):
                after.append(in_16_bits(choice, slow))
                continue
            seen = {i: self.reads[i] for i in choice.layers if i in usable}
            new = decide(seen, needs, choice) if seen else replace(choice, reasons=None)
            after.append(new if new.reasons else widen(new, saturated(self, choice, counts)))
        allowed = self.allowed
        paid = after if allowed is None else budget.spend(after, self.reads, self.flops, allowed)
        for old, new, final in zip(before, after, paid, strict=True):
            if final is not new:
                final = replace(final, reasons={**reasons(final, new, paid_for(self, final)), **(new.reasons or {})})
            self._adopt(old, final, found)
        self.counts = counts
        sampled = {self.layers[i].layer for i, _ in found}
        whole = is_sampled(sample.step, self.recipe.interval)
        self.moves.sampled(sampled, self.amaxes(sample.tables.amax_S), whole)

    def settle(self, choices: Sequence[Choice], why: str) -> None:
        """Adopt the choices of all groups before the next step begins, for that reason."""
        self.step += 1
        for old, new in zip(self.groups(), choices, strict=True):
            slots = [(i, role) for i in new.layers for role in ROLES]
            changed = {slot: why for slot in slots if label(slot, old) != label(slot, new)}
            self._adopt(old, replace(new, reasons=changed), {})
        self.step -= 1

    def _adopt(self, old: Choice, new: Choice, found: Mapping[SlotKey, Measured]) -> None:
        """Give a group's layers the recipes of its new choice, and log the reasons."""
        for i in new.layers:
            self.choices[i] = new
            if not new.reasons or self.recipe_under(new, i) == self.recipe_under(old, i):
                continue
            slots = []
            for slot, why in new.reasons.items():
                if slot[0] == i:
                    measured = found.get(slot)
                    outcome = None if measured is None else outcome_of(self.reads.get(i), slot, new, measured)
                    if measured is not None and measured.crest >= UNUSUAL:
                        why = f"{why} (amax {measured.crest:.0f}x rms)"
                    slots.append(slot_change(self._name(slot), (label(slot, old), label(slot, new)), why, outcome))
            self._change(i, slots)

    def _decide_outputs(self, sample: PendingSample) -> None:
        """Decide on the storage of the layers' results, once their operands' casts are decided."""
        outputs = self.outputs
        changed, found = outputs.decide(sample.tables)
        for i, measured in found.items():
            now = outputs.stored[i]
            outcome = measured.predict(Cast(now.format), now.margin)
            self.history.enter(sample.step, self._name((i, OUTPUT)), now.label, measured, outcome)
        for i, (before, after) in changed.items():
            outcome = found[i].predict(Cast(after.format), after.margin) if i in found else None
            slot = slot_change(self._name((i, OUTPUT)), (before.label, after.label), after.reason, outcome)
            self._change(i, [slot])

    def _change(self, i: int, slots: Sequence[SlotChange]) -> None:
        numerics = self.layers[i]
        numerics.adopt(self.recipe_under(self.choices[i], i))
        self.log.append(Change(self.step, numerics.name, numerics.recipe, tuple(slots)))
