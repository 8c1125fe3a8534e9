"""Host time of one training step of a 16x16 fe.Linear in several checkouts, measured in turns in one run.

    git worktree add /tmp/before e72d215
    python benchmarks/host.py /tmp/before . [--turns 15]

Each turn starts a process per checkout, one after the other, so that the machine's drift falls on all of them alike.
A process reports the median of 1,000 steps (zero_grad, forward, backward) of the emulated recipe `current`, one thread.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from common import machine, save

STEPS = """
import time, warnings, torch
warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
import fp8engine as fe
model = fe.convert(torch.nn.Sequential(torch.nn.Linear(16, 16)), "current")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(16, 16, requires_grad=True)
def step():
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()
took = []
for i in range(1300):
    start = time.perf_counter()
    step()
    took.append(time.perf_counter() - start)
    optimizer.step()
took = sorted(took[300:])
print(took[len(took) // 2] * 1e6)
"""


def microseconds(checkout: Path) -> float:
    """The median step of one process that imports fp8engine from `checkout`."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", STEPS]
    return float(subprocess.run(run, env=environment, cwd=checkout, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Measure every checkout in turns, print medians and ratios to the first, save them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--turns", type=int, default=15)
    asked = parser.parse_args()
    found: dict[str, list[float]] = {str(path): [] for path in asked.checkouts}
    for _ in range(asked.turns):
        for path in asked.checkouts:
            found[str(path)].append(microseconds(path.resolve()))
    first = median(found[str(asked.checkouts[0])])
    rows = {}
    for path, took in found.items():
        low, middle, high = (sorted(took)[int(share * (len(took) - 1))] for share in (0.25, 0.5, 0.75))
        rows[path] = {"us": middle, "quartiles_us": [low, high], "of_first": middle / first}
        print(f"{path}: {middle:.1f} us a step (quartiles {low:.1f} to {high:.1f}), {middle / first:.2f} of the first")
    save("host", {"machine": machine(), "turns": asked.turns, "checkouts": rows})


if __name__ == "__main__":
    main()
