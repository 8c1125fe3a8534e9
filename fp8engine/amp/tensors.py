"""The 16-bit dtypes, and the tensors inside the arguments and results of modules and functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8engine._torch import tree_leaves

SIXTEEN_BIT = (torch.float16, torch.bfloat16)


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists and dicts (a Hugging Face output is a dict), in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors(value)


def floating(tree: Any) -> list[torch.Tensor]:
    """Every floating tensor in any tree that torch knows."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point]
