"""A report as a value: plain dicts, and the table a person reads."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass, field

from fp8engine.controller import Controller, merge
from fp8engine.errors import StateError
from fp8engine.scaling import ROLES

COLUMNS = ("name", "kind", "shape", "recipe", "backend", "emulated", "reason")
SLOT_COLUMNS = ("cast", "scale", "amax", "saturated", "underflowed", "nonfinite", "recasts")


@dataclass(frozen=True)
class Report:
    """What each linear layer ran, and the sums.

    layers: one dict each: name, kind, shape, recipe, backend, emulated, reason, and a dict for each of input, weight,
    grad_output and output.  totals: fp8_flops_share, converted, left_alone, never_ran, ...  Shares are of elements.
    decisions: changes of format, oldest first (a fixed recipe makes none).  controllers: who made them.
    """

    layers: list[dict]
    totals: dict
    decisions: list[dict] = field(default_factory=list)
    controllers: list[Controller] = field(default_factory=list, repr=False)

    def save_plan(self, path: str | os.PathLike) -> None:
        """Write the decisions so far, for `fe.auto(plan=path)` to repeat step by step.

        Raises StateError where no layer is under `auto`.
        """
        if not self.controllers:
            raise StateError('save_plan: no layer is under "auto", so nothing was decided; fe.convert(model, "auto")')
        merge([controller.as_plan() for controller in self.controllers]).save(path)

    def to_dict(self) -> dict:
        """Everything, in types that JSON knows."""
        return {"layers": self.layers, "totals": self.totals, "decisions": self.decisions}

    def to_csv(self, path: str | os.PathLike) -> None:
        """One line a layer, the slots' numbers flattened into columns such as `input.amax`."""
        slots = [f"{role}.{key}" for role in ROLES for key in SLOT_COLUMNS]
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*COLUMNS, *slots])
            for layer in self.layers:
                numbers = [layer[role].get(key, "") for role in ROLES for key in SLOT_COLUMNS]
                shape = "x".join(map(str, layer["shape"]))
                writer.writerow([shape if key == "shape" else layer[key] for key in COLUMNS] + numbers)

    def table(self, width: int = 160) -> str:
        """The layers and the sums as text, `width` columns wide."""
        from rich.console import Console  # here: importing rich draws from Python's random numbers
        from rich.table import Table

        stores = any(layer["output"]["cast"] != "none" for layer in self.layers)  # a result in FP8 is rare
        table = Table(title="FP8 engine: what ran, and why", title_justify="left")
        for heading in (
            "layer",
            "shape",
            "recipe",
            "backend",
            "input",
            "weight",
            "grad_output",
            *["output"] * stores,
            "saturated",
            "flushed",
        ):
            table.add_column(heading, overflow="fold")
        table.add_column("note", overflow="fold", ratio=1)
        for layer in self.layers:
            slots = [layer[role] for role in ROLES]
            backend = f"{layer['backend']} (emulated)" if layer["emulated"] else layer["backend"]
            table.add_row(
                layer["name"],
                "x".join(map(str, layer["shape"])),
                layer["recipe"],
                backend,
                *[slot["cast"] for slot in [*slots, layer["output"]][: len(ROLES) + stores]],
                _percent([slot.get("saturated") for slot in slots]),
                _percent([slot.get("underflowed") for slot in slots]),
                "" if layer["emulated"] and layer["reason"].startswith("emulated") else layer["reason"],
            )
        out = io.StringIO()
        console = Console(  # names and reasons are text: [brackets] in them are no markup, :colons: no pictures
            file=out, width=width, color_system=None, legacy_windows=False, markup=False, emoji=False
        )
        console.print(table)
        for line in self._summary():
            console.print(line, highlight=False, soft_wrap=True)
        return out.getvalue()

    def _summary(self) -> list[str]:
        totals = self.totals
        lines = [
            f"{totals['fp8_flops_share']:.1%} of linear-layer FLOPs in FP8; {totals['converted']} layers converted "
            f"({totals['emulated']} emulated, {totals['never_ran']} never ran), {totals['left_alone']} left alone"
        ]
        if 0 < totals["sampled"] < 1:
            lines.append(f"flushed shares are from a sample of {totals['sampled']:.1%} of the elements")
        if totals["nonfinite"]:
            lines.append(f"{totals['nonfinite']} elements were NaN or Inf and stayed so")
        if totals["recasts"]:
            lines.append(f"{totals['recasts']} tensors saturated under a predicted scale and were cast again")
        if totals["kept_weight_bytes"]:
            why = ", ".join(sorted({layer["kept_why"] for layer in self.layers if layer["kept_bytes"]}))
            size = totals["kept_weight_bytes"] / 2**20
            lines.append(f"quantised weights kept between calls take {size:.1f} MiB ({why})")
        return lines

    def __str__(self) -> str:
        return self.table()


def _percent(shares: list[float | None]) -> str:
    return (
        " / ".join("-" if share is None else f"{share:.2%}" for share in shares)
        if any(share is not None for share in shares)
        else "-"
    )
