"""`make gpu`: everything that needs a CUDA card, in one script and within nine minutes: correctness, then timing.

    python3 benchmarks/gpu.py [--minutes 9] [--out FOLDER] [--groups smoke,gemm,...]
    python3 benchmarks/gpu.py --table FILE          the table of a run, made anew
    python3 benchmarks/gpu.py --pack [--jobs N]     make gpu-pack: compile the kernels beforehand, no card needed

Needs torch with CUDA and Triton, and nothing installed beside them: it runs from a bare checkout.  It begins by naming
all that is missing on this machine, each with its remedy.  Each group of measurements runs in a process of its own and
within its own time, and writes each result to benchmarks/results/<card>/<date>-gpu.jsonl, or to FOLDER, as soon as it
has it.  After 3, 6 and 9 minutes and at the end the table is printed.  Without a card it says "not measured" and exits
with 0; it exits with 1 where a check fails, a group ends badly, there is no torch or Triton, or a machine with a card
lacks something else.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

# after the path, which makes a bare checkout importable
from benchmarks.card import preflight, records, run, table  # noqa: E402
from benchmarks.card.plan import NAMES, PACK, PLAN  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
MOST_PROCESSES = 16  # of the pool
COMPILED = tuple(group.name for group in PLAN if group.compiles)


def main() -> int:
    """Run, compile or print; the exit status."""
    asked = _arguments()
    if asked.table:
        print(table.text(asked.table))
        return 0
    if asked.group or asked.warm:
        return _child(asked)
    if asked.pack:
        return _pack(asked)
    asked.cache = _cache(asked)
    start = time.monotonic()
    lacks = preflight.lacks(preflight.Places(asked.cache, asked.out or RESULTS, PACK))
    if lacks:
        print("\n".join(f"not measured: {lack}" for lack in lacks.values()))
        return int("driver" not in lacks or any(importlib.util.find_spec(it) is None for it in ("torch", "triton")))
    print(f"preflight: nothing is lacking, {time.monotonic() - start:.1f} s")
    import torch

    return _run(asked, torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it")
    parser.add_argument("--out", type=Path, help="folder of the results; default: benchmarks/results/<card>")
    parser.add_argument("--groups", default="", help=f"some of: {','.join(NAMES)}")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of that file, and nothing else")
    parser.add_argument(
        "--pack", action="store_true", help="compile the groups' kernels into .gpu-pack/, without a card"
    )
    parser.add_argument(
        "--jobs", type=int, help="processes that compile; default: this machine's cores, 16 at most; 0: none"
    )
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels; default: TRITON_CACHE_DIR or a new one")
    for internal in ("--group", "--warm", "--seconds", "--file"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.chosen = tuple(filter(None, asked.groups.split(",")))
    if unknown := set(asked.chosen) - set(NAMES):
        parser.error(f"no group is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if asked.jobs is None:
        asked.jobs = min(max(len(os.sched_getaffinity(0)), 1), MOST_PROCESSES)
    return asked


def _run(asked: argparse.Namespace, card: str, capability: tuple[int, int]) -> int:
    from benchmarks.card import pack, pretend

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # then the group on the card is ended too
    folder = asked.out or RESULTS / _slug(card)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}-gpu.jsonl"
    cache, begun = asked.cache, time.monotonic()
    print(f"{card}: results go to {file}", flush=True)
    plan = [group for group in PLAN if not asked.chosen or group.name in asked.chosen]
    processes = run.Processes(file, cache)
    if capability == pretend.CAPABILITY:
        records.Sink(file, "").write("pack", **pack.unpack(pack.FILE, cache))
        processes.start_pool(asked.jobs, [group.name for group in plan if group.compiles])
    else:
        records.Sink(file, "").write("note", text="kernels are compiled ahead for sm_90 alone")
    try:
        left = 60 * asked.minutes - (time.monotonic() - begun)
        status = run.run(plan, file, left, processes.world(lambda text: print(text, flush=True)))
    finally:
        processes.stop_pool()
    file.with_suffix(".txt").write_text(table.text(file, plan) + "\n")
    return status


def _pack(asked: argparse.Namespace) -> int:
    """Compile in processes of their own, then write the file."""
    import triton

    from benchmarks.card import launchers, pack

    cache, groups, start = _cache(asked), asked.chosen or COMPILED, time.monotonic()
    file = Path(tempfile.mkdtemp(prefix="fp8engine-pack-")) / "pack.jsonl"
    file.touch()
    os.environ["TRITON_STORE_BINARY_ONLY"] = "1"
    processes = run.Processes(file, cache)
    processes.start_pool(max(asked.jobs, 1), [name for name in groups if name in COMPILED])
    launchers.make(cache)
    wrong = processes.wait_for_pool()
    lost = [record for record in records.read(file)[0] if record["kind"] == "unfollowed"]
    made = pack.write(cache, pack.FILE, {"groups": list(groups), "date": f"{datetime.date.today()}"})
    print(
        f"{pack.FILE.relative_to(ROOT)}: {made['kernels']} kernels for sm_90, {made['bytes'] / 2**20:.1f} MiB, in "
        f"{time.monotonic() - start:.0f} s; for Triton {triton.__version__} and {made['ptxas']} alone"
    )
    carried = ", ".join(made["launchers"]) or "none: no C compiler or no Python.h here"
    print(f"Triton's launcher, compiled for {carried}")
    for record in lost:
        print(f"could not be followed without a card: {record['what']}: {record['why']}")
    for line in wrong:
        print(f"FAILED {line}")
    return bool(wrong)


def _child(asked: argparse.Namespace) -> int:
    from benchmarks.card import child, pretend

    file, cache = Path(asked.file), asked.cache
    if asked.group:
        child.work(asked.group, file, cache, float(asked.seconds))
    else:
        index, count = map(int, asked.warm.split("/"))
        child.warm(pretend.Share(index, count), file, cache, asked.chosen)
    return 0


def _cache(asked: argparse.Namespace) -> Path:
    given = asked.cache or os.environ.get("TRITON_CACHE_DIR")
    return Path(given).absolute() if given else Path(tempfile.mkdtemp(prefix="fp8engine-kernels-"))


def _slug(card: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in card.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
