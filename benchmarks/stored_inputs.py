"""What fe.TransformerLayer's memory options save, and what keeping the inputs of norms and activations in FP8 costs.

A SwiGLU block (h 256, f 896, 8 heads, 2 of keys; 1024 tokens) with unit-normal input and output gradient, BF16, against
the same block in float64: SQNR of y, dx and the parameters' gradients, the mean of all matrices' in dB and the worst.
"outliers": 4 of the 256 columns of the input are 30 times as large.

    python benchmarks/stored_inputs.py [--seeds 3] [--json]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics

import torch
from common import machine, save
from networks import Block, Size, fused

from fp8engine.bench.steps import saved_bytes

SIZE, BATCH, T = Size(256, 896, 8, 2), 4, 256
OPTIONS = {
    "16 bits": {},
    "recompute": {"recompute": True},
    "fp8": {"store": "fp8"},
    "recompute, fp8": {"recompute": True, "store": "fp8"},
}


def sqnr(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """In dB."""
    noise = (found.double() - wanted).square().sum()
    return 10 * math.log10(wanted.square().sum().item() / noise.item())


def gradients(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """y, dx and every parameter's gradient."""
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    return {"y": y.detach(), "dx": leaf.grad} | {name: p.grad for name, p in layer.named_parameters()}


def measured(recipe: str, outliers: bool, seed: int) -> dict[str, dict[str, float]]:
    """Option -> what it reaches and keeps."""
    torch.manual_seed(seed)
    plain = Block(SIZE).bfloat16()
    x, dy = torch.randn(2, BATCH, T, SIZE.hidden)
    if outliers:
        x[..., :4] *= 30
    x, dy = x.bfloat16(), dy.bfloat16()
    wanted = gradients(copy.deepcopy(plain).double(), x.double(), dy.double())
    found = {}
    for option, memory in OPTIONS.items():
        layer = fused(plain, recipe, **memory)
        reached = {name: sqnr(wanted[name], value) for name, value in gradients(layer, x, dy).items()}
        matrices = [db for name, db in reached.items() if name.endswith("proj.weight")]
        kept = saved_bytes(layer, lambda: layer(x.clone().requires_grad_()))  # noqa: B023 - called at once
        found[option] = {
            "y": reached["y"],
            "dx": reached["dx"],
            "dw": statistics.fmean(matrices),
            "worst": min(reached.values()),
            "bytes_a_token": kept / BATCH / T,
        }
    return found


def main() -> None:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for outliers in (False, True):
        for recipe in ("current", "rowwise", "blockwise"):
            runs = [measured(recipe, outliers, seed) for seed in range(options.seeds)]
            for option in OPTIONS:
                means = {key: statistics.fmean(run[option][key] for run in runs) for key in runs[0][option]}
                rows.append({"recipe": recipe, "outliers": outliers, "option": option, **means})
    result = {"machine": machine(), "size": str(SIZE), "tokens": BATCH * T, "rows": rows}
    if options.json:
        print(json.dumps(result))
        return
    print(f"{'input':9s} {'recipe':10s} {'kept':15s}      y     dx     dw  worst   bytes/token")
    for row in rows:
        numbers = " ".join(f"{row[key]:6.2f}" for key in ("y", "dx", "dw", "worst"))
        what = "outliers" if row["outliers"] else "normal"
        print(f"{what:9s} {row['recipe']:10s} {row['option']:15s} {numbers}   {row['bytes_a_token']:.0f}")
    print(f"written to {save('stored-inputs', result)}")


if __name__ == "__main__":
    main()
