"""Samples of a training step: each slot's statistics per tensor, and the rows on which casts are tried.

    observe     in the forward and the backward: write a row of the table, and the sampled rows of an operand.  The
                calls of a layer in one step share these rows, an input and its gradient the same; the table has the
                call whose amax is the largest.  In a compiled graph, which numbers no calls, the last one has all rows
    finish      once, when the step has ended: try the casts on those rows (reads.py)

`observe` is an operator, so that a compiled graph takes it whole, and an ordered effect, as every operator that writes
a slot's row.  Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from fp8engine._torch import transforms_active
from fp8engine.numerics.recipe import ROLES
from fp8engine.ops import library
from fp8engine.ops.scale_update import SLOTS
from fp8engine.scaling.histogram import LENGTH, measure, read
from fp8engine.scaling.prediction import HEADER, Measured
from fp8engine.scaling.reads import GOLDEN, MOST, SHAPE, Layout, judge, layout_of

SAMPLE = 16384  # elements of the histogram, beside the exact amax
AMAX, NONFINITE, ELEMENTS = (HEADER.index(name) for name in ("amax", "nonfinite", "elements"))
FAILED = "failed"  # attribute of a row that could not be written: why


class Tables(NamedTuple):
    """What a sampled step has left.

    slots_SL: a row for each slot (`read_row`).  reads: [layers, 6, 5, 5] (`reads.judge`), NaN for layers without.
    loss_1: the loss, where it was seen, else NaN.
    """

    slots_SL: torch.Tensor
    reads: torch.Tensor
    loss_1: torch.Tensor


class Sampled(NamedTuple):
    """Where `observe` describes one operand or result of a layer, as views: equal layers are one graph.

    row_1L: its row of the table.  part: a buffer of `reads.Layout`, empty for what no matmul reads.  rows: how many
    rows of the operand it keeps; 0 for a result; negative for a weight, whose rows' energies are kept too.  owners_R:
    the numbers of the calls whose rows of input and gradient are kept; None where all are of the latest call.
    """

    row_1L: torch.Tensor
    part: torch.Tensor
    rows: int
    owners_R: torch.Tensor | None = None


class Call(NamedTuple):
    """A call of a layer in a sampled step.  share: of the sampled rows that are to be of it; 0 of a gradient's."""

    number: int
    share: float


ALONE = Call(0, 1.0)  # a call that is not counted, and takes all rows
AGAIN = Call(-1, 0.0)  # no row: the gradient comes to the first time's node


class StepSamples:
    """The samples of one training step.

    layers: how many the state has; the table has a row for each of their SLOTS.  shapes: of the weights, by a layer's
    index; layers that are not among them are not sampled.  Rows of an operand are kept in FP32, 16 to 64 of them
    (reads.py), until the step has ended.
    """

    def __init__(self, layers: int, shapes: Mapping[int, Sequence[int]], device: torch.device):
        slots = len(SLOTS) * layers
        self.slots_SL = torch.zeros(slots, LENGTH, dtype=torch.float32, device=device)
        self.rows = self.slots_SL.split(1) if slots else ()
        self.loss_1 = torch.full((1,), math.nan, dtype=torch.float32, device=device)
        self.layouts = {i: {role: layout_of(shape, role) for role in ROLES} for i, shape in shapes.items()}
        self.layers = layers
        self.tables: Tables | None = None
        # By layer: calls so far, how many count no more, the others' rows, the most of one; 0 without gradients, 2 in a
        # backward.
        self.calls: dict[int, tuple[int, int, int, int, int]] = {}
        # Each begins at a multiple of 16 bytes: CUDA graphs of torch.compile write to a copy else (columns.py).
        lengths = [layout.length + -layout.length % 4 for roles in self.layouts.values() for layout in roles.values()]
        self.flat = torch.zeros(sum(lengths), dtype=torch.float32, device=device)
        flat = iter(self.flat.split(lengths))
        owners = torch.zeros(len(self.layouts), MOST, device=device)
        self.owners = {i: owners[n, : roles["input"].rows] for n, (i, roles) in enumerate(self.layouts.items())}
        nothing = torch.empty(0, device=device)
        self.parts: list[torch.Tensor] = [nothing] * slots
        for i, roles in self.layouts.items():
            for j, layout in enumerate(roles.values()):
                self.parts[len(SLOTS) * i + j] = next(flat)[: layout.length]

    @staticmethod
    def finished(tables: Tables) -> StepSamples:
        """The samples of a step that had ended when they were saved."""
        made = StepSamples(0, {}, tables.slots_SL.device)
        made.tables = tables
        return made

    def of(self, layer: int, role: str) -> Sampled | None:
        """Where a slot of a layer is described; None: this step does not sample it."""
        if layer not in self.layouts:
            return None
        row = len(SLOTS) * layer + SLOTS.index(role)
        rows = self.layouts[layer][role].rows if role in ROLES else 0
        if role in ("input", "grad_output"):
            return Sampled(self.rows[row], self.parts[row], rows, self.owners[layer])
        return Sampled(self.rows[row], self.parts[row], -rows)

    def call(self, layer: int, rows: int) -> Call:
        """The next call of a layer, of that many rows; AGAIN for what a checkpoint computes a second time."""
        kind = 2 if library.in_backward() else int(torch.is_grad_enabled())
        number, before, total, most, was = self.calls.get(layer, (0, 0, 0, 0, kind))
        if (was, kind) == (1, 2):
            return AGAIN
        if kind != was:
            before, total, most = number, 0, 0
        self.calls[layer] = number + 1, before, total + rows, max(most, rows), kind
        return Call(number + 1, rows / (total + rows) if total else 1.0)

    @property
    def failed(self) -> dict[int, str]:
        """Rows of the table that could not be written, and why."""
        return {i: vars(row)[FAILED] for i, row in enumerate(self.rows) if FAILED in vars(row)}

    def see_loss(self, loss: torch.Tensor) -> None:
        """Keep the step's loss, a mean over tokens; not that of a call inside a transform of torch.func."""
        if transforms_active():
            return
        self.loss_1.copy_(loss.detach().reshape(1))

    def finish(self, sizes: Mapping[int, tuple[int, int, int] | None], backward: bool) -> Tables:
        """Try the casts on the sampled rows.

        sizes: M, N, K of a layer's matmul where known (smaller than the weight's where ranks divide it).
        backward: whether gradients were sampled too.
        """
        if self.tables is not None:
            return self.tables
        where = self.slots_SL.device
        with torch.no_grad(), outside_of_autocast(where):
            reads = torch.full((self.layers, *SHAPE), math.nan, device=self.slots_SL.device)
            for i, layouts in self.layouts.items():
                whole_n, whole_k = layouts["grad_output"].columns, layouts["input"].columns
                _, n, k = sizes.get(i) or (0, whole_n, whole_k)
                local = (
                    layouts["input"]._replace(columns=k),
                    layouts["weight"]._replace(columns=k, energies=layouts["weight"].energies * n // whole_n),
                    layouts["grad_output"]._replace(columns=n),
                )
                x, w, dy = (layout.part(self.parts[len(SLOTS) * i + j]) for j, layout in enumerate(local))
                if n and k:
                    number, before, total, most, _ = self.calls.get(i, (1, 0, 0, 0, 0))
                    if most:  # x.total is the last call's
                        x.total.fill_(most)
                    rows = total / most if most else 1.0
                    # Calls of as many rows each are taken to be of the same tokens again, as ALBERT's are.
                    tokens = 1.0 if rows == number - before else rows
                    reads[i] = judge(x, w, dy if backward else None, rows, tokens)
            return Tables(self.slots_SL, reads, self.loss_1)


def outside_of_autocast(where: torch.device) -> AbstractContextManager:
    """What is computed within has the dtypes that are written there, whatever autocast a forward runs under."""
    return nullcontext() if where.type == "meta" else torch.autocast(where.type, enabled=False)


def observe(x_MK: torch.Tensor, to: Sampled, call: Call = ALONE) -> None:
    """Write the statistics of x [M, K] to its row of the table, and some of its rows to the buffer."""
    if library.direct(x_MK):
        _observe(x_MK, *to, *call)
    else:
        torch.ops.fp8engine.observe.default(x_MK, *to, *call)


def read_row(row_L: torch.Tensor) -> Measured | None:
    """The statistics in a row on the host; None where none were written."""
    found = read(row_L)
    return found if found.elements else None


def _observe(x_MK: torch.Tensor, row_1L: torch.Tensor, part: torch.Tensor, rows: int, *call: Any) -> None:
    """A failure leaves the row and the part empty, and why in the row's attribute: nothing raises in a forward."""
    if not x_MK.numel():
        return
    try:
        _describe(x_MK, row_1L, part, rows, *call)
    except Exception as error:
        part.zero_()
        row_1L.zero_()
        vars(row_1L)[FAILED] = f"{type(error).__name__}: {error}"


def _describe(
    x_MK: torch.Tensor, row_1L: torch.Tensor, part: torch.Tensor, rows: int, owners_R: torch.Tensor | None, *call: Any
) -> None:
    with torch.no_grad(), outside_of_autocast(x_MK.device):
        x_MK, mine_R = x_MK.detach(), None if owners_R is None else _mine(owners_R, *call)
        if part.numel():
            layout = Layout(abs(rows), x_MK.shape[1], len(x_MK) if rows < 0 else 0)
            amax = layout.write(x_MK, part, mine_R)
        else:
            low, high = torch.aminmax(x_MK)
            amax = torch.maximum(-low, high)  # of the whole tensor: one element decides a scale
        new, old = describe(x_MK, amax), row_1L[0]
        if mine_R is not None:  # of several calls the row has that of the largest amax
            worse = (old[NONFINITE] > new[NONFINITE]) | ((old[NONFINITE] == new[NONFINITE]) & (old[AMAX] > new[AMAX]))
            new = torch.where((worse & ~mine_R.all()) | ~mine_R.any(), old, new)
        row_1L[0].copy_(new)


def _mine(owners_R: torch.Tensor, number: int, share: float) -> torch.Tensor:
    """Which of the sampled rows are a call's: an input takes its share of them, spread over all; a gradient has those.

    A gradient has all rows where it, or its input, is of a call that is not counted.
    """
    if share:
        i = torch.arange(1, len(owners_R) + 1, dtype=torch.float64, device=owners_R.device)
        owners_R.masked_fill_(i.mul_(GOLDEN * number).frac_() < share, number)
    return (owners_R == number) | (owners_R * number == 0)


def describe(x_MK: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """The row of the table of x [M, K], or of a tensor with that amax of which x is the sample, but for "elements"."""
    flat = measure(x_MK, SAMPLE, amax)
    beyond = (amax - amax).ne(0).float()  # also where no element of the sample is
    flat[NONFINITE] = torch.maximum(flat[NONFINITE], beyond)
    return flat


library.define(
    "observe(Tensor x, Tensor row, Tensor part, int rows, Tensor? owners, int number, float share) -> ()",
    _observe,
    lambda *arguments: None,
    effect=True,
)
