"""Files that a run writes, each whole at any moment, and the reason in one line where the system refuses one."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fp8engine import files
from fp8engine.demo.config import DemoError


def write(path: Path, content: bytes) -> None:
    """Put `content` at `path`; whatever happens, `path` holds all of the old content or all of the new.

    Raises DemoError with the system's reason: a full disk, a folder that cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, content)
    except OSError as error:
        raise DemoError(
            f"cannot write {path}: {error.strerror or error}; what was there before is unchanged"
        ) from error


def check_writable(folder: Path) -> None:
    """Raise DemoError now rather than after minutes of work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DemoError(f"cannot write in {folder}: {error.strerror or error}; choose another with --out") from error
