"""The tuning table's configurations as the timing model sees them: what is predicted to be fast is tried first."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from fp8engine.numerics.cards import Card
from fp8engine.numerics.matmul_time import CEILINGS, REACHED, Kernel, predict

BLOCK = 128  # values of K under one scale
HOPPER = torch.device("cpu")  # for which kernels/tuning.py answers as for Hopper, the model's only architecture
SUMS = {"matmul_fp8": "fast", "matmul_fp8_promoted": "promoted", "matmul_block": "block", "matmul_fp16": "fast"}


def kernel_of(operation: str, config: Any, sums: str | None = None) -> Kernel:
    """A configuration, of kernels/tuning.py, as the timing model sees it.

    sums: what the main loop does with them, a key of CEILINGS; None: what the operation says, for blocks "block".
    A ceiling of blocks is known for 128 of K: shorter ones have their sums scaled as many times as often.

    >>> from fp8engine.kernels.tuning import Config
    >>> round(kernel_of("matmul_block", Config(128, 128, 128)).ceiling, 2)  # 0.63 of 0.64, its machine code's
    0.4
    >>> kernel_of("matmul_fp8", Config(64, 128, 128, warps=4)).programs
    2
    """
    family, sums = family_of(config), sums or SUMS[operation]
    ceiling = CEILINGS[family][sums] * REACHED[family][sums]
    if operation == "matmul_block":
        ceiling /= ceiling + (1 - ceiling) * BLOCK / config.block_k
    return Kernel(
        *config[:3],  # the sizes of its tiles
        ceiling=ceiling,
        group_m=config.group_m,
        bits=16 if operation == "matmul_fp16" else 8,
        programs=importlib.import_module("fp8engine.kernels.tuning").programs(operation, config, HOPPER),
        overlapped=config.kernel == "gluon" or config.flatten,
        split=config.split_k,
    )


def family_of(config: Any) -> str:
    """The key of CEILINGS and REACHED that a configuration, of kernels/tuning.py, belongs to."""
    return config.kernel if config.descriptors else "pointers"


def seconds(operation: str, config: Any, shape: tuple[int, int, int], card: Card) -> float:
    """Predicted time of a matmul of that shape, M, N, K, by one call after a pause: as a tuner times it."""
    return predict(card, kernel_of(operation, config), shape, sustained=False).seconds
