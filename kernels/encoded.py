"""Tensor maps that are encoded once, not at every launch.

A kernel's argument for a tensor descriptor is a CUtensorMap, 128 bytes that are passed by value and say nothing but an
address, a shape, strides, a box and a swizzle.  Triton 3.6 makes it anew at every launch: `make_tensordesc_arg` in
triton/backends/nvidia/driver.py calls the driver's encoder for each descriptor (line 635).  Here it is made the first
time, by the same function, and then kept with its descriptor (launch.py), which is itself kept per address and shape.

`f[grid](...)` returns the compiled kernel; its launcher's attribute `launch` is the function that encodes and then
calls C.  `encode_once` puts another in its place, on our own kernels only.  That attribute is no promise of Triton's:
where a launcher is not built as in 3.6, it is left as it is, and Triton encodes as it always did.
"""

import inspect
from typing import Any

# Arguments of a launcher ahead of the kernel's own: grid, stream, function, two flags, two scratch pointers, two of
# metadata, two hooks (_BASE_ARGS_FORMAT in Triton's driver.py).
AHEAD = 13
KNOWN = {"launcher", "tensordesc_indices", "tensordesc_meta"}  # what Triton's function holds


class EncodedOnce:
    """A launcher's `launch`: the kernel's arguments, each descriptor replaced by its map, shape and strides."""

    def __init__(self, launcher: Any, places: set[int], boxes: list[dict[str, Any]], encode: Any):
        self.launcher, self.encode = launcher, encode
        self.places = [(AHEAD + place, str(box), box) for place, box in zip(sorted(places), boxes, strict=True)]

    def __call__(self, *arguments: Any) -> Any:
        given: list[Any] = []
        start = 0
        for place, key, box in self.places:
            given += arguments[start:place]
            given += self._map(arguments[place], key, box)
            start = place + 1
        given += arguments[start:]
        return self.launcher(*given)

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
    if run is None or not inspect.isfunction(launch) or set(launch.__code__.co_freevars) != KNOWN:
        return
    held = inspect.getclosurevars(launch).nonlocals
    encode, boxes = launch.__globals__.get("make_tensordesc_arg"), held["tensordesc_meta"]
    if encode is not None and all(isinstance(box, dict) for box in boxes):
        run.launch = EncodedOnce(held["launcher"], held["tensordesc_indices"], boxes, encode)
