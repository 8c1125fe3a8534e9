"""FP16 training in every classic way, on the digits: time and accuracy per variant and per launcher.

    python benchmarks/amp.py [--quick] [--device cpu] [--out FILE] [--json]

    fp32        nothing
    autocast    the forward under FP16 autocast, no loss scale
    scaler      that, and GradScaler
    o2          weights and forward in FP16, norms FP32, master weights, GradScaler

    single      one process, one device          dp      nn.DataParallel, one process, every device
    ddp         DistributedDataParallel, a process a device (on a CPU: two, over gloo), the same batch shared out

Variants take turns, seed after seed.  Time is an epoch's training, its evaluation left out; `over_fp32` is fp32's
median over the variant's in one run.  A variant further than MARGIN from fp32's accuracy has no ratio.  The last
model's loss is so small that FP16 gradients vanish: there autocast alone must fail, and the scaler must cure it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]  # a bare checkout: fp8engine need not be installed

import digits  # noqa: E402  after the path
from amp_common import apart, leave  # noqa: E402

from benchmarks.common import save  # noqa: E402
from fp8engine.amp import GradScaler, autocast, decorate  # noqa: E402
from fp8engine.bench.harness import machine  # noqa: E402
from fp8engine.errors import BackendError, Fp8EngineError  # noqa: E402

VARIANTS = ("fp32", "autocast", "scaler", "o2")
LAUNCHERS = ("single", "dp", "ddp")
BATCH, RATE, EPSILON = 32, 5e-3, 1e-8  # AdamW's learning rate, falling linearly; its epsilon is torch's own
EPOCHS, SEEDS = 8, (0, 1, 2)  # 320 steps, enough for 97 % here; issue 5 asks for the mean of three seeds
QUICK_EPOCHS, QUICK_SEEDS = 2, (0,)
MARGIN = 1.0  # points of accuracy, issue 5's target
# A gradient of the mean loss by a logit lies below 1 / BATCH = 2^-5.  Times 2^-20 that is 2^-25, half of FP16's
# smallest number: every one rounds to zero.  GradScaler's first scale, 2^16, lifts them to 2^-9, within FP16's range.
FAINT = 2.0**-20
LOST = 30.0  # % right; chance is 10


@dataclass(frozen=True)
class Cell:
    """One training.  weight: of the loss."""

    launcher: str
    model: str
    variant: str
    seed: int
    epochs: int = EPOCHS
    weight: float = 1.0

    @property
    def name(self) -> str:
        """Of what is trained."""
        return self.model if self.weight == 1.0 else f"{self.model} faint"


@dataclass(frozen=True)
class Part:
    """Which of the processes that train together this is, and where it computes."""

    where: torch.device
    rank: int = 0
    ranks: int = 1


class UnderAutocast(nn.Module):
    """Autocast inside forward: nn.DataParallel runs each replica in a thread of its own, where autocast is off.

    >>> UnderAutocast(nn.Linear(4, 4), True)(torch.ones(1, 4)).dtype
    torch.float16
    """

    def __init__(self, model: nn.Module, enabled: bool):
        super().__init__()
        self.model, self.enabled = model, enabled

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """As the model's."""
        with autocast(images.device.type, torch.float16, enabled=self.enabled):
            return self.model(images)


def cells(epochs: int, seeds: Iterable[int], models: Iterable[str] = tuple(digits.MODELS)) -> list[Cell]:
    """Every training, variants taking turns within a seed.

    >>> [cell.variant for cell in cells(1, [0], ["cnn"])[:4]]
    ['fp32', 'autocast', 'scaler', 'o2']
    """
    kinds = [(launcher, model, 1.0) for launcher in LAUNCHERS for model in models]
    kinds.insert(kinds.index(("dp", kinds[0][1], 1.0)), ("single", kinds[0][1], FAINT))
    return [
        Cell(launcher, model, variant, seed, epochs, weight)
        for seed in seeds
        for launcher, model, weight in kinds
        for variant in VARIANTS
    ]


def train(cell: Cell, part: Part) -> dict[str, Any]:
    """Train once: accuracy in %, seconds of each epoch, the last loss, skipped steps, the last loss scale.

    ranks_apart: the largest difference between two processes' weights.  Raises BackendError without scikit-learn.
    """
    learned, held_out = digits.load(part.where)
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(cell.seed)
        net = digits.MODELS[cell.model]().to(part.where)
        optimizer: Any = torch.optim.AdamW(net.parameters(), RATE, eps=EPSILON * cell.weight)
        if cell.variant == "o2":
            net, optimizer = decorate(net, optimizer, level="O2", scaler=False)
        scaler = GradScaler(part.where, enabled=cell.variant in ("scaler", "o2"))
        model = _launched(UnderAutocast(net, cell.variant in ("autocast", "scaler")), cell.launcher)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, cell.epochs)
        seconds, loss = [], torch.zeros(())
        for epoch in range(cell.epochs):
            batches = learned.batches(BATCH, 1000 * cell.seed + epoch, slice(part.rank, None, part.ranks))
            start = _now(part.where)
            for batch in batches:
                loss = F.cross_entropy(model(batch.images).float(), batch.labels) * cell.weight
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            seconds.append(_now(part.where) - start)
            schedule.step()
        return {
            "accuracy": 100 * digits.accuracy(model, held_out),
            "seconds": seconds,
            "steps": len(batches),
            "loss": loss.item() / cell.weight if math.isfinite(loss.item()) else None,
            "skipped": scaler.stats.skipped,
            "loss_scale": scaler.get_scale(),
            "ranks_apart": apart(net) if part.ranks > 1 else 0.0,
        }


def _launched(model: nn.Module, launcher: str) -> nn.Module:
    if launcher == "ddp":
        return DistributedDataParallel(model)
    return nn.DataParallel(model) if launcher == "dp" else model


def _now(where: torch.device) -> float:
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return time.perf_counter()


def ranks(where: torch.device) -> int:
    """How many processes share the work of `ddp`: one a card; two on a CPU."""
    return torch.cuda.device_count() if where.type == "cuda" else 2


def _processes(asked: list[Cell], where: torch.device) -> list[dict[str, Any]]:
    """Each cell trained by ranks() processes, which start once; what the first of them found."""
    count = ranks(where)
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.json"
        multiprocessing.spawn(_process, (asked, where, count, folder), nprocs=count)
        return json.loads(answers.read_text())


def _process(rank: int, asked: list[Cell], where: torch.device, count: int, folder: str) -> None:
    backend = "gloo"
    if where.type == "cuda":
        where, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(where)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    torch.distributed.init_process_group(backend, f"file://{folder}/meeting", rank=rank, world_size=count)
    try:
        answers = [train(cell, Part(where, rank, count)) for cell in asked]
    finally:
        leave()
    if rank == 0:
        (Path(folder) / "answers.json").write_text(json.dumps(answers))


def amp(where: torch.device, quick: bool = False, note: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Train everything on that device: {"machine", "what", "head", "rows"}.  quick: one seed, two epochs, not judged.

    note: called with a line on each training before it starts.  Raises BackendError without scikit-learn, and for one
    card of several.
    """
    if where.type not in ("cpu", "cuda") or where.index:
        raise BackendError(f"no amp benchmark on {where}: cpu, or cuda, which takes every card")
    asked = cells(QUICK_EPOCHS, QUICK_SEEDS) if quick else cells(EPOCHS, SEEDS)
    digits.load()  # missing: said before anything is trained
    note = note or (lambda _: None)
    found: dict[Cell, dict[str, Any]] = {}
    standalone = [cell for cell in asked if cell.launcher != "ddp"]
    for number, cell in enumerate(standalone, 1):
        note(f"{number}/{len(asked)}: {cell.launcher}, {cell.name}, {cell.variant}, seed {cell.seed}")
        found[cell] = train(cell, Part(where))
    spread = [cell for cell in asked if cell.launcher == "ddp"]
    note(f"{len(standalone) + 1} to {len(asked)}/{len(asked)}: ddp, {ranks(where)} processes")
    found |= zip(spread, _processes(spread, where), strict=True)
    epochs, seeds = asked[0].epochs, len({cell.seed for cell in asked})
    return {
        "machine": machine(where),
        "what": f"digits in FP16: {epochs} epochs of batches of {BATCH}, {seeds} seed{'s' if seeds > 1 else ''}",
        "head": [*notes(where, quick), HEADING],
        "rows": rows(found, judged=not quick),
    }


def notes(where: torch.device, quick: bool) -> list[str]:
    """Remarks on this machine, without which the numbers mislead."""
    found = []
    if where.type == "cpu":
        found.append("CPU: FP16 values as on a GPU; FP16 is slower than FP32 here, and the times say nothing of a GPU")
        found.append("dp on a CPU: one device, for which nn.DataParallel calls the module itself")
    elif torch.cuda.device_count() == 1:
        found.append("one card: dp calls the module itself, and ddp is one process")
    if quick:
        found.append("quick: too few steps to judge the accuracy by")
    return [*found, f"faint: the loss is {FAINT:g} of what it was; FP16 without a loss scale must fail there"]


def rows(found: dict[Cell, dict[str, Any]], judged: bool = True) -> list[dict[str, Any]]:
    """A row for each launcher, model and variant, over the seeds."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell, one in found.items():
        groups.setdefault((cell.launcher, cell.name, cell.variant), []).append(one)
    made = []
    for (launcher, name, variant), several in groups.items():
        row = {"launcher": launcher, "model": name, "variant": variant, **_joined(several)}
        base = _joined(groups[launcher, name, "fp32"])
        row["points"] = round(row["accuracy"] - base["accuracy"], 2)
        row |= _verdict(row) if judged else {"correct": None, "why": "not judged"}
        if row["correct"] is not False:
            row["over_fp32"] = base["epoch_seconds"] / row["epoch_seconds"]
        made.append(row)
    return made


def _joined(several: list[dict[str, Any]]) -> dict[str, Any]:
    epochs = [second for one in several for second in one["seconds"]]
    low, _, high = statistics.quantiles(epochs, n=4)
    middle = statistics.median(epochs)
    return {
        "accuracies": [round(one["accuracy"], 2) for one in several],
        "accuracy": statistics.fmean(one["accuracy"] for one in several),
        "losses": [one["loss"] for one in several],
        "epoch_seconds": middle,
        "step_seconds": middle / several[0]["steps"],
        "spread": (high - low) / middle,
        "skipped": [one["skipped"] for one in several],
        "loss_scale": [one["loss_scale"] for one in several],
        "ranks_apart": max(one["ranks_apart"] for one in several),
        "over_fp32": None,
    }


def _verdict(row: dict[str, Any]) -> dict[str, Any]:
    if row["ranks_apart"]:
        return {"correct": False, "why": f"the processes' weights differ by {row['ranks_apart']:.1e}"}
    if row["model"].endswith(" faint") and row["variant"] == "autocast":
        lost = row["accuracy"] < LOST
        return {"correct": lost, "why": "underflows, as it must" if lost else "no underflow: the test shows nothing"}
    right = abs(row["points"]) <= MARGIN
    return {"correct": right, "why": "" if right else f"over {MARGIN:g} point from fp32: no ratio"}


HEADING = (
    f"{'launcher':8s} {'model':10s} {'variant':9s} {'accuracy':>9s} {'points':>7s} {'ms a step':>10s}"
    f" {'s an epoch':>11s} {'spread':>7s} {'x fp32':>7s} {'skipped':>8s} {'loss scale':>11s}"
)


def line(row: dict[str, Any]) -> str:
    """A row as plain text, under HEADING."""
    ratio = "" if row["over_fp32"] is None else f"{row['over_fp32']:.2f}"
    skipped = "/".join(map(str, row["skipped"]))
    scales = "/".join(sorted({f"{scale:g}" for scale in row["loss_scale"]}))
    return (
        f"{row['launcher']:8s} {row['model']:10s} {row['variant']:9s} {row['accuracy']:7.2f} % {row['points']:+7.2f}"
        f" {1e3 * row['step_seconds']:10.2f} {row['epoch_seconds']:11.3f} {row['spread']:7.0%} {ratio:>7s}"
        f" {skipped:>8s} {scales:>11s}  {'WRONG: ' if row['correct'] is False else ''}{row['why']}"
    ).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result; the exit status.  A quick result is only printed, or written to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, two epochs; accuracy is not judged")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: benchmarks/results/<machine>/")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"error: --device {options.device}: there is no CUDA device here", file=sys.stderr)
        return 2
    try:
        result = amp(torch.device(options.device), options.quick, note=lambda text: print(text, file=sys.stderr))
    except (Fp8EngineError, RuntimeError) as error:  # RuntimeError: torch's, of a device that it does not know
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    print(text if options.json else "\n".join([result["what"], *result["head"], *map(line, result["rows"])]))
    if options.out is not None:
        options.out.write_text(text)
    elif not options.quick:
        print(f"written to {save('amp', result)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
