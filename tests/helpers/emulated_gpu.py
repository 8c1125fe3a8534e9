"""benchmarks/gpu.py with the emulated card as its device; the script, its processes, records and table are real.

    EMULATED_PLACES='{"smoke": [0, 5]}' python tests/helpers/emulated_gpu.py --groups smoke,gluon --out FOLDER --jobs 0

Each process of the run starts here, replaces what asks torch for a card, and goes on in the script.  The card computes
on CPU tensors.  Shapes are small where the script's are a language model's, every timed call runs once ("time":
"emulated" stands in each row), and no group is killed for its time.  Results go to FOLDER alone.

EMULATED_PLACES: which of a group's checks or shapes are begun, as first and last or by the end of a name; the first
where it does not say.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.card import plan  # noqa: E402  before the script, which reads it

plan.PLAN = tuple(group._replace(seconds=3600.0) for group in plan.PLAN)

from emulator.card import emulated  # noqa: E402

from benchmarks import block, casts, checks, experts, generate, model, networks, peers  # noqa: E402  # noqa: E402
from benchmarks.card import child, measure, preflight, pretend, run  # noqa: E402
from benchmarks.checks import matmuls  # noqa: E402
from fp8engine.bench import cases, harness, linear, timing  # noqa: E402
from fp8engine.bench.cases import Shape  # noqa: E402
from fp8engine.ops import casts as cast_operations  # noqa: E402
from fp8engine.ops import device, grouped, matmul, reference, scaled_mm, triton_backend  # noqa: E402

PLACES = "EMULATED_PLACES"
NAME = "emulated card"
CPU = torch.device("cpu")
NETWORK = networks.Size(64, 128, 2, 1, 1, 64)


def main() -> None:
    """The script, with this process's arguments."""
    if "--table" not in sys.argv and not {"--out", "--file"} & set(sys.argv):
        sys.exit("give --out FOLDER: an emulated card has no results to keep")
    run.SCRIPT = Path(__file__)
    there = emulated(90, seed=3) if "--group" in sys.argv else contextlib.nullcontext()
    _pretend_torch()
    _pretend_card()
    _shorten()
    with there as card:
        try:
            runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"), run_name="__main__")
        finally:
            if card is not None:  # read by the test, in the file of results
                name = sys.argv[sys.argv.index("--group") + 1]
                file = Path(sys.argv[sys.argv.index("--file") + 1])
                launched = sorted({done.kernel for done in card.done})
                measure.Sink(file, name).write("emulated", launches=len(card.done), kernels=launched)


def _pretend_torch() -> None:
    """A card, as far as the script asks torch for one; what only a real driver has is not asked for."""
    preflight.CHECKS = preflight.python, preflight.triton, preflight.compiler, preflight.disk
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_name = lambda where=None: NAME
    torch.cuda.get_device_capability = lambda where=None: (9, 0)
    torch.cuda.synchronize = lambda where=None: None
    child.card = lambda: CPU


def _pretend_card() -> None:
    """The library takes the CPU's tensors for a Hopper's, and every choice falls on our kernels."""
    asked = matmul.asked
    for old, new in (
        (device.capability, lambda where: (9, 0)),
        (device.has_fp8, lambda where: True),
        (device.name, lambda where: NAME),
        (device.cpu_multiplies, lambda format: True),  # a layer on a CPU without it does not ask which backend to take
        (triton_backend.no_card, lambda where, oldest=None: None),
        (cast_operations.choose, lambda where: "reference" if asked() == "reference" else "triton"),
        (matmul._choose, lambda where, by_block, *rest: (asked() or "triton", None)),
        (grouped.kernels_run, lambda where: asked() in (None, "triton")),
        (scaled_mm.matmul, _cublas),
        (harness.compare, _labelled(harness.compare)),
        (harness.limits, functools.partial(harness.limits, side=64, copied=1 << 16)),
        (harness.machine, lambda where, real=harness.machine: {**real(where), "card": NAME, "capability": "sm_90"}),
        (timing.measure, _once),
    ):
        pretend.replace(old, new)


def _shorten() -> None:
    """The smallest shapes on which every kernel of a group still has whole tiles."""
    for old, new in (
        (cases.LLM, (Shape(128, 256, 256),)),
        (cases.FEW_TOKENS, (Shape(16, 128, 256),)),
        (cases.SQUARE, (Shape(16, 16, 16),)),
        (checks.checks, lambda where, more, real=checks.checks: real(where)),
        (peers.GRAPHS, (peers.Graph(Shape(64, 128, 128), "current"),)),
        (experts.CASES, (experts.Case(96, 50, 128, 256, 3),)),
    ):
        pretend.replace(old, new)
    linear.HOST_CALLS = 1
    matmuls.GLUON_SHAPES = matmuls.GLUON_SHAPES[:3]
    casts.SHAPES["cuda"] = ((128, 256),)
    linear.SHAPES["cuda"] = (Shape(64, 128, 128),)
    block.CASES["cuda"] = (networks.case("block", NETWORK, 32, 16),)
    model.CASES["cuda"] = [networks.case("llama", NETWORK, 32, 16)]
    generate.CASES["cuda"] = (generate.Case(NETWORK, 1, 16, 2),)
    places, each = json.loads(os.environ.get(PLACES, "{}")), measure.Group.each

    def some(self: measure.Group, things: Iterable, do: Callable, name: Callable = str) -> None:
        place, every = places.get(self.sink.group, [0, 1]), list(things)
        chosen = every[slice(*place)] if isinstance(place, list) else [it for it in every if name(it).endswith(place)]
        each(self, chosen, do, name)

    measure.Group.each = some


def _cublas(a, b, bias_N=None, out: torch.dtype = torch.bfloat16, fast: bool = False) -> torch.Tensor:
    return reference.matmul_fp8(a, b, bias_N, out)


def _labelled(compare: Callable) -> Callable:
    return lambda *given, **named: [{**row, "time": "emulated"} for row in compare(*given, **named)]


def _once(calls: Mapping[str, Callable], clock: timing.Clock, turns: int = 0, warmup: int = 0) -> dict:
    found = {}
    for name, call in calls.items():
        clock.time(lambda call=call: call(0))
        found[name] = timing.Timing(tuple(clock.seconds()))
    return found


if __name__ == "__main__":
    main()
