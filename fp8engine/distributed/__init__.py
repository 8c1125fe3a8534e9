"""Training on several processes: weights, rows of experts and gradients sent in FP8; layers divided over ranks.

What needs DTensor is imported when it is first asked for: that takes torch a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fp8engine.distributed.amax import reduce_amax
from fp8engine.distributed.checkpoint import has_checkpoint, load, save
from fp8engine.distributed.fsdp import fsdp, gather_fp8
from fp8engine.distributed.gradients import fp8_gradient_hook, fp8_gradients

if TYPE_CHECKING:
    from fp8engine.distributed.decoders import decoder_plan
    from fp8engine.distributed.experts import ExpertParallel
    from fp8engine.distributed.parallelize import tensor_parallel
    from fp8engine.distributed.planner import Plan, plan
    from fp8engine.distributed.styles import Colwise, Rowwise

__all__ = [
    "Colwise",
    "ExpertParallel",
    "Plan",
    "Rowwise",
    "decoder_plan",
    "fp8_gradient_hook",
    "fp8_gradients",
    "fsdp",
    "gather_fp8",
    "has_checkpoint",
    "load",
    "plan",
    "reduce_amax",
    "save",
    "tensor_parallel",
]

LATER = {
    "Colwise": "styles",
    "ExpertParallel": "experts",
    "Plan": "planner",
    "Rowwise": "styles",
    "decoder_plan": "decoders",
    "plan": "planner",
    "tensor_parallel": "parallelize",
}


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{LATER[name]}"), name)
    globals()[name] = found
    return found
