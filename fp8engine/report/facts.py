"""Facts of a report: plain data, which its forms read."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8engine.report.auto_run import AutoRun
from fp8engine.report.rows import Layer, Totals


@dataclass(frozen=True)
class Facts:
    """What each linear layer ran, and the sums.

    layers: one dict each: name, kind, shape, recipe, backend, emulated, reason, fused, and a dict for each of input,
    weight, grad_output and output.  totals: fp8_flops_share, layers = in_fp8 (of which in_fp8_in_part have matmuls in
    16 bits) + in_16_bits + never_ran + left_alone, ...  Shares are of elements.  Their types: report/rows.py.
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
