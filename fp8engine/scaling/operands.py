"""Operands that travel with their tensor: `x.fp8` holds what sibling layers have cast x to, by cast.

The first layer that reads x (q) casts it and leaves the operand there; its siblings (k, v) find it.  x alone holds its
operands, so that they are freed with it.  A view, a sum or what a hook returns is another tensor, which has none; a
tensor that is copied or saved takes none along.

That a tensor is the same object with the same version counter does not prove that its values are: NumPy, `.data` and
collectives write without moving the counter.  So operands are read again only

    by another layer of the same parent module, once each      a layer that runs a second time casts again
    within one forward of the converted root, or one backward  a block that a checkpoint recomputes there
    in the same thread                                         another thread may run on another CUDA stream
    in the same CUDA graph, or outside of any                  a replay changes what was cast before the capture
    while version, and on a CPU the fingerprint, stand still   a CPU shares contiguous inputs alone

Outside of a forward of the root nothing is attached, and when it ends nothing stays attached: a user's batch keeps no
operands.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable

import torch

from fp8engine import _torch
from fp8engine.ops.fingerprint import capturing, fingerprint
from fp8engine.ops.reference import Operand, Slot

# Operands made of one tensor, and the slot that counted each.
Kept = dict[Hashable, tuple[Operand, Slot]]  # by the cast; by (cast, "transposed") for the transpose under it


def siblings(names: Iterable[str]) -> list[str | None]:
    """For each layer the name of its parent module, None where no other layer has that parent.

    An adapter's shell around a layer does not count: peft names the layer `q_proj.base_layer`.

    >>> siblings(["h.0.attn.q", "h.0.attn.k", "h.0.mlp.up", "h.1.attn.q.base_layer", "h.1.attn.k.base_layer"])
    ['h.0.attn', 'h.0.attn', None, 'h.1.attn', 'h.1.attn']
    """
    parents = [name.removesuffix(".base_layer").rpartition(".")[0] for name in names]
    count = Counter(parents)
    return [parent if count[parent] > 1 else None for parent in parents]


class Operands(Kept):
    """Operands of one tensor.  seen: what must be unchanged where they are read.  consumers: layers that read them."""

    __slots__ = ("__weakref__", "consumers", "seen")

    def __init__(self, seen: tuple):
        super().__init__()
        self.seen = seen
        self.consumers: set[int] = set()

    def __reduce__(self):
        return OrderedDict, ()  # of a tensor that is saved; torch.load(weights_only=True) refuses a plain dict


class RootForward(threading.local):
    """The forward of the root that runs in this thread: between `begin` and `end` its layers share operands."""

    def __init__(self):
        self.number: object | None = None  # equal to itself alone, so that no two forwards have the same
        self.attached: list[weakref.ref[Operands]] = []

    def begin(self) -> None:
        """A forward begins."""
        self.end()
        self.number = object()

    def end(self) -> None:
        """It has ended, or failed: nothing that was made of its tensors is read again."""
        for reference in self.attached:
            if (found := reference()) is not None:
                found.clear()
        self.number, self.attached = None, []

    def operands(self, x: torch.Tensor, layer: int, parent: str) -> Kept:
        """The operands of x, for a layer with that parent, which adds those that it makes; of no tensor, where none may
        be attached to x.
        """
        task = _torch.graph_task()  # of the backward pass under way; -1 outside of one
        during = self.number if task == -1 else task
        if during is None or (x.device.type == "cpu" and not x.is_contiguous()):
            return {}
        seen = (during, parent, x._version, capturing(x.device), fingerprint(x))
        found = vars(x).get("fp8")
        if not isinstance(found, Operands) or found.seen != seen or layer in found.consumers:
            x.fp8 = found = Operands(seen)  # pyright: ignore[reportAttributeAccessIssue]
            if task == -1:
                self.attached.append(weakref.ref(found))
        found.consumers.add(layer)
        return found

    def __reduce__(self):
        return RootForward, ()
