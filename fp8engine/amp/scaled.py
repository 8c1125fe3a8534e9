"""An optimizer with its loss scaler inside: backward(loss) scales, step() unscales, skips and updates.

    optimizer.backward(loss):  gradients of S·loss, for every term of the loss, whatever its way to the weights

Between backward and step each gradient is S times too large, also those of tensors that no decorated optimizer holds.
Clip with `optimizer.clip_grad_norm_`, or after `optimizer.unscale_()`.

A gradient that is divided by S although a part of it holds no S would train, and wrongly.  So step() refuses, by the
parameter's number, a gradient that a plain loss.backward() has made or added to (before, between or after the scaled
passes), and one that was changed while it held S; a scaled pass after unscale_() is refused too.  It knows them by the
tensor and version of each gradient, recorded after each scaled pass.  Only where another gradient stands there when a
scaled pass begins (zeroed in place by the model, or without S), its largest magnitude is kept for step() to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from fp8engine.amp.master import MasterWeights
from fp8engine.amp.tensors import Stamp, readable
from fp8engine.amp.wrapped import Wrapped, parameters_of
from fp8engine.errors import OptimizerError

SCALER = "scaler"  # key in the state_dict, beside torch's own two
KEPT = ("inner", "scaler", "_together")  # by a copy, and in a file


class ScaledOptimizer(Wrapped):
    """What `decorate` returns for an optimizer: backward(loss) and step() scale, unscale, skip and update.

    scaler: the GradScaler inside (statistics, hooks).  together: the list of all that share it, to which each adds
    itself; an iteration ends when all of them have stepped.  state_dict is the inner optimizer's, the scaler's added.

    >>> model = nn.Linear(4, 1)
    >>> optimizer = ScaledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu"))
    >>> optimizer.zero_grad()
    >>> optimizer.backward(model(torch.ones(2, 4)).sum())
    >>> optimizer.clip_grad_norm_(1.0).item()  # of (2, 2, 2, 2) and (2,): the unscaled gradients
    4.47...
    >>> optimizer.step()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        together: list[ScaledOptimizer] | None = None,
    ):
        super().__init__(optimizer)
        self.scaler: Any = scaler
        self._together = [] if together is None else together
        self._together.append(self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Every GradScaler reads this before it steps an optimizer.
        if self.scaler.is_enabled():
            raise OptimizerError(
                "this optimizer holds its own GradScaler: call optimizer.step() without one,"
                " or decorate(..., scaler=False) and keep yours"
            )
        return getattr(self.inner, "_step_supports_amp_scaling", False)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Gradients of the scaled loss; options are those of Tensor.backward.

        Raises OptimizerError if it has added to gradients that were unscaled already.
        """
        together = self._together if self.scaler.is_enabled() else []
        for optimizer in together:
            optimizer._before_pass()
        self.scaler.scale(loss).backward(**options)
        for optimizer in together:
            optimizer._after_pass()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's parameters."""
        super().zero_grad(set_to_none)
        if self._is(OptState.UNSCALED):  # a batch is given up: its Inf lowers the scale all the same
            if len(self.scaler._per_optimizer_states) == 1:
                self.scaler.update()
            self.scaler._per_optimizer_states.pop(id(self.inner), None)
        self._unscaled_amax.clear()
        self._record_scaled()  # zeros are scaled by any scale

    def unscale_(self) -> None:
        """Divide the gradients by the scale now, to clip or read them; step() does it otherwise."""
        if not self.scaler.is_enabled() or self._is(OptState.UNSCALED):
            return
        self._check()
        self.scaler.unscale_(self.inner)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Unscale, then torch's clip_grad_norm_ over what is stepped (FP32 masters where there are); the norm."""
        self.unscale_()
        return nn.utils.clip_grad_norm_(parameters_of(self.inner), max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Unscale, step or skip, and after the last optimizer of the iteration update the scale.

        Raises OptimizerError: no gradients, or gradients that hold the scale in part or not at all, or were changed
        while they held it; a closure; a second step before the others that were decorated together have taken theirs.
        """
        if not self.scaler.is_enabled():
            result = self.inner.step() if closure is None else self.inner.step(closure)
            if self is self._together[-1]:
                self.scaler.update()  # changes nothing; `find_overflow` counts steps by it
            return result
        if closure is not None:
            raise OptimizerError(
                f"{type(self.inner).__name__}.step(closure) under a loss scale: a closure's gradients would not be"
                " unscaled; decorate with dtype=torch.bfloat16, which needs no scale"
            )
        if self._is(OptState.STEPPED):
            raise OptimizerError(
                "a second step before the other optimizers that were decorated together have taken theirs: their"
                " gradients hold this scale; decorate them apart, or scaler=False and a GradScaler of your own"
            )
        if not self._is(OptState.UNSCALED):
            self._check()
        result = self.scaler.step(self.inner)
        if all(one._is(OptState.STEPPED) for one in self._together):
            self.scaler.update()
        self._forget()
        return result

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]  # torch hooks the inner step, if none is skipped

    def _is(self, stage: OptState) -> bool:
        """Whether the scaler, which keeps the stages of an iteration, has this optimizer at that one."""
        states = getattr(self.scaler, "_per_optimizer_states", {})  # of a scaler that is enabled
        state = states.get(id(self.inner))  # get: asking must not begin an iteration
        return state is not None and state["stage"] is stage

    def _check(self) -> None:
        gradients = list(self._gradients())
        if not gradients:
            raise OptimizerError(
                f"no parameter of {type(self.inner).__name__} has a gradient: call optimizer.backward(loss) before this"
            )
        if not any(i in self._scaled for i, _ in gradients):
            raise OptimizerError(
                "these gradients hold no loss scale: they do not come from optimizer.backward(loss) of an optimizer"
                " decorated in the same call, or were stepped with already; write optimizer.backward(loss) for"
                " loss.backward(), once before every step()"
            )
        for i, grad in gradients:
            if not self._is_scaled(i, grad):
                raise OptimizerError(
                    f"the gradient of parameter {i} {tuple(grad.shape)} was changed while it held the loss scale: write"
                    " optimizer.backward(loss) for every loss.backward(); to clip, use optimizer.clip_grad_norm_(...)"
                    " or call optimizer.unscale_() first"
                )
        for i, grad in gradients:
            if i in self._unscaled_amax and bool(self._unscaled_amax[i] != 0):
                raise OptimizerError(
                    f"the gradient of parameter {i} {tuple(grad.shape)} holds the loss scale in part: another value was"
                    " there when optimizer.backward(loss) added to it; write optimizer.backward(loss) for every"
                    " loss.backward(), and optimizer.zero_grad() after step()"
                )

    def _before_pass(self) -> None:
        """Record, for step(), gradients that a scaled pass may add to."""
        if self._is(OptState.UNSCALED):
            self._record_scaled()
            return
        gradients = dict(self._gradients())
        self._unscaled_amax = {i: amax for i, amax in self._unscaled_amax.items() if i in gradients}
        for i, grad in gradients.items():
            if not self._is_scaled(i, grad) and (values := readable(grad)) is not None:
                self._unscaled_amax[i] = values.abs().max()

    def _after_pass(self) -> None:
        if self._is(OptState.UNSCALED) and not all(self._is_scaled(i, grad) for i, grad in self._gradients()):
            raise OptimizerError(
                "optimizer.backward(loss) has added to gradients that were unscaled already: call unscale_() and"
                " clip_grad_norm_() after the last backward, and step() after them (it skips what is not finite)"
            )
        self._record_scaled()

    def _forget(self) -> None:
        """An iteration begins."""
        self._scaled: dict[int, Stamp] = {}
        self._unscaled_amax: dict[int, torch.Tensor] = {}  # of what stood there before a scaled pass

    def _record_scaled(self) -> None:
        self._scaled = {i: Stamp(grad) for i, grad in self._gradients()}

    def _is_scaled(self, i: int, grad: torch.Tensor) -> bool:
        return i in self._scaled and self._scaled[i].unchanged(grad)

    def _gradients(self) -> Iterator[tuple[int, torch.Tensor]]:
        inner = self.inner
        parameters = inner.model_parameters() if isinstance(inner, MasterWeights) else parameters_of(inner)
        return ((i, p.grad) for i, p in enumerate(parameters) if p.grad is not None)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, with {"scaler": the scaler's} added."""
        return {**self.inner.state_dict(), SCALER: self.scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load both; a state without a scaler's leaves the scale as it is."""
        scaler, before = state_dict.get(SCALER), self.scaler.state_dict()
        if scaler:
            self.scaler.load_state_dict(scaler)
        try:
            self.inner.load_state_dict({name: value for name, value in state_dict.items() if name != SCALER})
        except Exception:
            if scaler and before:
                self.scaler.load_state_dict(before)  # all or nothing
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: state[name] for name in KEPT if name in state})
        self._forget()
