"""Change of a module's class in place: the same object, parameters and hooks under another forward.

    change_class(module, kind)   to a class of ours, such as fe.Linear
    mix(module, mixin)           to a subclass of `mixin` and of the class that the module had, made when it is needed

Accelerate puts a wrapper into the instance's `forward` and keeps the class's own forward, bound, in `_old_forward`; an
attribute that holds the class's forward is bound to that of the new class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class Mixin(nn.Module):
    """First base of a mixed class, with a forward of its own.

    plain: the class that the module had.  plain_forward: its forward, when the mixed class was made.
    """

    plain: type[nn.Module]
    plain_forward: Any
    mixin: type[Mixin]
    prefix = ""  # of the mixed class's name

    def __reduce_ex__(self, protocol):  # a mixed class is no name in any file, nor may the one below be (fe.amp's)
        make, args = _empty, (self.plain,)
        if self.plain.__reduce_ex__ is not object.__reduce_ex__:
            make, args, *_ = self.plain.__reduce_ex__(self, protocol)  # pyright: ignore[reportAssignmentType]
        return _remade, (self.mixin, make, args), dict(self.__dict__)


def bound_forwards(module: nn.Module) -> list[str]:
    """Attributes of the instance that hold its class's own forward."""
    held = list(vars(module).items())  # copied: another thread may add an attribute now
    return [key for key, value in held if getattr(value, "__func__", None) is type(module).forward]


def change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module another class; attributes of the instance that hold the old class's forward get the new one's."""
    bound = bound_forwards(module)
    module.__class__ = kind
    for key in bound:
        object.__setattr__(module, key, MethodType(kind.forward, module))


def mix(module: nn.Module, mixin: type[Mixin]) -> None:
    """Put a mixin's methods before those of the module's class."""
    change_class(module, mixed(mixin, type(module)))


def replaced(module: Mixin) -> bool:
    """Whether the forward of the plain class is another than when the module's class was made."""
    kind = type(module)
    return kind.plain.forward is not kind.plain_forward


def mixed(mixin: type[Mixin], plain: type[nn.Module]) -> Any:
    """The subclass of both, made once.

    >>> class Loud(Mixin):
    ...     def forward(self, x):
    ...         return super().forward(x) + 1
    >>> mixed(Loud, nn.Identity)()(1), mixed(Loud, nn.Identity) is mixed(Loud, nn.Identity)
    (2, True)
    """
    return _mixed(mixin, plain, plain.forward)


@functools.cache
def _mixed(mixin: type[Mixin], plain: type[nn.Module], forward: Any) -> Any:
    attributes = {"__module__": mixin.__module__, "plain": plain, "mixin": mixin}
    attributes["plain_forward"] = staticmethod(forward)
    return type(f"{mixin.prefix}{plain.__name__}", (mixin, plain), attributes)


def _empty(plain: type[nn.Module]) -> nn.Module:
    return plain.__new__(plain)


def _remade(mixin: type[Mixin], make: Callable[..., nn.Module], args: tuple) -> nn.Module:
    """An instance for copy and pickle to fill."""
    made = make(*args)
    made.__class__ = mixed(mixin, type(made))
    return made
