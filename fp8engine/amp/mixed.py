"""Classes made at run time, by which one module runs its forward in another precision.

    type(module) = mixed(mixin, kind)       mixin.forward calls super().forward, which is kind's

The module stays the same object: its names, hooks, ties, state_dict and isinstance stay, and its forward keeps the
signature that callers inspect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


@functools.cache
def mixed(mixin: type, kind: type[nn.Module]) -> type:
    """The class `kind` with `mixin` before it."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    body = {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": forward}
    return type(kind.__name__, (mixin, kind), body)


def reduced(mixin: type, module: Any, protocol: Any) -> tuple:
    """What `__reduce_ex__` of a mixin returns: pickle finds a class by its name, and one made at run time has none.

    So what the module is below the mixin is made first, in its own way where it has one, and mixed then.
    """
    mro = type(module).__mro__
    kind: Any = mro[mro.index(mixin) + 1]
    own = kind.__reduce_ex__ is not object.__reduce_ex__
    make, args, *state = kind.__reduce_ex__(module, protocol) if own else (_new, (kind,), module.__getstate__())
    return _rebuild, (mixin, make, args), *state


def fp32(device_type: str) -> torch.autocast:
    """Autocast off, also in decorated models inside: torch keeps the dtype of an autocast that is off, and hands it on
    to a checkpoint's second forward and to compiled graphs."""
    return torch.autocast(device_type, torch.float32, enabled=False)


def in_fp32(device_type: str) -> bool:
    """Whether a pin or the FP32 run of a comparison is around."""
    return torch.get_autocast_dtype(device_type) == torch.float32


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _rebuild(mixin: type, make: Callable[..., Any], args: tuple) -> Any:
    module = make(*args)
    module.__class__ = mixed(mixin, type(module))
    return module
