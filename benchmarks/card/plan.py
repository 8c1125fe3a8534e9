"""What `make gpu` runs, in this order: each group in a process of its own, within its own time.

The order is that of value: a run that is cut off after three minutes has checked the kernels and timed the matmuls.
Gluon comes first, because its kernels synchronise by hand and are the likeliest to hang: where they do, the other
groups run without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PACK = Path(__file__).parents[2] / ".gpu-pack" / "sm_90.tar.xz"  # ignored by git
CHUNKS = 8  # of the checks that are not among the smoke checks
GLUON_SETTING, MEASURE_SETTING = "FP8ENGINE_GLUON", "FP8ENGINE_MEASURE"  # environment.py
MARKS = (180.0, 360.0, 540.0)  # seconds after which the table is printed


class Group(NamedTuple):
    """name: also of its log file.  seconds: after these its process is killed.  compiles: our kernels, so that the
    pool and the pack compile them ahead.  else_set: a variable of the environment, and its value, for all later groups
    where this one, the first, goes wrong.  trials: the card may time the kernels between which it can choose; where it
    may not, every row is of the committed choice, whatever the groups before it have timed."""

    name: str
    seconds: float
    what: str
    compiles: bool = True
    else_set: tuple[str, str] | None = None
    trials: bool = False


PLAN = (
    Group("gluon", 45, "the warp-specialised matmuls, checked and timed", else_set=(GLUON_SETTING, "0")),
    Group("smoke", 90, "20 short checks, each kernel of a dense layer at least once"),
    Group("gemm", 120, "matmuls on shapes of language models, beside torch's scaled matmul and BF16"),
    Group("casts", 45, "casts, beside a copy"),
    Group("linear", 60, "a Linear's forward and backward under every recipe, beside BF16"),
    Group("block", 60, "a decoder block's forward and backward under every recipe, beside BF16"),
    Group("experts", 60, "grouped matmuls of experts, ours and torch's, beside BF16"),
    Group("host", 40, "the host's time for a Linear, and a CUDA graph beside eager code"),
    Group("compiled", 120, "torch.compile: Inductor's cast, BF16, torchao's float8 Linear", compiles=False),
    *(Group(f"checks-{part}", 90, f"the other checks, part {part} of {CHUNKS}") for part in range(1, CHUNKS + 1)),
    Group("sweep", 90, "every configuration of the FP8 matmuls, beside its predicted time"),
    Group("tuned", 45, "the Linear again, on kernels that this card's own trials choose", trials=True),
    Group("few", 60, "matmuls of few tokens and square ones"),
    Group("generate", 60, "generation, a token at a time"),
    Group("model", 150, "a model of 12 layers of width 2048: eager, compiled, in CUDA graphs"),
)
NAMES = tuple(group.name for group in PLAN)
