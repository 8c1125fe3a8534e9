"""Report of a session: one row a recipe, the same in the table on screen, in CSV and in JSON, and a picture."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fp8engine.demo import config as disk
from fp8engine.demo.config import Config, read
from fp8engine.demo.model import GPT
from fp8engine.demo.trainer import Curve
from fp8engine.ops import device

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


# 16 and 32 bits in greys and blues, FP8 in warm and strong colours; told apart by colour-blind readers too (Okabe-Ito).
COLOURS = {
    "fp32": "#1b1b1b",
    "bf16": "#7f8c9b",
    "fp16": "#b3bcc6",
    "current": "#d55e00",
    "delayed": "#e69f00",
    "rowwise": "#0072b2",
    "blockwise": "#009e73",
    "rowwise_gw_hp": "#cc79a7",
    "auto": "#7b2fbe",
}
INK, DIM, FAINT = "#2b2f36", "#6b747e", "#d9dde2"
TABLE = "table.json"
GOAL = 0.5  # percent: DESIGN section 9


@dataclass(frozen=True)
class Result:
    """Loss, speed and memory of one run.

    steps: taken; fewer than asked for where the run was stopped.  Losses in nats a byte: train_loss the mean of the
    last 20 steps, validation_loss over the validation windows.  tokens_per_second from the median step.
    activation_bytes: saved for one backward.  fp8_flops_share: of the linear layers' FLOPs.  saturated, underflowed:
    shares of the elements cast to FP8 (None where none was).  skipped: steps lost to overflow under the loss scale.
    sample: text that the model writes; "" where it is not shown.
    decisions: changes of format under auto, as in fe.inspect(model).decisions.
    """

    recipe: str
    seed: int
    steps: int
    train_loss: float
    validation_loss: float
    tokens_per_second: float
    seconds: float
    activation_bytes: int
    fp8_flops_share: float
    saturated: float | None
    underflowed: float | None
    skipped: int
    ran_on: str
    sample: str
    curve: Curve
    decisions: list[dict] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    """The runs of one session.

    about: what they have in common: model, text, machine.
    """

    about: dict
    results: list[Result]

    def rows(self) -> list[dict]:
        """One dict of plain values a recipe, keys as in COLUMNS; None where a value does not exist."""
        losses = {(result.recipe, result.steps): result.validation_loss for result in self.results}
        rows = []
        for result in self.results:
            row = {key: getattr(result, key, None) for key in COLUMNS}
            if (base := losses.get(("fp32", result.steps))) is not None:
                row["difference_to_fp32_percent"] = 100 * (result.validation_loss / base - 1)
            rows.append({key: None if _is_nan(value) else value for key, value in row.items()})
        return rows

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
        results = {
            result.recipe: _clean(
                {"curve": asdict(result.curve), "sample": result.sample, "decisions": result.decisions}
            )
            for result in self.results
        }
        return {"about": self.about, "note": self.note(), "rows": self.rows(), "runs": results}

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


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _clean(value):
    if isinstance(value, dict):
        return {key: _clean(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(inner) for inner in value]
    return None if _is_nan(value) else value


def draw(summary: Summary, path: Path) -> Path | None:
    """Write the picture; None, and no file, where matplotlib is not installed or no step was taken."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    results = [result for result in summary.results if result.steps]
    if not results:
        return None
    with matplotlib.rc_context(
        {
            "font.size": 9,
            "axes.edgecolor": FAINT,
            "text.color": INK,
            "axes.labelcolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    ):
        figure = Figure(figsize=(9.6, 6.4), layout="constrained")
        FigureCanvasAgg(figure)
        emulated = bool(summary.note())  # its speeds say nothing
        below = ["loss", "small"] if emulated else ["loss", "fast", "small"]
        mosaic: Any = [["far"] * len(below), below]
        panels: Any = figure.subplot_mosaic(mosaic, height_ratios=[1.35, 1])
        for panel in panels.values():
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(length=0)
            panel.grid(color=FAINT, linewidth=0.6)
            panel.set_axisbelow(True)
        _difference(panels["far"], results)
        _loss(panels["loss"], results, summary.about["loss_of_byte_pairs"])
        if not emulated:
            _bars(panels["fast"], results, "thousand tokens a second", [r.tokens_per_second / 1e3 for r in results])
        saved = [result.activation_bytes / 2**20 for result in results]
        _bars(panels["small"], results, "activations saved for backward, MiB", saved)
        figure.suptitle(summary.title(), x=0.01, ha="left", fontsize=12, fontweight="bold")
        if summary.note():
            figure.supxlabel(summary.note(), x=0.01, ha="left", fontsize=8.5, color="#9a3b00")
        memory = io.BytesIO()
        figure.savefig(memory, format="png", dpi=130, facecolor="white", metadata={"Software": None})
    disk.write(path, memory.getvalue())
    return path


def _loss(panel: Axes, results: list[Result], pairs: float) -> None:
    last = max(result.steps for result in results)
    for result in results:
        plain = result.recipe == "fp32"
        smooth = _smooth(result.curve.losses)
        colour = COLOURS.get(result.recipe, INK)
        panel.plot(range(1, len(smooth) + 1), smooth, color=colour, linewidth=2.4 if plain else 1.1)
    panel.axhline(pairs, color="#9aa3ad", linewidth=1, linestyle=(0, (4, 3)))
    told = f"a table of byte pairs: {pairs:.2f}"
    panel.annotate(told, (last, pairs), xytext=(-2, 4), textcoords="offset points", ha="right", color=DIM, fontsize=8.5)
    ends = _finite(min(result.curve.losses) for result in results)
    panel.set(xlabel="step", xlim=(0, 1.015 * last), ylim=(min([pairs, *ends]) - 0.15, 4.2))
    panel.set_title("training loss, nats a byte", loc="left", fontsize=10)


def _difference(panel: Axes, results: list[Result]) -> None:
    """Training losses are paired: both saw the same batch, and what one batch differs from another by falls out."""
    base = next((result.curve for result in results if result.recipe == "fp32"), None)
    panel.set_xlim(0, 1.015 * max(result.steps for result in results))
    panel.set_xlabel("step")
    panel.set_title(
        f"loss against fp32's on the same text, one seed, %   (green: within {GOAL})", loc="left", fontsize=10
    )
    if base is None:
        panel.text(0.5, 0.5, "fp32 was not among the recipes", transform=panel.transAxes, ha="center", color=DIM)
        return
    panel.axhspan(-GOAL, GOAL, color="#e8f3ec", zorder=0)
    panel.axhline(0, color=COLOURS["fp32"], linewidth=1.6, label="fp32")
    widest, validation = GOAL, dict(base.validation)
    for result in results:
        if result.recipe == "fp32":
            continue
        colour = COLOURS.get(result.recipe, INK)
        pairs = zip(result.curve.losses, base.losses, strict=False)  # one of both may have been stopped
        far = _smooth([100 * (loss / other - 1) for loss, other in pairs], keep=0.97)
        dots = [
            (step, 100 * (loss / validation[step] - 1))
            for step, loss in result.curve.validation
            if validation.get(step)
        ]
        label = f"{result.recipe}   {dots[-1][1]:+.2f}" if dots else result.recipe
        panel.plot(range(1, len(far) + 1), far, color=colour, linewidth=1.3, label=label)
        panel.plot([step for step, _ in dots], [each for _, each in dots], "o", color=colour, markersize=5)
        widest = max([widest, *_finite(abs(each) for _, each in dots)])
    panel.set_ylim(-1.9 * widest, 1.25 * widest)  # the legend is below
    title = "lines: training, smoothed; dots: validation, at the end:"
    panel.legend(frameon=False, title=title, alignment="left", loc="lower left", ncols=4, handlelength=1.2)


def _bars(panel: Axes, results: list[Result], title: str, values: list[float]) -> None:
    names = [result.recipe for result in results]
    bars = panel.barh(names, values, color=[COLOURS.get(name, INK) for name in names], height=0.68)
    panel.bar_label(bars, fmt="%.1f", padding=3, fontsize=8.5)
    panel.invert_yaxis()
    panel.grid(visible=False)
    panel.spines["bottom"].set_visible(False)
    panel.set_xticks([])
    panel.set_xlim(0, 1.18 * max(values))
    panel.set_title(title, loc="left", fontsize=10)


def _finite(values: Iterable[float]) -> list[float]:
    """Without the NaN and Inf of a diverged run."""
    return [value for value in values if math.isfinite(value)]


def _smooth(losses: list[float], keep: float = 0.9) -> list[float]:
    """An exponential average that starts at the first value."""
    smooth, last = [], losses[0]
    for loss in losses:
        last = keep * last + (1 - keep) * loss
        smooth.append(last)
    return smooth
