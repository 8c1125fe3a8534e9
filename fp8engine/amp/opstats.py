"""Counts of the operators that ran in each precision in a block, and of the casts (fe.amp.op_stats).

A TorchDispatchMode gets each operator below autograd and below autocast, as the device will run it; those of backward
too, if it runs in the block.  An operator counts in the dtype of its floating result (of its inputs where the result is
none, as with a comparison).  Views and allocations compute nothing and are left out; casts have a table of their own,
and an operator that took a tensor widened in the block counts as upcast.

A function under torch.compile is one call to the mode and is not counted: run the block eagerly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fp8engine._torch import TorchDispatchMode
from fp8engine.amp.tensors import floating
from fp8engine.amp.text import FOLD, RIGHT, as_text, precision

# They reserve memory or fill it with one value: no precision is at stake.
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_zeros", "zeros", "zeros_like", "ones",
               "ones_like", "full", "full_like", "fill_", "zero_", "detach", "scalar_tensor")  # fmt: skip
CASTS = {"_to_copy": 0, "copy_": 1}  # and which of their floating tensors they read: copy_(target, source)
COPIES = ("_unsafe_view", "clone")  # the values of their input, as a view has them
SHOWN = ("FP16", "BF16", "FP32")  # columns of the table; others share the last one


@dataclass
class OpStats:
    """What a block ran.

    ops: operator -> precision ("FP16", "BF16", "FP32", "float64", ...) -> calls.  upcast: operator -> calls that took
    a tensor widened in the block.  casts: ("FP16", "FP32") -> [calls, elements].
    """

    ops: dict[str, Counter[str]] = field(default_factory=dict)
    upcast: Counter[str] = field(default_factory=Counter)
    casts: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def total(self, precision: str) -> int:
        """Calls of operators in a precision."""
        return sum(counts[precision] for counts in self.ops.values())

    def to_dict(self) -> dict:
        """Everything, in types that JSON knows."""
        names = ("from", "to", "calls", "elements")
        casts = [dict(zip(names, (*dtypes, *counts), strict=True)) for dtypes, counts in self.casts.items()]
        ops = {name: dict(counts) for name, counts in self.ops.items()}
        return {"ops": ops, "upcast": dict(self.upcast), "casts": casts}

    def table(self, width: int = 100) -> str:
        """Operators, most called first, and casts as text, `width` columns wide."""
        columns = [("operator", FOLD), *((heading, RIGHT) for heading in (*SHOWN, "other", "upcast"))]
        every: Counter[str] = Counter()
        rows = []
        for name, counts in sorted(self.ops.items(), key=lambda item: -item[1].total()):
            every += counts
            rows.append(_row(name, counts, self.upcast[name]))
        rows += [[], _row("all", every, self.upcast.total())]
        casts = [
            f"cast {source} -> {target}: {calls} times, {elements} elements"
            for (source, target), (calls, elements) in sorted(self.casts.items(), key=lambda item: -item[1][1])
        ]
        return as_text("Operators by precision", columns, rows, casts, width)

    def __str__(self) -> str:
        return self.table()


def _row(name: str, counts: Counter[str], upcast: int) -> list[str]:
    numbers = [counts[precision] for precision in SHOWN]
    return [name, *(str(number or "") for number in (*numbers, counts.total() - sum(numbers), upcast))]


@contextmanager
def op_stats() -> Iterator[OpStats]:
    """Count the operators that run in the block, by precision.

    >>> x = torch.randn(4, 4)
    >>> with op_stats() as stats, torch.autocast("cpu", dtype=torch.bfloat16):
    ...     _ = torch.nn.functional.mse_loss(x @ x, x)
    >>> stats.to_dict()["ops"]
    {'mm': {'BF16': 1}, 'mse_loss': {'FP32': 1}}
    >>> stats.upcast["mse_loss"], stats.casts["FP32", "BF16"]
    (1, [2, 32])
    """
    stats = OpStats()
    with _Counting(stats):
        yield stats


class _Counting(TorchDispatchMode):
    def __init__(self, stats: OpStats):
        super().__init__()
        self.stats = stats
        self.widened = WeakTensorKeyDictionary()  # tensors that a cast in the block made wider

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        inputs = floating((args, kwargs))
        if name in CASTS:
            if len(inputs) > CASTS[name]:  # else what it reads is no floating tensor
                self._cast(inputs[CASTS[name]], result)
        elif name in COPIES or func.is_view:
            if inputs and inputs[0] in self.widened:
                self.widened.update(dict.fromkeys(floating(result)))
        elif name not in ALLOCATIONS and (counted := floating(result) or inputs):
            self.stats.ops.setdefault(name, Counter())[precision(counted[0].dtype)] += 1
            self.stats.upcast[name] += any(value in self.widened for value in inputs)
        return result

    def _cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        if source.dtype == result.dtype or not result.dtype.is_floating_point:
            return
        count = self.stats.casts.setdefault((precision(source.dtype), precision(result.dtype)), [0, 0])
        count[0] += 1
        count[1] += result.numel()
        if result.dtype.itemsize > source.dtype.itemsize:
            self.widened[result] = None
