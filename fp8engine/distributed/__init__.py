"""Training on several processes: amaxes joined over ranks; weights, experts' rows and gradients sent in FP8.

What needs DTensor is imported when it is first asked for: that takes torch a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fp8engine.distributed.amax import reduce_amax
from fp8engine.distributed.fsdp import fsdp
from fp8engine.distributed.gradients import fp8_gradient_hook, fp8_gradients

if TYPE_CHECKING:
    from fp8engine.distributed.experts import ExpertParallel

__all__ = ["ExpertParallel", "fp8_gradient_hook", "fp8_gradients", "fsdp", "reduce_amax"]

LATER = {"ExpertParallel": "experts"}


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{LATER[name]}"), name)
    globals()[name] = found
    return found
