"""Validation loss of the demo's GPT under every recipe, over several seeds: the mean difference to fp32 in %.

The seed sets the weights and the batches; every recipe of a seed sees the same ones.  Paired by seed, because seeds
differ from each other by more than recipes do; the spread printed is the standard error of the mean difference.

    python benchmarks/accuracy.py [--seeds 3] [--steps N] [--recipes fp32 auto ...] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time

from common import machine, save

from fp8engine.demo import DEFAULT, Config, run

TARGET_PERCENT = 0.5
RECIPES = (*DEFAULT, "rowwise_gw_hp")


def differences(losses: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Mean difference to fp32 in % and its standard error, paired by seed."""
    found = {}
    for recipe, values in losses.items():
        percent = [100 * (value / base - 1) for value, base in zip(values, losses["fp32"], strict=True)]
        error = statistics.stdev(percent) / len(percent) ** 0.5 if len(percent) > 1 else float("nan")
        found[recipe] = {
            "loss": statistics.fmean(values),
            "difference_percent": statistics.fmean(percent),
            "standard_error": error,
        }
    return found


def main() -> None:
    """Train, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=Config().steps)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="fp32, to compare with, and others")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    config = Config(steps=options.steps)
    losses: dict[str, list[float]] = {recipe: [] for recipe in options.recipes}
    start = time.monotonic()
    for seed in range(options.seeds):
        for recipe in options.recipes:
            losses[recipe].append(run(config, recipe, seed).validation_loss)
            print(f"seed {seed} {recipe:14s} {losses[recipe][-1]:.4f}  {time.monotonic() - start:5.0f} s", flush=True)
    result = {
        "machine": machine(),
        "config": dataclasses.asdict(config),
        "losses": losses,
        "summary": differences(losses),
    }
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"\n{'recipe':14s}  validation loss  ÷ fp32 (target: within {TARGET_PERCENT} %)")
        for recipe, row in result["summary"].items():
            print(f"{recipe:14s} {row['loss']:16.4f}  {row['difference_percent']:+.2f} % ± {row['standard_error']:.2f}")
    print(f"written to {save('accuracy', result)}")


if __name__ == "__main__":
    main()
