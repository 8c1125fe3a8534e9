"""fe.hf, the public names for Hugging Face's models and their FP8 checkpoints.

`describe` is in convert/recognised.py, checkpoints in export/.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fp8engine.convert.recognised import Description, describe
from fp8engine.export import ExportReport, export, iter_fp8, load

if TYPE_CHECKING:
    from fp8engine.export import Fp8EngineConfig
    from fp8engine.nn.hf_cache import Fp8Cache


# By name, the module that has it: both need transformers.
LATE = {"Fp8EngineConfig": "fp8engine.export", "Fp8Cache": "fp8engine.nn.hf_cache"}


def __getattr__(name: str) -> Any:
    if name not in LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(LATE[name]), name)


__all__ = [
    "Description",
    "ExportReport",
    "Fp8Cache",
    "Fp8EngineConfig",
    "describe",
    "export",
    "iter_fp8",
    "load",
]
