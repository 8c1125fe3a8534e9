"""Losses, gradients and scaling states of short trainings, to the bit, in a process in which no CPU feature can show.

    python tests/golden/record.py OUT.json [GROUP ...]      every group without names

A group is one process's work: the three models under every recipe, 20 steps each; layers beyond Linear, 5 steps each;
and products in BF16.  tests/golden/test_golden.py compares with `golden.json`.  It is recorded again only for a change
that is meant to change numbers, and the commit says which and why.

A training on a CPU is not the same to the bit on another CPU: libraries choose their code by the CPU's instructions,
and with the code the order of sums and what is fused into one rounding.  This script starts itself again with
everything of that kind fixed to what any x86-64 CPU can do:

| pinned | by | because |
| --- | --- | --- |
| ATen's kernels | ATEN_CPU_CAPABILITY=default | vectors of 4, 8 or 16 sum in another order; AVX2 brings FMA |
| MKL's matmuls | MKL_CBWR=COMPATIBLE | one code path for all CPUs, Intel's or not |
| oneDNN | torch.backends.mkldnn off | its BF16 matmuls and norms are generated for the CPU; it has no such switch |
| libm | GLIBC_TUNABLES without AVX2 and FMA | exp, tanh, log, sin, cos and pow have an FMA variant |
| numpy | NPY_DISABLE_CPU_FEATURES, OPENBLAS_CORETYPE | `auto` predicts in numpy |
| threads | OMP_NUM_THREADS, MKL_NUM_THREADS, OPENBLAS_NUM_THREADS = 1 | a sum is split by their number |
| attention | the backend MATH, "eager" in transformers | the fused one rounds by the alignment of its memory |
| emulated products | torch.cpu.get_capabilities replaced | the engine emulates FP8 in BF16 where the CPU has it |

Weights and batches are made of integers, so that nothing hangs on how random normal numbers are computed.  The
optimizer is SGD: torch.sqrt, which Adam needs, is MKL's, which differs from one CPU to the next under every pin.
agree.py beside this file checks the independence on other (emulated) CPUs, and which pins this machine needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PINNED = {
    "ATEN_CPU_CAPABILITY": "default",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",
    "MKL_CBWR": "COMPATIBLE",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_CORETYPE": "Prescott",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
GROUPS = ("gpt", "transformers", "more", "bf16_products")  # one importing transformers costs 8 s more


def environment() -> dict[str, str]:
    """This process's environment with every pin in it, and this checkout on the path."""
    from numpy._core._multiarray_umath import __cpu_dispatch__  # which features, differs from one numpy to the next

    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/helpers")))
    return {**os.environ, **PINNED, "NPY_DISABLE_CPU_FEATURES": " ".join(__cpu_dispatch__), "PYTHONPATH": path}


def pin(bf16: bool) -> None:
    """What a process can fix only from inside.  bf16: whether emulated products are in BF16 instead of FP32."""
    import torch

    torch.backends.mkldnn.set_flags(False)
    torch.set_num_threads(1)
    torch.backends.cuda.enable_flash_sdp(False)  # of the CPU too
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    # Where fp8engine asks which formats this CPU multiplies; its own modules may move, this name does not.
    torch.cpu.get_capabilities = lambda: {"avx512_bf16": bf16}


def record(group: str) -> dict[str, dict]:
    """Every run of a group, in this process.  Only one group's pins hold in a process."""
    import torch
    from golden import trainings

    pin(bf16=group == "bf16_products")
    warnings.simplefilter("ignore")
    found = {}
    for name, make in trainings.groups()[group].items():
        torch.manual_seed(0)
        found[name] = {"group": group, **vars(make().run())}
    return found


def versions() -> dict[str, str]:
    """Of the libraries whose arithmetic is recorded too."""
    from importlib.metadata import version

    return {name: version(name).split("+")[0] for name in ("torch", "transformers", "numpy")}


def start(group: str, out: Path) -> None:
    """Record a group in a process of its own.  Raises CalledProcessError."""
    subprocess.run([sys.executable, __file__, str(out), f"--here={group}"], check=True, env=environment())


def read(path: Path) -> dict[str, Any]:
    """What was recorded: {"versions": ..., "runs": {name: run}}."""
    return json.loads(path.read_text())


def differences(wanted: dict[str, dict], found: dict[str, dict]) -> Iterator[str]:
    """A line for each run that differs: in what, and where first; steps and decisions are counted from 1."""
    for name in sorted(wanted.keys() | found.keys()):
        if name not in wanted or name not in found:
            yield f"{name}: only {'recorded before' if name in wanted else 'found now'}"
        elif what := [key for key in wanted[name] if wanted[name][key] != found[name][key]]:
            one, other = (run[what[0]] for run in (wanted[name], found[name]))
            one, other = (each if isinstance(each, list) else [each] for each in (one, other))
            place = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
            yield f"{name}: {', '.join(what)}; {what[0]} first at {place + 1}: {one[place:][:1]} -> {other[place:][:1]}"


def main(out: str, *names: str) -> None:
    """Record the groups, or with --here=GROUP one of them in this process."""
    if names and names[0].startswith("--here="):
        runs = record(names[0].removeprefix("--here="))
    else:
        runs = {}
        for group in names or GROUPS:
            part = Path(f"{out}.{group}")
            start(group, part)
            runs |= read(part)["runs"]
            part.unlink()
    Path(out).write_text(_lines({"versions": versions(), "runs": runs}))


def _lines(whole: dict) -> str:
    """JSON with a list on one line, so that a diff shows which run changed and in what."""
    runs = ",\n".join(
        f"  {json.dumps(name)}: {{\n" + ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in run.items()) + "}"
        for name, run in whole["runs"].items()
    )
    return f'{{"versions": {json.dumps(whole["versions"])},\n "runs": {{\n{runs}\n }}}}\n'


if __name__ == "__main__":
    main(*sys.argv[1:])
