"""Slots of a scaling table as a layer's call takes them: in eager code by their column, in a graph by views of it."""

from __future__ import annotations

import torch

from fp8engine.ops.reference import Slot
from fp8engine.scaling.sample import Sampled


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
    """The slots of a state as eager code takes them, by (column, record, count), each made when first asked for."""

    def __init__(self, tables: tuple[torch.Tensor, torch.Tensor], host: tuple | None, groups: dict[int, str]):
        self.tables, self.host, self.groups = tables, host, groups

    def __missing__(self, key: tuple[int, bool, bool]) -> Slot:
        made = self[key] = Slot(*self.tables, *key, self.host, self.groups.get(key[0], ""))
        return made


class GraphSlots:
    """The slots of one layer as a graph's operators take them, by (place among its columns, record, count)."""

    def __init__(self, columns: tuple[Column, ...]):
        self.columns = columns

    def __getitem__(self, key: tuple[int, bool, bool]) -> Slot:
        return self.columns[key[0]].slot(key[1], key[2])
