"""What a model of very many small linear layers costs: seconds beside a fixed recipe, bytes that `auto` remembers.

    python benchmarks/many_layers.py [--layers 10000] [--json]

CPU seconds of this process (a busy machine counts less), one thread, one run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from common import machine, save
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout: fp8engine need not be installed

import fp8engine as fe

RECIPES = {"current": "current", "delayed": "delayed", "auto": "auto", "auto, results too": "auto"}


class Deep(nn.Module):
    """Linear layers of 16 by 16, one after the other."""

    def __init__(self, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x):
        """x [M, 16] through all of them."""
        for layer in self.layers:
            x = layer(x)
        return x


def seconds(call: Callable[[], object]) -> float:
    """Of the processor, for one call."""
    start = time.process_time()
    call()
    return round(time.process_time() - start, 3)


def measured(name: str, layers: int) -> dict[str, float]:
    """What each part takes under one recipe."""
    torch.manual_seed(0)
    model, x = Deep(layers), torch.randn(8, 16)
    options = {"example_inputs": (x,)} if name.endswith("too") else {}
    asked = RECIPES[name]
    found = {"convert": seconds(lambda: fe.convert(model, asked, skip=lambda *_: False, **options))}
    for step in range(4):
        found[f"step {step}"] = seconds(lambda: model(x).sum().backward())
        model.zero_grad()  # ends the step: `auto` decides between steps
    found["str(fe.inspect(model))"] = seconds(lambda: str(fe.inspect(model)))
    found["dict(fe.scaling_state(model))"] = seconds(lambda: dict(fe.scaling_state(model)))
    found["fe.scaling_state_dict(model)"] = seconds(lambda: fe.scaling_state_dict(model))
    return found


def main() -> None:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=10000)
    parser.add_argument("--json", action="store_true", help="print the result as JSON only")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    measured("auto", 10)  # imports, first calls
    found = {name: measured(name, arguments.layers) for name in RECIPES}
    result = {"machine": machine(), "layers": arguments.layers, "cpu_seconds": found}
    result["auto_first_step_over_current"] = round(found["auto"]["step 0"] / found["current"]["step 0"], 2)
    if arguments.json:
        print(json.dumps(result))
        return
    parts = list(found["auto"])
    print(f"{'':32}" + "".join(f"{name:>20}" for name in found))
    for part in parts:
        print(f"{part:32}" + "".join(f"{each[part]:20.2f}" for each in found.values()))
    print(save("many_layers", result))


if __name__ == "__main__":
    main()
