"""The report of a model as a value, and its forms: dict, text table, CSV, HTML page, TensorBoard events."""

from __future__ import annotations

import csv
import io
import itertools
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fp8engine import files
from fp8engine.auto import Alarm, Controller, merge
from fp8engine.errors import StateError
from fp8engine.report import outliers
from fp8engine.report.page import write
from fp8engine.scaling.table import ROLES

if TYPE_CHECKING:
    from fp8engine.report.page.write import Drawn

COLUMNS = ("name", "kind", "shape", "recipe", "backend", "emulated", "reason", "fused")
NARROWEST = 5  # characters that every column of a text table keeps
SLOT_COLUMNS = ("cast", "scale", "amax", "saturated", "underflowed", "nonfinite", "recasts")


@dataclass(frozen=True)
class Report:
    """What each linear layer ran, and the sums.

    layers: one dict each: name, kind, shape, recipe, backend, emulated, reason, fused, and a dict for each of input,
    weight, grad_output and output.  totals: fp8_flops_share, converted, left_alone, ...  Shares are of elements.
    decisions: changes of format, oldest first (a fixed recipe makes none).  controllers: who made them.
    alarms: early warnings, oldest first: step, slot, ratio (amax/rms), growth over the last `steps` steps.
    attention: one dict for each attention whose format was asked for or is fe.Attention's: name, asked, ran and why.
    """

    layers: list[dict]
    totals: dict
    decisions: list[dict] = field(default_factory=list)
    controllers: list[Controller] = field(default_factory=list, repr=False)
    alarms: list[dict] = field(default_factory=list)
    attention: tuple[dict, ...] = ()

    @property
    def outliers(self) -> list[dict]:
        """Slots with standing outliers, the largest first: step, slot, ratio (amax/rms), cast, sqnr_db, remedy."""
        return outliers.standing(self.controllers)

    def save_plan(self, path: str | os.PathLike) -> None:
        """Write the decisions so far, for `fe.auto(plan=path)` to repeat step by step.

        Raises StateError where no layer is under `auto`.
        """
        if not self.controllers:
            raise StateError('save_plan: no layer is under "auto", so nothing was decided; fe.convert(model, "auto")')
        merge([controller.as_plan() for controller in self.controllers]).save(path)

    def to_dict(self) -> dict:
        """Everything, in types that JSON knows."""
        told = {"layers": self.layers, "totals": self.totals, "decisions": self.decisions, "alarms": self.alarms}
        told["outliers"] = self.outliers
        return told | ({"attention": list(self.attention)} if self.attention else {})

    def to_html(
        self, path: str | os.PathLike, losses: Sequence[float] | None = None, flow: Drawn | None = None
    ) -> None:
        """Write one self-contained page: pictures, numbers and style inside, nothing loaded from anywhere.

        losses: of each training step, for the curve.  flow: who consumes what, or anything else with `to_svg()`.
        Formats over time are drawn of layers under `auto`; for fixed recipes the page says why there are none.
        Raises ReportError for losses that are no numbers, or a path that cannot be written.
        """
        write(self, path, losses, flow)

    def to_tensorboard(self, logdir: str | os.PathLike) -> None:
        """Write everything that was sampled so far as TensorBoard's events, each sample at its own step.

        Raises ReportError where tensorboard is not installed.  A live run wants `report.tensorboard.Writer`.
        """
        from fp8engine.report.events import EventWriter  # an optional package, imported where it is used

        with EventWriter(logdir) as writer:
            writer.write_report(self)

    def to_csv(self, path: str | os.PathLike) -> None:
        """One line a layer, the slots' numbers flattened into columns such as `input.amax`."""
        slots = [f"{role}.{key}" for role in ROLES for key in SLOT_COLUMNS]
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow([*COLUMNS, *slots])
        for layer in self.layers:
            numbers = [layer[role].get(key, "") for role in ROLES for key in SLOT_COLUMNS]
            shape = "x".join(map(str, layer["shape"]))
            writer.writerow([shape if key == "shape" else layer[key] for key in COLUMNS] + numbers)
        files.write(path, text.getvalue())

    def table(self, width: int = 160) -> str:
        """The layers and the sums as text, `width` columns wide."""
        stores = any(layer["output"]["cast"] != "none" for layer in self.layers)  # a result in FP8 is rare
        shown = [*ROLES, *["output"] * stores]
        rows = [["layer", "shape", "recipe", "backend", *shown, "saturated", "flushed", "note"]]
        for layer in self.layers:
            slots = [layer[role] for role in ROLES]
            rows.append([
                layer["name"],
                "x".join(map(str, layer["shape"])),
                layer["recipe"],
                f"{layer['backend']} (emulated)" if layer["emulated"] else layer["backend"],
                *(layer[role]["cast"] for role in shown),
                _percent([slot.get("saturated") for slot in slots]),
                _percent([slot.get("underflowed") for slot in slots]),
                "; ".join(filter(None, [_unless_emulated(layer), layer["fused"], layer.get("outliers")])),
            ])  # fmt: skip
        return "\n".join(["FP8 engine: what ran, and why", *_columns(rows, width), *self._summary(), ""])

    def _gather(self) -> list[str]:
        """What fully_shard's gathers of weights send, and what they would send as codes."""
        sums = self.totals.get("gather")  # a report that 0.1 has pickled has none
        if sums is None:
            return []
        sent, plain, codes = (
            f"{sums[key] / 1e6:.2f} MB" for key in ("sent_bytes", "high_precision_bytes", "as_codes_bytes")
        )
        if sums["as_codes"] == 0 and sums["as_codes_bytes"] < sums["sent_bytes"]:
            return [
                f"fully_shard gathers weights in high precision: a rank sends {sent} to gather all; "
                f"fe.distributed.fsdp would send {codes}"
            ]
        line = f"{sums['as_codes']} of {sums['weights']} sharded weights are gathered as FP8 codes: a rank sends {sent}"
        why = sorted({layer["gather"] for layer in self.layers if layer.get("gather", "").startswith("high")})
        return [f"{line} to gather all, {plain} in high precision", *(f"gathered in {each}" for each in why)]

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
        if any(each.recipe.budget is not None and each.loss is None and each.log for each in self.controllers):
            lines.append(
                "the budget of loss is not kept: no loss was seen; call fe.scaling_state(model).see_loss(loss) before "
                "each backward, or return it from the model as .loss"
            )
        if totals.get("cost_millinats"):
            lines.append(
                f"the casts of all forwards are predicted to cost {totals['cost_millinats']:.3g} millinats of loss"
            )
        if self.alarms:
            lines.append(f"{len(self.alarms)} early warnings, the latest: {Alarm(**self.alarms[-1])}")
        if standing := self.outliers:
            lines.append(outliers.line(standing))
        if totals["kept_weight_bytes"]:
            why = ", ".join(sorted({layer["kept_why"] for layer in self.layers if layer["kept_bytes"]}))
            size = totals["kept_weight_bytes"] / 2**20
            lines.append(f"quantised weights kept between calls take {size:.1f} MiB ({why})")
        return lines + self._attention() + self._gather()

    def _attention(self) -> list[str]:
        """What attention ran in, where FP8 was asked for."""
        lines: dict[str, list[str]] = {}
        for each in self.attention:
            if each["asked"] != "16 bits":
                ran = f"ran in {each['ran']}" if each["ran"] else "has not run"
                lines.setdefault(": ".join(filter(None, [ran, each["why"]])), []).append(each["name"])
        return [
            f"attention {names[0]} and {len(names) - 1} more {what}" if names[1:] else f"attention {names[0]} {what}"
            for what, names in lines.items()
        ]

    def __str__(self) -> str:
        return self.table()


def _unless_emulated(layer: dict) -> str:
    return "" if layer["emulated"] and layer["reason"].startswith("emulated") else layer["reason"]


def _percent(shares: list[float | None]) -> str:
    return (
        " / ".join("-" if share is None else f"{share:.2%}" for share in shares)
        if any(share is not None for share in shares)
        else "-"
    )


def _columns(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    r"""Lines: the first row, a rule, the other rows.  What is too long for its column goes on in the line below.

    Words, and so the names of layers, stay whole where the width allows; then those of the first column, the names.

    >>> print(*_columns([["layer", "note"], ["blocks.0.up", "never ran"]], 23), sep="\n")
    │ layer       │ note  │
    ├─────────────┼───────┤
    │ blocks.0.up │ never │
    │             │ ran   │
    """
    table = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in table]
    longest = [max(len(word) for cell in column for word in cell.split() or [""]) for column in table]
    for least in (longest, [longest[0], *[NARROWEST] * (len(widths) - 1)], [NARROWEST] * len(widths)):
        while sum(widths) + 3 * len(widths) + 1 > width:
            wide = [i for i, size in enumerate(widths) if size > least[i]]
            if not wide:
                break
            widths[max(wide, key=lambda i: widths[i])] -= 1
    for i, row in enumerate(rows):
        cells = [_folded(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            yield f"│ {' │ '.join(part.ljust(width) for part, width in zip(line, widths, strict=True))} │"
        if i == 0:
            yield f"├{'┼'.join('─' * (width + 2) for width in widths)}┤"


def _folded(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False)
