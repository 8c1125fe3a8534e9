"""The clock of `fe.auto`: which training steps are looked at, when a look is read, and what follows from it.

    step t      watched: every tensor that a layer casts is described in a row of a table on the device
    step t + 1  the table's copy to the host is started; nobody waits for it
    then        at the first step that finds it arrived: decide, change recipes, write down why

Watched are step 0 and every `interval`-th after.  A step is a forward of the model with gradients; all of this happens
before its first layer runs, so that a step, its recomputed parts too, has one recipe.  Looking changes no number: a run
under a plan repeats the losses of the run that made it, bit for bit.  A graph that torch.compile made of the whole
model does not come by here: it computes in the formats that it was compiled with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fp8engine import device, ranks
from fp8engine.controller.history import History
from fp8engine.controller.log import Change, Plan, SlotChange
from fp8engine.controller.outputs import Outputs, label_of
from fp8engine.controller.saving import choices_from_list, choices_to_list
from fp8engine.cost import speedup
from fp8engine.errors import InvalidRecipe, StateError
from fp8engine.functional.numerics import Numerics
from fp8engine.observe import seen, width
from fp8engine.policy import Choice, Slot, begin, decide, in_16_bits, needs_of, predicted, recipe_of, widen
from fp8engine.prediction import Measured, Prediction
from fp8engine.recipe import Auto, Cast
from fp8engine.scaling import OUTPUT, ROLES, ScalingState

CALLS, ELEMENTS, SATURATED = 0, 1, 3  # rows of the counters
CLOCK = ("interval", "freeze_after", "plan", "objective")


class Controller:
    """Decides for the layers of one scaling state whose recipes are `Auto`; the first one's clock is everybody's.

    layers: their numerics, with those recipes.  shapes: of their weights, [N, K] or [E, N, K].
    log: every change so far.  history: what was seen.  step: the training step under way, -1 before the first.
    plan: decisions to repeat.  Raises InvalidRecipe for recipes that disagree on more than needs.
    """

    def __init__(self, layers: Sequence[Numerics], shapes: Sequence[tuple[int, ...]], plan: Plan | None = None):
        self.layers, self.shapes = list(layers), [tuple(shape) for shape in shapes]
        self.recipes = [_auto(numerics) for numerics in self.layers]
        self.recipe = self.recipes[0]
        self.check(self.recipes)
        self.step = 0 if self.layers[0].alone else -1  # no root tells a layer made by hand of its first step
        self.choices: dict[int, Choice] = {}  # by a layer's place in `layers`; layers of a group share one
        self.log: list[Change] = []
        self.history = History()
        self.pending: tuple | None = None
        self.counts: torch.Tensor | None = None
        self.plan = plan
        self.outputs = Outputs(self.layers, self.recipes)
        if plan is not None:
            for numerics in self.layers:
                numerics.adopt(plan.start)
        self.state.clock = self.begin_step
        self._watch()

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
        """Whether nothing is decided any more, in the run that a plan repeats."""
        recipe = self.recipe if self.plan is None else self.plan.start
        last = recipe.freeze_after if isinstance(recipe, Auto) else None
        return last is not None and self.step >= last

    def follow(self, flow: object) -> None:
        """Who reads each layer's result, before the first step: a Flow, or {layer: kinds of its consumers}.

        Without it every result is stored in 16 bits.
        """
        self.outputs.follow(flow)
        self._watch()

    def begin_step(self) -> None:
        """A training step begins."""
        self.step += 1
        self.state.outputs.widen = not self.frozen
        if self.plan is not None:
            self._repeat(self.plan)
            return
        self._collect()
        self._watch()

    def as_plan(self) -> Plan:
        """The decisions so far, to be repeated."""
        start = self.plan.start if self.plan is not None else replace(self.recipe, plan=None)
        return Plan(self._names(), start, tuple(self.log))

    def state_dict(self) -> str:
        """Where it stands, as JSON."""
        kept = {
            "step": self.step,
            "choices": choices_to_list(self.choices),
            "log": [change.to_dict() for change in self.log],
            "trends": self.history.trends_to_dict(),
            "outputs": self.outputs.state_dict(),
        }
        return json.dumps(kept)

    def load_state_dict(self, text: str) -> None:
        """Go on where `state_dict` was called.  Raises StateError for another controller's, with nothing loaded."""
        try:
            kept = json.loads(text)
            choices = choices_from_list(kept["choices"])
            log = [Change.from_dict(change) for change in kept["log"]]
            step = int(kept["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"not the state of an auto recipe ({type(error).__name__}: {error})") from error
        by_name = {numerics.name: numerics for numerics in self.layers}
        if not set(choices) <= set(range(len(self.layers))) or not {change.layer for change in log} <= set(by_name):
            raise StateError("the state of an auto recipe for another model: its layers are not these")
        self.step, self.choices, self.log, self.pending = step, choices, log, None
        self.history.trends_from_dict(kept["trends"])
        self.outputs.load_state_dict(kept.get("outputs", ()))
        for change in log:
            by_name[change.layer].adopt(change.recipe)
        self.state.samples = None  # the step under way, if any, was watched by another process

    def _names(self) -> dict[str, tuple[int, ...]]:
        return {numerics.name: shape for numerics, shape in zip(self.layers, self.shapes, strict=True)}

    def _repeat(self, plan: Plan) -> None:
        by_name = {numerics.name: numerics for numerics in self.layers}
        for change in plan.changes:
            if change.step == self.step and change.layer in by_name:
                by_name[change.layer].adopt(change.recipe)
                self.log.append(change)

    def _watch(self) -> None:
        """Begin or end watching, by the number of the step that begins."""
        state = self.state
        state.samples = None
        due = max(self.step, 0) % self.recipe.interval == 0 and not self.frozen
        if due and self.plan is None and self.pending is None and state.device.type != "meta":
            rows = (len(ROLES) + self.outputs.any) * len(state.layers)
            state.samples = torch.zeros(rows, width(), dtype=torch.float32, device=state.device)

    def _collect(self) -> None:
        """Start the copy of what the last step left; decide on what has arrived."""
        state = self.state
        if state.samples is not None:
            ranks.agree(state.samples, state.ranks)
            left = [_to_host(table) for table in (state.samples, state.counts_CS, state.rules_3S)]
            self.pending = (self.step - 1, left, _event(state.device))
        if self.pending is not None and (self.pending[-1] is None or self.pending[-1].query()):
            step, left, _ = self.pending
            self.pending = None
            if not self.frozen:
                self._decide(step, self._read(left[0]), left[1])
                self._decide_outputs(step, left)

    def _read(self, samples: torch.Tensor) -> dict[Slot, Measured]:
        """What the rows of this controller's layers say; layers that read one tensor become a group."""
        found: dict[Slot, Measured] = {}
        readers: dict[bytes, int] = {}
        for i, numerics in enumerate(self.layers):
            for j, role in enumerate(ROLES):
                row = samples[len(ROLES) * numerics.layer + j]
                if (measured := seen(row, role)) is None:
                    continue
                found[i, role] = measured
                if role == "input" and i not in self.choices:
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
        for (i, role), measured in found.items():
            choice = self.choices[i]
            format = choice.formats[i, role]
            outcome = predicted(measured, role, choice, format)
            self.history.enter(step, self._name((i, role)), _label(format, choice), measured, outcome)
        needs = {slot: needs_of(self.recipes[slot[0]]) for slot in found}
        for choice in list({id(choice): choice for choice in self.choices.values()}.values()):
            inside = {slot: found[slot] for slot in choice.formats if slot in found and found[slot].amax > 0}
            if choice.changes == 0 and (slow := self._slow(choice, counts)):
                new = in_16_bits(choice, slow)
            else:
                new = decide(inside, needs, choice)
                new = new if new.reasons else widen(new, self._saturated(choice, counts))
            self._adopt(choice, new, inside)
        self.counts = counts

    def _adopt(self, old: Choice, new: Choice, inside: Mapping[Slot, Measured]) -> None:
        for i in sorted({i for i, _ in new.formats}):
            self.choices[i] = new
            reasons = {slot: why for slot, why in (new.reasons or {}).items() if slot[0] == i}
            before, after = (recipe_of(self.recipes[i], choice, i) for choice in (old, new))
            if new.reasons and after != before:
                slots = [self._explain(slot, why, (old, new), inside.get(slot)) for slot, why in reasons.items()]
                self.layers[i].adopt(self.outputs.with_output(i, after))
                self.log.append(Change(self.step, self.layers[i].name, self.layers[i].recipe, tuple(slots)))

    def _decide_outputs(self, step: int, left: list[torch.Tensor]) -> None:
        """What results are stored in, their layers' operands being decided."""
        changed = self.outputs.decide(*left)
        for i, measured in self.outputs.measured.items():
            now = self.outputs.stored[i]
            label, outcome = label_of(now), measured.predict(Cast(now.format), now.margin)
            self.history.enter(step, self._name((i, OUTPUT)), label, measured, outcome)
        for i, (before, after) in changed.items():
            found = self.outputs.measured.get(i)
            self.layers[i].adopt(self.outputs.with_output(i, recipe_of(self.recipes[i], self.choices[i], i)))
            numbers = () if found is None else _rounded(found.predict(Cast(after.format), after.margin))
            slot = SlotChange(self._name((i, OUTPUT)), label_of(before), label_of(after), after.reason, *numbers)
            self.log.append(Change(self.step, self.layers[i].name, self.layers[i].recipe, (slot,)))

    def _explain(self, slot: Slot, why: str, choices: tuple[Choice, Choice], measured: Measured | None) -> SlotChange:
        before, after = (_label(choice.formats[slot], choice) for choice in choices)
        if measured is None:
            return SlotChange(self._name(slot), before, after, why)
        found = predicted(measured, slot[1], choices[1], choices[1].formats[slot])
        return SlotChange(self._name(slot), before, after, why, *_rounded(found))

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
        return f"in FP8 it would take {took / flops:.2f}x its time in 16 bits on this card (by fp8engine/cost.py)"

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
        plan.check({numerics.name: tuple(s) for numerics, s in zip(layers, shapes, strict=True)}, recipe.plan)
    Controller(layers, shapes, plan)


def _auto(numerics: Numerics) -> Auto:
    if not isinstance(numerics.recipe, Auto):
        raise InvalidRecipe(f"{numerics.name}: {numerics.recipe.name} is fixed; want fe.auto(...)")
    return numerics.recipe


def _rounded(found: Prediction) -> tuple[float, float]:
    return round(float(found.sqnr_db), 2), round(float(found.flushed), 6)


def _label(format, choice: Choice) -> str:
    if not format.is_fp8:
        return str(format)
    return f"{format}/{choice.grain}" + (f" margin {choice.margin}" if choice.margin else "")


def _to_host(table: torch.Tensor) -> torch.Tensor:
    """A copy on the host; from a card it is only started."""
    if table.device.type == "cpu":
        return table.clone()
    return torch.empty_like(table, device="cpu", pin_memory=True).copy_(table, non_blocking=True)


def _event(where: torch.device) -> torch.cuda.Event | None:
    """What says that everything up to here has happened on a card."""
    if where.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(where))
    return event
