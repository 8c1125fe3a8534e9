"""The FP16 baseline, which knows nothing of FP8: autocast with lists of its own, loss scaling, master weights, and a
debugger that names the layer that overflowed.

| question | name |
| --- | --- |
| one line for a plain script | `decorate` |
| which function runs in which precision | `autocast`, `OpLists`, `keep_lists` (for checkpoints), `op_stats` |
| gradients too small for FP16 | `GradScaler`, `ScaleRules`, `ScaleStats` |
| updates too small for FP16 | `MasterWeights` |
| NaN, Inf: who did it | `find_overflow`, `pin_fp32` |
| how far apart two precisions are, layer by layer | `compare` |

Sources: Micikevicius et al. 2017 (arXiv 1710.03740), mixed precision training; torch.amp; Paddle's paddle.amp.
"""

from fp8engine.amp.autocast import autocast, keep_lists
from fp8engine.amp.compare import Comparison, compare
from fp8engine.amp.decorate import decorate
from fp8engine.amp.lists import OpLists
from fp8engine.amp.master import MasterWeights
from fp8engine.amp.opstats import OpStats, op_stats
from fp8engine.amp.overflow import Finding, OverflowReport, find_overflow
from fp8engine.amp.pin import pin_fp32
from fp8engine.amp.scale_rules import ScaleRules, ScaleStats
from fp8engine.amp.scaled import ScaledOptimizer
from fp8engine.amp.scaler import GradScaler

__all__ = [
    "Comparison",
    "Finding",
    "GradScaler",
    "MasterWeights",
    "OpLists",
    "OpStats",
    "OverflowReport",
    "ScaleRules",
    "ScaleStats",
    "ScaledOptimizer",
    "autocast",
    "compare",
    "decorate",
    "find_overflow",
    "keep_lists",
    "op_stats",
    "pin_fp32",
]
