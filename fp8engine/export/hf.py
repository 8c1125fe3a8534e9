"""fe.hf, the public names for Hugging Face's models and their FP8 checkpoints.

`export` writes checkpoints, `iter_fp8` hands out what it would write, `load` reads them, `Fp8EngineConfig` casts 16-bit
ones while they load; `describe` tells what the probe sees in a model.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fp8engine.convert.recognised import Description, describe
from fp8engine.errors import ConversionError
from fp8engine.export.iterate import iter_fp8
from fp8engine.export.read import load
from fp8engine.export.write import ExportReport, export

if TYPE_CHECKING:
    from fp8engine.export.quantizer import Fp8EngineConfig
    from fp8engine.nn.hf_cache import Fp8Cache

# Names that need transformers, and the modules that have them; the first registers itself there.
LATE = {"Fp8EngineConfig": "fp8engine.export.quantizer", "Fp8Cache": "fp8engine.nn.hf_cache"}


def __getattr__(name: str) -> Any:
    if name not in LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(LATE[name]), name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "transformers":
            raise
        raise ConversionError(f"{name} needs transformers: pip install 'fp8engine[hf]'") from error


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
