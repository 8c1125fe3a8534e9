"""Cache of a weight's FP8 copies: how long they live, a byte an element and orientation, against casting again.

    auto    until the backward that reads them; across calls once one version of the weight is read again:
            frozen       it takes no gradient
            inference    called without gradients; given up when a backward comes after all
            read again   a second microbatch had to cast what the first one had; remembered for the next versions
    True    as long as the weight stands ("asked")
    False   not even until backward, which casts the weight again

Under predicted scales a copy stands until they are predicted again, that of a frozen weight until its amax fills the
window and its scale stays; but for "asked".
A copy is used again only while the parameter is the same tensor (`Mark`) at the same address and its version counter
stands still, and on a CPU its fingerprint too (of its samples alone where a copy was asked for).  Writes through
`.data` and by collectives do not move the counter.  Where nothing can be read without waiting for the device:

    a counter at 0         proves nothing, because fully_shard's unsharded weights stay there: nothing is kept
    training               a copy is kept for the next microbatch only if the counter was seen to move between steps
    a captured CUDA graph  its replays change weights, and no counter: from the capture on nothing is kept or used again
    everything else        the caller of `fe.weights_changed(model)` says so

What a pending backward holds anyway is found again by every call, at no cost: a layer called twice, a recompute.
Several threads may read one weight at once: what is known of a version is one object that is replaced as a whole.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable

import torch

from fp8engine.ops.fingerprint import capturing, fingerprint
from fp8engine.ops.library import in_backward
from fp8engine.scaling.operands import Made, Operands


class Mark:
    """An attribute of a weight, by which that tensor is known again.

    torch.utils.swap_tensors takes it along with the values, and refuses a tensor that a weak reference knows.
    """

    def __reduce__(self):
        return (
            OrderedDict,
            (),
        )  # of a tensor that is saved or copied; torch.load(weights_only=True) refuses a plain dict

    @staticmethod
    def of(weight: torch.Tensor) -> Mark:
        """The mark of that tensor, the same at every call."""
        found = vars(weight).get("fp8_mark")
        if not isinstance(found, Mark):
            weight.fp8_mark = found = Mark()  # pyright: ignore[reportAttributeAccessIssue]
        return found


class Version:
    """One version of a weight and its copies.

    why: the word of the table above, "" for nothing kept.  since: how many scales were predicted at its first use.
    """

    def __init__(self, mark: Mark | None = None, key: tuple = (), why: str = "", since: int = 0):
        self.mark, self.key, self.why, self.since = mark, key, why, since
        self.kept: Operands | None = None
        self.latest: Callable[[], Operands | None] = _nothing

    @property
    def read_again(self) -> bool:
        """Whether the next training forward is another microbatch's: the first one's copies are gone, or kept."""
        return self.why == "read again" or (self.why == "" and self.latest() is None)

    def operands(self) -> Operands:
        """What a call or this version still references; this version keeps it where there is a reason."""
        found = self.latest()
        if found is None:
            found = Operands()
            self.latest = weakref.ref(found)
        self.kept = found if self.why else None
        return found


def _nothing() -> None:
    """No copies yet."""


class KeptWeight:
    """The copies of one layer's weight.  cache: the recipe's `cache_weights`.

    joined: ranks cast their parts of it together.  None may find a copy that others do not, so none is looked for.
    product: what is cast is the weight times other scales at every call (smooth.py).
    window: steps of amaxes that decide a predicted scale.
    """

    def __init__(self, cache: bool | str = "auto", joined: bool = False, product: bool = False, window: int = 1):
        self.cache, self.joined, self.product, self.window = cache, joined, product, window
        self.version = Version()
        self.again = False  # the latest version was read by more than one step's worth of calls
        self.moves = False  # its counter has moved between calls
        self.captured = False  # a CUDA graph was captured that reads the weight

    @property
    def kept(self) -> Operands:
        """The copies that outlive their consumers."""
        return self.version.kept or Operands()

    @property
    def why(self) -> str:
        """Why they do."""
        return self.version.why

    def operands(
        self, weight: torch.Tensor, training: bool, predictions: int = 0, s: float = 0.0
    ) -> tuple[Made, bool, bool]:
        """(operands, wait, outlive): the FP8 copies of the weight's current version, where calls insert what they make;
        whether these wait for the backward of the call that reads them; and whether they outlive it.

        predictions: of the weight's scale so far.  A copy under an older one is not read again: what a layer computes
        does not depend on which copies there are.  (A frozen weight's amax fills the window, and its scale stays then.)
        s: the predicted factor, where the host knows it.
        weight: real data, of eager code.
        """
        if self.cache is False:
            return Operands(), False, False
        if self.product:
            return Operands(), True, False
        if self.joined:
            return Operands(), weight._version > 0, False  # of a counter at 0: below
        if self.captured or capturing(weight.device):
            self.captured, self.version = True, Version()
            return Operands(), True, False
        seen = fingerprint(weight, whole=self.cache is not True)
        if weight._version == 0 and not seen and self.cache is not True:
            self.give_up()
            return Operands(), False, False  # held until backward, it would undo fully_shard's sharding
        mark = Mark.of(weight if weight._base is None else weight._base)  # a Conv1D's is a new view at every call
        version, values = self.version, (weight.data_ptr(), (weight.shape, weight.stride()), weight._version, seen)
        stands = version.mark is mark and version.key[:-2] == values
        since = version.since if stands else predictions
        if self.cache is True:
            predictions, s = 0, 0.0
        elif not weight.requires_grad:
            predictions = min(predictions - since, self.window)
        key = (*values, predictions, s)
        if not stands or version.key != key:
            self.moves |= version.key[:2] == key[:2] and version.key[2] != key[2]
            version = self.version = Version(mark, key, self._why_kept(weight, training), since)
        elif training and not in_backward() and version.read_again and (seen or self.moves):
            self.again, version.why = True, "read again"
        if not (version.why or training):
            version.why = "inference"
        return version.operands(), True, bool(version.why)

    def _why_kept(self, weight: torch.Tensor, training: bool) -> str:
        """Why copies of a version that is read for the first time outlive their consumers."""
        habit, self.again = self.again and self.cache == "auto", False
        if self.cache is True:
            return "asked"
        if training and not weight.requires_grad:
            return "frozen"
        return "read again" if habit else ""

    def after_backward(self) -> None:
        """A backward came: what was kept for an inference is needed no more (the weight is about to change)."""
        if self.version.why == "inference":
            self.give_up()

    def give_up(self) -> None:
        """Keep nothing, and use nothing again."""
        self.version = Version()
