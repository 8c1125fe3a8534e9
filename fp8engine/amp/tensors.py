"""The 16-bit dtypes, and the tensors inside the arguments and results of modules and functions."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8engine._torch import is_functorch_wrapped_tensor, tree_leaves, tree_map

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
NARROW = (torch.float32, *SIXTEEN_BIT)  # what mixed precision casts: FP64 and integers are left
FLOATS = (*NARROW, torch.float64)


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


def readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values to read: this rank's part, all of a nested tensor in one, a complex number as two.

    None for integers and what holds no values.
    """
    if hasattr(tensor, "to_local"):  # DTensor
        tensor = tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]
    tensor = tensor.detach()
    if tensor.is_nested:
        if not tensor.is_contiguous():  # what lies between its rows is nobody's
            return None
        tensor = tensor.values()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in FLOATS or tensor.layout is not torch.strided or not tensor.numel():
        return None
    if tensor._is_zerotensor():  # forward-mode AD's zeros, which have no storage
        return None
    return None if tensor.device.type == "meta" or is_functorch_wrapped_tensor(tensor) else tensor


def tensors(tree: Any, objects: bool = False) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, mappings (a Hugging Face output is one) and dataclasses, in order.

    objects: also in what other objects hold, but not in objects that those hold.
    """
    return (tensor for _, tensor in named_tensors(tree, objects=objects))


def named_tensors(
    tree: Any, path: str = "", around: tuple[int, ...] = (), objects: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """(where it is in the tree, as "hidden[0].keys", tensor) of each of `tensors`.

    path: of the tree itself.  around: ids of what holds the tree, which it may hold in turn.
    """
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif id(tree) not in around:
        held = tree if isinstance(tree, Mapping) else _parts(tree)
        if objects and not held:
            held, objects = _attributes(tree), False
        for key, part in held.items():
            name = f"{path}[{key}]" if isinstance(tree, (list, tuple)) else f"{path}.{key}" if path else str(key)
            yield from named_tensors(part, name, (*around, id(tree)), objects)


def _fields(value: Any) -> dict[str, Any]:
    """What an instance of a dataclass holds, by name; nothing of anything else."""
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, dict)):
        return {}
    return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds by name, a SimpleNamespace or UserDict say; nothing of a module of torch's or Python's."""
    held = getattr(value, "__dict__", None)
    return held if type(held) is dict and not isinstance(value, (nn.Module, ModuleType)) else {}


def floating(tree: Any) -> list[torch.Tensor]:
    """Every floating tensor in any tree that torch knows, and in dataclasses."""
    return [x for leaf in tree_leaves(tree) for x in tensors(leaf) if x.dtype.is_floating_point]


class Lent(NamedTuple):
    """A container that a module was given, the copy it has instead, and what they held then, by key."""

    given: Any
    copy: Any
    held: dict[Any, Any]
    cast: dict[Any, Any]

    def write_back(self) -> None:
        """Put into the container what the module has written into the copy since."""
        now = _parts(self.copy)
        if now.keys() == self.cast.keys() and all(now[key] is value for key, value in self.cast.items()):
            return
        _put(self.given, {k: self.held[k] if k in self.cast and v is self.cast[k] else v for k, v in now.items()})


def cast_all(
    tree: Any, of: tuple[torch.dtype, ...], to: torch.dtype, lent: list[Lent] | None = None, around: tuple = ()
) -> Any:
    """The tree with its tensors of these dtypes cast to another; what holds none of them is the object itself.

    A container that holds some is copied, a frozen dataclass too; one that can be written into is noted in `lent`.
    around: as for `named_tensors`.
    """
    if isinstance(tree, torch.Tensor):
        return tree.to(to) if tree.dtype in of else tree
    if id(tree) in around or not any(x.dtype in of for x in floating(tree)):
        return tree
    held, here = _parts(tree), (*around, id(tree))
    if not held:  # of another class that torch knows: a deque
        return tree_map(lambda leaf: cast_all(leaf, of, to, lent, here), tree)
    cast = {key: cast_all(value, of, to, lent, here) for key, value in held.items()}
    if isinstance(tree, tuple):
        return getattr(tree, "_make", type(tree))(cast.values())
    made = tree.copy() if type(tree) in (list, dict) else copy.copy(tree)  # Dynamo traces the first alone
    _put(made, cast)
    if lent is not None:
        lent.append(Lent(tree, made, held, cast))
    return made


def _parts(value: Any) -> dict[Any, Any]:
    """What a list, tuple, dict or dataclass holds, by key; nothing of anything else."""
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return dict(value) if isinstance(value, dict) else _fields(value)


def _put(value: Any, parts: dict[Any, Any]) -> None:
    """Let a list, dict or dataclass hold these parts, and no others."""
    if isinstance(value, list):
        value[:] = parts.values()
    elif isinstance(value, dict):
        for key in value.keys() - parts.keys():
            del value[key]
        for key, part in parts.items():
            value[key] = part
    else:
        for name, part in parts.items():
            object.__setattr__(value, name, part)


def device_type(module: Any, given: Any) -> str:
    """Where a module computes: the type of its parameters' device, else of the tensors that it is given."""
    for parameter in module.parameters():
        return parameter.device.type
    leaves = tree_leaves(given)  # a replica of nn.DataParallel has no parameters
    return next((x.device.type for leaf in leaves for x in tensors(leaf)), "cpu")
