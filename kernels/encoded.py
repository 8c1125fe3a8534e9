"""Tensor maps that are encoded once, not at every launch.

A kernel's argument for a tensor descriptor is a CUtensorMap, 128 bytes that are passed by value and say nothing but an
address, a shape, strides, a box and a swizzle.  Triton makes it anew at every launch: `make_tensordesc_arg` in
triton/backends/nvidia/driver.py calls the driver's encoder for each descriptor.  Here it is made the first time, by
the same function, and then kept with its descriptor (launch.py), which is itself kept per address and shape.

`f[grid](...)` returns the compiled kernel; its launcher's attribute `launch` is the function that encodes and then
calls C.  `encode_once` puts another in its place, on our own kernels only.  That attribute is no promise of Triton's:
it is read as 3.6, 3.7 and 3.8 to 3.9 build it, and where a launcher is built in a fourth way it is left as it is, and
Triton encodes as it always did.
"""

import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

# What Triton's function holds in 3.6 and 3.7, and from 3.8 on, when descriptors may stand in tuples.
BY_INDEX = {"launcher", "tensordesc_indices", "tensordesc_meta"}
BY_PATH = {"launcher", "make_tensordesc_arg", "relevant_paths", "signature", "tensordesc_meta"}
# Its global in 3.6 alone: how many arguments stand ahead of the kernel's own, which follow one by one.  Later they are
# a list, the last argument.
AHEAD = "_BASE_ARGS_FORMAT_LEN"


class EncodedOnce:
    """A launcher's `launch`: the kernel's arguments, each descriptor replaced by its map, shape and strides.

    places: of the descriptors among the kernel's arguments.  ahead: of these stand so many; None where they are a list.
    """

    def __init__(
        self, launcher: Any, places: Iterable[int], boxes: list[dict[str, Any]], encode: Any, ahead: int | None
    ):
        self.launcher, self.encode, self.listed = launcher, encode, ahead is None
        self.places = [((ahead or 0) + place, str(box), box) for place, box in zip(sorted(places), boxes, strict=True)]

    def __call__(self, *arguments: Any) -> Any:
        if self.listed:
            return self.launcher(*arguments[:-1], self._replaced(arguments[-1]))
        return self.launcher(*self._replaced(arguments))

    def _replaced(self, arguments: Sequence[Any]) -> list[Any]:
        given: list[Any] = []
        start = 0
        for place, key, box in self.places:
            given += arguments[start:place]
            given += self._map(arguments[place], key, box)
            start = place + 1
        given += arguments[start:]
        return given

    def _map(self, descriptor: Any, key: str, box: dict[str, Any]) -> list[Any]:
        kept = descriptor.__dict__.setdefault("encoded", {})
        if key not in kept:
            kept[key] = self.encode(descriptor, box)
        return kept[key]


def encode_once(kernel: Any) -> None:
    """Let a kernel of ours that has been launched keep its tensor maps from now on.  kernel: what a launch returned.

    Nothing happens where it is None (interpreted, or not launched), takes no descriptor, or Triton's launcher is not
    built as this file knows it.
    """
    run = getattr(kernel, "_run", None)
    launch = getattr(run, "launch", None)
    if run is None or not inspect.isfunction(launch):
        return
    names = set(launch.__code__.co_freevars)
    held = inspect.getclosurevars(launch).nonlocals
    if names == BY_INDEX:
        places, encode = held["tensordesc_indices"], launch.__globals__.get("make_tensordesc_arg")
    elif names == BY_PATH:
        places, encode = held["relevant_paths"], functools.partial(_by_path, held["make_tensordesc_arg"])
    else:
        return
    boxes = held["tensordesc_meta"] or []
    if encode is not None and len(boxes) == len(places) and all(isinstance(box, dict) for box in boxes):
        run.launch = EncodedOnce(held["launcher"], places, boxes, encode, launch.__globals__.get(AHEAD))


def _by_path(encode: Any, descriptor: Any, box: dict[str, Any]) -> list[Any]:
    """Triton's encoder from 3.8 on.  Its third argument is for AMD's launcher: NVIDIA's has no use for it."""
    return encode(descriptor, box, None)
