"""What does deciding cost: a training step under fe.auto beside the same step under the decisions it came to, fixed.

The demo's GPT on Python's manual, in FP32 with FP8 emulated.  One model trains under fe.auto until it has settled; its
plan is given to a second one, which measures nothing and casts alike.  A turn is `interval` steps, so that each holds
one look; turns alternate.  The target is 5 %.  Besides: seconds of a step that is watched and of one that is not.

    python benchmarks/auto.py [--size small] [--interval 16] [--turns 8] [--profile] [--json]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from common import interleaved, machine, save, timed
from torch import nn

import fp8engine as fe
from fp8engine.demo.config import Config, Text
from fp8engine.demo.config import read as read_text
from fp8engine.demo.model import GPT, loss_of
from fp8engine.numerics.recipe import Recipe
from fp8engine.report.state import controllers_of

TARGET = 0.05
SETTLING = 3  # intervals


def training(config: Config, recipe: Recipe, text: Text) -> tuple[nn.Module, Callable[[], object]]:
    """(a model, its next step)."""
    torch.manual_seed(0)
    model = GPT(config.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fe.errors.EmulationWarning)
        fe.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.peak, fused=True)
    steps = iter(range(1 << 30))

    def step() -> None:
        loss_of(model, text.batch(0, next(steps), config.batch, config.shape.context)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def several(step: Callable[[], object], count: int) -> Callable[[], None]:
    """So many steps as one call."""

    def call() -> None:
        for _ in range(count):
            step()

    return call


def one_by_one(model: nn.Module, step: Callable[[], object], count: int) -> dict[str, float]:
    """Median seconds of watched and of other steps."""
    (controller,) = controllers_of(model)
    seconds: dict[str, list[float]] = {"watched": [], "not watched": []}
    for _ in range(count):
        start = time.perf_counter()
        step()
        seconds["watched" if controller.state.samples is not None else "not watched"].append(
            time.perf_counter() - start
        )
    return {name: statistics.median(times) for name, times in seconds.items() if times}


def main() -> None:
    """Train, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small")
    parser.add_argument("--interval", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="where a turn's time goes")
    parser.add_argument("--json", action="store_true", help="save under benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)

    config = Config(size=options.size)
    text = read_text(None, config.shape.context)
    model, step = training(config, fe.auto(interval=options.interval), text)
    several(step, SETTLING * options.interval + 2)()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        fe.inspect(model).save_plan(path)
        _, repeat = training(config, fe.auto(plan=path), text)
    several(repeat, SETTLING * options.interval + 2)()
    turn, turn_fixed = several(step, options.interval), several(repeat, options.interval)
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(turn)
        pstats.Stats(profile).sort_stats("cumtime").print_stats("fp8engine")
        return
    found = interleaved(
        {"auto": lambda: timed(turn), "fixed": lambda: timed(turn_fixed)}, turns=options.turns, warmup=1
    )
    overhead = found["auto"]["median"] / found["fixed"]["median"] - 1
    steps = one_by_one(model, step, 2 * options.interval)
    for name, row in found.items():
        print(f"{name:12} {row['median'] / options.interval * 1e3:8.1f} ms a step ± {row['spread']:.0%}")
    for name, seconds in steps.items():
        print(f"{name:12} {seconds * 1e3:8.1f} ms")
    print(f"overhead     {overhead:8.1%} (target {TARGET:.0%}){'' if overhead <= TARGET else ' MISSED'}")
    if options.json:
        result = {"machine": machine(), "size": options.size, "interval": options.interval}
        print(save("auto", result | {"seconds_a_turn": found, "seconds_a_step": steps, "overhead": overhead}))


if __name__ == "__main__":
    main()
