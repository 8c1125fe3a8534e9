"""Operands that travel with their tensor: `x.fp8` holds what layers have cast x to, by cast.

The first layer that reads x (q) casts it and leaves the operand there; the others (k, v) find it.  A producer (a norm,
an activation; autograd/produce.py) may leave codes there beforehand.  x alone holds its operands, so that they are
freed with it.  A view, a sum or what a hook returns is another tensor, which has none; a tensor that is copied or saved
takes none along.

What a producer has made is read again by any layer, once each, in the same thread, while its version, and on a CPU its
fingerprint, stand still.  Of any other tensor that does not prove that its values are the same: callers refill buffers
by NumPy, `.data` and collectives, which move no version counter.  So its operands are read again only

    by another layer of the same parent module, once each      a layer that runs a second time casts again
    within one forward of the converted root, or one backward  a block that a checkpoint recomputes there
    in the same thread                                         another thread may run on another CUDA stream
    in the same CUDA graph, or outside of any                  a replay changes what was cast before the capture
    while version, and on a CPU the fingerprint, stand still   a CPU shares contiguous inputs alone

Outside of a forward of the root nothing is attached to it, and when it ends nothing stays attached: a user's batch
keeps no operands.

A graph knows no version counters.  There a producer's result carries the number of the graph's nodes that were traced
before it, and operands are read again if no node traced since writes in place (`unwritten`).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fp8engine import _torch
from fp8engine.ops.fingerprint import capturing, fingerprint
from fp8engine.ops.reference import Operand, Slot
from fp8engine.scaling.written import Place, unwritten

# Operands made of one tensor, and the slot that counted each, by the cast's `text`, or its `text_of_transpose`.
Made = dict[str, tuple[Operand, Slot]]


def siblings(names: Iterable[str]) -> list[str | None]:
    """For each layer the name of its parent module, None where no other layer has that parent.

    An adapter's shell around a layer does not count: peft names the layer `q_proj.base_layer`.

    >>> siblings(["h.0.attn.q", "h.0.attn.k", "h.0.mlp.up", "h.1.attn.q.base_layer", "h.1.attn.k.base_layer"])
    ['h.0.attn', 'h.0.attn', None, 'h.1.attn', 'h.1.attn']
    """
    parents = [name.removesuffix(".base_layer").rpartition(".")[0] for name in names]
    count = Counter(parents)
    return [parent if count[parent] > 1 else None for parent in parents]


class Operands(Made):
    """Operands of one tensor.

    seen: what must be unchanged where they are read; None until the first is made.  consumers: layers that read them.
    producer: what made the tensor, if it is told who reads it.  place: where in a graph it was made.
    again: how it is made a second time in backward, where no operand of it is to be kept until then.
    """

    seen: tuple | None = None
    producer: Producer | None = None
    place: Place | None = None
    again: Again | None = None
    consumers: frozenset[int] = frozenset()

    def __reduce__(self):
        return OrderedDict, ()  # of a tensor that is saved; torch.load(weights_only=True) refuses a plain dict


class Again:
    """How a tensor is made a second time: make(of, tensors), tensors being what whoever reads it saves instead.

    In eager code it is made once for all layers that wait for it in a backward pass, with the casts that they share.
    """

    def __init__(self, make: Callable[[tuple, Any], torch.Tensor], of: tuple, tensors: tuple):
        self.make, self.of, self.tensors = make, of, tensors
        self.waiting = 0
        self.made: tuple[torch.Tensor, Made] | None = None

    def result(self, tensors: Sequence[torch.Tensor | None], compiling: bool) -> tuple[torch.Tensor, Made]:
        """The tensor as a matrix, and the operands that other layers have made of it."""
        if compiling:
            return self.make(self.of, tensors), {}
        found = self.made or (self.make(self.of, tensors), {})
        self.waiting -= 1
        self.made = found if self.waiting > 0 else None
        return found


class Producer:
    """What a norm or an activation knows of the layers that read its result.

    reader: numerics of the layer for which codes are written beside the next result; None: nobody has read one.
    transposed: whether their transpose is read too.  unread: results with codes that nobody has read, in a row.
    back: the same for the gradient that an activation's backward gives to the layer before it.
    """

    MOST_UNREAD = 16  # several threads may be between a norm and its reader

    def __init__(self, name: str = ""):
        self.name, self.reader, self.transposed, self.unread = name, None, True, 0
        self.back: Producer | None = None

    def read_by(self, reader: Any, transposed: bool) -> None:
        """A layer reads the result: it has found its operand, or makes it now."""
        self.reader, self.transposed, self.unread = self.reader or reader, transposed, 0

    def __reduce__(self):
        return Producer, (self.name,)  # the readers of a copy are others


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

    def operands(self, x: torch.Tensor, layer: int, parent: str | None) -> Operands:
        """The operands of x, for a layer with that parent, which adds those that it makes; of no tensor, where none may
        be attached to x.
        """
        if x.device.type == "cpu" and not x.is_contiguous():
            return Operands()
        found, task = vars(x).get("fp8"), _torch.graph_task()  # of the backward pass under way; -1 outside of one
        found = found if type(found) is Operands else Operands()
        if found.producer is not None:
            seen = unchanged(x)
            valid = found.place is None and found.seen in (None, seen)  # a graph may have written into what it has made
        else:
            during = self.number if task == -1 else task
            if during is None or parent is None:
                return Operands()
            seen = (during, parent, *unchanged(x))
            valid = found.seen == seen
        if not valid or layer in found.consumers:
            producer, again = found.producer, found.again
            x.fp8 = found = Operands()  # pyright: ignore[reportAttributeAccessIssue]
            found.producer, found.again = producer, again
        if not found.consumers and task == -1 and self.number is not None:
            self.attached.append(weakref.ref(found))
        found.seen, found.consumers = seen, found.consumers | {layer}
        return found

    def __reduce__(self):
        return RootForward, ()


def unchanged(x: torch.Tensor) -> tuple:
    """What is equal while x holds the values that it holds, as far as a thread can know without waiting for a card."""
    values = fingerprint(x) if _torch.dispatch_modes() == 0 else []  # a mode would be shown what reads them
    return threading.get_ident(), x._version, capturing(x.device), values


def operands_of_gradient(dy: torch.Tensor) -> Operands | None:
    """What an activation's backward has made of dy, if dy is what it gave."""
    found = vars(dy).get("fp8")
    if type(found) is not Operands or (found.seen is not None and found.seen != unchanged(dy)):
        return None
    return found


def carries(x: torch.Tensor) -> bool:
    """Whether a producer's result x may take operands along, in eager code; a fake one where a step is planned."""
    return type(x) in (torch.Tensor, _torch.FakeTensor) and not x.is_meta and not x.is_inference()


def in_graph(x: torch.Tensor) -> Operands:
    """The operands of x in a graph that is being traced, where a producer of this graph has made x."""
    found = getattr(x, "fp8", None)
    if isinstance(found, Operands) and found.place is not None and unwritten(found.place):
        return found
    return Operands()
