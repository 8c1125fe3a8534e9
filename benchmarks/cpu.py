"""Emulated FP8 training on this CPU, beside torchao's emulation and beside nn.Linear in FP32 and BF16.

Two cases: one 16x16 Linear (host time) and three 512x512 Linears with GELU between (throughput).  A step is zero_grad,
forward, backward; between steps, outside the clock, the weights and the input change, so nothing can be reused.
No ratio is printed for a variant whose gradients are wrong.

    python benchmarks/cpu.py [--turns 40] [--json]
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import math
import warnings
from collections.abc import Callable

import torch
from common import interleaved, machine, save, timed
from torch import nn

import fp8engine as fe
from fp8engine.ops import device

# SQNR that per-tensor hybrid FP8 leaves in the gradient of three chained layers is about 22 dB; below this it is wrong.
LEAST_SQNR_DB = 18.0
TARGETS = {("small", "torchao"): 0.4, ("three", "torchao"): 0.25, ("three", "fp32"): 0.5}


def small() -> nn.Module:
    """One 16x16 Linear: what a step costs on the host."""
    return nn.Sequential(nn.Linear(16, 16))


def three() -> nn.Module:
    """Three 512x512 Linears with GELU."""
    return nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))


def variants() -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Name -> what it makes of a plain model."""
    made: dict[str, Callable[[nn.Module], nn.Module]] = {"fp32 nn.Linear": lambda m: m, "bf16 nn.Linear": lambda m: m}
    for recipe in ("current", "delayed", "rowwise", "blockwise"):
        made[f"fp8engine {recipe}"] = lambda m, recipe=recipe: fe.convert(m, recipe)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return made
    for recipe in ("tensorwise", "rowwise"):
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        made[f"torchao {recipe}"] = lambda m, config=config: convert_to_float8_training(m, config=config)
    return made


def step(model: nn.Module, x: torch.Tensor) -> None:
    """One training step but for the optimizer."""
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()


def ready(plain: nn.Module, change: Callable[[nn.Module], nn.Module], x: torch.Tensor) -> Callable[[], float]:
    """A call that times one step on new weights and a new input."""
    model = change(copy.deepcopy(plain)).to(x.dtype)
    own = x.clone()

    def call() -> float:
        seconds = timed(lambda: step(model, own))
        with torch.no_grad():
            own.mul_(-1)
            for parameter in model.parameters():
                parameter.mul_(-1)
        return seconds

    return call


def gradient_sqnr(plain: nn.Module, change: Callable[[nn.Module], nn.Module], x: torch.Tensor) -> float:
    """Signal to noise of the first layer's weight gradient against float64, in dB."""
    exact = copy.deepcopy(plain).double()
    step(exact, x.double())
    model = change(copy.deepcopy(plain)).to(x.dtype)
    step(model, x)
    truth = next(exact.parameters()).grad
    got = next(model.parameters()).grad
    if truth is None or got is None:
        return -math.inf
    noise = (got.double() - truth).square().sum()
    return float(10 * torch.log10(truth.square().sum() / noise))


def measure(turns: int) -> dict:
    """Both cases, every variant."""
    torch.manual_seed(0)
    result: dict = {"machine": machine(), "matmul_ms": device.cpu_timings(), "cases": {}}
    for case, make, rows in (("small", small, 16), ("three", three, 512)):
        plain = make()
        x = torch.randn(rows, 16 if case == "small" else 512)
        calls, sqnr = {}, {}
        for name, change in variants().items():
            own = x.bfloat16() if name.startswith("bf16") else x
            calls[name] = ready(plain, change, own)
            sqnr[name] = gradient_sqnr(plain, change, own)
        times = interleaved(calls, turns * (10 if case == "small" else 1))
        result["cases"][case] = {
            name: {"ms": 1e3 * times[name]["median"], "spread": times[name]["spread"], "sqnr_db": sqnr[name]}
            for name in calls
        }
    return result


def ratios(rows: dict[str, dict], name: str) -> dict[str, float | None]:
    """Time over FP32 nn.Linear's and over torchao's for the same granularity; None where the result is wrong."""
    peer = "torchao rowwise" if name in ("fp8engine rowwise", "fp8engine blockwise") else "torchao tensorwise"
    right = rows[name]["sqnr_db"] >= LEAST_SQNR_DB
    return {
        "fp32": rows[name]["ms"] / rows["fp32 nn.Linear"]["ms"] if right else None,
        "torchao": rows[name]["ms"] / rows[peer]["ms"] if right and peer in rows else None,
    }


def show(result: dict) -> None:
    """The table a person reads."""
    m, matmul = result["machine"], result["matmul_ms"]
    print(f"{m['cpu']}, {m['threads']} threads, {', '.join(m['bf16_instructions']) or 'no BF16 instructions'}")
    print(f"torch {m['torch']}, commit {m['commit']}, {m['date']}.  FP8 is emulated here.")
    print("256x512x512 matmul: " + ", ".join(f"{k} {v:.2f} ms" for k, v in matmul.items() if v is not None))
    for case, rows in result["cases"].items():
        print(f"\n{case:28s}     ms  spread  ÷ fp32  ÷ torchao  gradient SQNR")
        for name, row in rows.items():
            fp32, peer = ("wrong" if value is None else f"{value:.2f}" for value in ratios(rows, name).values())
            print(
                f"{name:28s} {row['ms']:6.3f}  {row['spread']:5.0%}  {fp32:>6s}  {peer:>9s}  {row['sqnr_db']:6.1f} dB"
            )
    print("\ntargets, current: " + ", ".join(f"{case} ÷ {peer} <= {t}" for (case, peer), t in TARGETS.items()))


def main() -> None:
    """Measure, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--turns", type=int, default=40, help="rounds for the large case; ten times as many for the small"
    )
    parser.add_argument("--threads", type=int, default=None, help="torch's threads (default: torch's own choice)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    result = measure(options.turns)
    for rows in result["cases"].values():
        for name in rows:
            rows[name]["ratio"] = ratios(rows, name)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    path = save(f"cpu-{result['machine']['threads']}-threads", result)
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
