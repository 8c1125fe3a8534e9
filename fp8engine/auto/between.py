"""Whether an optimizer has stepped between two training forwards: only there may a decision be adopted.

A change between two forwards of one optimizer step (microbatches, a second forward before a backward) would give one
gradient parts in two formats, and a gathered weight two formats in one step.  An optimizer's step is seen by

    the version counters of the trained parameters, which it moves
    gradients that came and are gone                                   an optimizer that writes through `.data`

Where neither tells, a decision waits for PATIENCE forwards, and is then adopted after a backward; so is, at once, that
of layers without a root that is called.
"""

from __future__ import annotations

import weakref

from torch import nn

PATIENCE = 1024  # forwards
SAME = -1  # in place of the counters of a state that was saved before the optimizer had stepped
Root = weakref.ref[nn.Module] | None


class Between:
    """The counters at the last training forward.

    seen: their sum; None: nothing ran before.  waited: forwards since something was to be decided.
    """

    def __init__(self):
        self.seen: int | None = None
        self.waited = 0

    def opens(self, root: Root, backward: bool) -> bool:
        """Whether the training forward that begins may adopt a decision.  backward: one came since the last forward."""
        trained = _trained(root)
        if not trained:
            return backward
        if self._moved(trained) or (backward and all(p.grad is None and type(p) is nn.Parameter for p in trained)):
            self.waited = 0
            return True
        self.waited += 1
        return backward and self.waited > PATIENCE

    def note(self, root: Root, undecided: bool) -> None:
        """A training forward begins.  undecided: whether anything waits to be decided; else no counter is read."""
        self.seen = _counters(_trained(root)) if undecided else None

    def state(self, root: Root) -> list[int]:
        """As `load` takes it."""
        return [int(not self._moved(_trained(root))), self.waited]

    def load(self, same: int, waited: int) -> None:
        """Go on where `state` was called, with parameters that have other counters."""
        self.seen, self.waited = SAME if same else None, waited

    def _moved(self, trained: list[nn.Parameter]) -> bool:
        return self.seen is None or self.seen not in (SAME, _counters(trained))


def _trained(root: Root) -> list[nn.Parameter]:
    """The trained parameters of a model; none of no model."""
    model = None if root is None else root()
    return [] if model is None else [p for p in model.parameters() if p.requires_grad and not p.is_inference()]


def _counters(trained: list[nn.Parameter]) -> int:
    return sum(p._version for p in trained)
