"""The warp-specialised matmul beside the Triton one that it is a variant of, and beside torch's; sm_90 alone."""

from __future__ import annotations

import torch

from fp8engine.bench.cases import Pair
from fp8engine.bench.gemm import BASE, PROMOTED, Variant, kernel, variants
from fp8engine.kernels.tuning import Config
from fp8engine.ops.reference import Epilogue

END = Epilogue(None, torch.bfloat16)
TILE = Config(128, 128, 128)
GLUON = TILE._replace(stages=5, parts=2, kernel="gluon")
KINDS = ("tensor", "block", "block by block")  # of operands, all promoted


def _triton(pair: Pair) -> torch.Tensor:
    return kernel("matmul_fp8")(pair.a, pair.b, END, True, TILE)


def _gluon(pair: Pair) -> torch.Tensor:
    return kernel("matmul_gluon", "matmul_gluon")(pair.a, pair.b, END, GLUON)


def gluon_variants() -> dict[str, Variant]:
    """The kernels of KINDS and their peers, by name."""
    plain, peer = variants("cuda", (9, 0)), "torch fp8 tensor"
    found = {BASE: plain[BASE], peer: plain[peer]}
    for kind in KINDS:
        triton, torchs = f"plain triton fp8 {kind}", peer if kind == "tensor" else None
        found[triton] = Variant(kind, _triton, PROMOTED, torchs)  # gemm's is the table's choice
        found[f"gluon fp8 {kind}"] = Variant(kind, _gluon, PROMOTED, torchs or triton)
    return found
