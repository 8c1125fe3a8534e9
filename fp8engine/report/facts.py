"""Facts of a report: plain data, which its forms read; the row of a layer, the slots in it, and the sums over all."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from fp8engine.auto import Controller
from fp8engine.auto.budget import Spent
from fp8engine.auto.history import Samples, Spread
from fp8engine.auto.log import Plan

ABOVE = 100.0  # amax / rms: a normal distribution has 5 at a million elements; 10,000 elements are needed to exceed it


class Counted(TypedDict):
    """What was counted of a tensor that is cast, or of all of them.

    saturated, underflowed: shares of the elements seen, 0 to 1; sampled: share of the elements that underflowed was
    counted over.  elements, nonfinite, recasts: counts.
    """

    elements: int
    saturated: float
    underflowed: float
    sampled: float
    nonfinite: int
    recasts: int


class Slot(Counted):
    """An operand or a result of a layer; of what is never cast to FP8 only cast and format are there.

    cast: as "E4M3 per row", or "none"; format: "E4M3", "BF16", or "none".  scale: the dequantisation factor of the
    latest cast; amax: of the latest step, of a weight whose FP8 copy was read again that of its values; both None where
    none was recorded, as without gradients.  margin: powers of two.
    """

    cast: str
    format: str
    scale: float | None
    amax: float | None
    calls: int
    margin: int
    cost_millinats: float | None


class InputSlot(Slot):
    """The slot of an input.  ready: calls that took FP8 codes as they came; dequantised: calls that did not, by why."""

    ready: int
    dequantised: dict[str, int]


class OutputSlot(Slot):
    """The slot of a result.  consumers: who reads it, as "name kind"; reason: why it is not stored in FP8."""

    consumers: list[str]
    reason: str


class Layer(TypedDict):
    """A layer.  rows: of its input, all calls together, None where none was counted; experts: [used, all] or None."""

    name: str
    kind: str
    shape: list[int]
    recipe: str
    backend: str
    emulated: bool
    reason: str
    fused: str
    outliers: str
    ran: bool
    rows: int | None
    fp8_share: float
    flops_share: float
    experts: list[int] | None
    kept_bytes: int
    kept_why: str
    gather: str
    divided: str
    input: InputSlot
    weight: Slot
    grad_output: Slot
    output: OutputSlot


class Totals(Counted):
    """Sums over all layers: numbers of layers, of elements and of bytes; shares are 0 to 1.

    gather: what fully_shard's gathers send, in bytes; None where nothing is sharded.
    """

    layers: int
    converted: int
    in_fp8: int
    in_fp8_in_part: int
    in_16_bits: int
    left_alone: int
    never_ran: int
    emulated: int
    fp8_flops_share: float
    cost_millinats: float
    kept_weight_bytes: int
    gather: dict[str, int] | None


@dataclass(frozen=True)
class AutoRun:
    """The samples and decisions of `auto` up to now, copied from its controllers; empty where no layer is under it.

    plans: the decisions, a plan for each scaling state.  samples, spreads: by slot.  repeats: the run repeats a plan,
    so nothing is sampled.  lacks_loss: decisions were made under a budget of loss, and no loss was seen.
    failed: what could not be sampled or decided, and why.  spent: what measuring the budget has found.
    """

    plans: tuple[Plan, ...] = ()
    samples: dict[str, Samples] = field(default_factory=dict)
    spreads: dict[str, Spread] = field(default_factory=dict)
    repeats: bool = False
    lacks_loss: bool = False
    failed: tuple[str, ...] = ()
    spent: Spent | None = None

    @staticmethod
    def of(controllers: Sequence[Controller]) -> AutoRun:
        """What they hold now: later samples and decisions do not enter it."""
        return AutoRun(
            tuple(each.as_plan() for each in controllers),
            {slot: copy.deepcopy(seen) for each in controllers for slot, seen in each.history.samples.items() if seen},
            {slot: spread for each in controllers for slot, spread in each.history.spreads.items()},
            any(each.plan is not None for each in controllers),
            any(each.recipe.budget is not None and each.loss is None and each.log for each in controllers),
            tuple(told for each in controllers for told in each.failures.told.values()),
            next((each.spent for each in controllers if each.spent is not None), None),
        )


@dataclass(frozen=True)
class Facts:
    """What each linear layer ran, and the sums.

    layers: one dict each: name, kind, shape, recipe, backend, emulated, reason, fused, and a dict for each of input,
    weight, grad_output and output.  totals: fp8_flops_share, layers = in_fp8 (of which in_fp8_in_part have matmuls in
    16 bits) + in_16_bits + never_ran + left_alone, ...  Shares are of elements.  Their types: report/facts.py.
    decisions: changes of format, oldest first (a fixed recipe makes none).  auto: the samples behind them, and plans.
    alarms: early warnings, oldest first: step, slot, ratio (amax/rms), growth over the last `steps` steps.
    attention: one dict for each attention whose format was asked for or is fe.Attention's: name, asked, ran and why.
    outliers: slots with standing outliers, the largest first: step, slot, ratio (amax/rms), cast, sqnr_db, remedy.
    It is plain data: it keeps nothing of the model alive, and does not change while training goes on.
    """

    layers: list[Layer]
    totals: Totals
    decisions: list[dict] = field(default_factory=list)
    auto: AutoRun = field(default_factory=AutoRun, repr=False)
    alarms: list[dict] = field(default_factory=list)
    attention: tuple[dict, ...] = ()
    outliers: list[dict] = field(default_factory=list)


def standing(controllers: Iterable[Controller]) -> list[dict]:
    """Standing outliers: slots with an element far above the others, whether it is growing (auto/alarm.py) or not.

    They are those whose amax / rms is above ABOVE at their latest sample, the largest first, in types that JSON knows.
    step: of that sample.  ratio: amax / rms.  cast: as "E4M3/tensor".  sqnr_db: predicted of the cast, None where it
    is not finite (16 bits); a slot need not be harmed, and it says so.  remedy: the call that an alarm would propose,
    "" where none is known.

    >>> from types import SimpleNamespace
    >>> from fp8engine.auto.history import History, Sample, Samples
    >>> history = History()
    >>> for slot, amax in (("up.input", 5.0), ("down.input", 1185.0)):
    ...     history.samples[slot] = Samples([Sample(16, "E4M3/row", amax, 1.0, 3.0, 29.2, 0.0, 0.0, 0)])
    >>> [(each["slot"], each["ratio"], each["sqnr_db"]) for each in standing([SimpleNamespace(history=history)])]
    [('down.input', 1185.0, 29.2)]
    """
    found = []
    for history in (controller.history for controller in controllers):
        for slot, samples in history.samples.items():
            if samples and ABOVE < (last := samples[-1]).crest < math.inf:
                sqnr = last.sqnr_db if math.isfinite(last.sqnr_db) else None
                told = {"step": last.step, "slot": slot, "ratio": last.crest, "cast": last.cast, "sqnr_db": sqnr}
                found.append(told | {"remedy": history.remedies.get(slot, "")})
    return sorted(found, key=lambda each: (-each["ratio"], each["slot"]))
