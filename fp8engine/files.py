"""Atomic writes to files, and asynchronous copies of tensors to the host.

`write`, `write_by`: a file holds all of its old content or all of its new, whatever happens meanwhile.
`HostCopy`: device memory is read without making the host wait for the device.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch


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
    beside = path.parent / f".{path.name}.{secrets.token_hex(4)}.part"  # unique: several threads may write one path
    try:
        with open(beside, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.chmod(beside, path.stat().st_mode)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_by(path: str | os.PathLike, save: Callable[[Path], object]) -> None:
    """`write` for what another library saves: `save(a path of the same name)`, and the files that it put beside that.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_by(Path(folder) / "b.txt", lambda path: path.write_text("whole"))
    ...     (Path(folder) / "b.txt").read_text(), os.listdir(folder)
    ('whole', ['b.txt'])
    """
    path = Path(path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        save(Path(folder) / path.name)
        for made in sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name):  # what others name first
            with open(made, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(made, path.parent / made.name)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force the new name to the disk too, where the system can: the file itself is in place already."""
    with contextlib.suppress(OSError):  # Windows opens no folders; others need the right to read it, or cannot sync it
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class HostCopy:
    """An asynchronous copy of tensors to the host: on CUDA into pinned memory behind an event, elsewhere made at once.

    tensors: the copies, in the order given.  Those of CUDA tensors hold their values once `done` returns True or `wait`
    has returned; what is later written to the originals is in none of them.

    >>> counts = torch.tensor([1, 2])
    >>> copy = HostCopy([counts])
    >>> _ = counts.zero_()
    >>> copy.done(), copy.wait()
    (True, [tensor([1, 2])])
    """

    def __init__(self, tensors: Iterable[torch.Tensor]):
        originals = [tensor.detach() for tensor in tensors]
        self.tensors = [
            torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            if tensor.is_cuda
            else tensor.cpu().clone()
            for tensor in originals
        ]
        self._events = []
        for device in {tensor.device for tensor in originals if tensor.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def done(self) -> bool:
        """Whether every copy has been made, so that `wait` would not wait."""
        return all(event.query() for event in self._events)

    def wait(self) -> list[torch.Tensor]:
        """The copies, once the device has made them."""
        for event in self._events:
            event.synchronize()
        return self.tensors
