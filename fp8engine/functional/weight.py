"""How long the FP8 copies of a weight live: a byte an element and orientation, against the time to cast it again.

    auto    until the backward that reads them; across calls once one version of the weight is read again:
            frozen       it takes no gradient
            inference    called without gradients; given up when a backward comes after all
            read again   a second microbatch had to cast what the first one had; remembered for the next versions
    True    as long as the weight stands ("asked")
    False   not even until backward, which casts the weight again

A copy is used again only while the parameter's version counter, address and a sample of its values stand still: writes
through `.data` do not move the counter; on a CPU the sample catches them, elsewhere nothing can for free.
What a pending backward holds anyway is found again by every call, at no cost: a layer called twice, a recompute.
"""

from __future__ import annotations

import weakref

import torch

from fp8engine.reference import How
from fp8engine.scaling import Kept, in_backward


class Copies(Kept):
    """Operands of one version of a weight, by cast."""

    __slots__ = ("__weakref__",)


class KeptWeight:
    """The copies of one layer's weight.

    kept: those that outlive their readers.  why: the word of the table above, "" where nothing is kept.
    holds: whether the latest call's copies wait for their backward.
    """

    def __init__(self, cache: bool | str = "auto"):
        self.cache = cache
        self.where = self.key = None
        self.sample = torch.empty(0)
        self.kept = Copies()
        self.why, self.holds = "", False
        self.latest = weakref.ref(self.kept)
        self.again = False  # this version was read by more than one step's worth of calls

    def operands(self, weight: torch.Tensor, training: bool) -> Copies:
        """What has been made of this version; the caller adds to it, and holds what its backward reads."""
        self.holds = False
        if self.cache is False:
            return Copies()
        where = (weight.data_ptr(), weight.shape)
        if where != self.where:
            self.where, self.sample = where, _view_of_a_few(weight)
        key = (where, weight._version, self.sample.tolist())
        # Without a sample (CUDA) a version that never moved proves nothing: fully_shard's unsharded weights stay at 0,
        # and what is held until backward would undo its sharding.
        if weight._version == 0 and not len(self.sample) and self.cache is not True:
            self.give_up()
            return Copies()
        self.holds = True
        found = self.latest()
        if key != self.key:
            habit, self.again = self.again and self.cache == "auto", False
            self.key, self.why, found = key, "read again" if habit else "", None
            if self.cache is True:
                self.why = "asked"
            elif training and not weight.requires_grad:
                self.why = "frozen"
        elif training and self.why in ("", "read again") and not in_backward() and (found is None or self.why):
            self.again, self.why = True, "read again"
        if not (self.why or training):
            self.why = "inference"
        if found is None:
            found = Copies()
            self.latest = weakref.ref(found)
        self.kept = found if self.why else Copies()
        return found

    def after_forward(self, copies: Kept, how: How | None) -> None:
        """Forward has read the cast `how`, which backward will not: gone, unless it is kept for the next call."""
        if copies is not self.kept:
            copies.pop(how, None)  # nothing to pop where the weight was read in 16 bits

    def after_backward(self) -> None:
        """A backward came: what was kept for an inference is needed no more (the weight is about to change)."""
        if self.why == "inference":
            self.give_up()

    def give_up(self) -> None:
        """Keep nothing."""
        self.why, self.kept, self.key = "", Copies(), None


def _view_of_a_few(weight: torch.Tensor) -> torch.Tensor:
    """Some 8 of a CPU weight's elements, seen without a copy: any optimizer's step moves them.

    Not through NumPy: a storage that NumPy has seen cannot be resized any more, which fully_shard does every step.
    """
    as_stored = weight if weight.is_contiguous() else weight.mT  # a Conv1D's is a transposed view
    if weight.device.type != "cpu" or not as_stored.is_contiguous() or weight.numel() == 0:
        return torch.empty(0)
    bits = as_stored.detach().view(torch.int32 if weight.dtype == torch.float32 else torch.int16).view(-1)
    return bits[:: max(weight.numel() // 8, 1)]
