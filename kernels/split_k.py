"""Split-K: the sum over K cut into parts, each summed by a program of its own and added afterwards in a fixed order.

    part[s, m, n] = sum of a[m, k] b[n, k] over the k of part s           FP32, by the matmul itself
    y[m, n] = f(((part[0] + part[1]) + part[2] + ...) * (scale_a[m] * scale_b[n]) + bias[n])      by the kernel here

A result of few tiles leaves most of a card idle: M <= 64 by N 1024 has 8 tiles, and an H100 132 multiprocessors.  The
weight is then read by 8 of them, which together cannot ask for it as fast as memory gives it.

The rule.  K is cut where all of this holds, into the least of the numbers on the right:

    a multiprocessor is free for every part         parts <= multiprocessors // tiles
    a part is long enough to fill the pipeline      parts <= K // 512: four stages of 128
    the configuration allows it                     parts <= split_k
    what is saved is more than a second launch      K >= 2048

Nothing is added by atomics: two runs are equal bit for bit.  A result's last bits do depend on how many parts there
are, and so on M, N and the card.  Workspace comes from torch's allocator, 4 bytes an element and part, so that a CUDA
graph can be captured.  Cost: 8 bytes an element and part, mostly in L2.
Twin: fp8engine/ops/reference/split_k.py.
Source: "Stream-K", Osama et al., arXiv 2301.03598, section 3, for splitting against idle multiprocessors.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fp8engine.kernels.epilogue import publish, store_result
from fp8engine.kernels.launch import processors, triton_dtype, writable
from fp8engine.kernels.tile import load_tile
from fp8engine.kernels.tuning import Config

SHORTEST_PART = 512  # values of K
SHORTEST_K = 2048
BLOCK_M, BLOCK_N, WARPS = 16, 128, 4  # 16 elements a thread; M = 64 by N = 1024 makes 32 programs


class Sums(NamedTuple):
    """Where a matmul puts its sums.

    y: the result [M, N], or parts of it [parts * M, N] in FP32.  epilogue: what the matmul applies itself.
    depth: values of K in a part; None where the sum is whole.  described: y is written by descriptor; parts are not,
    because a tile that reaches beyond M has to stop there.
    """

    y: torch.Tensor
    epilogue: Any
    depth: int | None = None
    parts: int = 1
    described: bool = False

    def end(self, scales, epilogue) -> torch.Tensor:
        """The result: y itself, or its parts added under these scales and ended by this epilogue."""
        if self.depth is None:
            return self.y
        return add_parts(self.y.unflatten(0, (self.parts, -1)), scales, epilogue)


def parts_of(m: int, n: int, k: int, config: Config, multiprocessors: int) -> int:
    """Into how many parts the rule above cuts K; 1 for not at all.

    >>> small = Config(64, 128, 128, warps=4, split_k=16)
    >>> [parts_of(64, 1024, k, small, 132) for k in (1024, 2048, 4096, 8192, 65536)]
    [1, 4, 8, 16, 16]
    >>> parts_of(64, 8192, 4096, small, 132), parts_of(64, 8448, 4096, small, 132)  # 64 tiles, 66
    (2, 2)
    """
    tiles = math.ceil(m / config.block_m) * math.ceil(n / config.block_n)
    if k < SHORTEST_K or tiles == 0:
        return 1
    most = max(min(multiprocessors // tiles, k // SHORTEST_PART, config.split_k), 1)
    return math.ceil(k / depth_of(k, config, most))


def depth_of(k: int, config: Config, parts: int) -> int:
    """Values of K in each of at most that many parts: a multiple of the kernel's step.  The last may be shorter."""
    return math.ceil(math.ceil(k / config.block_k) / parts) * config.block_k


def sums_of(m: int, n: int, k: int, config: Config, epilogue, where: torch.device) -> Sums:
    """Where an M x N x K matmul under that configuration and epilogue puts its sums."""
    parts = parts_of(m, n, k, config, processors(where))
    if parts == 1:
        y_MN = torch.empty(m, n, dtype=epilogue.out, device=where)
        return Sums(y_MN, epilogue, described=writable(y_MN, config))
    part = torch.empty(parts * m, n, dtype=torch.float32, device=where)
    return Sums(part, type(epilogue)(out=torch.float32), depth_of(k, config, parts), parts)


@triton.jit(do_not_specialize=["M", "PARTS"])
def _add_parts_kernel(
    part, scale_a, scale_b, bias, output_scale,
    y, amax_ptr, counts_ptr,
    M, N, PARTS,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_ROW_A: tl.constexpr, BY_ROW_B: tl.constexpr,
    ACTIVATION: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = amax_ptr is not None or counts_ptr is not None
    row = tl.program_id(1) * BLOCK_M
    column = tl.program_id(0) * BLOCK_N
    acc_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for number in range(PARTS):
        from_MN = part + number * (tl.cast(M, tl.int64) * N)
        acc_MN += load_tile(from_MN, row, column, M, N, (N, 1), BLOCK_M, BLOCK_N, "pointer")
    amax, saturated, nonfinite = store_result(
        y, acc_MN, row, column, M, N, scale_a, scale_b, bias, output_scale,
        OUT, ACTIVATION, BY_ROW_A, BY_ROW_B, False, 1, COUNT,
    )  # fmt: skip
    if COUNT:
        publish(amax_ptr, counts_ptr, amax, saturated, nonfinite)


def add_parts(part_SMN: torch.Tensor, scales, epilogue) -> torch.Tensor:
    """y [M, N] from the parts of its sums, FP32 and contiguous, added in their order.

    scales: (scale_a, scale_b), FP32, () or [M, 1] and [N, 1]; (None, None) where the parts are scaled already.
    """
    parts, m, n = part_SMN.shape
    scale_a, scale_b = scales
    y_MN = part_SMN.new_empty(m, n, dtype=epilogue.out)
    _add_parts_kernel[(math.ceil(n / BLOCK_N), math.ceil(m / BLOCK_M))](
        part_SMN, scale_a, scale_b, epilogue.bias_N, epilogue.scale,  # inputs
        y_MN, epilogue.amax, epilogue.counts,  # outputs
        m, n, parts,  # sizes
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,  # constants
        BY_ROW_A=scale_a is not None and scale_a.dim() == 2, BY_ROW_B=scale_b is not None and scale_b.dim() == 2,
        ACTIVATION=epilogue.activation, OUT=triton_dtype(epilogue.out),
        num_warps=WARPS,
    )  # fmt: skip
    return y_MN
