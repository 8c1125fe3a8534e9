"""Reader of FP8 checkpoints, of any layout we know, into served layers; nothing is half loaded."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8engine.errors import ConversionError, StateError
from fp8engine.export import headers
from fp8engine.export.layout import OURS, parse, to_config


def load(path: str | os.PathLike, kind: Any = None, **options: Any) -> Any:
    """The model of a folder with FP8 weights, in eval mode; codes and scales are the files', bit for bit.

    path: a local folder with quant_method "fp8", "compressed-tensors" or "fp8engine".
    kind: a transformers class, such as AutoModel; by default the one that config.json names.
    options: of from_pretrained, such as dtype or device_map.

    Raises StateError for files that are missing, cut off, damaged, or not what config.json says; UnknownName for a
    quant_method that is not read; ConversionError where there is no such folder or no transformers.
    """
    folder = Path(path)
    try:
        import transformers
    except ImportError as error:
        raise ConversionError("load needs transformers: pip install 'fp8engine[hf]'") from error
    from fp8engine.export import quantizer  # noqa: F401 - registers quant_method "fp8engine"

    written = read_config_file(folder)
    stored = parse(written)
    headers.fp8_layers(headers.read(headers.files_of(folder)), stored)
    known = getattr(kind, "config_class", None) or transformers.AutoConfig  # Auto does not know every part of a model
    config = known.from_pretrained(folder, local_files_only=True)
    config.quantization_config = to_config(replace(stored, layout=OURS))
    whole = kind is None
    kind = kind or _architecture(transformers, config)
    options |= {"config": config, "local_files_only": True, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # they are refused here, by name; transformers' own error has no name
    model, info = kind.from_pretrained(folder, **options)
    for name, in_file, wanted in sorted(info["mismatched_keys"]):
        raise StateError(
            f"{folder}: {name} is {list(in_file)} in the files and {list(wanted)} in {type(model).__name__} under this "
            "config.json: export the model again, with its own config.json"
        )
    if missing := sorted(info["missing_keys"]):
        raise StateError(
            f"{folder}: {len(missing)} tensors of {type(model).__name__} are not in the files, {missing[0]} the first; "
            f"kind={type(model).__name__} with a new head: from_pretrained, which makes one up"
        )
    if whole and (strange := sorted(info["unexpected_keys"])):
        raise StateError(
            f"{folder}: {len(strange)} tensors of the files are none of {type(model).__name__} under this config.json, "
            f"{strange[0]} the first; pass kind= to load a part of a model"
        )
    return model


def read_config_file(folder: Path) -> dict:
    """The quantization_config of a folder's config.json.  Raises ConversionError, StateError."""
    file = folder / "config.json"
    if not file.is_file():
        raise ConversionError(f"{folder} has no config.json: want the folder of an exported model")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise StateError(f"{file} is not JSON ({error}): export the model again") from error
    found = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(found, dict):
        raise StateError(
            f"{file} has no quantization_config: these weights are not FP8; "
            "from_pretrained(path, quantization_config=Fp8EngineConfig()) casts them while it loads"
        )
    return found


def _architecture(transformers: Any, config: Any) -> Any:
    names = config.architectures or []
    kind = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
    if kind is None:
        raise ConversionError(f"config.json names no class of transformers ({names}): pass kind=, such as AutoModel")
    return kind
