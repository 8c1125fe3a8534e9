"""Environment of the process: its variables, which no other file of the engine reads, and what it was started as.

None of the variables changes a result.  Each is read when it is asked for, so that a test or a script may set it first.

    FP8ENGINE_MEASURE   0: a card does not time the kernels that it may choose between       ops/card_trials.py
    FP8ENGINE_GLUON     0: matmuls are left to plain Triton, Gluon's kernels are not used    ops/triton_backend.py
    TRITON_INTERPRET    1: kernels are interpreted on the CPU; Triton's own variable         ops/triton_backend.py
    LOCAL_WORLD_SIZE    how many processes run on this node; torchrun sets it                distributed/gradients.py
    XDG_CACHE_HOME      the folder for caches; ~/.cache without it (XDG base directories)    ops/choice_file.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

MEASURE, GLUON = "FP8ENGINE_MEASURE", "FP8ENGINE_GLUON"


def measures() -> bool:
    """Whether a card may time its kernels."""
    return os.environ.get(MEASURE, "1") != "0"


def gluon() -> bool:
    """Whether Gluon's kernels may be used."""
    return os.environ.get(GLUON) != "0"


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU (slow, exact, for tests)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def local_world_size() -> int | None:
    """How many processes torchrun has started on this node; None where it has started none."""
    found = os.environ.get("LOCAL_WORLD_SIZE")
    return int(found) if found else None


def caches() -> Path:
    """The folder in which programs keep their caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def starts_command_line() -> bool:
    """Whether this process is `fp8engine ...` or `python -m fp8engine ...`, and has not imported torch yet.

    Its help needs nothing of torch, whose import takes longer than all else.  Python keeps what it was started with in
    `orig_argv`; the child of a process, which may take over its parent's `argv`, was started as something else.
    """
    program = next(iter(sys.orig_argv[-len(sys.argv) :]), "")
    started = sys.argv[:1] in (["-m"], [program])
    return started and Path(program).stem == "fp8engine" and "torch" not in sys.modules
