"""What each recipe costs in accuracy: SQNR in dB of y, dx and dw of one Linear against float64, on two kinds of data.

    gaussian   all of x, w, dy normal
    spread     the same, rows of x spread over six decades and rows of dy over twelve, as tokens and their gradients are

The SQNR of each row is taken; printed is the 10th percentile over rows: the total would only see the largest rows.

    python benchmarks/errors.py [--json]
"""

from __future__ import annotations

import argparse
import json
import warnings

import torch
from common import machine, save
from torch import nn

import fp8engine as fe

RECIPES = ("current", "delayed", "rowwise", "rowwise_gw_hp", "blockwise", "bf16")
M, K, N = 1024, 1024, 1024


def data(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] and dy [M, N] of that kind."""
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(M, K, generator=generator), torch.randn(M, N, generator=generator)
    if kind == "spread":
        x *= torch.logspace(-6, 0, M)[:, None]
        dy *= torch.logspace(-12, 0, M)[:, None]
    return x, dy


def sqnr_db(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Signal over noise in dB, the 10th percentile over rows."""
    noise = (got.double() - truth).square().sum(1)
    return float((10 * torch.log10(truth.square().sum(1) / noise)).quantile(0.1))


def errors(recipe: str, kind: str) -> dict[str, float]:
    """SQNR of y, dx and dw."""
    torch.manual_seed(1)
    plain = nn.Linear(K, N, bias=False).bfloat16()
    exact = nn.Linear(K, N, bias=False).double()
    exact.load_state_dict(plain.state_dict())
    layer = fe.Linear(K, N, bias=False, recipe=recipe, dtype=torch.bfloat16)
    layer.load_state_dict(plain.state_dict())
    x, dy = (t.bfloat16() for t in data(kind))
    found = {}
    for module, dtype in ((exact, torch.float64), (layer, torch.bfloat16)):
        own = x.to(dtype).requires_grad_()
        y = module(own)
        y.backward(dy.to(dtype))
        found[dtype] = (y.detach(), own.grad, module.weight.grad)
    truth, got = found[torch.float64], found[torch.bfloat16]
    return {name: sqnr_db(g, t) for name, g, t in zip(("y", "dx", "dw"), got, truth, strict=True)}


def main() -> None:
    """Print the table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    kinds = ("gaussian", "spread")
    result = {"machine": machine(), "sqnr_db": {r: {k: errors(r, k) for k in kinds} for r in RECIPES}}
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(
            f"{'SQNR, dB':16s}" + "".join(f"{kind + ' ' + part:>14s}" for kind in kinds for part in ("y", "dx", "dw"))
        )
        for recipe, rows in result["sqnr_db"].items():
            print(f"{recipe:16s}" + "".join(f"{rows[k][p]:14.1f}" for k in kinds for p in ("y", "dx", "dw")))
    print(f"written to {save('errors', result)}")


if __name__ == "__main__":
    main()
