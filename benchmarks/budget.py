"""Budget of loss on real models: is it kept on text that neither decided nor checked, and what is left in FP8?

    python benchmarks/budget.py smollm2|minilm [--budgets 0.002 0.005 0.01 0.02] [--windows 16] [--others 16]

For each budget `fe.auto` is calibrated on one window, and `fe.keep_budget` measures on --windows others; then the cost
is measured on --others more, paired with 16 bits, ± the standard error over windows.  "predicted alone": the same
without measuring.
The models are those of benchmarks/real.py, SmolLM2 on a card where there is one.  On a CPU FP8 is emulated: values are
FP8's, times are not.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from common import WHERE, machine, parser, save
from real import Paired, fp8_share, paired
from real_models import Real, load
from rich.console import Console
from rich.table import Table
from torch import nn

import fp8engine as fe
from fp8engine.bench import harness
from fp8engine.errors import EmulationWarning

BUDGETS = (0.002, 0.005, 0.01, 0.015, 0.02)


class WithLoss(nn.Module):
    """A model that returns its loss as `.loss`, as fe.convert's example_inputs want it."""

    def __init__(self, real: Real):
        super().__init__()
        self.model, self.real = copy.deepcopy(real.model), real

    def forward(self, window: object) -> dict:
        """The loss of a window, in nats."""
        return {"loss": self.real.loss(self.model, window)}


def calibrated(real: Real, budget: float | None) -> WithLoss:
    """The model under `fe.auto`, which has decided on the first window."""
    model = WithLoss(real)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationWarning)
        fe.convert(model, fe.auto(budget=budget), example_inputs=(real.windows[0],))
    return model


def cost(real: Real, model: WithLoss, base: Sequence, windows: Sequence) -> Paired:
    """What FP8 costs on windows, in hundredths of the loss of `base`."""
    apart = [a - b for a, b in zip(losses(real, model.model, windows), base, strict=True)]
    return paired(apart, statistics.fmean(base))


@torch.no_grad()
def losses(real: Real, model: nn.Module, windows: Sequence) -> list[float]:
    """The loss of each window."""
    return [float(real.loss(model, window)) for window in windows]


def rows(real: Real, options, say: Callable[[str], None]) -> list[dict]:
    """A row for each budget."""
    last = 1 + options.windows
    measured_on, others = real.windows[1:last], real.windows[last : last + options.others]
    base, found = losses(real, real.model, others), []
    for budget in options.budgets:
        start = time.monotonic()
        model = calibrated(real, budget)
        alone, alone_share = cost(real, model, base, others), fp8_share(model)
        spent = fe.keep_budget(model, [(window,) for window in measured_on])
        held = cost(real, model, base, others)
        found.append(
            {
                "budget": budget,
                "promised": spent._asdict() | {"kept": spent.kept},
                "others": held._asdict(),
                "fp8_flops_share": fp8_share(model),
                "predicted_alone": alone._asdict() | {"fp8_flops_share": alone_share},
            }
        )
        say(f"{budget:.3%}: {time.monotonic() - start:.0f} s; {spent}; on others {held} %")
    return found


def table(result: dict) -> Table:
    """The result as a table for a terminal."""
    what = f"{result['model']}, {result['windows']} + {result['others']} windows; % of the loss"
    shown = Table(
        "budget", "measured", "bound", "other text", "FLOPs in FP8", "predicted alone", "FLOPs in FP8", title=what
    )
    for row in result["rows"]:
        spent, alone = row["promised"], row["predicted_alone"]
        percent = 100 / spent["loss"]
        shown.add_row(
            f"{row['budget']:.2%}",
            str(Paired(percent * spent["cost"], percent * spent["error"])),
            f"{percent * spent['bound']:.3f}",
            str(Paired(**row["others"])),
            f"{row['fp8_flops_share']:.0%}",
            str(Paired(alone["percent"], alone["error"])),
            f"{alone['fp8_flops_share']:.0%}",
        )
    return shown


def main() -> None:
    """Measure, print the table, write the result."""
    options = parser(__doc__)
    options.add_argument("model", choices=("smollm2", "minilm"))
    options.add_argument("--budgets", nargs="+", type=float, default=BUDGETS)
    options.add_argument("--windows", type=int, default=16)
    options.add_argument("--others", type=int, default=16)
    options.add_argument("--length", type=int, default=512)
    options = options.parse_args()
    real = load(options.model, options.length, 1 + options.windows + options.others)
    about = machine()
    if options.model == "smollm2" and WHERE.type == "cuda":  # the encoder's windows are sentences
        real = replace(real, model=real.model.to(WHERE), windows=[ids_BT.to(WHERE) for ids_BT in real.windows])
        about = harness.machine(WHERE)
    asked = {key: getattr(options, key) for key in ("model", "windows", "others", "length")}
    result = {"machine": about, **asked, "rows": rows(real, options, Console(stderr=True).print)}
    Console().print(table(result))
    Console(stderr=True).print(f"written to {save(f'budget_{options.model}', result)}")


if __name__ == "__main__":
    main()
