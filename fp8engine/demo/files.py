"""Files that are whole or not there: written beside, forced to the disk, then renamed over the old one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fp8engine.demo.config import DemoError


def write(path: Path, content: bytes) -> None:
    """Put `content` at `path`; whatever happens, `path` holds all of the old content or all of the new.

    Raises DemoError with the system's reason: a full disk, a folder that cannot be written.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Path(folder) / "a" / "b.txt", b"whole")
    ...     (Path(folder) / "a" / "b.txt").read_bytes(), os.listdir(Path(folder) / "a")
    (b'whole', ['b.txt'])
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(beside, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise DemoError(
            f"cannot write {path}: {error.strerror or error}; what was there before is unchanged"
        ) from error


def _sync_folder(folder: Path) -> None:
    """The new name on the disk too, where the system can (Windows cannot open a folder)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_writable(folder: Path) -> None:
    """Raise DemoError now rather than after minutes of work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DemoError(f"cannot write in {folder}: {error.strerror or error}; choose another with --out") from error
