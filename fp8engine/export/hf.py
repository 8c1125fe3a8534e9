"""fe.hf, the public names for Hugging Face's models and their FP8 checkpoints.

`describe` is in convert/recognised.py, checkpoints in export/.
"""

from typing import TYPE_CHECKING, Any

from fp8engine.convert.recognised import Description, describe
from fp8engine.export import ExportReport, export, iter_fp8, load

if TYPE_CHECKING:
    from fp8engine.export import Fp8EngineConfig
    from fp8engine.nn.hf_cache import Fp8Cache


def __getattr__(name: str) -> Any:
    if name == "Fp8EngineConfig":  # here: it needs transformers, and registers itself there
        from fp8engine.export import Fp8EngineConfig

        return Fp8EngineConfig
    if name == "Fp8Cache":  # the same
        from fp8engine.nn.hf_cache import Fp8Cache

        return Fp8Cache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
