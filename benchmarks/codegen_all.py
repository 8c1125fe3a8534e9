"""`make codegen-all`: every kernel compiled by every Triton that users get, and where one is worse than another.

    python benchmarks/codegen_all.py [--jobs N] [--only VERSION ...] [--changed] [--update] [--folder DIR]

Each Triton is installed by pip into a folder of its own (1 GB each, kept), which holds nothing else; torch, which
only makes tensors without memory, is the one of this environment.  codegen.py runs with that folder first on Python's
path, and compares with that version's baseline.  Then the baselines of these versions are compared with all others
(machine_code/versions.py); what is worse without a reason in machine_code/reasons.py fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout: fp8engine need not be installed

from benchmarks.machine_code import baselines, versions

ROOT = Path(__file__).parents[1]


def main(arguments: list[str] | None = None) -> int:
    """Install, compile, compare; the exit status.  arguments: the command line's by default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", default="1", help="processes")
    parser.add_argument("--only", nargs="*", default=baselines.RANGE, choices=baselines.RANGE, metavar="VERSION")
    parser.add_argument("--changed", action="store_true", help="only kernels whose key is not the baseline's")
    parser.add_argument("--update", action="store_true", help="write the baselines anew")
    parser.add_argument("--folder", type=Path, default=ROOT / ".tritons", help="where Tritons are installed")
    asked = parser.parse_args(arguments)
    passed_on = [f"--{name}" for name in ("changed", "update") if getattr(asked, name)]
    broken = False
    for version in asked.only:
        installed = install(version, asked.folder)
        print(f"== Triton {version} ==", flush=True)
        command = [sys.executable, "benchmarks/codegen.py", "--jobs", asked.jobs, *passed_on]
        broken |= bool(subprocess.run(command, cwd=ROOT, env=with_triton(installed)).returncode)
    return int(broken | compared(asked.only))


def install(version: str, folder: Path) -> Path:
    """The folder that holds that Triton and nothing else, made if it is not there.  Raises where it cannot be."""
    found = folder / version
    if not (found / f"triton-{version}.dist-info").is_dir():
        print(f"installing triton=={version} into {found}", flush=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--target", str(found), f"triton=={version}"], check=True)
    words = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    runs = subprocess.run(words, env=with_triton(found), capture_output=True, text=True, check=True).stdout.strip()
    if runs != version:
        raise RuntimeError(f"{found} was to hold Triton {version}, and {runs} is imported from there")
    return found


def with_triton(installed: Path) -> dict[str, str]:
    """This environment with that folder ahead of all others on Python's path."""
    paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def compared(judged: Sequence[str]) -> bool:
    """Print where one of these versions is worse than another; whether any is without a reason."""
    found = {
        version: baselines.load(baselines.path(version), version)
        for version in baselines.RANGE
        if baselines.path(version).exists()
    }
    print(f"== the baselines of {', '.join(found)} compared ==")
    rows = [row for row in versions.worse(found) if row.version in judged]
    for row in rows:
        reason = row.reason()
        print(f"{'allowed' if reason else 'FAILED'} {row}{f': {reason.why}' if reason else ''}")
    for reason in versions.unused(found):
        print(f"needed no more: {reason}")
    for version in sorted(set(baselines.RANGE) - set(found)):
        print(f"no baseline of Triton {version}: not compared")
    unexplained = sum(row.reason() is None for row in rows)
    print(f"{len(rows)} rows are worse in one version than in another; {unexplained} without a reason")
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
