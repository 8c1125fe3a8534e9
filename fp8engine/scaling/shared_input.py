"""The FP8 operands of one input that sibling layers share: made by the first (q), read by the others (k, v).

That a tensor is the same object with the same version counter does not prove that its values are: NumPy, `.data` and
collectives write without moving the counter.  So operands are read again only

    by another layer of the same parent module, once each      a layer that runs a second time casts again
    within one forward of the converted root, or one backward  a block that a checkpoint recomputes there
    in the same thread                                         another thread may run on another CUDA stream
    in the same CUDA graph, or outside of any                  a replay changes what was cast before the capture
    while version, and on a CPU the fingerprint, stand still   a CPU shares contiguous inputs alone

Outside of a forward of the root nothing is shared.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
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


class _Entry:
    """What was made of one tensor.  seen: what must still hold.  readers: layers that have read it."""

    __slots__ = ("kept", "readers", "seen", "tensor")

    def __init__(self, x: torch.Tensor, seen: tuple):
        kept: Kept = {}
        # The tensor is freed: so are its operands, whatever thread frees it.
        self.tensor, self.seen, self.kept = weakref.ref(x, lambda _: kept.clear()), seen, kept
        self.readers: set[int] = set()


class SharedInput(threading.local):
    """Operands of the input that the layers of a model read last, in this thread."""

    def __init__(self):
        self.active = False  # whether a forward of the root is running
        self.entry: _Entry | None = None  # None again when one begins or ends

    def operands(self, x: torch.Tensor, layer: int, parent: str) -> Kept:
        """What has been made of this very tensor so far, for a layer with that parent; the caller adds to it."""
        task = _torch.graph_task()  # of the backward pass under way; -1 outside of one
        outside = task == -1 and not self.active
        if outside or (x.device.type == "cpu" and not x.is_contiguous()):
            return {}
        seen = (task, parent, x._version, capturing(x.device), fingerprint(x))
        entry = self.entry
        if entry is None or entry.tensor() is not x or entry.seen != seen or layer in entry.readers:
            entry = self.entry = _Entry(x, seen)
        entry.readers.add(layer)
        return entry.kept

    def __reduce__(self):
        return SharedInput, ()
