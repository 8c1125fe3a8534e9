"""Checkpoints of a sharded model by torch.distributed.checkpoint, for any number of ranks to load, and for torch.

    path/.metadata      torch's, which names the files of the checkpoint: one rename makes a new one the checkpoint
    path/data-1a2b...   what one save wrote, 16 hexadecimal digits; removed once .metadata names another's

A first save writes all of that to path.part, and renames it: `path` is there only when it is whole.  Parts "model" and
"optimizer" are torch's own, so that `dcp_to_torch_save` and `dcp.load` read them without this library.  `load` reads
into copies first: a checkpoint that is cut short, or of another model, is an error on every rank and changes nothing.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fp8engine import _torch, files
from fp8engine.amp.scaled import ScaledOptimizer
from fp8engine.amp.wrapped import has_masters
from fp8engine.auto.between import unseen
from fp8engine.distributed.agree import agree
from fp8engine.distributed.amax import join_now, states_of
from fp8engine.errors import StateError
from fp8engine.ops import ranks

METADATA = ".metadata"  # torch's name for it; a folder that has it is whole
DATA, DIGITS = "data-", 16
NEW = "the optimizer has no state"  # name of a part that says so, which no keyword is


class Stateful(Protocol):
    """An object with a state, such as `fe.scaling_state(model)`, a learning-rate schedule or a GradScaler."""

    def state_dict(self) -> Any:
        """Its state, in types that torch.load(weights_only=True) reads."""
        ...

    def load_state_dict(self, state_dict: Any) -> object:
        """Put a state back."""
        ...


def save(
    path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **others: Stateful
) -> None:
    """Write model, optimizer and others to the folder `path`; every rank has to call it.

    others: by name; pass scaling=fe.scaling_state(model), without which predicted scales begin anew.  The first rank's
    state is written, because ranks agree on it: amaxes of activations are joined before (where `fsdp` or `reduce_amax`
    has named a group).  Whenever a save is killed, a checkpoint that was there, or the new one, is whole and loads.
    Raises StateError on every rank, with the checkpoint that was there unchanged, where one rank cannot write, and for
    a part whose state torch.load(weights_only=True) does not read.
    """
    from torch.distributed import checkpoint

    join_now(model)
    parts: dict[str, Any] = _tensors(model, optimizer)
    if optimizer is not None and not optimizer.state and ranks.first():
        parts[NEW] = b""
    into: list[Any] = [None]
    failed = f"{os.fspath(path)} was not saved, and what was there is unchanged"

    def pack() -> None:
        for name, other in others.items():
            state = other.state_dict()
            if ranks.first():  # torch writes any one rank's of those that have the name
                parts[name] = packed(state)
                _unpacked(name, parts[name])

    _on_all(pack, failed, "a part's state_dict holds tensors, numbers, text, lists and dicts alone")

    def begin() -> None:
        into[0] = _begin(Path(path)) if ranks.first() else None

    _on_all(begin, failed)
    if dist.is_initialized():
        dist.broadcast_object_list(into)
    _on_all(lambda: checkpoint.save(parts, checkpoint_id=into[0]) and None, failed)
    _on_all(lambda: _finish(Path(path), into[0]) if ranks.first() else None, failed)


def load(
    path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **others: Stateful
) -> None:
    """Put back what `save` wrote, on any number of ranks, into the same model, converted or not; every rank calls it.

    others: by the names that they were saved under.  Raises StateError on every rank, with nothing changed, for a
    folder that holds no whole checkpoint, one of another model, or one that a rank cannot read, and where a part
    refuses its state on one rank: the others' parts get back what `state_dict` gave before.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    failed = f"{os.fspath(path)} is no whole checkpoint of this model"
    wanted = _tensors(model, optimizer) | dict.fromkeys(others, b"")
    copies: dict[str, Any] = {}
    states: dict[str, Any] = {}

    def read() -> None:
        copies.update(_torch.tree_map(_copy, wanted))
        checkpoint.load(copies, checkpoint_id=_whole(Path(path)))
        states.update({name: _unpacked(name, copies[name]) for name in others})

    remedy = "nothing was loaded: name a folder all ranks see, saved from this model (8-bit states: on as many ranks)"
    # A rank that cannot read would not come to the collectives of the others: they learn of it before.
    _, is_new = _on_all(lambda: _check(Path(path), wanted), failed, remedy)
    _on_all(read, failed, remedy)
    wanted.clear()  # tensors that torch has made for an optimizer without state
    _put_all(model, others, states, f"{os.fspath(path)} was not loaded")  # first: a part may refuse its state
    optimizers, of_optimizer = () if optimizer is None else optimizer, copies.get("optimizer", {})
    with _state_may_be_made(optimizer):
        set_state_dict(model, optimizers, model_state_dict=copies["model"], optim_state_dict=of_optimizer)
    if optimizer is not None and is_new:
        optimizer.state.clear()


def _put_all(model: nn.Module, others: Mapping[str, Stateful], states: dict[str, Any], failed: str) -> None:
    """Give each part its state on every rank, or leave all as they were.  Raises StateError where one refuses."""
    marks = [(state, state.saved_1.clone()) for state in states_of(model)]  # which reading and loading a state sets
    kept: dict[str, Any] = {}

    def put() -> None:
        kept.update({name: copy.deepcopy(other.state_dict()) for name, other in others.items()})
        for name, other in others.items():
            try:
                other.load_state_dict(states[name])
            except Exception as error:
                raise StateError(f"part {name!r}: {type(error).__name__}: {error}") from error

    try:
        _on_all(put, failed, "all parts are as they were: leave that part out (scales are then found anew)")
    except StateError:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of amaxes of this rank, which are its own
            for name, before in kept.items():
                others[name].load_state_dict(before)
        for state, mark in marks:
            state.saved_1.copy_(mark)
        raise


def packed(state: Any) -> bytes:
    """A state as bytes, which DCP writes as they are."""
    written = io.BytesIO()
    torch.save(state, written)
    return written.getvalue()


def _unpacked(name: str, state: bytes) -> Any:
    """The state that `packed` has made bytes of.  Raises StateError where it holds what could run code."""
    try:
        return torch.load(io.BytesIO(state), weights_only=True)
    except pickle.UnpicklingError as error:
        raise StateError(f"torch.load(weights_only=True) does not read the state of part {name!r}") from error


def has_checkpoint(path: str | os.PathLike) -> bool:
    """Whether `load` finds a whole checkpoint there, of a save that was killed too; for scripts that then resume.

    Every rank has to call it.  Raises StateError on every rank where one sees a checkpoint and another does not.

    >>> has_checkpoint("runs/not-begun")
    False
    """
    return _on_all(lambda: _whole(Path(path)) is not None, f"has_checkpoint({path})", "name a folder seen by all ranks")


def _on_all(action: Callable[[], object], failed: str, remedy: str = "see the ranks' disks and rights") -> Any:
    """What the action returns on every rank.  Raises StateError on all where one has failed, or has another result."""
    from torch.distributed.checkpoint import CheckpointException

    found = problem = None
    try:
        found = action()
    except CheckpointException as error:  # what every rank is told of the ranks that have failed
        problem: Any = next(iter(error.failures.values()))[0]
    except Exception as error:  # whatever torch raises on this rank alone
        problem = error
    agree(failed, {"what is found there": found}, problem=problem, remedy=remedy, error=StateError)
    return found


def _whole(path: Path) -> Path | None:
    """The folder of the checkpoint: `path`, or the part beside it of a save that was killed before its rename.

    Raises OSError where it cannot be read.
    """
    return next((folder for folder in (path, Path(f"{path}.part")) if (folder / METADATA).exists()), None)


def _begin(path: Path) -> Path:
    """An empty folder for what a save writes, in the checkpoint that it will replace or, where none is, in a part."""
    folder = _whole(path) or (path if path.exists() else Path(f"{path}.part"))
    _tidy(folder)
    into = folder / f"{DATA}{secrets.token_hex(DIGITS // 2)}"
    into.mkdir(parents=True)
    return into


def _finish(path: Path, into: Path) -> None:
    """Make what was written to the folder `into` the checkpoint, and remove what was it before."""
    folder, metadata = into.parent, _metadata(into)
    metadata.storage_data = {
        name: replace(stored, relative_path=f"{into.name}/{stored.relative_path}")
        for name, stored in metadata.storage_data.items()
    }
    files.write(into / METADATA, pickle.dumps(metadata))
    (into / METADATA).replace(folder / METADATA)
    files.sync_folder(folder)
    if folder != path:
        folder.rename(path)
        files.sync_folder(path.parent)
    _tidy(path)
    _tidy(part := Path(f"{path}.part"))
    with contextlib.suppress(OSError):  # where it is not there, or holds what no save has written
        part.rmdir()


def _tidy(folder: Path) -> None:
    """Remove what saves have left in a folder that its metadata does not name, as far as the system lets us.

    By names that nothing else has: what a user keeps in the same folder stays.
    """
    used = set()
    if (folder / METADATA).exists():
        used = {Path(stored.relative_path).parts[0] for stored in _metadata(folder).storage_data.values()}
    digits = "[0-9a-f]" * DIGITS
    for each in (*folder.glob(f"{DATA}{digits}"), *folder.glob("__[0-9]*_[0-9]*.distcp")):  # the second: torch's own
        if each.name not in used:
            shutil.rmtree(each, ignore_errors=True)
            with contextlib.suppress(OSError):
                each.unlink(missing_ok=True)


def _metadata(folder: Path) -> Any:
    """What torch has written of the checkpoint in a folder.  Raises OSError where nothing is."""
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(folder).read_metadata()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The parts that hold tensors.  torch steps an optimizer that has no state yet, to find its names: that is undone.

    AdamW would count one step more than it has made.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict

    if optimizer is not None and has_masters(optimizer):
        raise StateError(
            "torch's checkpoints do not know the FP32 masters of this optimizer: give it as a part to save and load,"
            " fe.distributed.save(path, model, masters=optimizer)"
        )
    if isinstance(optimizer, ScaledOptimizer) and optimizer.scaler.is_enabled():
        raise StateError(
            "torch's checkpoints do not know the loss scale of this optimizer: give it as a part to save and load,"
            " fe.distributed.save(path, model, optimizer.inner, scaler=optimizer.scaler)"
        )
    is_new = optimizer is not None and not optimizer.state
    with _state_may_be_made(optimizer), unseen(states_of(model)):
        of_model, of_optimizer = get_state_dict(model, () if optimizer is None else optimizer)
    if optimizer is not None and is_new:
        optimizer.state.clear()
    return {"model": of_model} | ({} if optimizer is None else {"optimizer": of_optimizer})


@contextlib.contextmanager
def _state_may_be_made(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Without the gradients, for torch to make the state of an optimizer that has none: it makes none where any is."""
    groups = [] if optimizer is None or optimizer.state else optimizer.param_groups
    kept = [(p, p.grad) for group in groups for p in group["params"]]
    for p, _ in kept:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in kept:
            p.grad = gradient


def _copy(x: Any) -> Any:
    if hasattr(x, "__tensor_flatten__"):  # part by part: torchao's optimizer states, in a DTensor or not, have no clone
        names, rest = x.__tensor_flatten__()
        return type(x).__tensor_unflatten__({n: _copy(getattr(x, n)) for n in names}, rest, x.shape, x.stride())
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _check(path: Path, wanted: dict[str, Any]) -> tuple[object, bool]:
    """What names the save that this rank finds there, and whether its optimizer had no state.

    Raises StateError where there is none, or of other tensors.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = _metadata(_whole(path) or path)
    there = metadata.state_dict_metadata
    sizes = {name: tuple(kept.size) for name, kept in there.items() if isinstance(kept, TensorStorageMetadata)}
    for name, x in _flat(wanted):
        if name not in there:
            raise StateError(f"it has no {name}")
        if isinstance(x, torch.Tensor) and sizes.get(name) != tuple(x.shape):
            raise StateError(f"its {name} is {list(sizes.get(name, ()))}, wanted is {list(x.shape)}")
    unknown = sorted(name for name in sizes if name.startswith("model.") and name not in dict(_flat(wanted)))
    if unknown:
        raise StateError(f"it has {len(unknown)} tensors that the model has not, {unknown[0]} the first")
    return metadata.storage_meta and metadata.storage_meta.save_id, NEW in there


def _flat(parts: Mapping[str, Any]):
    """(dotted name, value) of every tensor and of every part that is one value, as DCP names them."""
    for name, part in parts.items():
        if isinstance(part, Mapping):
            yield from ((f"{name}.{below}", value) for below, value in _flat(part))
        elif isinstance(part, torch.Tensor | bytes):
            yield str(name), part
