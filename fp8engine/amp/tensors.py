"""The 16-bit dtypes, and the tensors inside the arguments and results of modules and functions."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from fp8engine._torch import tree_leaves, tree_map

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
NARROW = (torch.float32, *SIXTEEN_BIT)  # what mixed precision casts: FP64 and integers are left


class Stamp:
    """The identity and the version of a tensor, which tell later whether it was written; it keeps no memory alive."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.version = weakref.ref(tensor), _version(tensor)

    def unchanged(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is this tensor, not written since."""
        return self.tensor() is tensor and self.version == _version(tensor)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # a tensor of inference mode counts no versions


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


def cast_all(tree: Any, of: tuple[torch.dtype, ...], to: torch.dtype) -> Any:
    """The tree with its tensors of these dtypes cast to another; everything else as it is."""
    return tree_map(lambda x: x.to(to) if isinstance(x, torch.Tensor) and x.dtype in of else x, tree)


def device_type(module: Any, given: Any) -> str:
    """Where a module computes: the type of its parameters' device, else of the tensors that it is given."""
    for parameter in module.parameters():
        return parameter.device.type
    leaves = tree_leaves(given)  # a replica of nn.DataParallel has no parameters
    return next((x.device.type for x in leaves if isinstance(x, torch.Tensor)), "cpu")
