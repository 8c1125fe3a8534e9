"""Knowledge of a controller: its layers and recipes, what it has decided, and the statistics that it waits for.

Its state is JSON and tensors, so that a resumed run decides as the uninterrupted one would have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from fp8engine import _numpy as numpy
from fp8engine.auto import budget
from fp8engine.auto.alarm import Alarm
from fp8engine.auto.between import Between
from fp8engine.auto.failures import Failures
from fp8engine.auto.history import History, trends_from_dict
from fp8engine.auto.host_copy import PendingSample
from fp8engine.auto.log import Change, Plan
from fp8engine.auto.outputs import Outputs
from fp8engine.auto.schedule import Moves
from fp8engine.autograd.numerics import Numerics
from fp8engine.errors import StateError
from fp8engine.files import HostCopy
from fp8engine.numerics.formats import Format
from fp8engine.numerics.recipe import Auto, Recipe
from fp8engine.ops.reference.operand import COUNTERS
from fp8engine.scaling.choice import Casts, Choice, SlotKey, recipe_of
from fp8engine.scaling.histogram import LENGTH
from fp8engine.scaling.reads import READS, SHAPE, Reads
from fp8engine.scaling.sample import StepSamples, Tables
from fp8engine.scaling.table import ROLES, SLOTS, ScalingState

# Attributes that the JSON text holds as they are: of a controller, of a choice.
PLAIN = ("step", "tentative", "calibrated", "loss", "spent")
OF_CHOICE = ("layers", "margin", "changes", "spent")
PENDING = ("slots", "reads", "loss", "pending_counts", "pending_amax", "pending_rules")  # as `host_copy.Copied`
TABLES = (*PENDING, "counts", "remembered", "moves", "parts", "watched", "evaluated")


class Known:
    """What a controller of `fe.auto` knows, and how its slots are named.

    layers: numerics, shape of the weight, [N, K] or [E, N, K], and recipe of each; kept as three lists.
    flops: of each layer's matmul for one row, without the factor 2.
    log: every change so far.  history: the samples.  failures: what could not be sampled or decided.
    step: the training step under way, -1 before the first.
    plan: decisions to repeat.  choices: by a layer's place in `layers`; layers that are decided together share one.
    reads: what is remembered of each layer's casts.  loss: the latest that was seen, in nats; None for none.
    spent: what measuring the budget has found; None where nobody has measured it.
    """

    def __init__(self, layers: Sequence[tuple[Numerics, tuple[int, ...], Auto]], plan: Plan | None = None):
        self.layers, self.shapes, self.recipes = map(list, zip(*layers, strict=True))
        self.by_layer = {numerics.layer: i for i, numerics in enumerate(self.layers)}
        self.by_name = {numerics.name: numerics for numerics in self.layers}
        self.recipe = self.recipes[0]
        self.flops = {i: float(math.prod(shape[-2:])) for i, shape in enumerate(self.shapes)}
        self.step = -1
        self.choices: dict[int, Choice] = {}
        self.reads: dict[int, Reads] = {}
        self.loss: float | None = None
        self.spent: budget.Spent | None = None
        self.log: list[Change] = []
        self.history = History()
        self.failures, self.between = Failures(), Between()
        self.moves = Moves()
        self.watched: PendingSample | None = None  # amaxes that `moves` will be asked about
        self.pending: PendingSample | None = None
        self.counts: torch.Tensor | None = None  # the state's counters at the last sample, less those of evaluations
        self.steps_without_backward = 0  # forwards since the sampled one
        self.tentative = False  # this step began in a forward without gradients: of a checkpoint, or of an evaluation
        self.calibrated = False  # whether decisions made before the first training step stay
        self.compiled_whole = False  # whether this step begins between graphs: scaling/whole_graph.py
        self.plan = plan
        self.outputs = Outputs(self.layers, self.recipes)

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

    def cost(self, numerics: Numerics, role: str) -> float | None:
        """Predicted cost in nats of a layer's cast of its "input" or "weight" for the forward; None where not known."""
        layer = self.by_layer.get(numerics.layer, -1)
        seen, choice = self.reads.get(layer), self.choices.get(layer)
        if seen is None or choice is None or role not in ("input", "weight"):
            return None
        known = seen.knows_cost(READS.index((role, "forward")))
        return budget.cost_of(seen, choice.used.get((layer, "forward")), role) if known else None

    @property
    def allowed(self) -> float | None:
        """Nats that all forward casts may be predicted to cost; None without a budget, or a loss."""
        if self.recipe.budget is None or self.loss is None:
            return None
        return self.loss * (self.recipe.budget if self.spent is None else self.spent.rate)

    def groups(self) -> list[Choice]:
        """The choice of each group once."""
        return list({id(choice): choice for choice in self.choices.values()}.values())

    def recipe_under(self, choice: Choice, i: int) -> Recipe:
        """A layer's recipe under a choice, with the storage of its result."""
        return self.outputs.with_output(i, recipe_of(self.recipes[i], choice, i))

    def sizes(self) -> dict[int, tuple[int, int, int] | None]:
        """M, N, K of each layer's latest matmul, by its index in the state."""
        return {numerics.layer: numerics.sizes for numerics in self.layers}

    def amaxes(self, amax_S: torch.Tensor) -> numpy.ndarray:
        """The amaxes of the operands of each layer of the state, [layers, 3]."""
        return amax_S.view(-1, len(SLOTS))[:, : len(ROLES)].double().numpy()

    def begin_sampling(self, only: Collection[int] | None = None) -> None:
        """Give the step that begins a table for the statistics of layers, by their index in the state; None: of all."""
        self.state.sample(self._samples(only))

    def _samples(self, only: Collection[int] | None) -> StepSamples:
        shapes = {layer: self.shapes[i] for layer, i in self.by_layer.items() if only is None or layer in only}
        return StepSamples(len(self.state.layers), shapes, self.state.device)

    def state_dict(self) -> dict[str, Any]:
        """Its decisions as JSON, and as tensors what it remembers and what it has not decided on yet."""
        state, pending, samples = self.state, self.pending, self.state.samples
        decided = {key: getattr(self, key) for key in PLAIN} | {
            "late": self.steps_without_backward,
            "pending": None if pending is None else pending.step,
            "begun": state.begun,
            "decides_next": state.decides_next,
            "between": self.between.kept(state),
            "choices": choices_to_list(self.groups()),
            "log": [change.to_dict() for change in self.log],
            "trends": self.history.trends_to_dict(),
            "alarms": self.history.alarms,
            "told": self.history.told,
            **self.outputs.state_dict(),
            "remembered": [[i, seen.count] for i, seen in self.reads.items()],
            "tries": [self.moves.number, list(self.moves.tries.items())],
        }
        tables = {"moves": torch.from_numpy(self.moves.ranges), "evaluated": state.evals_CS}
        if self.counts is not None:
            tables["counts"] = self.counts
        if self.reads:
            tables["remembered"] = torch.stack([torch.from_numpy(seen.table) for seen in self.reads.values()])
        if self.watched is not None:
            tables["watched"] = self.watched.copy.wait()[0]
        if pending is not None:
            tables |= zip(PENDING, pending.copy.wait(), strict=True)
        elif samples is not None and (samples.tables is not None or state.backward_seen):
            tables |= zip(PENDING[:3], samples.finish(self.sizes(), state.backward_seen), strict=True)
        elif samples is not None:  # its backward, or another forward, is still to come
            decided["sampled"] = list(samples.layouts)
            tables |= {"slots": samples.slots_SL, "parts": samples.flat, "loss": samples.loss_1}
        kept = {key: tables.get(key, torch.empty(0)).detach().cpu().clone() for key in TABLES}
        return {"decided": json.dumps(decided), **kept}

    def loading(self, found: Mapping[str, Any]) -> Callable[[], None]:
        """The inverse of `state_dict`: what loads it.  Raises StateError for another controller's state, or none."""
        state = self.state
        try:
            decided = json.loads(found["decided"])
            samples = self._samples(decided["sampled"]) if "sampled" in decided else None
            tables = self._tables(found, decided, samples)
            new: dict[str, Any] = {key: decided[key] for key in PLAIN} | {"steps_without_backward": decided["late"]}
            new["spent"] = None if new["spent"] is None else budget.Spent(*new["spent"])
            new |= {"choices": choices_from_list(decided["choices"]), "pending": None, "watched": None}
            new["log"] = [Change.from_dict(change) for change in decided["log"]]
            new["moves"] = Moves(tables["moves"].numpy().copy().reshape(3, -1, 3), *decided["tries"])
            new["counts"] = tables["counts"] if len(tables["counts"]) else None
            remembered = zip(decided["remembered"], tables["remembered"], strict=True)
            new["reads"] = {i: Reads(table.numpy().copy(), count) for (i, count), table in remembered}
            if len(tables["watched"]):
                new["watched"] = PendingSample(new["step"], HostCopy([tables["watched"]]))
            if decided["pending"] is not None:
                new["pending"] = PendingSample(decided["pending"], HostCopy(tables[key] for key in PENDING))
            elif samples is None and len(tables["slots"]):
                finished = Tables(*(tables[key].to(state.device, copy=True) for key in PENDING[:3]))
                samples = StepSamples.finished(finished)
            alarms = [Alarm(*alarm) for alarm in decided.get("alarms", ())]  # older states have none
            history = {"trends": trends_from_dict(decided["trends"]), "alarms": alarms}
            history["told"] = decided.get("told", len(alarms))
            begun, decides_next, (same, waited) = (decided[key] for key in ("begun", "decides_next", "between"))
            new["outputs"] = Outputs(self.layers, self.recipes)
            new["outputs"].load_state_dict(decided)
            ready = [dict(each) for each in decided["taken"]["ready"]]
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise StateError(f"not the state of an auto recipe ({type(error).__name__}: {error})") from error
        unknown = {change.layer for change in new["log"]} - self.by_name.keys()
        if unknown or set(new["choices"]) - set(range(len(self.layers))):
            raise StateError("the state of an auto recipe for another model: its layers are not these")

        def load() -> None:
            vars(self).update(new)
            vars(self.history).update(history)
            for numerics, recipe in zip(self.layers, self.recipes, strict=True):
                numerics.adopt(recipe if self.plan is None else self.plan.start)
            for numerics, taken in zip(self.layers, ready, strict=False):
                numerics.ready = taken
            for change in self.log:
                self.by_name[change.layer].adopt(change.recipe)
            self.between.load(same, waited)
            state.outputs.widen = not self.frozen
            state.begun, state.decides_next = begun, decides_next
            state.evals_CS.zero_()
            if len(evaluated := tables["evaluated"]):
                state.evals_CS.copy_(evaluated[: len(COUNTERS)])
            state.sample(samples)

        return load

    def _tables(self, found: Mapping, decided: Mapping, samples: StepSamples | None) -> dict[str, torch.Tensor]:
        """The tables of a state; `samples`, of a step whose backward is to come, take theirs.

        Raises StateError for what is no table, or too small.
        """
        columns = len(self.state.columns)
        shapes = {
            "slots": (columns, LENGTH),
            "reads": (len(self.state.layers), *SHAPE),
            "loss": (1,),
            "pending_counts": (len(COUNTERS), columns),
            "pending_amax": (columns,),
            "pending_rules": (3, columns),
            "counts": (len(COUNTERS), columns),
            "remembered": (len(decided["remembered"]), *SHAPE),
            "moves": (3, 0, 3),
            "parts": (0,),
            "watched": (columns,),
            "evaluated": (len(COUNTERS), columns),
        }
        needed = PENDING if decided["pending"] is not None else PENDING[:3] if len(found["slots"]) else ()
        tables = {key: found[key] for key in TABLES[:-1]}
        tables["evaluated"] = found.get("evaluated", torch.empty(0))  # older states have none
        for key, table in tables.items():
            least = shapes[key]
            if table.shape == (0,) and (samples is not None or key not in needed):
                continue
            if table.dim() != len(least) or any(has < wants for has, wants in zip(table.shape, least, strict=True)):
                raise StateError(f"{key} has the shape {list(table.shape)}, and not {list(least)} or more")
        if samples is not None:
            for mine, key in ((samples.slots_SL, "slots"), (samples.flat, "parts"), (samples.loss_1, "loss")):
                mine.copy_(tables[key].view(mine.shape))
        return tables

    def _slot(self, row: int) -> SlotKey:
        """The slot that a row of the samples describes."""
        layer, place = divmod(row, len(SLOTS))
        return self.by_layer[layer], SLOTS[place]

    def _name(self, slot: SlotKey) -> str:
        return f"{self.layers[slot[0]].name}.{slot[1]}"

    def __getstate__(self) -> dict:
        # A copy to the host that is under way belongs to this process.
        return {**self.__dict__, "pending": None, "watched": None}


def choices_to_list(groups: Iterable[Choice]) -> list[dict]:
    """The choice of each group, in types that JSON knows; the log has the reasons."""
    return [
        {key: getattr(choice, key) for key in OF_CHOICE}
        | {"fades": choice.fades_db, "cheaper": [[*key, count] for key, count in choice.cheaper.items()]}
        | {"matmuls": _casts_to_list(choice.matmuls), "paid": _casts_to_list(choice.paid)}
        for choice in groups
    ]


def choices_from_list(found: Iterable[Mapping]) -> dict[int, Choice]:
    """The inverse of `choices_to_list`, by layer.

    >>> from fp8engine.scaling.choice import begin
    >>> from fp8engine.numerics.recipe import auto
    >>> choices = {0: begin([0], auto())}
    >>> choices_from_list(choices_to_list([choices[0]])) == choices
    True
    """
    choices = {}
    for group in found:
        parts: dict[str, Any] = {key: group[key] for key in OF_CHOICE} | {"layers": tuple(group["layers"])}
        parts |= {key: _casts_from_list(group[key]) for key in ("matmuls", "paid")}
        cheaper = {(layer, matmul): count for layer, matmul, count in group["cheaper"]}
        choice = Choice(**parts, fades_db=group["fades"], cheaper=cheaper)
        choices |= dict.fromkeys(choice.layers, choice)
    return choices


def _casts_to_list(casts: Mapping[tuple[int, str], Casts | None]) -> list[list]:
    """[layer, matmul] of one in 16 bits, [layer, matmul, granularity, first, second] of the others."""
    return [[*key, *map(str, found or ())] for key, found in casts.items()]


def _casts_from_list(found: Iterable[Sequence]) -> dict[tuple[int, str], Casts | None]:
    return {
        (layer, matmul): Casts(rest[0], *map(Format.named, rest[1:])) if rest else None
        for layer, matmul, *rest in found
    }
