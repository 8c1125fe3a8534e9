"""A 16-bit parameter and its FP32 master: which of them was written since one was copied to the other.

A tensor's version tells most writes and not those through `.data`.  So the sum of a gradient's magnitudes is kept where
the caller was given the master, and with it the copy of the gradient, before the step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from fp8engine import _torch
from fp8engine.amp.tensors import SIXTEEN_BIT
from fp8engine.errors import OptimizerError


class Pair:
    """A 16-bit parameter, its master, and what was copied from one to the other last."""

    def __init__(self, parameter: nn.Parameter, master: nn.Parameter):
        self.parameter, self.master = parameter, master
        self.copied: tuple[int, int] | None = None  # which gradient, in which version
        self.accumulated = False  # a backward pass has added to the gradient since
        self.overwritten = False  # another hand has written it, when the masters' had been changed too
        self.given: tuple[torch.Tensor, int] | None = None  # sum of magnitudes and version of what the caller was given
        self.rounded = self.now()
        watching: weakref.ref[Pair] = weakref.ref(self)
        frozen = not parameter.requires_grad  # torch hooks only what it may differentiate; it may be thawed later
        parameter.requires_grad_(True).register_post_accumulate_grad_hook(lambda _: _mark(watching))
        parameter.requires_grad_(not frozen)

    def now(self) -> tuple[int, int]:
        """Changes whenever the parameter is written; not through `.data` in place, which torch does not count."""
        return self.parameter._version, self.parameter.data_ptr()

    @property
    def gradient(self) -> torch.Tensor:
        """The parameter's, where it has one."""
        return cast(torch.Tensor, self.parameter.grad)

    @property
    def clipped(self) -> bool:
        """Whether the caller has written the master's gradient; unscaling counts no version."""
        return self.given is not None and getattr(self.master.grad, "_version", None) != self.given[1]

    def new_gradient(self) -> bool:
        """Whether the parameter has a gradient that is not what the master's was made of."""
        grad = self.parameter.grad
        if grad is None:
            self.forget()
            return False
        now = (id(grad), grad._version)
        if not self.accumulated and self.copied == now:
            return False
        self.overwritten = self.copied is not None and not self.accumulated
        self.copied, self.accumulated = now, False
        return True

    def forget(self) -> None:
        """No gradient on the master, and none copied."""
        self.master.grad = self.copied = self.given = None
        self.accumulated = self.overwritten = False

    def follow(self) -> None:
        """Take the parameter's values where the master's rounding is no longer theirs."""
        p, m = self.parameter, self.master
        if p.dtype not in SIXTEEN_BIT or p.device != m.device or p.shape != m.shape:
            raise OptimizerError(
                f"a parameter {tuple(m.shape)} of MasterWeights is {p.dtype} {tuple(p.shape)} on {p.device} now, its"
                f" master on {m.device}: move and cast the model first, then wrap the optimizer"
            )
        m.copy_(torch.where(m.to(p.dtype) == p, m, p.to(torch.float32)))
        self.rounded = self.now()


def _mark(watching: weakref.ref[Pair]) -> None:
    pair = watching()
    if pair is not None:
        pair.accumulated = True


def sums(pairs: list[Pair]) -> Sequence[torch.Tensor]:
    """Of the magnitudes of the parameters' gradients, on their device."""
    return _torch.foreach_norm([pair.gradient for pair in pairs], 1, torch.float32) if pairs else ()


def errors(given: list[Pair], sums: Sequence[torch.Tensor]) -> list[float]:
    """How far sums are from those of the pairs, relative; waits for the device."""
    if not given:
        return []
    where = sums[0].device
    then = torch.stack([pair.given[0].to(where) for pair in given if pair.given])
    now = torch.stack([one.to(where) for one in sums])
    same = (then == now) | (then.isnan() & now.isnan())
    return torch.where(same, 0.0, ((then - now) / then).abs().nan_to_num(math.inf)).tolist()
