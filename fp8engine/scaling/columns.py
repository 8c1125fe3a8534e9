"""Slots of a scaling table as a layer's call takes them: in eager code by their column, in a graph by views of it.

CUDA graphs of torch.compile work on a copy of an input that may move, and of one that does not begin at a multiple of
16 bytes (`remove_unaligned_input_idxs` in torch/_inductor/utils.py); what a cast writes to a copy is lost.  That a
layer's columns stay, Dynamo knows, and they lie `apart`.  Of the tables in an update of scales that is a graph alone it
does not: such a graph writes to an input, as torch is told, and is kept out of CUDA graphs for it.
"""

from __future__ import annotations

import torch

from fp8engine.ops.reference import Slot
from fp8engine.scaling.sample import Sampled

APART = 4  # columns of memory from one slot to the next in the tables that casts write: 16 bytes, or 32


def apart(table: torch.Tensor) -> torch.Tensor:
    """A table [R, S] whose columns lie APART."""
    if table.stride(1) == APART:
        return table
    return table.new_zeros(len(table), APART * table.shape[1])[:, ::APART].copy_(table)


class Column:
    """A slot's column of the tables, as views of one column: what a graph is given, so that equal layers are one graph.

    (Of the whole tables a graph would be given the column's number too, as a constant of its own.)
    sample: where this step describes the slot; None: nowhere.
    """

    live_21: torch.Tensor
    counts_C1: torch.Tensor
    sample: Sampled | None = None

    def slot(self, record: bool, count: bool) -> Slot:
        """The slot as a graph's operators take it."""
        return Slot(self.live_21, self.counts_C1, 0, record, count)

    def __reduce__(self):
        return Column, ()  # whose tables it shows then, the copied state says


class Slots(dict[tuple[int, bool, bool], Slot]):
    """A layer's slots as eager code takes them, by (place among its columns, record, count), made when first asked for.

    first: the column of its first one.
    """

    def __init__(
        self, tables: tuple[torch.Tensor, torch.Tensor], first: int, host: tuple | None, groups: dict[int, str]
    ):
        self.tables, self.first, self.host, self.groups = tables, first, host, groups

    def __missing__(self, key: tuple[int, bool, bool]) -> Slot:
        place, record, count = key
        column = self.first + place
        made = self[key] = Slot(*self.tables, column, record, count, self.host, self.groups.get(column, ""))
        return made


class GraphSlots:
    """A layer's slots as a graph's operators take them, by the same keys."""

    host: tuple | None = None

    def __init__(self, columns: tuple[Column, ...]):
        self.columns = columns

    def __getitem__(self, key: tuple[int, bool, bool]) -> Slot:
        return self.columns[key[0]].slot(key[1], key[2])
