"""The rule by which a loss scale moves, in plain numbers.

    an iteration with Inf or NaN is skipped; the n-th in a row lowers the scale:  S <- max(S·backoff_factor, floor)
    every growth_interval-th finite iteration in a row raises it:                 S <- min(S·growth_factor, ceiling)

n = decrease_every_n.  A finite iteration forgets the bad ones before it and a bad one the finite ones, as in Paddle's
`update_loss_scaling`; n = 1 is torch's rule.  A growth that would leave FP32 is not made (both libraries' rule).  One
thing differs from torch: the scale stops at `floor`, where torch's goes on to 0 and then unscales by 1/0: the next
finite gradients, all 0, become 0·Inf = NaN after they were checked, and are stepped with.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fp8engine import _torch
from fp8engine.errors import LossScaleError

SMALLEST_NORMAL = 2.0**-126  # of FP32; below 2^-128 the reciprocal that unscales the gradients is Inf
TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")  # of a state_dict
KEPT_CHANGES = 1000  # changes of the scale remembered for a report: two million iterations of torch's usual growth


@dataclass(frozen=True)
class ScaleRules:
    """The parameters of a loss scale's rule that torch's scaler does not have.

    decrease_every_n: iterations with Inf or NaN in a row that lower the scale.  floor, ceiling: it stays within.
    collapse_after: how many times in a row the scale is lowered (or would be, at the floor) before `on_collapse` is
    called with the scaler; 0 never.  Without `on_collapse`, a warning.

    Raises LossScaleError for rules that contradict each other.

    >>> ScaleRules(decrease_every_n=2, floor=1.0).floor  # Paddle's: decr_every_n_nan_or_inf=2, never below 1
    1.0
    """

    decrease_every_n: int = 1
    floor: float = SMALLEST_NORMAL
    ceiling: float = math.inf
    collapse_after: int = 10
    on_collapse: Callable[[Any], None] | None = None

    def __post_init__(self):
        LossScaleError.unless(self.on_collapse, Callable | None, "ScaleRules(on_collapse=) takes a function")
        if not isinstance(self.decrease_every_n, int) or self.decrease_every_n < 1 or self.collapse_after < 0:
            raise LossScaleError(
                f"decrease_every_n={self.decrease_every_n}, collapse_after={self.collapse_after}: counts of iterations,"
                " the first at least 1 and the second at least 0"
            )
        if not SMALLEST_NORMAL <= self.floor <= self.ceiling:
            raise LossScaleError(
                f"floor={self.floor}, ceiling={self.ceiling}: a loss scale lies between 2^-126 and FP32's largest,"
                " the floor at or below the ceiling"
            )
        for name in ("floor", "ceiling"):
            object.__setattr__(self, name, fp32(getattr(self, name)))

    def check(self, scale: float, call: str) -> None:
        """Raise LossScaleError, naming the call, for a scale that is not between floor and ceiling."""
        if not self.floor <= scale <= self.ceiling:
            raise LossScaleError(f"{call} is outside the floor and ceiling of {self}")


class Counts(NamedTuple):
    """The state of the rule: the scale, and finite and bad iterations in a row since it last changed."""

    scale: float
    good: int = 0
    bad: int = 0


class Factors(NamedTuple):
    """torch's part of the rule, in the order of its kernel."""

    growth: float
    backoff: float
    interval: int


@dataclass(frozen=True)
class ScaleStats:
    """Counts of a scaler so far.  history: (iteration, scale after it) of the last 1,000 changes, oldest first."""

    iterations: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    falls_in_a_row: int = 0
    history: tuple[tuple[int, float], ...] = ()

    def after(self, found: bool, fell: bool) -> ScaleStats:
        """The counts after one more iteration."""
        return replace(
            self,
            iterations=self.iterations + 1,
            skipped=self.skipped + found,
            skipped_in_a_row=self.skipped_in_a_row + 1 if found else 0,
            falls_in_a_row=self.falls_in_a_row + fell if found else 0,
        )

    def moved(self, scale: float) -> ScaleStats:
        """The counts once the scale is another."""
        return replace(self, history=(*self.history, (self.iterations, scale))[-KEPT_CHANGES:])

    def to_dict(self) -> dict:
        """Plain numbers, for a checkpoint."""
        return {**vars(self), "history": list(self.history)}


def following(now: Counts, found: bool, factors: Factors, rules: ScaleRules) -> tuple[Counts, bool]:
    """The counts after one more iteration, and whether it was one that lowers the scale.

    >>> following(Counts(4.0, good=3), True, Factors(2.0, 0.5, 2000), ScaleRules(decrease_every_n=2))
    (Counts(scale=4.0, good=0, bad=1), False)
    """
    if found:
        if now.bad + 1 < rules.decrease_every_n:
            return Counts(now.scale, 0, now.bad + 1), False
        return Counts(max(fp32(now.scale * factors.backoff), rules.floor)), True
    if now.good + 1 != factors.interval:
        return Counts(now.scale, now.good + 1, 0), False
    raised = fp32(now.scale * factors.growth)
    return Counts(min(raised, rules.ceiling) if math.isfinite(raised) else now.scale), False


def follow_on_device(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], found: torch.Tensor, factors: Factors, rules: ScaleRules
) -> None:
    """`following`, in place on (scale, good, bad), for a flag that the host has not read."""
    scale, good, bad = tensors
    if rules.decrease_every_n == 1:
        _torch.update_loss_scale(scale, good, found.float(), *factors)
        scale.clamp_(rules.floor, rules.ceiling)
        return
    bad.add_(1).mul_(found)
    fell = bad >= rules.decrease_every_n
    waits = found & ~fell  # the kernel takes this for a finite iteration: undone below
    kept = scale.clone()
    _torch.update_loss_scale(scale, good, fell.float(), *factors)
    scale.clamp_(rules.floor, rules.ceiling)
    scale.copy_(torch.where(waits, kept, scale))
    good.mul_(~waits)
    bad.mul_(~fell)


def fp32(value: float) -> float:
    """Rounded to the nearest FP32, as torch's kernel rounds the double product; Inf beyond the largest."""
    return ctypes.c_float(value).value


def check(scale: float, growth: float = 2.0, backoff: float = 0.5, interval: int = 1) -> None:
    """Raise LossScaleError unless these can scale a loss."""
    if not (math.isfinite(fp32(scale)) and fp32(scale) > 0):
        raise LossScaleError(
            f"a loss scale of {scale}: it must be finite and above 0 in FP32; 65536 is the usual start"
        )
    if not (1 < growth < math.inf and 0 < backoff < 1 and isinstance(interval, int) and interval >= 1):
        raise LossScaleError(
            f"growth_factor={growth}, backoff_factor={backoff}, growth_interval={interval}: the scale grows by more"
            " than 1 after a whole number of iterations, at least 1, and falls by less than 1 but more than 0"
        )


def first_fp16(optimizer: torch.optim.Optimizer) -> str:
    """The first parameter with an FP16 gradient, as a user would find it."""
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"parameter {i} of group {g}" for i in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            if p.grad is not None and p.grad.dtype == torch.float16:
                return f"{name} {tuple(p.shape)}"
    return f"{type(optimizer).__name__}"


def numbers_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """torch's five entries of a scaler's state_dict, checked; LossScaleError if they are no scaler's."""
    missing = [name for name in TORCH_KEYS if name not in state_dict]
    if missing:
        raise LossScaleError(f"this is no GradScaler's state_dict: {', '.join(missing)} missing; nothing was loaded")
    scale, growth, backoff = (float(state_dict[name]) for name in TORCH_KEYS[:3])
    interval, good = (int(state_dict[name]) for name in TORCH_KEYS[3:])
    try:
        check(scale, growth, backoff, interval)
    except LossScaleError as wrong:
        raise LossScaleError(f"the loaded state_dict holds {wrong}; nothing was loaded") from None
    if good < 0:
        raise LossScaleError(f"the loaded state_dict counts {good} finite iterations; nothing was loaded")
    return dict(zip(TORCH_KEYS, (fp32(scale), growth, backoff, interval, good), strict=True))
