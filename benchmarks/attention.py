"""What FP8 attention costs in accuracy, against float64, over several seeds: mean and standard error.

    normal     q, k, v standard normal
    outliers   the same and N(0, 100) in one place of a thousand: the test of FlashAttention-3 (arXiv 2407.08608)
    gradient   of the output, standard normal

The first table is the RMSE of the output: every operand cast per tensor, the softmax among them ("plain"); the same
with P against 448 as here; this library's attention without and with the rotation; torch's in BF16.
The second is the SQNR of dq, dk and dv in dB: this library's, and what other choices of products in FP8 would give, by
simulation in float64 with every other product in BF16.

    python benchmarks/attention.py [--seeds N] [--json]
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable

import torch
from common import machine, parser, save
from torch.nn import functional as F

from fp8engine.ops import reference
from fp8engine.ops.reference.attention import Form, attention_cast, rotation_of

HEADS, FORWARD, BACKWARD, D = 2, 1024, 512, 128
SCALE = D**-0.5
E4M3 = torch.float8_e4m3fn
PRODUCTS = ("none", "dP", "S", "dV", "S, dP", "all")


def data(kind: str, rows: int, seed: int) -> list[torch.Tensor]:
    """q, k, v and a gradient [1, HEADS, rows, D], BF16."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in "qkv":
        x = torch.randn(1, HEADS, rows, D, generator=generator)
        if kind == "outliers":
            rare = torch.rand(x.shape, generator=generator) < 0.001
            x = x + 10 * torch.randn(x.shape, generator=generator) * rare
        found.append(x.bfloat16())
    return [*found, torch.randn(1, HEADS, rows, D, generator=generator).bfloat16()]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The output in float64."""
    return torch.softmax(q.double() @ k.double().mT * SCALE, -1) @ v.double()


def per_tensor(x: torch.Tensor) -> torch.Tensor:
    """x rounded to E4M3 under one scale, in float64."""
    s = 448 / x.float().abs().amax()
    return (x.float() * s).clamp(-448, 448).to(E4M3).double() / s.double()


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every operand of both products under one scale, the softmax as it is: its values are at most 1."""
    p = torch.softmax(per_tensor(q) @ per_tensor(k).mT * SCALE, -1)
    return p.float().to(E4M3).double() @ per_tensor(v)


def plain_448(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same with the softmax's largest weight of each row at 448."""
    s = per_tensor(q) @ per_tensor(k).mT * SCALE
    p = (448 * torch.exp(s - s.amax(-1, keepdim=True))).float().to(E4M3).double()
    return p @ per_tensor(v) / p.sum(-1, keepdim=True)


def ours(rotated: bool) -> Callable[..., torch.Tensor]:
    """This library's attention: the twin, which the kernel is bit for bit on the emulated card."""
    return lambda q, k, v: reference.attention(q, k, v, Form(SCALE, rotated=rotated)).transpose(1, 2)


METHODS = {
    "plain": plain,
    "plain, P to 448": plain_448,
    "fp8 unrotated": ours(False),
    "fp8": ours(True),
    "BF16": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=SCALE),
}


def rmse(kind: str, seed: int) -> dict[str, float]:
    """Of each method's output."""
    q, k, v, _ = data(kind, FORWARD, seed)
    wanted = exact(q, k, v)
    return {name: float((run(q, k, v).double() - wanted).square().mean().sqrt()) for name, run in METHODS.items()}


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    """x rotated, rounded to E4M3 as attention casts it, and rotated back, in float64."""
    codes, scale = attention_cast(x, True)
    values = codes.double() * scale.double().repeat_interleave(64, 2)[..., None]
    return values @ rotation_of(D, torch.bfloat16, x.device).double() / D


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """x rounded to E4M3 with a scale for each row."""
    s = 448 / x.abs().amax(-1, keepdim=True)
    return (x * s).float().to(E4M3).double() / s


def half(x: torch.Tensor) -> torch.Tensor:
    """x rounded to BF16."""
    return x.bfloat16().double()


def gradients(given: list[torch.Tensor], products: str) -> list[torch.Tensor]:
    """dq, dk, dv with these products in FP8; L and delta of the P and dP that they have."""
    q, k, v, do = (x.double() for x in given)
    q8, k8, v8, do8 = (in_blocks(x) for x in given)
    fp8 = ("S", "dP", "dQ", "dK", "dV") if products == "all" else products.split(", ")
    p = torch.softmax((q8 @ k8.mT if "S" in fp8 else q @ k.mT) * SCALE, -1)
    dp = do8 @ v8.mT if "dP" in fp8 else do @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * SCALE
    dq = in_rows(ds) @ k8 if "dQ" in fp8 else half(ds) @ k
    dk = in_rows(ds.mT) @ q8 if "dK" in fp8 else half(ds).mT @ q
    dv = in_rows(p.mT) @ do8 if "dV" in fp8 else half(p).mT @ do
    return [dq, dk, dv]


def sqnr(kind: str, seed: int) -> dict[str, float]:
    """dB of dq, dk and dv, by what computed them."""
    given = data(kind, BACKWARD, seed)
    wide = [x.double().requires_grad_() for x in given[:3]]
    exact(*wide).backward(given[3].double())
    found = {"fp8": [x.transpose(1, 2) for x in reference.attention_backward(given[3], *given[:3], Form(SCALE))]}
    found |= {f"products: {products}": gradients(given, products) for products in PRODUCTS}
    rows = {}
    for name, parts in found.items():
        for which, part, like in zip(("dq", "dk", "dv"), parts, wide, strict=True):
            noise = (part.double() - like.grad).square().sum() / like.grad.square().sum()
            rows[f"{name} {which}"] = -10 * math.log10(float(noise))
    return rows


def over_seeds(of: Callable[[str, int], dict[str, float]], kind: str, seeds: int) -> dict[str, list[float]]:
    """Mean and standard error of each number."""
    rows = [of(kind, seed) for seed in range(seeds)]
    return {
        name: [statistics.mean(each), statistics.stdev(each) / math.sqrt(seeds)]
        for name in rows[0]
        for each in [[row[name] for row in rows]]
    }


def main() -> None:
    """Print both tables and write the result; exits with 1 where the promised bounds are missed."""
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=5, help="2 or more")
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    kinds = ("normal", "outliers")
    result = {
        "machine": machine(),
        "seeds": asked.seeds,
        "rmse": {kind: over_seeds(rmse, kind, asked.seeds) for kind in kinds},
        "sqnr_db": {kind: over_seeds(sqnr, kind, asked.seeds) for kind in kinds},
    }
    if asked.json:
        print(json.dumps(result, indent=1))
    else:
        for what, form in (("rmse", "{:.2e} ± {:.0e}"), ("sqnr_db", "{:.1f} ± {:.1f}")):
            print(f"{what:28s}" + "".join(f"{kind:>22s}" for kind in kinds))
            for name in result[what]["normal"]:
                cells = (form.format(*result[what][kind][name]) for kind in kinds)
                print(f"{name:28s}" + "".join(f"{cell:>22s}" for cell in cells))
    outliers, least = (
        result["rmse"]["outliers"],
        min(mean for kind in kinds for name, (mean, _) in result["sqnr_db"][kind].items() if name.startswith("fp8")),
    )
    ratio = outliers["plain"][0] / outliers["fp8"][0]
    print(f"outliers: {ratio:.2f} times less error than plain (wanted: 2); gradients: at least {least:.1f} dB (25)")
    print(f"written to {save('attention', result)}")
    sys.exit(ratio < 2 or least < 25)


if __name__ == "__main__":
    main()
