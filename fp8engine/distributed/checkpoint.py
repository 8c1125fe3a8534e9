"""Checkpoints of a sharded model by torch.distributed.checkpoint, for any number of ranks to load, and for torch.

`save` writes one folder; its parts "model" and "optimizer" are torch's own, so that `dcp_to_torch_save` and `dcp.load`
read them without this library.  `load` reads into copies first: a checkpoint that is cut short, or of another model,
is an error on every rank and changes nothing.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fp8engine import _torch
from fp8engine.errors import StateError
from fp8engine.nn.linear import float8_modules
from fp8engine.ops import ranks


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
    has named a group).  A checkpoint that is there already stays whole until the new one is, and is then replaced.
    Raises what torch.distributed.checkpoint raises for a folder that cannot be written.
    """
    from torch.distributed import checkpoint

    for state in {id(layer.numerics.state): layer.numerics.state for layer in float8_modules(model)}.values():
        if state.ranks and state.delayed:
            ranks.join(state.live_2S[0], state.ranks, torch.zeros_like(state.saved_1))
    parts: dict[str, Any] = _tensors(model, optimizer)
    for name, other in others.items():
        written = io.BytesIO()
        torch.save(other.state_dict(), written)
        parts[name] = written.getvalue()  # one value, whatever is in it: the first rank's
    part = Path(f"{os.fspath(path)}.part")
    _first_rank(lambda: shutil.rmtree(part, ignore_errors=True))  # of a save that was interrupted
    checkpoint.save(parts, checkpoint_id=part)
    _first_rank(lambda: _replace(Path(path), part))


def load(
    path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **others: Stateful
) -> None:
    """Put back what `save` wrote, on any number of ranks, into the same model, converted or not; every rank calls it.

    others: by the names that they were saved under.  Raises StateError on every rank, with nothing changed, for a
    folder that holds no whole checkpoint, or one of another model.
    """
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.checkpoint.state_dict import set_state_dict

    wanted = _tensors(model, optimizer)
    parts: dict[str, Any] = dict.fromkeys(others, b"")
    error: BaseException | None = None
    copies = _torch.tree_map(_copy, wanted) | parts
    try:
        _read(path, copies)
        states = {name: torch.load(io.BytesIO(copies[name]), weights_only=True) for name in others}
    except CheckpointException as found:  # what every rank is told of the ranks that could not read
        error, states = next(iter(found.failures.values()))[0], {}
    except Exception as found:  # whatever torch raises on this rank alone
        error, states = found, {}
    _raise_alike(error, path)
    for name, other in others.items():
        other.load_state_dict(states[name])  # first: it checks before it changes anything
    optimizers = () if optimizer is None else optimizer
    set_state_dict(model, optimizers, model_state_dict=copies["model"], optim_state_dict=copies.get("optimizer", {}))


def _first_rank(action: Callable[[], None]) -> None:
    """The action on the first rank; the others wait until it is done."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        action()
    if dist.is_initialized():
        dist.barrier()


def _replace(path: Path, part: Path) -> None:
    before = Path(f"{path}.before")
    shutil.rmtree(before, ignore_errors=True)
    if path.exists():
        path.rename(before)
    part.rename(path)
    shutil.rmtree(before, ignore_errors=True)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

    if optimizer is None:
        return {"model": get_model_state_dict(model)}
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _read(path: str | os.PathLike, copies: dict[str, Any]) -> None:
    """Fill the copies.  Raises StateError where the checkpoint holds other tensors."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    there = checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    sizes = {name: tuple(kept.size) for name, kept in there.items() if isinstance(kept, TensorStorageMetadata)}
    for name, x in _flat(copies):
        if name not in there:
            raise StateError(f"it has no {name}")
        if isinstance(x, torch.Tensor) and sizes.get(name) != tuple(x.shape):
            raise StateError(f"its {name} is {list(sizes.get(name, ()))}, wanted is {list(x.shape)}")
    unknown = sorted(name for name in sizes if name.startswith("model.") and name not in dict(_flat(copies)))
    if unknown:
        raise StateError(f"it has {len(unknown)} tensors that the model has not, {unknown[0]} the first")
    checkpoint.load(copies, checkpoint_id=path)


def _flat(parts: Mapping[str, Any]):
    """(dotted name, value) of every tensor and of every part that is one value, as DCP names them."""
    for name, part in parts.items():
        if isinstance(part, Mapping):
            yield from ((f"{name}.{below}", value) for below, value in _flat(part))
        elif isinstance(part, torch.Tensor | bytes):
            yield str(name), part


def _raise_alike(error: BaseException | None, path: str | os.PathLike) -> None:
    """Raise StateError on every rank where one of them has found an error."""
    told = [None if error is None else f"{type(error).__name__}: {error}"]
    if dist.is_initialized():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, told[0])
        told = everyone
    found = [(rank, text) for rank, text in enumerate(told) if text is not None]
    if found:
        rank, text = found[0]
        raise StateError(
            f"{os.fspath(path)} is no whole checkpoint of this model (rank {rank}: {text.splitlines()[0]}); nothing "
            "was loaded: name a folder that fe.distributed.save has written from the same model and optimizer"
        ) from error
