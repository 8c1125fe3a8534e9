"""One parameter under a loss scaler, whose gradients a test chooses; and a scaler that acts as one on a GPU would."""

from typing import Any

import torch
from torch import nn

from fp8engine.amp.scaler import GradScaler


class Waiting:
    """A flag as a GPU would deliver it: not there until someone waits, or until `lag` looks have been taken."""

    def __init__(self, found: torch.Tensor, lag: int):
        self.found, self.looks = found.clone(), lag

    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> list[torch.Tensor]:
        return [self.found]


class OnDevice(GradScaler):
    """The path of a fused optimizer on a GPU, on a CPU: no flag can be read at once."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        result = super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        self._skips.pop(id(optimizer))
        return result

    def _sent(self, found: torch.Tensor) -> Any:
        return Waiting(found, lag=2)


class Run:
    """One parameter under one scaler."""

    def __init__(self, scaler: torch.amp.GradScaler):
        self.scaler: Any = scaler
        self.weight = nn.Parameter(torch.ones(2))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD([self.weight], lr=2.0**-8)

    def step(self, value: float = 1.0, *new_scale: float) -> None:
        """One iteration; the gradient is `value`."""
        self.weight.grad = self.scaler.scale(torch.full((2,), value))
        self.scaler.step(self.optimizer)
        self.scaler.update(*new_scale)

    def steps(self, *values: float) -> None:
        """Iterations whose gradients are these."""
        for value in values:
            self.step(value)

    def seen(self) -> tuple:
        """What an iteration can change."""
        state = self.scaler.state_dict()
        return state["scale"], state["_growth_tracker"], self.weight.tolist()


def decorated_step(optimizer: Any, loss: torch.Tensor) -> None:
    """One iteration with the optimizer that fe.amp.decorate has made."""
    optimizer.zero_grad()
    optimizer.backward(loss)
    optimizer.step()


def scaled_step(scaler: Any, optimizer: Any, loss: torch.Tensor) -> Any:
    """One iteration; what the optimizer's step returned."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    result = scaler.step(optimizer)
    scaler.update()
    return result
