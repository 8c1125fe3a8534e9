"""An optimizer with its loss scaler inside: step() unscales, skips and updates.

The scale S enters the gradients at one of two places, as the script is written:

    loss.backward()            where the loss's gradient enters a decorated model's outputs:  dy -> S·dy
    optimizer.backward(loss)   at the loss:  S·loss

Backward is linear, so the gradients of the model are S times as large either way.  The first needs no change of the
script; what reaches weights beside the model's outputs (a penalty on them, added to the loss) is not scaled by it, so
such a script says optimizer.backward(loss).  Gradients are S times too large until step(): clip with
`optimizer.clip_grad_norm_`, or after `optimizer.unscale_()`.  A step whose gradients were not scaled, or were changed
while scaled, is refused: both would train, and wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fp8engine.amp.master import MasterWeights, Wrapped
from fp8engine.errors import OptimizerError

SCALER = "scaler"  # key in the state_dict, beside torch's own two


class Scaling:
    """One scaler for models and optimizers decorated together; an iteration ends when all of these have stepped."""

    def __init__(self, scaler: torch.amp.GradScaler):
        self.scaler = scaler
        self.optimizers: list[ScaledOptimizer] = []
        self.at_loss = False  # optimizer.backward is running: the model's outputs add no scale
        self.entered = False  # this iteration's gradients are scaled
        self.stepped: set[int] = set()
        self._watched = -1

    def at_output(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of a decorated model's output, scaled unless the loss was."""
        if self.at_loss:
            return grad
        self.entered = True
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._watched):
            # Queued twice: DistributedDataParallel's own last word in a backward pass writes the gradients.
            self._watched, engine = task, torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self.note))
        return self.scaler.scale(grad)

    def note(self) -> None:
        """A backward pass has ended."""
        for optimizer in self.optimizers:
            optimizer._note()

    def ended(self, optimizer: ScaledOptimizer) -> None:
        """This optimizer has stepped."""
        self.stepped.add(id(optimizer))
        if len(self.stepped) == len(self.optimizers):
            self.stepped.clear()
            self.entered = False
            self.scaler.update()


class ScaledOutput(torch.autograd.Function):
    """y -> y, whose gradient is scaled."""

    @staticmethod
    def forward(ctx, y, scaling):
        """y itself, under a new name."""
        ctx.scaling = scaling
        return y.view_as(y)

    @staticmethod
    def backward(ctx, *grads):
        """S·dy."""
        return ctx.scaling.at_output(grads[0]), None


class ScaledOptimizer(Wrapped):
    """What `decorate` returns for an optimizer: backward(loss) and step() scale, unscale, skip and update.

    scaler: the GradScaler inside (statistics, hooks).  state_dict is the inner optimizer's, the scaler's added.

    >>> model = nn.Linear(4, 1)
    >>> optimizer = ScaledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), Scaling(torch.amp.GradScaler("cpu")))
    >>> optimizer.zero_grad()
    >>> optimizer.backward(model(torch.ones(2, 4)).sum())
    >>> optimizer.clip_grad_norm_(1.0).item()  # of (2, 2, 2, 2) and (2,): the unscaled gradients
    4.47...
    >>> optimizer.step()
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaling: Scaling):
        super().__init__(optimizer)
        self._scaling = scaling
        self._unscaled = False
        self._noted: dict[int, tuple[int, int]] = {}
        scaling.optimizers.append(self)

    @property
    def scaler(self) -> Any:
        """The loss scaler: an fe.amp.GradScaler unless another was given."""
        return self._scaling.scaler

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # The one thing that every GradScaler asks before it steps an optimizer.
        if self.scaler.is_enabled():
            raise OptimizerError(
                "this optimizer holds its own GradScaler: call optimizer.step() without one,"
                " or decorate(..., scaler=False) and keep yours"
            )
        return getattr(self.inner, "_step_supports_amp_scaling", False)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Gradients of the scaled loss; options are those of Tensor.backward."""
        scaling = self._scaling
        scaling.at_loss = True
        try:
            self.scaler.scale(loss).backward(**options)
        finally:
            scaling.at_loss = False
        scaling.entered = True
        scaling.note()

    def unscale_(self) -> None:
        """Divide the gradients by the scale now, to clip or look at them; step() does it otherwise."""
        if not self.scaler.is_enabled() or self._unscaled:
            return
        self._check()
        self.scaler.unscale_(self.inner)
        self._unscaled = True

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Unscale, then torch's clip_grad_norm_ over what is stepped (FP32 masters where there are); the norm."""
        self.unscale_()
        params = [p for group in self.inner.param_groups for p in group["params"]]
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Unscale, step or skip, and after the last optimizer of the iteration update the scale.

        Raises OptimizerError: gradients that were not scaled or were changed while they were, a closure, or a second
        step before the other optimizers that were decorated together have taken theirs.
        """
        if not self.scaler.is_enabled():
            return self.inner.step() if closure is None else self.inner.step(closure)
        if closure is not None:
            raise OptimizerError(
                f"{type(self.inner).__name__}.step(closure) under a loss scale: a closure's gradients would not be"
                " unscaled; decorate with dtype=torch.bfloat16, which needs no scale"
            )
        if id(self) in self._scaling.stepped:
            raise OptimizerError(
                "a second step before the other optimizers that were decorated together have taken theirs: their"
                " gradients hold this scale; decorate them apart, or scaler=False and a GradScaler of your own"
            )
        if not self._unscaled:
            self._check()
        result = self.scaler.step(self.inner)
        self._unscaled, self._noted = False, {}
        self._scaling.ended(self)
        return result

    def _check(self) -> None:
        if not self._scaling.entered:
            raise OptimizerError(
                "these gradients hold no loss scale: they came neither through a decorated model's outputs nor from"
                " optimizer.backward(loss); write optimizer.backward(loss) for loss.backward()"
            )
        for i, p in enumerate(self._parameters()):
            grad, (noted, version) = p.grad, self._noted.get(i, (0, 0))
            if grad is not None and id(grad) == noted and grad._version != version:
                raise OptimizerError(
                    f"the gradient of parameter {i} {tuple(p.shape)} was changed while it held the loss scale"
                    " (clipped?): call optimizer.unscale_() first, or optimizer.clip_grad_norm_(...)"
                )

    def _note(self) -> None:
        self._noted = {i: (id(p.grad), p.grad._version) for i, p in enumerate(self._parameters()) if p.grad is not None}

    def _parameters(self) -> Iterator[torch.Tensor]:
        if isinstance(self.inner, MasterWeights):
            return self.inner.model_parameters()
        return (p for group in self.inner.param_groups for p in group["params"])

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
        return {"inner": self.inner, "_scaling": self._scaling, "_unscaled": False, "_noted": {}}
