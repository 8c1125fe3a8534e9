"""What fine-tuning ends at under each recipe: the loss of text that was not trained on, beside 16 bits'.

    python benchmarks/trained.py [--recipes plain current ... auto auto_budget] [--seeds 0 1 2] [--steps 500]
                                 [--batch 2] [--length 512] [--held-out 64] [--every 100] [--rows FILE]
    python benchmarks/trained.py --table FILE ...       rows of several processes, as one table and one result

SmolLM2 (benchmarks/real_models.py) with weights in FP32, on a card under BF16 autocast; AdamW; a seed is an order of
the text.  The loss is that of the recipe's own forward, of each held-out window, every --every steps.  What a recipe
costs is paired: the same windows after as many steps on the same text in the same order, less those without FP8; the
standard error is that over seeds.  --rows: rows are appended as they are found.

On a card a step of a fixed recipe is one CUDA graph; `auto` decides on the host between steps, and runs eagerly.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from common import WHERE, machine, parser, save
from graphs import captured
from real import fp8_share
from real_models import load
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import fp8engine as fe
from fp8engine.bench import harness
from fp8engine.bench.steps import WARM_UP
from fp8engine.errors import EmulationWarning

BASE = "plain"
RECIPES = (BASE, "current", "delayed", "rowwise", "blockwise", "auto", "auto_budget")
BUDGET = 0.005
LEARNING_RATE = 5e-5  # the default of transformers' Trainer
TOGETHER = 8  # held-out windows of one forward


class Text(NamedTuple):
    """Windows of token ids, [windows, length] each, on the device that trains."""

    train: torch.Tensor
    held_out: torch.Tensor

    def batches(self, seed: int, size: int, steps: int) -> Iterator[torch.Tensor]:
        """A batch [size, length] for each step; the windows are shuffled anew in each epoch."""
        random, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            if len(order) < size:
                order = torch.cat([order, torch.randperm(len(self.train), generator=random)])
            yield self.train[order[:size].to(self.train.device)]
            order = order[size:]


def converted(model: nn.Module, recipe: str) -> nn.Module:
    """A copy of the model under a recipe."""
    made = copy.deepcopy(model).to(WHERE)
    if recipe == BASE:
        return made
    asked = {"auto": fe.auto(), "auto_budget": fe.auto(budget=BUDGET)}.get(recipe, recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationWarning)
        return fe.convert(made, asked)


def forward(model: nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """The loss of each window's next tokens [B], in nats."""
    with torch.autocast(WHERE.type, torch.bfloat16, enabled=WHERE.type == "cuda"):
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    return F.cross_entropy(logits_BTV[:, :-1].float().transpose(1, 2), ids_BT[:, 1:], reduction="none").mean(1)


def stepper(model: nn.Module, first_BT: torch.Tensor, graph: bool) -> Callable[[torch.Tensor], None]:
    """A training step of a batch, after WARM_UP steps on the first one.  graph: it is captured once and replayed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, capturable=graph)
    ids_BT = first_BT.clone()

    def eager(batch_BT: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(model, batch_BT).mean().backward()
        optimizer.step()

    if not graph:
        for _ in range(WARM_UP):
            eager(ids_BT)
        return eager
    replayed, _ = captured(lambda turn: eager(ids_BT), WHERE)

    def replay(batch_BT: torch.Tensor) -> None:
        ids_BT.copy_(batch_BT)
        replayed.replay()

    return replay


@torch.no_grad()
def losses(model: nn.Module, windows_WT: torch.Tensor) -> list[float]:
    """The loss of each window, in evaluation mode."""
    model.eval()
    found = torch.cat([forward(model, part_BT) for part_BT in windows_WT.split(TOGETHER)]).tolist()
    model.train()
    return found


def trained(model: nn.Module, recipe: str, seed: int, text: Text, options) -> Iterator[dict]:
    """A row every --every steps of one training."""
    start, made = time.monotonic(), converted(model, recipe).train()
    batches = list(text.batches(seed, options.batch, options.steps))
    step = stepper(made, batches[0], graph=WHERE.type == "cuda" and not recipe.startswith("auto"))
    for number, batch_BT in enumerate(batches, 1):
        step(batch_BT)
        if number % options.every == 0:
            found = losses(made, text.held_out)
            row = {"recipe": recipe, "seed": seed, "step": number, "losses": found}
            if recipe != BASE:
                row["fp8_flops_share"] = fp8_share(made)
            yield row | {"seconds": round(time.monotonic() - start, 1)}


def summary(rows: Sequence[dict], step: int) -> list[dict]:
    """What each recipe costs at a step, in % of the loss without: the mean over seeds, and its standard error."""
    at = {(row["recipe"], row["seed"]): row for row in rows if row["step"] == step}
    found = []
    for recipe in RECIPES:
        pairs = [
            (row["losses"], at[BASE, seed]["losses"], row.get("fp8_flops_share"))
            for (name, seed), row in sorted(at.items())
            if name == recipe and (BASE, seed) in at
        ]
        if not pairs:
            continue
        means = [(statistics.fmean(mine), statistics.fmean(base)) for mine, base, _ in pairs]
        percent = [100 * (mine / base - 1) for mine, base in means]
        error = statistics.stdev(percent) / math.sqrt(len(percent)) if len(percent) > 1 else math.nan
        shares = [share for _, _, share in pairs if share is not None]
        found.append(
            {
                "recipe": recipe,
                "step": step,
                "seeds": len(pairs),
                "loss": statistics.fmean(mine for mine, _ in means),
                "percent": statistics.fmean(percent),
                "error": error,
                "fp8_flops_share": statistics.fmean(shares) if shares else 0.0,
            }
        )
    return found


def table(found: Sequence[dict]) -> Table:
    """Summaries as a table for a terminal."""
    shown = Table("recipe", "step", "seeds", "loss, nats", "over 16 bits, %", "± over seeds", "FLOPs in FP8")
    for row in found:
        shown.add_row(
            row["recipe"],
            str(row["step"]),
            str(row["seeds"]),
            f"{row['loss']:.4f}",
            f"{row['percent']:+.3f}",
            f"{row['error']:.3f}",
            f"{row['fp8_flops_share']:.0%}",
        )
    return shown


def read(files: Sequence[Path]) -> tuple[dict, list[dict]]:
    """What was asked (the first line of each file, which has to be the same), and all rows.  Raises SystemExit."""
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    about = [{key: value for key, value in each[0].items() if key != "machine"} for each in lines]
    if any(other != about[0] for other in about):
        raise SystemExit("these files are of trainings that are not alike")
    return lines[0][0], [row for each in lines for row in each[1:]]


def main() -> None:
    """Train, or join what was trained; print the table, write the result."""
    options = parser(__doc__)
    options.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    options.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    options.add_argument("--rows", type=Path)
    options.add_argument("--table", nargs="+", type=Path)
    numbers = {"steps": 500, "batch": 2, "length": 512, "held_out": 64, "every": 100}
    for name, default in numbers.items():
        options.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    options = options.parse_args()
    say = Console(stderr=True).print
    if options.table:
        about, rows = read(options.table)
    else:
        real = load("smollm2", options.length, options.held_out + options.batch)
        windows_WT = torch.cat(real.windows).to(WHERE)
        apart = len(windows_WT) // options.held_out  # held out all over the text: its end is of other topics
        held = torch.arange(len(windows_WT), device=WHERE) % apart == 0
        text = Text(windows_WT[~held], windows_WT[held][: options.held_out])
        where = harness.machine(WHERE) if WHERE.type == "cuda" else machine()
        about = {"machine": where, **{name: getattr(options, name) for name in numbers}, "windows": len(windows_WT)}
        rows = []
        write = options.rows.open("a") if options.rows else None
        if write:
            print(json.dumps(about), file=write, flush=True)
        for recipe in options.recipes:
            for seed in options.seeds:
                for row in trained(real.model, recipe, seed, text, options):
                    rows.append(row)
                    mean = statistics.fmean(row["losses"])
                    say(f"{recipe}, seed {seed}, step {row['step']}: {mean:.4f}, {row['seconds']} s")
                    if write:
                        print(json.dumps(row), file=write, flush=True)
    found = [each for step in sorted({row["step"] for row in rows}) for each in summary(rows, step)]
    Console().print(table(found))
    if not options.rows:
        say(f"written to {save('trained_smollm2', about | {'summary': found, 'rows': rows})}")


if __name__ == "__main__":
    main()
