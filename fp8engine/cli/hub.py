"""Folder of a model that a command line names: a folder on the disk, or a model of the Hugging Face hub by its id.

A hub's model is downloaded where the hub can be reached; else what an earlier download left in the local cache is used,
and a line on stderr says so (`HF_HOME`; `HF_HUB_OFFLINE=1` asks for the cache alone).  huggingface_hub does both.
"""

from __future__ import annotations

import os
from pathlib import Path

from fp8engine.cli.shared import console
from fp8engine.errors import ConversionError

# Of a hub's model, what is read: sizes alone, or weights and tokenizer too.  Code is never downloaded.
SIZES = ("config.json",)
TOKENIZER = ("*.json", "*.model", "*.txt", "*.jinja")
WHOLE = (*TOKENIZER, "*.safetensors")


def folder_of(target: str, files: tuple[str, ...] = WHOLE) -> Path | None:
    """The folder that a target names; None where it names module:function.

    files: patterns of what is downloaded of a hub's model.
    Raises ConversionError, naming all that was tried, where there is no such model.

    >>> folder_of("."), folder_of("my.models:large")
    (PosixPath('.'), None)
    """
    if os.path.isdir(target):  # False of a name that is too long for one
        return Path(target)
    if ":" in target:
        return None
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConversionError(
            f"{target!r} is neither a folder that exists nor module:function; for a model of the Hugging Face hub "
            "pip install 'fp8engine[hf]'"
        ) from error
    try:
        folder = Path(huggingface_hub.snapshot_download(target, allow_patterns=list(files)))
    except (OSError, ValueError) as error:  # what huggingface_hub raises: of the network, of the cache, of the id
        reason = " ".join(str(error).split()).split(". ")[0]
        raise ConversionError(
            f"{target!r} is neither a folder that exists nor module:function, nor a model of the Hugging Face hub that "
            f"can be downloaded, nor in the local cache {huggingface_hub.constants.HF_HUB_CACHE} "
            f"({type(error).__name__}: {reason})"
        ) from error
    if not huggingface_hub.constants.HF_HUB_OFFLINE:  # snapshot_download takes the cache without a word
        try:
            huggingface_hub.model_info(target)
        except Exception:  # of httpx or of requests, by huggingface_hub's version
            note = f"{target}: the Hugging Face hub cannot be reached; read from the local cache, {folder}"
            console(stderr=True).print(note, soft_wrap=True, highlight=False)
    return folder
