"""Reading of a sample on the host: statistics of each slot, tried casts of each layer, layers that share an input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fp8engine.auto.host_copy import PendingSample
from fp8engine.scaling.choice import SlotKey, begin
from fp8engine.scaling.prediction import Measured
from fp8engine.scaling.reads import READS, Reads
from fp8engine.scaling.sample import read_row
from fp8engine.scaling.table import ROLES

if TYPE_CHECKING:
    from fp8engine.auto.controller import Controller


def read(controller: Controller, slots: torch.Tensor) -> dict[SlotKey, Measured]:
    """Statistics of a controller's layers; layers whose inputs are the same tensor become a group."""
    found: dict[SlotKey, Measured] = {}
    consumers: dict[bytes, int] = {}
    for i, numerics in enumerate(controller.layers):
        for j, role in enumerate(ROLES):
            row = slots[len(ROLES) * numerics.layer + j]
            if measured := read_row(row):
                found[i, role] = measured
            if measured and role == "input" and i not in controller.choices and measured.amax > 0:
                _join(controller, i, consumers.setdefault(row.numpy().tobytes(), i))
    return {slot: measured for slot, measured in found.items() if slot[0] in controller.choices}


def _join(controller: Controller, layer: int, first: int) -> None:
    """Begin with a layer that is sampled for the first time: alone, or with the first layer that has its input."""
    mine = begin([layer], controller.recipes[layer])
    if first != layer and controller.choices[first].changes == 0:
        group = controller.choices[first]
        mine = replace(group, layers=(*group.layers, layer), matmuls={**group.matmuls, **mine.matmuls})
    for i in mine.layers:
        controller.choices[i] = mine


def remember(controller: Controller, found: Mapping[SlotKey, Measured], sample: PendingSample) -> set[int]:
    """Enter the tried casts of layers whose tensors were finite; returns those layers."""
    tried, usable = sample.tables.reads.double().numpy(), set()
    for i in {i for i, _ in found}:
        mine = [found[i, role] for role in ROLES if (i, role) in found]
        new = Reads(tried[controller.layers[i].layer])
        if any(measured.nonfinite for measured in mine) or not any(new.seen(read) for read in range(len(READS))):
            continue
        controller.reads[i] = new.after(controller.reads.get(i), controller.choices[i].fades_db)
        usable.add(i)
    return usable
