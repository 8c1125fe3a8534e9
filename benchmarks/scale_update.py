"""Host time of one scale update for 10 to 10,000 slots on this CPU: is it flat in the number of slots?

A model has one slot for each operand of each layer: 1,000 layers are 3,000 slots.  Two cases, both with a window of all
16 steps: every slot ran (as a rule), and one in ten did not.  Variants take turns, and each turn is one call.

    python benchmarks/scale_update.py [--turns 200] [--json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from common import interleaved, machine, save, timed

from fp8engine.ops.reference import scale_update

SLOTS = (10, 100, 1000, 10_000)
STEPS = 16


def update(slots: int, idle: bool) -> Callable[[], float]:
    """A call that times one update; the amaxes are entered anew outside the clock."""
    history_HS, live_2S = torch.rand(STEPS, slots), torch.rand(2, slots)
    rules_3S = torch.tensor([[448.0], [float(STEPS)], [1.0]]).repeat(1, slots)
    amax_S = torch.rand(slots)
    if idle:
        amax_S[::10] = -1.0

    def call() -> float:
        live_2S[0] = amax_S
        return timed(lambda: scale_update(history_HS, live_2S, rules_3S))

    return call


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="save under benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    calls = {f"{slots} {idle}": update(slots, idle == "idle") for slots in SLOTS for idle in ("all", "idle")}
    found = interleaved(calls, arguments.turns)
    print(f"{'slots':>7} {'all ran':>10} {'times 10':>9} {'one in ten did not':>19} {'times 10':>9}")
    for slots in SLOTS:
        line = f"{slots:>7}"
        for idle, width in (("all", 10), ("idle", 19)):
            seconds = found[f"{slots} {idle}"]["median"]
            line += f" {seconds * 1e6:>{width - 3}.1f} us {seconds / found[f'{SLOTS[0]} {idle}']['median']:>9.2f}"
        print(line)
    if arguments.json:
        print(save("scale_update", {"machine": machine(), "steps": STEPS, "seconds": found}))


if __name__ == "__main__":
    main()
