"""Atomic writes: a file holds all of its old content or all of its new, whatever happens meanwhile."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write(path: str | os.PathLike, content: bytes | str) -> None:
    """Put `content` at `path`, text as UTF-8: written beside it, forced to the disk, then renamed over the old file.

    Raises OSError with the reason (a full disk, a folder that is missing or cannot be written); the old content
    is then unchanged and nothing is left beside it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Path(folder) / "b.txt", "whole")
    ...     (Path(folder) / "b.txt").read_bytes(), os.listdir(folder)
    (b'whole', ['b.txt'])
    """
    path = Path(path)
    beside = path.with_name(
        f".{path.name}.{secrets.token_hex(4)}.part"
    )  # unique: threads and processes may write at once
    try:
        with open(
            os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666), "wb"
        ) as file:
            file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.chmod(beside, path.stat().st_mode)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Force the new name to the disk too, where the system can (Windows cannot open a folder)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
