"""A Hugging Face model folder with its weights and its tokenizer; nothing is downloaded."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import nn

from fp8engine.cli.inspect import load
from fp8engine.errors import ConversionError
from fp8engine.report.compare_text import BYTES, Tokens

BYTES_NAME = "bytes"


def load_pretrained(target: str, tokenizer: str | None) -> tuple[nn.Module, Tokens, list[str]]:
    """(model with its weights, its tokens, notes for the user) of a folder, or of module:function.

    tokenizer: a folder, or "bytes"; None: the model's folder.  Raises ConversionError, saying what was wrong.
    """
    if not Path(target).is_dir():
        model, notes = load(target), []
        if tokenizer is None:
            raise ConversionError(f"{target}: a function brings no tokenizer: give --tokenizer FOLDER, or bytes")
    else:
        model, notes = _weights(Path(target))
    return model, _tokens(Path(target), tokenizer), notes


def _weights(folder: Path) -> tuple[nn.Module, list[str]]:
    if not (folder / "config.json").is_file():
        raise ConversionError(f"{folder} has no config.json: want the folder of a Hugging Face model")
    transformers = _transformers()
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        named = [getattr(transformers, name, None) for name in config.architectures or []]
        kind = next((found for found in named if found is not None), transformers.AutoModel)
        model, told = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    except Exception as error:  # whatever transformers raises for a file it cannot use
        raise ConversionError(f"transformers cannot load {folder}: {type(error).__name__}: {error}") from error
    finally:
        if shown:
            transformers.logging.enable_progress_bar()
    missing = sorted(told["missing_keys"])
    random = f"{len(missing)} weights are not in {folder} and are random, {missing[0]!r} the first" if missing else ""
    return model, [random] * bool(random)


def _tokens(folder: Path, asked: str | None) -> Tokens:
    if asked == BYTES_NAME:
        return BYTES
    where = Path(asked) if asked else folder
    if not where.is_dir():
        raise ConversionError(f"--tokenizer {asked}: neither a folder that exists nor {BYTES_NAME!r}")
    try:
        made: Any = _transformers().AutoTokenizer.from_pretrained(where, local_files_only=True)
    except ConversionError:
        raise
    except Exception as error:  # whatever transformers raises for a file it cannot use
        raise ConversionError(
            f"{where} has no tokenizer that transformers can load ({type(error).__name__}): give --tokenizer FOLDER, "
            f"or {BYTES_NAME}"
        ) from error
    pad = made.pad_token_id if made.pad_token_id is not None else made.eos_token_id
    return Tokens(lambda text: made(text)["input_ids"], pad or 0, made.mask_token_id or 0)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConversionError("reading a model folder needs transformers: pip install 'fp8engine[hf]'") from error
