"""Loaders of what a command line names: models, with or without weights, tokenizers and texts.

A model is a folder with a Hugging Face config.json, the id of a model of the hub (hub.py), or module:function, a Python
function without arguments (or a model itself).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8engine.cli.hub import SIZES, TOKENIZER, folder_of
from fp8engine.cli.options import DTYPES, LLAMA_NAMES, LLAMAS
from fp8engine.demo.config import DemoError, manual
from fp8engine.errors import ConversionError
from fp8engine.report.compare import BYTES, Tokens

BYTES_NAME = "bytes"


def load_structure(target: str, quantised: bool = False) -> nn.Module:
    """The model that a folder or a hub's id (on the meta device: no weights are read) or module:function stands for.

    quantised: of a folder of quantised weights too, as the model that they were made of.
    Raises ConversionError, saying what was wrong.
    """
    folder = folder_of(target, SIZES)
    if folder is None:
        return _from_function(target)
    with _transformers_refuses(f"cannot build {folder}"):
        transformers, config, kind = _class_of(folder)
        if not quantised:
            _check_plain(folder, config)
        with torch.device("meta"):
            return kind._from_config(config) if kind else transformers.AutoModel.from_config(config)


def load_sizes(target: str) -> nn.Module:
    """As `load_structure`; also a name of LLAMAS, of which no file is needed."""
    if target not in LLAMAS:
        try:
            return load_structure(target, quantised=True)
        except ConversionError as error:
            if os.path.isdir(target) or ":" in target:
                raise
            raise ConversionError(f"{error}; known without a file: {LLAMA_NAMES}") from error
    hidden, mlp, layers, heads = LLAMAS[target]
    transformers = _transformers()
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def load_pretrained(target: str, tokenizer: str | None) -> tuple[nn.Module, Tokens, list[str]]:
    """(model with its weights, its tokens, notes for the user) of a folder, of a hub's id, or of module:function.

    tokenizer: a folder, a hub's id, or "bytes"; None: the model's.  Raises ConversionError, saying what was wrong.
    """
    if (folder := folder_of(target)) is None:
        model = _from_function(target)
        if tokenizer is None:
            raise ConversionError(f"{target}: a function brings no tokenizer: give --tokenizer FOLDER, or bytes")
        return model, tokens_of(None, tokenizer), []
    model, missing, notes = load_weights(folder)
    if missing:
        notes.append(f"{len(missing)} weights are not in {folder} and are random, {missing[0]!r} the first")
    return model, tokens_of(folder, tokenizer), notes


def load_weights(folder: Path, dtype: str = "auto") -> tuple[Any, list[str], list[str]]:
    """(model of the class that the folder's config.json names, names of weights that the folder lacks and that are
    random, notes for the user of weights that the class has no place for).  dtype: one of DTYPES; "auto" is the stored
    one.

    Raises ConversionError, saying what was wrong: no such folder, FP8 already, files that transformers cannot use.
    """
    with _transformers_refuses(f"cannot load {folder}"):
        transformers, config, kind = _class_of(folder)
        _check_plain(folder, config)
        how = {"dtype": DTYPES[dtype], "local_files_only": True, "output_loading_info": True}
        with quiet():
            model, info = (kind or transformers.AutoModel).from_pretrained(folder, **how)
    extra, kind = info["unexpected_keys"], type(model).__name__
    note = f"{len(extra)} weights of {folder} are left out, {min(extra, default='')!r} the first: {kind} has none"
    return model, sorted(info["missing_keys"]), [note] if extra else []


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bars, unless standard error is a terminal."""
    transformers = _transformers()
    hide = transformers.logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hide:
        transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            transformers.logging.enable_progress_bar()


def read_text(path: Path | None) -> str:
    """The text of a file, or of Python's own manual.  Raises DemoError."""
    if path is None:
        return manual().decode()
    try:
        found = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DemoError(f"cannot read --text {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DemoError(f"cannot read --text {path}: it is not UTF-8 ({error.reason} at byte {error.start})") from error
    if not found.strip():
        raise DemoError(f"--text {path} is empty: want a text of paragraphs or lines")
    return found


def token_ids(texts: list[str], tokens: Tokens, length: int) -> tuple[list[list[int]], int]:
    """(token ids, how many texts were longer than `length`)."""
    ids = [tokens.encode(text) for text in texts]
    return [one[:length] for one in ids], sum(len(one) > length for one in ids)


def tokens_of(folder: Path | None, asked: str | None) -> Tokens:
    """The tokenizer asked for, or of a model's folder.  Raises ConversionError."""
    if asked == BYTES_NAME:
        return BYTES
    try:
        where = folder_of(asked, TOKENIZER) if asked else folder
    except ConversionError as error:
        raise ConversionError(f"--tokenizer: {error}; {BYTES_NAME!r} takes each byte for a token") from error
    if where is None:
        raise ConversionError(f"--tokenizer {asked}: want a folder, the id of a hub's model, or {BYTES_NAME!r}")
    transformers = _transformers()
    try:
        made: Any = transformers.AutoTokenizer.from_pretrained(where, local_files_only=True)
    except Exception as error:  # whatever transformers raises for a file it cannot use
        raise ConversionError(
            f"{where} has no tokenizer that transformers can load ({type(error).__name__}): give --tokenizer FOLDER, "
            f"or {BYTES_NAME}"
        ) from error
    pad = made.pad_token_id if made.pad_token_id is not None else made.eos_token_id
    return Tokens(lambda text: made(text)["input_ids"], pad or 0, made.mask_token_id or 0)


def _from_function(name: str) -> nn.Module:
    module, colon, function = name.partition(":")
    if not colon or not module or not function or "/" in module:
        raise ConversionError(f"{name!r} is neither a folder that exists nor module:function")
    sys.path.insert(0, "")  # a module in the folder where the command runs, as `python -m` finds it
    try:
        made: Any = importlib.import_module(module)
        for part in function.split("."):
            made = getattr(made, part)
        model = made if isinstance(made, nn.Module) else made()
    except Exception as error:  # the user's code: anything
        raise ConversionError(f"{name} cannot be called: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove("")
    if not isinstance(model, nn.Module):
        raise ConversionError(f"{name} gave {type(model).__name__}, not an nn.Module")
    return model


def _class_of(folder: Path) -> tuple[Any, Any, Any]:
    """(transformers, the folder's config, the class that it names or None)."""
    if not (folder / "config.json").is_file():
        raise ConversionError(f"{folder} has no config.json: want the folder of a Hugging Face model")
    transformers = _transformers()
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    named = [getattr(transformers, name, None) for name in config.architectures or []]
    return transformers, config, next((found for found in named if found is not None), None)


@contextlib.contextmanager
def _transformers_refuses(what: str) -> Iterator[None]:
    """Turn an error in the block into a ConversionError of one line: transformers raises anything for a bad file."""
    try:
        yield
    except ConversionError:
        raise
    except Exception as error:
        # Its texts may begin with an empty line, or name the cause last.
        reason = " ".join(str(error).split())
        raise ConversionError(f"transformers {what}: {type(error).__name__}: {reason}") from error


def _check_plain(folder: Path, config: Any) -> None:
    """transformers would dequantise such weights without an FP8 card, and what is then measured is no longer them."""
    if found := getattr(config, "quantization_config", None):
        method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", "?")
        raise ConversionError(
            f"{folder} is quantised already ({method}): want the 16- or 32-bit weights that it was made from "
            "(fe.hf.load reads it as it is)"
        )


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConversionError("reading a model folder needs transformers: pip install 'fp8engine[hf]'") from error
