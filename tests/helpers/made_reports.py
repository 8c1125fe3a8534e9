"""Reports to draw: one of a real training, with every kind of trouble in its names, and made-up large ones."""

import math
import random
from typing import Any

import torch
from support import converted
from torch import nn

import fp8engine as fe
from fp8engine.auto.history import Sample, Samples
from fp8engine.auto.log import Plan
from fp8engine.report.facts import AutoRun
from fp8engine.report.table import Report

EVIL = """</script><script>hacked=1</script><b id=hacked>"bold"&amp;<!--'"""


def trained(recipe: Any, steps: int = 12) -> tuple[nn.Module, list[float]]:
    """A small model with an evil name, and a layer left alone; one element of its input grows 1.5 times a step."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("up", nn.Linear(64, 64))
    model.add_module("mid", nn.Linear(64, 64))
    model.add_module(EVIL, nn.Linear(64, 32))
    model.add_module("lm_head", nn.Linear(32, 16))
    converted(model, recipe, overrides={"lm_head": "fp32"})
    losses = []
    for step in range(steps):
        x = torch.randn(64, 64)
        x[0, 0] = 1.5**step
        loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()
        losses.append(loss.item())
    return model, losses


def made_up(layers: int, looks: int) -> Report:
    """As large a report as one likes, its numbers as long as they get; slots change their cast three times."""
    rng, samples = random.Random(0), dict[str, Samples]()
    rows = []
    for i in range(layers):
        name = f"model.decoder.layers.{i}.feed_forward.down_projection"
        slots = {}
        for role in ("input", "weight", "grad_output"):
            changes = sorted(rng.sample(range(1, looks), 3)) if looks > 3 else []
            seen = samples.setdefault(f"{name}.{role}", Samples())
            for look in range(looks):
                cast = ("E5M2/tensor", "E4M3/tensor", "E4M3/row", "BF16")[sum(look >= c for c in changes)]
                amax = 10 ** rng.uniform(-12, 12)
                share, other = rng.random(), rng.random() / 10
                sqnr = rng.uniform(5, 60) if cast != "BF16" else math.inf
                seen.append(Sample(16 * look, cast, amax, amax / rng.uniform(4, 9999), 3.0, sqnr, share, other, 0))
            slots[role] = {"cast": "E4M3 per tensor", "format": "E4M3", "scale": 0.1, "amax": 1.0, "calls": 1}
            slots[role] |= {"elements": 10, "saturated": 0.123, "underflowed": 0.123, "sampled": 1.0, "nonfinite": 0}
        row = {"name": name, "kind": "Linear", "shape": [4096, 14336], "recipe": "auto", "backend": "reference"}
        row |= {"emulated": True, "reason": "", "ran": True, "rows": 10, "fp8_share": 1.0, "experts": None}
        row |= {"kept_bytes": 0, "kept_why": "", "gather": "", "flops_share": 1 / layers, "output": {"cast": "none"}}
        rows.append(row | slots)
    decisions = [
        {"step": 16, "layer": row["name"], "slot": f"{row['name']}.{role}", "before": "E5M2/tensor", "sqnr_db": 31.5}
        | {
            "after": "E4M3/tensor",
            "why": "predicted SQNR 25.4 dB where 31.6 dB can be had (amax 33x rms)",
            "flushed": 0,
        }
        for row in rows
        for role in ("input", "weight", "grad_output")
        for _ in range(3)
    ]
    totals: Any = {"layers": layers, "converted": layers, "left_alone": 0, "never_ran": 0, "emulated": layers}
    totals |= {"in_fp8": layers, "in_fp8_in_part": 0, "in_16_bits": 0, "elements": 30 * layers}
    totals |= {"fp8_flops_share": 1.0, "saturated": 0.1, "underflowed": 0.1, "sampled": 1.0, "nonfinite": 3}
    totals |= {"recasts": 0, "kept_weight_bytes": 0, "gather": None}
    return Report(rows, totals, decisions, of_auto(samples))


def of_auto(samples: dict[str, Samples]) -> AutoRun:
    """What `auto` would tell that has sampled this and changed nothing."""
    return AutoRun((Plan({}, fe.auto(), ()),), samples)
