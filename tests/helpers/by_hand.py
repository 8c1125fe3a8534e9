"""FP8 casts and matmuls written out by hand, from docs/numerics.md alone: the oracle of tests/nightly.

Nothing here calls the engine.  torch's own conversion to FP8 rounds (to nearest even; tests/ops compares all values);
saturation and predicted scales are this file's, scales and groups those of casts.py, and matmuls are in float64.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy
import torch
from casts import MAX, ROUNDING, factor, groups

from fp8engine.numerics.cast import Cast

FITS = 1 + 2.0**-22  # an amax over MAX by less is the rounding of the scale itself
TINY = 2.0**-122  # BF16 products of a CPU take numbers near 2^-126 for 0: seen up to 7 times as large in a sum of 9


@dataclass
class Window:
    """The amaxes of one operand's last steps.

    live: the largest of the step that is under way; 0: none yet.  ran: whether the step has cast it.
    rule: cast and margin.  new: whether they changed, and no step that cast it has ended since: nothing is predicted.
    """

    steps: deque[float] = field(default_factory=deque)
    live: float = 0.0
    ran: bool = False
    rule: tuple[Cast, int] | None = None
    new: bool = False

    def follow(self, cast: Cast, margin: int) -> None:
        """The layer's recipe has this cast and margin now."""
        self.new |= self.rule not in (None, (cast, margin))
        self.rule = cast, margin

    def see(self, amax: float) -> None:
        """A training forward or a backward has cast the operand."""
        self.live, self.ran = max(self.live, amax), True

    def turn(self, history: int) -> None:
        """A step begins: the last one's amax enters; of a slot that did not run, nothing."""
        if self.ran:
            self.steps.append(self.live)
        while len(self.steps) > history:
            self.steps.popleft()
        self.live, self.ran, self.new = 0.0, False, self.new and not self.ran

    def predicted(self, largest: float, margin: int) -> float:
        """The factor s for values up to `largest` representable; 0 where no step has an amax."""
        amax = 0.0 if self.new else max(self.steps, default=0.0)
        return float(factor(amax, largest)) * 2.0**-margin if amax > 0 else 0.0


def restored(x: torch.Tensor, cast: Cast, window: Window | None = None, margin: int = 0) -> torch.Tensor:
    """What a matmul reads of a matrix x under a cast: float64 values q * scale.

    window: of an operand whose scale is predicted.
    """
    if not cast.is_fp8:
        return (x if x.dtype.itemsize == 2 else x.to(cast.dtype)).double()
    result = torch.empty(x.shape, dtype=torch.float64)
    for place in groups(x.shape, cast):
        part = x[place].float()
        finite = part[torch.isfinite(part)].abs()
        amax = float(finite.amax()) if finite.numel() else 0.0
        s = 0.0
        if cast.delayed and window is not None:
            s = window.predicted(MAX[cast.dtype], margin)
        # In FP32, as every backend compares.
        if s == 0.0 or numpy.float32(amax) * numpy.float32(s) > numpy.float32(MAX[cast.dtype] * FITS):
            s = float(factor(amax, MAX[cast.dtype], cast.power_of_2))
        scaled = (part * s).clamp(-MAX[cast.dtype], MAX[cast.dtype])
        scaled = torch.where(torch.isfinite(part), scaled, torch.nan)  # a non-finite number stays one
        scale = float(numpy.float32(1.0) / numpy.float32(s))
        result[place] = scaled.to(cast.dtype).double() * scale
    return result


def differs(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias=None, rounds: tuple = ()) -> float:
    """The largest |found - (a @ b^T + bias)| over its bound; above 1, or NaN, the matmul is wrong.

    a, b: float64, as `restored` gives them.  rounds: the dtypes to which the result was rounded on its way.
    The bound: K sums in FP32, of which each and each scale's product round by 2^-24 of the sum of magnitudes, and one
    rounding of the result for each dtype of `rounds`.
    """
    k, exact, sizes = a.shape[1], a @ b.t(), a.abs() @ b.abs().t()
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    usable = (
        torch.isfinite(exact)
        & (sizes < torch.finfo(torch.float32).max / 2)
        & (exact.abs() + sizes * k * 2.0**-24 < 0.99 * torch.finfo(rounds[-1]).max)
    )
    bound = (k + 10) * 2.0**-24 * sizes + 1.01 * sum(ROUNDING[dtype] for dtype in rounds) * exact.abs()
    bound = bound + TINY * (1 + a.abs().sum(1)[:, None] + b.abs().sum(1))
    if torch.float16 in rounds:
        bound = bound + 2.0**-25  # half of FP16's smallest number
    return float(((found.double() - exact).abs() / bound)[usable].max()) if usable.any() else 0.0
