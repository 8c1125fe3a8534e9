"""Report of a session: one row a recipe, the same in the table on screen, in CSV and in JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fp8engine.demo import disk
from fp8engine.demo.config import Config, read
from fp8engine.demo.model import GPT
from fp8engine.demo.trainer import Curve
from fp8engine.ops import device


def _percent(share: float) -> str:
    return "0" if share == 0 else "<0.001" if share < 1e-5 else f"{100 * share:.2g}"


# key of a row -> heading on screen, and how a value is written there; narrow, so that 80 columns hold them all
COLUMNS: dict[str, tuple[str, Callable[..., str]]] = {
    "recipe": ("recipe", str),
    "ran_on": ("matmuls\nran on", lambda text: text.replace(" (", "\n(")),
    "steps": ("steps", str),
    "train_loss": ("train\nloss", "{:.3f}".format),
    "validation_loss": ("valid.\nloss", "{:.3f}".format),
    "difference_to_fp32_percent": ("to\nfp32\n%", "{:+.2f}".format),
    "tokens_per_second": ("tokens\n/s", "{:,.0f}".format),
    "activation_bytes": ("saved\nacts.\nMiB", lambda bytes: f"{bytes / 2**20:.1f}"),
    "fp8_flops_share": ("FP8\nFLOPs\n%", lambda share: f"{100 * share:.0f}"),
    "saturated": ("satu-\nrated\n%", _percent),
    "underflowed": ("flushed\nto 0\n%", _percent),
    "skipped": ("steps\nlost", str),
}


TABLE = "table.json"


@dataclass(frozen=True)
class Result:
    """Loss, speed and memory of one run.

    steps: taken; fewer than asked for where the run was stopped.  Losses in nats a byte: train_loss the mean of the
    last 20 steps, validation_loss over the validation windows.  tokens_per_second from the median step.
    activation_bytes: saved for one backward, of FP8 runs with the rest of the model in BF16 (`Precision.usual`).
    fp8_flops_share: of the linear layers' FLOPs.  saturated, underflowed: shares of the elements cast to FP8 (None
    where none was).  skipped: steps lost to overflow under the loss scale.
    sample: text that the model writes; "" where it is not shown.
    decisions: changes of format under auto, as in fe.inspect(model).decisions.  formats: the last cast of each slot
    under auto, as its decisions write it.
    """

    recipe: str
    seed: int
    steps: int
    train_loss: float
    validation_loss: float
    tokens_per_second: float
    activation_bytes: int
    fp8_flops_share: float
    saturated: float | None
    underflowed: float | None
    skipped: int
    ran_on: str
    sample: str
    curve: Curve
    decisions: list[dict] = field(default_factory=list)
    formats: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """The runs of one session, or of several that differ in the seed.

    about: what they have in common: model, text, machine.
    """

    about: dict
    results: list[Result]

    def rows(self) -> list[dict]:
        """One dict of plain values a recipe, keys as in COLUMNS; None where a value does not exist."""
        far = zip(self.results, differences(self.results), strict=True)
        return [_clean({key: getattr(result, key, percent) for key in COLUMNS}) for result, percent in far]

    def table(self) -> Table:
        """The table on screen; with a column of steps only where a run was stopped early."""
        whole = all(result.steps == self.about["steps"] for result in self.results)
        columns = {key: column for key, column in COLUMNS.items() if not (key == "steps" and whole)}
        table = Table(title=self.title(), title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
        table.caption, table.caption_justify = self.note() or None, "left"
        for key, (heading, _) in columns.items():
            table.add_column(heading, justify="left" if key in ("recipe", "ran_on") else "right", no_wrap=True)
        for row in self.rows():
            table.add_row(*("-" if row[key] is None else show(row[key]) for key, (_, show) in columns.items()))
        return table

    def title(self) -> str:
        """One line: what was trained, on what."""
        about = self.about
        return (
            f"GPT {about['size']}, {about['parameters'] / 1e6:.1f}M parameters, {about['steps']} steps of "
            f"{about['batch']} x {about['context']} bytes, on {about['machine']}"
        )

    def note(self) -> str:
        """A remark on the speeds where FP8 was emulated; empty where it ran in hardware."""
        fp8 = [result for result in self.results if result.fp8_flops_share > 0]
        if not any("emulated" in result.ran_on for result in fp8):
            return ""
        return (
            f"FP8 is emulated on this {self.about['machine']}: the values and losses are those of FP8 training, "
            "the speeds are not those of FP8 Tensor Cores"
        )

    def to_dict(self) -> dict:
        """Everything, in types that JSON knows; NaN (a diverged run) becomes null."""
        runs = {
            result.recipe: {"curve": asdict(result.curve), "sample": result.sample, "decisions": result.decisions}
            for result in self.results
        }
        return _clean({"about": self.about, "note": self.note(), "rows": self.rows(), "runs": runs})

    def to_csv(self) -> str:
        """The rows, a heading first."""
        out = io.StringIO()
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())
        return out.getvalue()

    def samples(self) -> list[Result]:
        """The runs that have written a sample: the first, the last one in FP8, and one that was stopped."""
        return [result for result in self.results if result.sample]

    def write(self, folder: Path) -> list[Path]:
        """table.json and table.csv in a folder, each whole or as it was before.  Raises DemoError."""
        content = {TABLE: json.dumps(self.to_dict(), indent=1, allow_nan=False), "table.csv": self.to_csv()}
        for name, text in content.items():
            disk.write(folder / name, text.encode())
        return [folder / name for name in content]


def about(config: Config, seed: int) -> dict:
    """What the runs of a session have in common, as plain values."""
    where = torch.device(config.device)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in GPT(config.shape).parameters())
    text = read(config.text, config.shape.context)
    return {
        **asdict(config),
        **asdict(config.shape),
        "lr": config.peak,
        "parameters": parameters,
        "seed": seed,
        "text": config.text or "Python's manual (pydoc_data.topics)",
        "text_digest": text.digest,
        "loss_of_byte_pairs": text.entropy_of_pairs(),
        "machine": device.name(where),
        "threads": torch.get_num_threads() if where.type == "cpu" else None,
        "torch": torch.__version__,
    }


def differences(results: Sequence[Result]) -> list[float | None]:
    """Of each result its validation loss against fp32's of the same seed and step, in per cent; None without one."""
    base = {(one.seed, one.steps): one.validation_loss for one in results if one.recipe == "fp32"}
    found = ((one.validation_loss, base.get((one.seed, one.steps))) for one in results)
    return [None if other is None else 100 * (loss / other - 1) for loss, other in found]


def _clean(value: Any) -> Any:
    """The value in types that JSON knows: None for what is not finite."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)
