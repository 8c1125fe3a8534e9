"""Saves that are killed at any of their file operations: a whole checkpoint, old or new, is found and loads."""

import builtins
import io
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Number
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import fp8engine as fe
from benchmarks.distributed.processes import IMPORTED
from fp8engine.demo import disk

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of a process without a group
OPERATIONS = [(os, name) for name in ("rename", "replace", "remove", "unlink", "rmdir", "mkdir", "fsync", "open")]
OPERATIONS += [(builtins, "open"), (io, "open")]


class Killed(BaseException):
    """What every file operation raises from the fatal one on: nothing reaches the disk any more."""


class Disk:
    """File operations in a folder, counted while `running`; the fatal one and all after it do nothing but `die`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch | None = None):
        self.folder, self.count, self.fatal, self.running, self.die = str(folder), 0, -1, False, self._raise
        for module, name in OPERATIONS:
            # The disk itself does not fail here: what fsync was called for is not waited for, which saves seconds.
            counted = self._counted(getattr(module, name) if name != "fsync" else lambda file: None)
            if monkeypatch is None:
                setattr(module, name, counted)  # in a process that ends soon
            else:
                monkeypatch.setattr(module, name, counted)

    def _raise(self) -> None:
        raise Killed

    def _counted(self, real: Callable) -> Callable:
        def operation(*args: Any, **named: Any) -> Any:
            here = isinstance(args[0], int) or "dir_fd" in named or os.fspath(args[0]).startswith(self.folder)
            if self.running and here:
                self.count += 1
                if self.count > self.fatal >= 0:
                    self.die()
            return real(*args, **named)

        return operation

    def run(self, save: Callable[[], object], fatal: int = -1) -> bool:
        """Whether the save ended by itself.  fatal: how many operations it is granted; -1 for all."""
        self.count, self.fatal, self.running = 0, fatal, True
        try:
            save()
        except BaseException:
            if fatal < 0 or self.count <= fatal:
                raise
        finally:
            self.running = False
        return fatal < 0 or self.count <= fatal


def parts(value: int) -> dict[str, Any]:
    """A model, its optimizer's momenta and a number that are all `value`."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.5)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "number": Number(value)}


def save(path: Path, value: int) -> None:
    fe.distributed.save(path, **parts(value))


def loaded(path: Path) -> int:
    """The value of the checkpoint, in which all parts have one."""
    into = parts(0)
    fe.distributed.load(path, **into)
    momenta = [state["momentum_buffer"] for state in into["optimizer"].state.values()]
    numbers = {x for tensor in (*into["model"].parameters(), *momenta) for x in tensor.flatten().tolist()}
    assert numbers == {float(into["number"].value)}
    return into["number"].value


def found(path: Path) -> int:
    """What a script goes on from that loads if there is something to load; 0 where it begins anew."""
    there = fe.distributed.has_checkpoint(path)
    if path.exists():
        assert there  # a script that asks the file system, and not us, must not end in an error
    return loaded(path) if there else 0


def kills(disk: Disk, path: Path, value: int, before: Path) -> Iterator[int]:
    """The number of each operation of a save of `value` over a copy of `before`, after it was killed there."""
    fatal = 0
    while True:
        shutil.rmtree(path.parent, ignore_errors=True)
        shutil.copytree(before, path.parent)
        if disk.run(lambda: save(path, value), fatal):
            return
        yield fatal
        fatal += 1


@pytest.mark.parametrize("there", ["nothing", "a checkpoint", "one of torch alone"])
def test_a_save_that_is_killed_leaves_what_was_there_or_all(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk, path, before, seen = Disk(tmp_path, monkeypatch), tmp_path / "runs" / "a", tmp_path / "before", []
    was = 0 if there == "nothing" else 1
    before.mkdir()
    if was:
        save(before / "a", was)
    if there == "one of torch alone":
        plain(before / "a")
        assert loaded(before / "a") == was
    for _ in kills(disk, path, 2, before):
        seen.append(found(path))
        save(path, 3)
        assert found(path) == 3
        assert [each.name for each in path.parent.iterdir()] == ["a"]  # nothing is left of the one that was killed
        assert sorted(each.name[:5] for each in path.iterdir()) == [".meta", "data-"]
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert set(seen) == {was, 2}


def plain(path: Path) -> None:
    """Turn a checkpoint into what torch.distributed.checkpoint alone writes: data files beside their metadata."""
    (data,) = path.glob("data-*")
    metadata = FileSystemReader(path).read_metadata()
    for stored in metadata.storage_data.values():
        stored.relative_path = stored.relative_path.removeprefix(f"{data.name}/")
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    for file in data.iterdir():
        file.replace(path / file.name)
    data.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_save_that_is_killed_after_one_that_was_killed(first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk, left, path = Disk(tmp_path, monkeypatch), tmp_path / "left" / "a", tmp_path / "runs" / "a"
    (before := tmp_path / "before").mkdir()
    if not first:
        save(before / "a", 1)
    states = set()
    for _ in kills(disk, left, 2, before):
        state = frozenset((each.name[:8], each.stat().st_size) for each in left.parent.rglob("*"))
        if state in states:
            continue
        states.add(state)
        was = found(left)
        assert was in ((0, 2) if first else (1, 2))
        seen = [found(path) for _ in kills(disk, path, 3, left.parent)]
        assert seen == sorted(seen)
        assert set(seen) == {was, 3}


def test_what_a_user_keeps_beside_a_checkpoint_or_in_its_folder_stays(tmp_path: Path):
    mine = ("a/data-raw/corpus", "a/data-2024.csv", "a/data-20241231/x", "a.before/copy", "a.part/note")
    for name in mine:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    for value in (1, 2):
        save(tmp_path / "a", value)
        assert found(tmp_path / "a") == value
        assert [(tmp_path / name).read_text() for name in mine] == ["mine"] * len(mine)
    assert len(list((tmp_path / "a").iterdir())) == 3 + 2  # the latest save's folder, and .metadata


def die_in_save(path: Path, value: int, fatal: int) -> None:
    """A process of its own, which ends as a killed one does: what is in its buffers is lost."""
    torch.set_num_threads(1)
    disk = Disk(path.parent)
    disk.die = lambda: os._exit(9)
    disk.run(lambda: save(path, value), fatal)


@pytest.mark.slow
def test_a_process_that_is_killed(tmp_path: Path):
    multiprocessing.set_forkserver_preload(IMPORTED)
    context, before, path = multiprocessing.get_context("forkserver"), tmp_path / "before", tmp_path / "runs" / "a"
    save(before / "a", 1)
    seen, code, fatal = [], 9, 0
    while code == 9:
        shutil.rmtree(path.parent, ignore_errors=True)
        shutil.copytree(before, path.parent)
        process = context.Process(target=die_in_save, args=(path, 2, fatal))
        process.start()
        process.join()
        code, fatal = process.exitcode, fatal + 1
        seen.append(found(path))
    assert code == 0
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


def test_the_demos_file_is_whole_wherever_its_save_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its checkpoint is one file: the same atomic rename (files.write) makes it the current one."""
    operations, path, seen = Disk(tmp_path, monkeypatch), tmp_path / "runs" / "current-seed0.pt", []
    for value in (b"old", b"new"):
        fatal = 0
        while not operations.run(lambda value=value: disk.write(path, value), fatal):
            fatal += 1
            seen.append(path.read_bytes() if path.exists() else b"")
            if seen[-1] == value:
                path.unlink() if value == b"old" else path.write_bytes(b"old")
        assert path.read_bytes() == value
    assert set(seen) == {b"", b"old", b"new"}
