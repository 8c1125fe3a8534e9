"""Validation loss of the demo's GPT under every recipe, over several seeds: the mean difference to fp32 in %.

The seed sets the weights and the batches; every recipe of a seed sees the same ones.  Paired by seed, because seeds
differ from each other by more than recipes do; the spread printed is the standard error of the mean difference.

    python benchmarks/accuracy.py [--seeds 3] [--steps N] [--recipes fp32 auto ...] [--json] [--picture docs/demo.png]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

from common import machine, save

from fp8engine.demo import DEFAULT, Config, run
from fp8engine.demo.picture import by_recipe, draw, mean_and_error
from fp8engine.demo.report import Result, Summary, about

TARGET_PERCENT = 0.5
RECIPES = (*DEFAULT, "rowwise_gw_hp")


def summary(results: list[Result]) -> dict[str, dict[str, float | None]]:
    """Of each recipe the mean loss, and the mean difference to fp32 in % with its standard error, paired by seed."""
    found = {"fp32": [0.0]} | by_recipe(results)
    rows = {}
    for recipe, percent in found.items():
        losses = [result.validation_loss for result in results if result.recipe == recipe]
        middle, error = mean_and_error(percent)
        rows[recipe] = {"loss": statistics.fmean(losses), "difference_percent": middle, "standard_error": error}
    return rows


def main() -> None:
    """Train, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=Config().steps)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="fp32, to compare with, and others")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw what was found")
    options = parser.parse_args()
    config = Config(steps=options.steps)
    results = []
    start = time.monotonic()
    for seed in range(options.seeds):
        for recipe in options.recipes:
            results.append(run(config, recipe, seed))
            loss = results[-1].validation_loss
            print(f"seed {seed} {recipe:14s} {loss:.4f}  {time.monotonic() - start:5.0f} s", flush=True)
    result = {
        "machine": machine(),
        "config": dataclasses.asdict(config),
        "losses": {
            recipe: [each.validation_loss for each in results if each.recipe == recipe] for recipe in options.recipes
        },
        "activation_bytes": {each.recipe: each.activation_bytes for each in results},
        "summary": summary(results),
    }
    if options.picture:
        draw(Summary(about(config, 0), results), options.picture)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"\n{'recipe':14s}  validation loss  ÷ fp32 (target: within {TARGET_PERCENT} %)")
        for recipe, row in result["summary"].items():
            error = "" if row["standard_error"] is None else f" ± {row['standard_error']:.2f}"
            print(f"{recipe:14s} {row['loss']:16.4f}  {row['difference_percent']:+.2f} %{error}")
    print(f"written to {save('accuracy', result)}")


if __name__ == "__main__":
    main()
