"""A module's class changed in place to one that also has another's forward: same module, same parameters, same hooks.

The class is made when it is needed, and is no name of any file: copies and pickles ask for the two it was made of.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from fp8engine.nn.dispatched import change_class


class Mixin(nn.Module):
    """What such a class has first, with a forward of its own.  plain: the class that the module had."""

    plain: type[nn.Module]
    mixin: type[Mixin]
    prefix = ""  # of the name that the class then has

    def __reduce_ex__(self, protocol):
        return _again, (self.mixin, self.plain), dict(self.__dict__)


@functools.cache
def mixed(mixin: type[Mixin], plain: type[nn.Module]) -> Any:
    """The subclass of both, made once.

    >>> class Loud(Mixin):
    ...     def forward(self, x):
    ...         return super().forward(x) + 1
    >>> mixed(Loud, nn.Identity)()(1), mixed(Loud, nn.Identity) is mixed(Loud, nn.Identity)
    (2, True)
    """
    return type(
        f"{mixin.prefix}{plain.__name__}",
        (mixin, plain),
        {"__module__": mixin.__module__, "plain": plain, "mixin": mixin},
    )


def mix(module: nn.Module, mixin: type[Mixin]) -> None:
    """Change a module's class in place."""
    change_class(module, mixed(mixin, type(module)))


def _again(mixin: type[Mixin], plain: type[nn.Module]) -> nn.Module:
    made = mixed(mixin, plain)
    return made.__new__(made)
