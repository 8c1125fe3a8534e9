"""Mixed precision in FP16 and BF16 without FP8: autocast, loss scaling, master weights, overflow debugging.

| question | name |
| --- | --- |
| a plain FP32 script in mixed precision, in one line | `decorate` |
| which function runs in which precision | `autocast`, `OpLists`, `keep_lists` (for checkpoints), `op_stats` |
| gradients too small for FP16 | `GradScaler`, `ScaleRules`, `ScaleStats` |
| updates too small for FP16 | `MasterWeights` |
| the layer and op that make NaN or Inf, and a cure | `find_overflow`, `pin_fp32` |
| how much two precisions differ, layer by layer | `compare` |

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
