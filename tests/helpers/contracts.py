"""What a contract of operations is made of: sizes and layouts of inputs, a row of the table, how results are compared.

The table: helpers/operations.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8engine.numerics.cast import Cast
from fp8engine.ops.reference import Operand, Slot
from fp8engine.ops.reference.operand import COUNTERS
from fp8engine.ops.reference.quantize import quantize_operand


class Given(NamedTuple):
    """What arguments are made of: a size, the dtype of what is not cast, the layout of matrices.

    layout: "rows", "columns" (a transposed matrix), or "strided" (part of a matrix that holds NaN elsewhere).
    bad: whether a NaN and infinities are among the elements.
    """

    m: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    layout: str = "rows"
    bad: bool = False

    def matrix(self, m: int, k: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows of very different size, some elements zero."""
        x = (torch.randn(m, k) + 0.5) * torch.exp2(torch.randint(-8, 5, (m, 1)))
        x = torch.where(torch.rand(m, k) < 0.05, 0.0, x)
        if self.bad and x.numel() > 3:
            x.view(-1)[1:4] = torch.tensor([float("nan"), float("inf"), float("-inf")])
        return self.laid_out(x.to(dtype or self.dtype))

    def laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """The same values in the layout."""
        if self.layout == "rows":
            return x
        if self.layout == "columns":
            return x.t().contiguous().t()
        m, k = x.shape
        wide = x.new_empty(2 * m, k + 3)
        wide.view(torch.uint8).fill_(0xFF)  # a NaN in every format
        view = wide[::2, 1 : k + 1]
        return view.copy_(x)

    def codes(self, m: int, k: int, cast: Cast) -> Operand:
        """A quantised matrix whose codes have the layout."""
        x = self._replace(layout="rows").matrix(m, k, torch.float32)
        made = quantize_operand(x, cast)
        return made._replace(data=self.laid_out(made.data))


GIVENS = (
    Given(7, 130),
    Given(1, 24, torch.float32, "columns"),
    Given(24, 1, torch.float16, "strided"),
    Given(131, 33, torch.bfloat16, "columns"),
    Given(9, 257, torch.float16, bad=True),
    Given(5, 62, torch.float32, "strided", bad=True),
    Given(1, 1, torch.float32),
    Given(3, 20, bad=True),
)
NOTHING = (Given(0, 6), Given(3, 0, torch.float32), Given(0, 0, torch.float16))


class Operation(NamedTuple):
    """One row of the table.

    run, twin: the function of fp8engine/ops and that of reference/; both take what `arguments` makes.
    forms: what is asked for (a cast, an activation) by its name in a test.  ways: how besides (a slot, a dtype).
    arguments: of a Given, a form and a way; the same at every call, but for memory.
    exact: whether a kernel's results are the twin's bit for bit; else sums have another order.
    writes: places of the arguments that may be written.
    defined: of a result and its arguments, what a kernel writes; the memory beside it is nobody's.
    """

    run: Callable
    twin: Callable
    forms: Mapping[str, Any]
    ways: Sequence[Any]
    arguments: Callable[[Given, Any, Any], tuple]
    exact: bool = True
    writes: tuple[int, ...] = ()
    defined: Callable[[Any, tuple], Any] = lambda result, arguments: result


def tensors(tree: Any) -> list[torch.Tensor]:
    """All tensors of a result or of arguments."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def in_bytes(tree: Any) -> list[tuple]:
    """Shapes, dtypes and bytes of tensors, and whatever else there is: equal only where every bit is."""
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            row = leaf.detach().clone(memory_format=torch.contiguous_format).view(-1)
            found.append((leaf.dtype, tuple(leaf.shape), bytes(row.view(torch.uint8).numpy())))
        else:
            found.append((leaf,))
    return found


def layout(tree: Any) -> list[tuple]:
    """What a fake promises.  The stride of a dimension of 1, or of an empty tensor, has no meaning."""
    found = []
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            found.append((leaf,))
            continue
        strides = [stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True) if size > 1]
        found.append((leaf.dtype, tuple(leaf.shape), strides if leaf.numel() else []))
    return found


class Watch(TorchDispatchMode):
    """Our operators that pass the dispatcher, with their arguments."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[Any, tuple]] = []

    @property
    def names(self) -> list[str]:
        """The operators' names."""
        return [operator.name().removeprefix("fp8engine::") for operator, _ in self.seen]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fp8engine":
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


def slot_of(predicted: float = 0.0, record: bool = True, count: bool = True) -> Slot:
    """Column 1 of tables whose other columns hold what must stay."""
    live, counts = torch.full((2, 3), 77.0), torch.full((len(COUNTERS), 3), 1 << 40)
    live[:, 1], counts[:, 1] = torch.tensor([-1.0, predicted]), 0
    return Slot(live, counts, 1, record, count)


def counted(slot: Slot) -> dict[str, int]:
    """What a slot has counted, by the counters' names."""
    return dict(zip(COUNTERS, slot.counts_CS[:, slot.index].tolist(), strict=True))
