"""The engine of both comparisons of two runs of a model: each module's output, its relative error and its SQNR.

    error = ||low - high||_2 / ||high||_2        SQNR = 10 log10(||high||^2 / ||low - high||^2) dB

Sums are taken in FP64 over the elements that are finite in both runs; the others are counted.  `fe.amp.compare` (two
dtypes) and `fp8engine compare` (a model and its FP8 copy) are its front ends: `run_both` gives them the calls of both
runs in pairs, `Difference` adds up what they choose of each pair.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from fp8engine.amp.tensors import floating


@dataclass
class Difference:
    """Sums of squares of a reference (signal) and of the deviation from it (noise), over one or more tensors.

    nonfinite_low, nonfinite_high: how many elements are NaN or Inf.  finite: how many are neither, in both.  pairs: how
    many tensors were added.  comparable: each had its counterpart, of its own shape; where one had not, the others say
    nothing.

    >>> difference = Difference()
    >>> difference.add(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    >>> round(difference.error, 4), round(difference.sqnr_db, 2)
    (0.2236, 13.01)
    """

    signal: float = 0.0
    noise: float = 0.0
    nonfinite_low: int = 0
    nonfinite_high: int = 0
    pairs: int = 0
    comparable: bool = True
    finite: int = 0

    def add(self, low: torch.Tensor, high: torch.Tensor | None, rows: int | None = None) -> None:
        """Add two tensors, high None where its run has none.  rows: to convert to FP64 at once, by default all."""
        self.pairs += 1
        if high is None or low.shape != high.shape:
            self.comparable = False
            return
        pairs = [(low, high)] if rows is None else zip(low.split(rows), high.split(rows), strict=True)
        for ours, theirs in pairs:
            finite_low, finite_high = ours.isfinite(), theirs.isfinite()
            wrong_low, wrong_high = int((~finite_low).sum()), int((~finite_high).sum())
            got, want = ours.double(), theirs.double()
            if wrong_low or wrong_high:
                both = finite_low & finite_high
                got, want = got[both], want[both]
            self.noise += (got - want).square().sum().item()
            self.signal += want.square().sum().item()
            self.finite += want.numel()
            self.nonfinite_low += wrong_low
            self.nonfinite_high += wrong_high

    @property
    def error(self) -> float:
        """Relative error over the finite elements: Inf where the reference is 0 and the other is not."""
        if self.signal:
            return math.sqrt(self.noise / self.signal)
        return math.inf if self.noise else 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantisation-noise ratio in dB.

        Inf where nothing differs, -Inf where the reference is 0 and the other is not, NaN where an element is not
        finite or a sum of squares overflows FP64.
        """
        if self.nonfinite_low or self.nonfinite_high or not math.isfinite(self.signal + self.noise):
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def sqnr_db_or_none(self) -> float | None:
        """The same; None where there was nothing to compare."""
        return self.sqnr_db if self.pairs and self.comparable else None


class Call(NamedTuple):
    """One finished forward of one module.  key: the module's name, and the number of its earlier calls in this run."""

    key: tuple[str, int]
    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    output: Any

    def tensors(self) -> list[torch.Tensor]:
        """The floating tensors in the output, without their graphs; a later in-place function may still write them.

        Of a nested tensor its values, in one.
        """
        return [(tensor.values() if tensor.is_nested else tensor).detach() for tensor in floating(self.output)]


@contextlib.contextmanager
def on_calls(modules: Mapping[str, nn.Module], listener: Callable[[Call], None]) -> Iterator[None]:
    """Inside the block, give `listener` each call of the modules as it finishes: inner modules before outer ones.

    >>> calls = []
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with on_calls(dict(model.named_modules()), calls.append):
    ...     _ = model(torch.ones(1, 2))
    >>> [call.key for call in calls]
    [('0', 0), ('1', 0), ('', 0)]
    """
    counts = dict.fromkeys(modules, 0)

    def hook(name: str) -> Callable:
        def finished(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            counts[name] += 1
            listener(Call((name, counts[name] - 1), module, args, kwargs, output))

        return finished

    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(module.register_forward_hook(hook(name), with_kwargs=True).remove)
        yield


Kept = TypeVar("Kept")
Key = tuple[str, int]
Side = tuple[Mapping[str, nn.Module], Callable[[], Any]]  # the modules to follow, and what runs the model


def run_both(
    high: Side, low: Side, keep: Callable[[Call], Kept], match: Callable[[Call, Kept | None], None]
) -> tuple[Any, Any, dict[Key, Kept]]:
    """Run a model, then its counterpart; returns both outputs, and what was kept of calls that only the first made.

    keep: gives what to keep of a call of the first run (clones: a later function may work in place).  match: gets each
    call of the second run with what was kept of the same call of the first, None where there is none.
    """
    reference: dict[Key, Kept] = {}

    def first(call: Call) -> None:
        reference[call.key] = keep(call)

    def second(call: Call) -> None:
        match(call, reference.pop(call.key, None))

    outputs = []
    for (modules, run), listener in ((high, first), (low, second)):
        with on_calls(modules, listener):
            outputs.append(run())
    return *outputs, reference


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model with a dict of keywords, a tuple of arguments, or one argument."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
