"""FP8 checkpoints: `export` writes them, `load` reads them, `Fp8EngineConfig` casts 16-bit ones while they load.

`iter_fp8` hands out what `export` would write.
"""

from typing import TYPE_CHECKING, Any

from fp8engine.errors import ConversionError
from fp8engine.export.iterate import iter_fp8
from fp8engine.export.read import load
from fp8engine.export.write import ExportReport, export

if TYPE_CHECKING:
    from fp8engine.export.quantizer import Fp8EngineConfig


def __getattr__(name: str) -> Any:
    if name == "Fp8EngineConfig":  # here: it needs transformers, and registers itself there
        try:
            from fp8engine.export.quantizer import Fp8EngineConfig
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            raise ConversionError("Fp8EngineConfig needs transformers: pip install 'fp8engine[hf]'") from error
        return Fp8EngineConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["ExportReport", "Fp8EngineConfig", "export", "iter_fp8", "load"]
