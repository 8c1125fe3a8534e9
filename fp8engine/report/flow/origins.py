"""Origins of tensors' values, kept by storage.

An Origin is one thing that made values: one call of a layer, a norm, a residual addition, the model's input.  The
result of a view-like operation keeps its input's origins; a view shares those of its base, since both are one storage.
A storage is referenced weakly: its memory is freed as usual, but its key is not given to another one while recording.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(eq=False)
class Origin:
    """One call that made values, and its consumers.

    kind, name, where: as a Consumer has them.  layer: of which layer it is a call.  of: what it read.
    consumers: what read it.  depends: whether a layer's output is in it.  elementwise: a function of single elements of
    `of`.  reduced: a sum, mean or maximum over elements of `of`, from which a norm may come.
    scores: attention's, before its values have been weighed.  same_as: another origin that this one is a part of.
    call: which call of the module `where` it happened in.
    """

    kind: str
    name: str
    where: str
    of: list[Origin] = field(default_factory=list)
    layer: str | None = None
    consumers: list[Origin] = field(default_factory=list)
    depends: bool = False
    elementwise: bool = False
    reduced: bool = False
    scores: bool = False
    same_as: Origin | None = None
    call: int = 0

    def reads(self, origins: Iterable[Origin]) -> None:
        """Note that it reads what these made."""
        for origin in origins:
            if origin is not self and origin not in self.of:
                self.of.append(origin)
                origin.consumers.append(self)
                self.depends = self.depends or origin.depends

    def resolved(self) -> Origin:
        """Itself, or what it is a part of."""
        return self if self.same_as is None else self.same_as.resolved()

    def roots(self) -> list[Origin]:
        """What it is a function of, through elementwise functions: a mean of squares is one of x."""
        found = list(self.of)
        for origin in self.of:
            if origin.elementwise:
                found += origin.roots()
        return found


class State(NamedTuple):
    """Origins of a tensor's values; where it has none, the parameters that it was made of."""

    origins: tuple[Origin, ...] = ()
    parameters: tuple[str, ...] = ()

    def joined(self, other: State) -> State:
        """Both."""
        origins, parameters = self.origins + other.origins, self.parameters + other.parameters
        return State(tuple(dict.fromkeys(origins)), tuple(dict.fromkeys(parameters)))

    @property
    def depends(self) -> bool:
        """Whether a layer's output is in it."""
        return any(origin.depends for origin in self.origins)

    @property
    def elementwise(self) -> Origin | None:
        """The one elementwise function that it is, or None."""
        return self.origins[0] if len(self.origins) == 1 and self.origins[0].elementwise else None

    @property
    def scores(self) -> Origin | None:
        """The attention whose scores it is, or None."""
        return self.origins[0] if len(self.origins) == 1 and self.origins[0].scores else None

    @property
    def reduced(self) -> bool:
        """Whether it is nothing but sums, means or maxima of something."""
        return bool(self.origins) and all(origin.reduced for origin in self.origins)


NOTHING = State()


class States:
    """The State of every tensor, by its storage; a tensor never seen is a constant: NOTHING."""

    def __init__(self):
        self._of: dict[object, State] = {}

    def __getitem__(self, tensor: torch.Tensor) -> State:
        return self._of.get(_key(tensor), NOTHING)

    def __setitem__(self, tensor: torch.Tensor, state: State) -> None:
        key = _key(tensor)
        if state is not NOTHING or key in self._of:
            self._of[key] = state

    def same_memory(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether two tensors lie in one storage."""
        return _key(a) == _key(b)

    def written(self, tensor: torch.Tensor, state: State) -> None:
        """Note that `tensor` was written in place: a part of its storage, or all of it."""
        whole = tensor.numel() * tensor.element_size() >= _bytes(tensor)
        self[tensor] = state if whole else self[tensor].joined(state)


def place(tensor: torch.Tensor) -> tuple:
    """A key that two tensors share if they are the same values in the same memory, whatever their shapes."""
    version = 0 if tensor.is_inference() else tensor._version
    return _key(tensor), tensor.storage_offset(), tensor.numel(), tensor.dtype, version


def _key(tensor: torch.Tensor) -> object:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except RuntimeError:  # a subclass that has no storage: kept by itself, and kept alive
        return _ById(tensor)


def _bytes(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except RuntimeError:  # as above: a write to it is always one to all of it
        return 0


class _ById:
    """A tensor as a key: itself and no other."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __hash__(self) -> int:
        return id(self.tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.tensor is self.tensor
