"""Pairs of a 16-bit parameter and its FP32 master, kept in step: gradients to the masters, values back and forth.

A tensor's version tells most writes and not those through `.data`.  So where the caller is given a master's gradient,
the sum of its magnitudes is kept, and compared before the step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from fp8engine import _torch
from fp8engine.amp.tensors import SIXTEEN_BIT, Stamp
from fp8engine.errors import OptimizerError


class Pair:
    """One parameter, its master, and what was copied from one to the other last."""

    def __init__(self, parameter: nn.Parameter, master: nn.Parameter):
        self.parameter, self.master = parameter, master
        vars(master)["_fp8engine_master_of"] = parameter  # for whoever is given the optimizer alone
        self.copied: Stamp | None = None  # of the gradient that the master's was made of
        self.accumulated = False  # a backward pass has added to the gradient since
        self.overwritten = False  # other code has written it, when the masters' had been changed too
        self.shown: tuple[torch.Tensor, int] | None = None  # sum of magnitudes and version of what the caller was given
        self.rounded = self.version()
        this: weakref.ref[Pair] = weakref.ref(self)  # the hook lives as long as the parameter
        frozen = not parameter.requires_grad  # torch hooks only what it may differentiate; it may be thawed later
        parameter.requires_grad_(True).register_post_accumulate_grad_hook(lambda _: _mark(this))
        parameter.requires_grad_(not frozen)

    def version(self) -> tuple[int, int]:
        """A value that every write of the parameter changes; torch does not count writes through `.data` in place."""
        return self.parameter._version, self.parameter.data_ptr()

    @property
    def gradient(self) -> torch.Tensor:
        """The parameter's gradient, of a pair that has one."""
        return cast(torch.Tensor, self.parameter.grad)

    @property
    def clipped(self) -> bool:
        """Whether the caller has written the master's gradient; unscaling counts no version."""
        return self.shown is not None and getattr(self.master.grad, "_version", None) != self.shown[1]

    def new_gradient(self) -> bool:
        """Whether the parameter has a gradient that is not what the master's was made of."""
        grad = self.parameter.grad
        if grad is None:
            self.forget()
            return False
        if not self.accumulated and self.copied is not None and self.copied.unchanged(grad):
            return False
        self.overwritten = self.copied is not None and not self.accumulated
        self.copied, self.accumulated = Stamp(grad), False
        return True

    def forget(self) -> None:
        """No gradient on the master, and none copied."""
        self.master.grad = self.copied = self.shown = None
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
        self.rounded = self.version()


def _mark(pair: weakref.ref[Pair]) -> None:
    if (found := pair()) is not None:
        found.accumulated = True


class Pairs(dict[nn.Parameter, Pair]):
    """The pairs of one optimizer, by parameter."""

    @torch.no_grad()
    def gather(self) -> list[Pair]:
        """Copy gradients that are new to the masters; returns these pairs, without those of sparse gradients."""
        new = [pair for pair in self.values() if pair.new_gradient()]
        if any(pair.overwritten for pair in new) and not self._changed():
            for pair in new:
                pair.overwritten = False
        return _copy(new)

    def show(self) -> None:
        """Gather, for a caller that is about to be given the masters."""
        pairs = self.gather()
        for pair, total in zip(pairs, _sums(pairs), strict=True):
            pair.shown = total, cast(torch.Tensor, pair.master.grad)._version

    @torch.no_grad()
    def gather_unversioned(self, fused: bool) -> None:
        """Gather gradients written through `.data` after the masters' were shown, which no version tells.

        Waits for the device only if something read the masters' gradients before the step; a GradScaler that unscales
        them has waited already.  fused: the optimizer unscales in its own step, so the masters' gradients are as they
        were copied, and are copied again instead.
        """
        shown = self._shown()
        if fused:
            _copy([pair for pair in shown if not pair.clipped])
        elif written := [pair for pair, error in zip(shown, _errors(shown, _sums(shown)), strict=True) if error]:
            if self._changed():
                for pair in written:
                    pair.overwritten = True
            else:
                _copy(written)

    def check(self) -> None:
        """Raise OptimizerError where a gradient was changed after its master's had been changed too."""
        for i, pair in enumerate(self.values()):
            if pair.overwritten:
                raise OptimizerError(
                    f"the 16-bit gradient of parameter {i} {tuple(pair.master.shape)} was changed after its FP32 copy"
                    " had been read (optimizer.param_groups), and the copy unscaled or clipped: change the gradients of"
                    " optimizer.master_parameters(), not the model's"
                )

    @torch.no_grad()
    def follow(self, every: bool = False) -> None:
        """Take the values of parameters that were written.  every: of all, for writes that no version tells."""
        for pair in self.values():
            if every or pair.version() != pair.rounded:
                pair.follow()

    @torch.no_grad()
    def scatter(self) -> None:
        """Round the masters into the parameters."""
        _torch.foreach_copy_([pair.parameter for pair in self.values()], [pair.master for pair in self.values()])
        for pair in self.values():
            pair.rounded = pair.version()

    def _shown(self) -> list[Pair]:
        return [pair for pair in self.values() if pair.shown is not None]

    def _changed(self) -> bool:
        """Whether the masters' gradients are other than copied: clipped, or unscaled, which counts no version."""
        shown = self._shown()
        if not shown or any(pair.clipped for pair in shown):
            return bool(shown)
        # FP32 sums of the same numbers in another order; a scale is off by far more
        now = _torch.foreach_norm([cast(torch.Tensor, pair.master.grad) for pair in shown], 1)
        return any(error > 2.0**-10 for error in _errors(shown, now))


def _copy(pairs: list[Pair]) -> list[Pair]:
    """Copy gradients to the masters; returns the pairs of dense ones."""
    dense = [pair for pair in pairs if not pair.gradient.is_sparse]
    for pair in pairs:
        pair.shown = None
        if pair.gradient.is_sparse:
            pair.master.grad = pair.gradient.to(torch.float32)
        elif pair.master.grad is None or pair.master.grad.is_sparse:
            pair.master.grad = torch.empty_like(pair.master)
    if dense:
        _torch.foreach_copy_([cast(torch.Tensor, p.master.grad) for p in dense], [p.gradient for p in dense])
    return dense


def _sums(pairs: list[Pair]) -> Sequence[torch.Tensor]:
    """Sums of the magnitudes of the parameters' gradients, on their device."""
    return _torch.foreach_norm([pair.gradient for pair in pairs], 1, torch.float32) if pairs else ()


def _errors(shown: list[Pair], sums: Sequence[torch.Tensor]) -> list[float]:
    """The relative difference of sums to those of the pairs when they were shown; waits for the device."""
    if not shown:
        return []
    where = sums[0].device
    then = torch.stack([pair.shown[0].to(where) for pair in shown if pair.shown])
    now = torch.stack([one.to(where) for one in sums])
    same = (then == now) | (then.isnan() & now.isnan())
    return torch.where(same, 0.0, ((then - now) / then).abs().nan_to_num(math.inf)).tolist()
