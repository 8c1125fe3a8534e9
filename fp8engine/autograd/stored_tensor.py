"""StoredTensor: a layer's result stored in FP8, an ordinary tensor for other code and FP8 codes for FP8 layers.

    codes    until an operation may write into the result, or hands out its memory
    values   from then on, for this tensor and all its views: one piece of ordinary memory, laid out as the codes are

Autograd sees one tensor throughout: views, writes in place and hooks have the gradients of an ordinary tensor.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from fp8engine import _torch
from fp8engine._torch import no_dispatch, tree_map
from fp8engine.errors import ShapeError
from fp8engine.numerics.cast import Granularity
from fp8engine.ops.tensor import KEEPING, Float8Tensor

COPIES = (torch.ops.aten.clone.default, _torch.to_copy)


class Memory:
    """Memory of a result and its views.  values: all of the codes' memory as ordinary values, once it exists."""

    values: torch.Tensor | None = None


class StoredTensor(Float8Tensor):
    """One scale for the whole tensor; reading computes on the values, writing replaces the codes by them.

    A copy, a pickle, a NumPy array and a printed text of it are those of the ordinary tensor.
    """

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, granularity: Granularity, dtype: torch.dtype):
        super().__init__(data, scale, granularity, dtype)
        self._memory = Memory()

    @property
    def written(self) -> bool:
        """Whether the codes no longer count."""
        return self._memory.values is not None

    def memory(self) -> torch.Tensor:
        """The values as memory that this tensor and its views share; the codes no longer count."""
        shape = self._data
        return self._whole().as_strided(shape.shape, shape.stride(), shape.storage_offset())

    def _whole(self) -> torch.Tensor:
        """The values of all of the codes' memory, made once."""
        if self._memory.values is None:
            # Dynamo asks for the memory of a real tensor in its own mode, where tensors are fake.
            with torch.inference_mode(False), torch.no_grad(), _torch.disable_current_modes():
                codes = self._data.new_empty(0).set_(self._data.untyped_storage())
                self._memory.values = Float8Tensor(codes, self._scale, self.granularity, self.dtype).values()
        return self._memory.values

    def __tensor_flatten__(self):
        # A compiled graph may write, and reads no codes: it takes the values.
        self._whole()
        return ["_values"], (self._data.storage_offset(), self.granularity, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        offset, *rest = context
        values = inner["_values"]
        found = StoredTensor(values.as_strided(outer_size, outer_stride, offset), values, *rest)
        found._memory.values = values
        return found

    @property
    def _values(self) -> torch.Tensor:
        return self._whole()

    def values(self) -> torch.Tensor:
        return self.memory() if self.written else super().values()

    def dequantize(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.clone() if self.written else super().dequantize()

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As `torch.Tensor.data`: the values without a gradient; a write into them is a write into this tensor."""
        with torch.no_grad():
            return self.memory().detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        memory = self.memory()
        if values.shape != memory.shape:
            raise ShapeError(f"a stored result of shape {list(memory.shape)} cannot take data of {list(values.shape)}")
        memory.copy_(values)

    def numpy(self, *, force: bool = False):
        return self.data.requires_grad_(self.requires_grad).numpy(force=force)

    def apply_(self, function):
        self.data.apply_(function)
        return self

    def map_(self, other: torch.Tensor, function):
        self.data.map_(other, function)
        return self

    def data_ptr(self) -> int:
        return self.data.data_ptr()

    def _typed_storage(self):
        return self.data._typed_storage()

    def tolist(self):
        return self.values().tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return repr(self.dequantize())

    def __dlpack__(self, **options):
        return self.data.requires_grad_(self.requires_grad).__dlpack__(**options)

    def __reduce_ex__(self, protocol):
        return self.dequantize().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), copy.deepcopy(self.dequantize(), memo))

    def _viewed(self, data: torch.Tensor, scale: torch.Tensor, granularity: Granularity) -> StoredTensor:
        with torch.inference_mode(self.is_inference()):  # as torch's views: of a normal tensor, a normal tensor
            found = StoredTensor(data, scale, granularity, self.dtype)
        found._memory, found.source = self._memory, self.source
        return found

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in func.tags:
            return _shaped(func, args, kwargs)
        x = args[0] if args else None
        if isinstance(x, StoredTensor) and not (func._schema.is_mutable or (x.written and func in COPIES)):
            result = keep(func, args, kwargs) if (keep := KEEPING.get(func)) else None
            if result is not None:
                return result
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        access = {argument.name: argument.alias_info for argument in func._schema.arguments}
        plain = {name: _plain(value, access[name] is not None) for name, value in given.items()}
        found = func(*(plain[name] for name in names[: len(args)]), **{name: plain[name] for name in kwargs})
        if not func._schema.is_mutable:
            return found
        # The tensors that were given are returned instead of their memory.
        written = {name: given[name] for name, info in access.items() if name in given and info and info.is_write}
        for value in written.values():
            for x in value if isinstance(value, list) else ():  # autograd leaves versions to each element's operation
                torch.autograd.graph.increment_version(x)
        results = [found] if len(func._schema.returns) == 1 else list(found or ())
        for i, returned in enumerate(func._schema.returns):
            aliased = returned.alias_info.before_set if returned.alias_info else set()
            same = (name for name in written if access[name].before_set & aliased)
            results[i] = next((written[name] for name in same), results[i])
        return results[0] if len(results) == 1 else tuple(results) or None


def _plain(value: Any, share: bool) -> Any:
    """Ordinary tensors in place of stored ones; share: as memory, because the operation writes or returns it."""
    read = StoredTensor.memory if share else StoredTensor.values
    return tree_map(lambda x: read(x) if isinstance(x, StoredTensor) else x, value)


def _shaped(func, args, kwargs) -> StoredTensor:
    """`unsqueeze_` and its like: another shape of the same memory for the codes and for the tensor around them."""
    x = args[0]
    x._data = x._data.detach()  # a layer may have saved the codes in the shape they had
    func(x._data, *args[1:], **kwargs)
    with no_dispatch():
        return func(*args, **kwargs)
