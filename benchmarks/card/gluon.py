"""The warp-specialised matmuls beside the Triton ones that they are variants of, and beside torch's; sm_90 alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8engine.bench.cases import Pair
from fp8engine.bench.gemm import BASE, FAST, PROMOTED, Variant, kernel, variants
from fp8engine.kernels.tuning import Config
from fp8engine.ops.reference import Epilogue

END = Epilogue(None, torch.bfloat16)
TILE, WIDE = Config(128, 128, 128), Config(128, 256, 128, parts=2)
SCALED = TILE._replace(stages=5, parts=2, kernel="gluon")
Run = Callable[[Pair], torch.Tensor]


def _promoted(pair: Pair) -> torch.Tensor:
    return kernel("matmul_fp8")(pair.a, pair.b, END, True, TILE)


def _scaled(pair: Pair) -> torch.Tensor:
    return kernel("matmul_gluon_scaled", "matmul_gluon_scaled")(pair.a, pair.b, END, SCALED)


# Name -> (kind of operands, error of the sums, Triton's way, Gluon's way).
WAYS: dict[str, tuple[str, float, Run, Run]] = {
    "tensor fast": (
        "tensor",
        FAST,
        lambda pair: kernel("matmul_fp8")(pair.a, pair.b, END, False, WIDE),
        lambda pair: kernel("matmul_gluon", "matmul_gluon")(pair.a, pair.b, END, WIDE),
    ),
    "tensor promoted": ("tensor", PROMOTED, _promoted, _scaled),
    "block": ("block", PROMOTED, _promoted, _scaled),
    "block by block": ("block by block", PROMOTED, _promoted, _scaled),
}


def gluon_variants() -> dict[str, Variant]:
    """The kernels of WAYS and their peers, by name."""
    plain = variants("cuda", (9, 0))
    found = {
        BASE: plain[BASE],
        "torch fp8 tensor fast": plain["torch fp8 tensor fast"],
        "torch fp8 tensor promoted": plain["torch fp8 tensor"],
    }
    for name, (kind, sums, triton, gluon) in WAYS.items():
        peer = f"torch fp8 {name}" if kind == "tensor" else None
        found[f"plain triton fp8 {name}"] = Variant(kind, triton, sums, peer)  # gemm's are the table's choice
        found[f"gluon fp8 {name}"] = Variant(kind, gluon, sums, peer or f"plain triton fp8 {name}")
    return found
