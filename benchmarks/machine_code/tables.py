"""Tables of ceilings for documents, in Markdown, from a baseline's rows: of matmuls and attention, and of casts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.machine_code import ceilings
from fp8engine.numerics.cards import H100_SXM, H200

TILE = "sm_90 128x128x128 g8 w8"
PRODUCTS = {  # as the table calls it -> a row of the baseline
    "FP8 fast 128x256x128, 8 warps": "matmul_fp8 tensor sm_90 128x256x128 g8 w8 s3 p2 tma flat plain",
    "the same, bias + GELU + FP8 result + amax": ("matmul_fp8 tensor sm_90 128x256x128 g8 w8 s3 p2 tma flat gelu+amax"),
    "FP8 fast 128x128x128, 8 warps": "matmul_fp8 tensor sm_90 128x128x128 g8 w8 s5 p1 tma plain",
    "FP8 promoted 128x128x128, 8 warps": f"matmul_fp8_promoted tensor {TILE} s5 p4 tma plain",
    "Gluon promoted, 1 + 4 + 4 warps": f"matmul_fp8_promoted tensor {TILE} s5 p4 gluon plain",
    "blocks 1x128 by 128x128": f"matmul_block 1x128 128x128 {TILE} s5 p2 tma plain",
    "Gluon blocks 1x128 by 128x128": f"matmul_block 1x128 128x128 {TILE} s5 p2 gluon plain",
    "blocks 1x128 by 1x128 (wgrad)": f"matmul_block 1x128 1x128 {TILE} s5 p2 tma plain",
    "Gluon blocks 1x128 by 1x128 (wgrad)": f"matmul_block 1x128 1x128 {TILE} s5 p2 gluon plain",
    "grouped fast, rows": "grouped rows matmul_fp8 sm_90 128x256x128 g8 w8 s3 p2 tma",
    "grouped blocks, rows": f"grouped rows matmul_block {TILE} s5 p2 gluon",
    "grouped blocks, sums (wgrad)": f"grouped sums matmul_block {TILE} s5 p2 gluon",
    "BF16 128x256x64": "matmul_fp16 along K sm_90 128x256x64 g8 w8 s4 p2 tma flat plain",
    "attention, 128 columns": "attention 128 full sm_90",
    "the same, causal": "attention 128 causal sm_90",
    "attention, 64 columns": "attention 64 full sm_90",
    "its backward, by queries, 128 columns": "attention_backward 128 full sm_90: 1 _by_queries_kernel",
    "its backward, by keys": "attention_backward 128 full sm_90: 2 _by_keys_kernel",
}
MEMORY = {
    "per tensor, current: measure": "quantize tensor bfloat16 sm_90: 1 _measure_kernel",
    "cast": "quantize tensor bfloat16 sm_90: 2 _cast_kernel",
    "cast with the transpose": "cast_transpose tensor sm_90: 2 _cast_kernel",
    "per tensor, predicted": "quantize tensor predicted bfloat16 sm_90: 1 _measure_kernel",
    "with the transpose": "cast_transpose tensor predicted sm_90: 1 _measure_kernel",
    "per row, up to 16,384 columns": "quantize row bfloat16 sm_90",
    "rows and columns: measure": "cast_transpose row sm_90: 1 _line_amax_kernel",
    "cast rows and columns": "cast_transpose row sm_90: 2 _line_cast_kernel",
    "1x128": "quantize 1x128 bfloat16 sm_90",
    "1x128 with the transpose": "cast_transpose 1x128 sm_90",
    "128x128": "quantize 128x128 bfloat16 sm_90",
    "128x128 with the transpose": "cast_transpose 128x128 sm_90",
    "of experts, 128x1": "quantize_experts 128x1 bfloat16 sm_90",
    "RMSNorm, 4,096 columns, predicted": "norm rms 4096 predicted sm_90: 1 _norm_kernel",
    "SwiGLU, predicted, with the transpose": "act swiglu predicted transposed sm_90: 1 _act_kernel",
    "its backward, predicted": "act backward swiglu predicted sm_90: 1 _act_kernel",
    "attention's cast, 128 columns": "attention_cast 128 sm_90",
}


USED = {  # matmul -> the kernel that a Hopper card takes for it, and plain Triton's: keys of PRODUCTS
    "FP8, one scale per tensor or row, fast": ("FP8 fast 128x256x128, 8 warps",) * 2,
    "the same, promoted every 128 of K": ("Gluon promoted, 1 + 4 + 4 warps", "FP8 promoted 128x128x128, 8 warps"),
    "blocks 1x128 by 128x128 (forward, dgrad)": ("Gluon blocks 1x128 by 128x128", "blocks 1x128 by 128x128"),
    "blocks 1x128 by 1x128 (wgrad)": ("Gluon blocks 1x128 by 1x128 (wgrad)", "blocks 1x128 by 1x128 (wgrad)"),
}


def used(kernels: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines of the table of the matmuls that run by default, beside plain Triton's kernels."""
    yield "| matmul | by issue slots | by L2 | at most | plain Triton: by issue slots | at most |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for title, both in USED.items():
        names = [PRODUCTS[one] for one in both]
        ours, plain = (found for name in names if (found := ceilings.of(name, kernels[name], H100_SXM)))
        shares = (ours.issue, ours.l2, ours.least, plain.issue, plain.least)
        yield _line(title, *map(percent, shares))


def products(kernels: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines of the table of kernels with Tensor Core instructions."""
    columns = ("registers", "shared, bytes", "main loop", "Tensor Core instructions", "their clocks", "busiest unit")
    yield f"| kernel | {' | '.join(columns)} | by issue slots | by L2 | by loads | at most |"
    yield "| --- |" + " --- |" * (len(columns) + 4)
    for title, name in PRODUCTS.items():
        row, found = kernels[name], ceilings.of(name, kernels[name], H100_SXM)
        shares = [] if found is None else [found.issue, found.l2, found.loads, found.least]
        yield _line(
            title,
            row["registers"],
            f"{row['shared']:,}",
            row["loop"],
            f"{row['products']} {row['shape']}",
            f"{row['tensor_cycles']:.0f}",
            f"{row['busy_cycles']:.0f}",
            *map(percent, shares),
        )


def memory(kernels: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines of the table of kernels that are limited by memory."""
    columns = ("registers", "programs", "KiB on their way", "bytes a clock, by issue slots")
    yield f"| kernel | {' | '.join(columns)} | H100 SXM | H200 | limit there |"
    yield "| --- |" + " --- |" * (len(columns) + 3)
    for title, name in MEMORY.items():
        row = kernels[name]
        found = [ceilings.of(name, row, card) for card in (H100_SXM, H200)]
        shares = [percent(one.least) for one in found if one is not None]
        limit = found[1].limit if found[1] is not None else "-"
        clock = f"{row['bytes_per_clock']:.1f}"
        yield _line(title, row["registers"], row["resident"], row["in_flight"] // 1024, clock, *shares, limit)


def _line(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def percent(share: float | None) -> str:
    """A share as documents write it.

    >>> percent(0.563)
    '56 %'
    """
    return "-" if share is None else f"{100 * share:.0f} %"
