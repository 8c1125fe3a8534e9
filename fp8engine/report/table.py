"""The report of a model as a value, and its forms: dict, text table, CSV, HTML page, TensorBoard events."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence

from fp8engine import files
from fp8engine.auto import Alarm, merge
from fp8engine.errors import ReportError, StateError
from fp8engine.report import folded
from fp8engine.report.columns import columns, named, terminal_width, wrapped
from fp8engine.report.facts import Facts
from fp8engine.report.flow import repeats
from fp8engine.report.page import Drawn, page
from fp8engine.scaling.table import ROLES

COLUMNS = ("name", "kind", "shape", "recipe", "backend", "emulated", "reason", "fused")
SLOT_COLUMNS = ("cast", "scale", "amax", "saturated", "underflowed", "nonfinite", "recasts")


class Report(Facts):
    """What each linear layer ran, and the sums: `Facts` with their forms."""

    def save_plan(self, path: str | os.PathLike) -> None:
        """Write the decisions so far, for `fe.auto(plan=path)` to repeat step by step.

        Raises StateError where no layer is under `auto`, ReportError for a path that cannot be written.
        """
        if not self.auto.plans:
            raise StateError('save_plan: no layer is under "auto", so nothing was decided; fe.convert(model, "auto")')
        _write(path, merge(self.auto.plans).to_json())

    def to_dict(self) -> dict:
        """Everything, in types that JSON knows."""
        told = {"layers": self.layers, "totals": self.totals, "decisions": self.decisions, "alarms": self.alarms}
        return told | {"outliers": self.outliers} | ({"attention": list(self.attention)} if self.attention else {})

    def to_html(
        self, path: str | os.PathLike, losses: Sequence[float] | None = None, flow: Drawn | None = None
    ) -> None:
        """Write one self-contained page: pictures, numbers and style inside, nothing loaded from anywhere.

        losses: of each training step, for the curve.  flow: who consumes what, or anything else with `to_svg()`.
        Formats over time are drawn of layers under `auto`; for fixed recipes the page says why there are none.
        Raises ReportError for losses that are no numbers, or a path that cannot be written.
        """
        _write(path, page(self, losses, flow))

    def to_tensorboard(self, logdir: str | os.PathLike) -> None:
        """Write everything that was sampled so far as TensorBoard's events, each sample at its own step.

        Raises ReportError where tensorboard is not installed.  A live run wants `report.tensorboard.Writer`.
        """
        from fp8engine.report.events import EventWriter  # an optional package, imported where it is used

        with EventWriter(logdir) as writer:
            writer.write_report(self)

    def to_csv(self, path: str | os.PathLike) -> None:
        """One line a layer, the slots' numbers flattened into columns such as `input.amax`.

        Raises ReportError for a path that cannot be written.
        """
        slots = [f"{role}.{key}" for role in ROLES for key in SLOT_COLUMNS]
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow([*COLUMNS, *slots])
        for layer in self.layers:
            numbers = [layer[role].get(key, "") for role in ROLES for key in SLOT_COLUMNS]
            writer.writerow([folded.shape_of(layer) if key == "shape" else layer[key] for key in COLUMNS] + numbers)
        _write(path, text.getvalue())

    def table(self, width: int | None = None, every: bool = False) -> str:
        """The sums and the layers as text, `width` columns wide; None: as the terminal, or unwrapped in a pipe.

        Layers of repeated blocks that ran alike are one row with the largest of their shares; every: a row for each.
        Raises ReportError for a width that is no whole number of 1 or more.
        """
        if width is not None and (not isinstance(width, int) or width < 1):
            raise ReportError(f"table(width={width!r}): want a whole number of columns, 1 or more, or None")
        width = terminal_width() if width is None else width
        rows = folded.tables(self.layers, every)
        lines = ["FP8 engine: what ran, and why", *self._summary(), *[folded.READ_AS] * (not every)]
        parts = [wrapped(lines, width), *(columns(table, width) for table in rows)]
        return "\n\n".join("\n".join(part) for part in parts) + "\n"

    def _summary(self) -> list[str]:
        totals = self.totals
        part = f", {totals['in_fp8_in_part']} with some matmuls in 16 bits" if totals["in_fp8_in_part"] else ""
        lines = [
            f"{totals['fp8_flops_share']:.1%} of linear-layer FLOPs in FP8; {totals['in_fp8']} of {totals['layers']} "
            f"layers in FP8 ({totals['emulated']} emulated{part}), {totals['in_16_bits']} converted in 16 bits, "
            f"{totals['never_ran']} never ran, {totals['left_alone']} left alone"
        ]
        if 0 < totals["sampled"] < 1:
            lines.append(f"flushed shares are from a sample of {totals['sampled']:.1%} of the elements")
        if fused := sum(bool(layer["fused"]) for layer in self.layers):
            lines.append(f"{fused} layers read what a norm, an activation or a gated product wrote for them")
        words = {"saturated": "saturated", "underflowed": "was flushed to zero"}
        if nothing := [word for key, word in words.items() if folded.measured(totals, key) == 0]:
            lines.append(f"nothing {' or '.join(nothing)}")
        if totals["nonfinite"]:
            lines.append(f"{totals['nonfinite']} elements were NaN or Inf and stayed so")
        if totals["recasts"]:
            lines.append(f"{totals['recasts']} tensors saturated under a predicted scale and were cast again")
        lines += self.auto.failed
        if self.auto.lacks_loss:
            lines.append(
                "the budget of loss is not kept: no loss was seen; call fe.scaling_state(model).see_loss(loss) before "
                "each backward, or return it from the model as .loss"
            )
        if cost := totals["cost_millinats"]:
            lines.append(f"the casts of all forwards are predicted to cost {cost:.3g} millinats of loss")
        if self.auto.spent is not None:
            lines.append(str(self.auto.spent))
        if self.alarms:
            lines.append(f"{len(self.alarms)} early warnings, the latest: {Alarm(**self.alarms[-1])}")
        if self.outliers:
            first, many = self.outliers[0], len(self.outliers)
            remedy = f"; remedy: {first['remedy']}" if first["remedy"] else ""
            lines.append(
                f"{many} slot{'s have' if many > 1 else ' has'} standing outliers, the largest {first['slot']}: amax "
                f"{first['ratio']:.0f}x rms{remedy}"
            )
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
        return [f"attention {named(names)} {what}" for what, names in lines.items()]

    def _gather(self) -> list[str]:
        """What fully_shard's gathers of weights send, and what they would send as codes."""
        sums = self.totals["gather"]
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
        asked = ((layer["gather"].partition("high precision: ")[2], layer["name"]) for layer in self.layers)
        whys = repeats.grouped(pair for pair in asked if pair[0])
        told = f"{sums['as_codes']} of {sums['weights']} sharded weights are gathered as FP8 codes: a rank sends {sent}"
        return [
            f"{told} to gather all, {plain} in high precision",
            *(
                f"{len(names)} gathered in high precision ({named(names)}): {why}"
                for why, names in sorted(whys.items())
            ),
        ]

    def __str__(self) -> str:
        return self.table()


def _write(path: str | os.PathLike, text: str) -> None:
    """Write a file, whole or not at all; what UTF-8 does not hold, as names and losses may, becomes question marks."""
    try:
        files.write(path, text.encode(errors="replace"))
    except OSError as error:
        raise ReportError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error
