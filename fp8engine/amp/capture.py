"""Capture of layer outputs in two runs of a model, and their difference as a relative error and an SQNR.

`fe.amp.compare` (two dtypes) and `fp8engine compare` (a model and its FP8 copy) both use it in this way:

    with on_calls(modules, keep): model(...)      # reference[call.key] = clones of call.tensors()
    with on_calls(modules, match): copy(...)      # Difference().add(low, high), high = reference.pop(call.key)

Sums are taken in FP64, over the elements that are finite in both runs; the others are counted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8engine._torch import tree_leaves


class Call(NamedTuple):
    """One finished forward of one module.  key: the module's name, and the number of its earlier calls in this run."""

    key: tuple[str, int]
    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    output: Any

    def tensors(self) -> list[torch.Tensor]:
        """The floating tensors in the output, without their graphs; a later in-place function may still write them."""
        leaves = tree_leaves(self.output)
        return [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point]


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


@dataclass
class Difference:
    """Sums of squares of reference values and of what differs from them, over any number of tensors.

    nonfinite_low, nonfinite_high: NaN and Inf elements, which the sums leave out in both.

    >>> found = Difference()
    >>> found.add(torch.tensor([1.1, 2.0]), torch.tensor([1.0, math.inf]))
    >>> round(found.error, 3), round(found.sqnr_db), found.nonfinite_high
    (0.1, 20, 1)
    """

    signal: float = 0.0
    noise: float = 0.0
    nonfinite_low: int = 0
    nonfinite_high: int = 0

    def add(self, low: torch.Tensor, high: torch.Tensor) -> None:
        """Add `low` and the reference `high`, of one shape; they are copied in FP64, so large ones come in parts."""
        finite_low, finite_high = low.isfinite(), high.isfinite()
        both = finite_low & finite_high
        want = high.double()[both]
        self.noise += (low.double()[both] - want).square().sum().item()
        self.signal += want.square().sum().item()
        self.nonfinite_low += int((~finite_low).sum())
        self.nonfinite_high += int((~finite_high).sum())

    @property
    def error(self) -> float:
        """||low - high|| / ||high||: 0 for equal tensors, inf where only the reference is zero."""
        if self.signal:
            return math.sqrt(self.noise / self.signal)
        return math.inf if self.noise else 0.0

    @property
    def sqnr_db(self) -> float:
        """10 log10(sum high^2 / sum (low - high)^2): inf for equal tensors, -inf where only the reference is zero."""
        if not math.isfinite(self.signal + self.noise):  # FP64 overflowed
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf
