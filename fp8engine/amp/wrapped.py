"""An optimizer around another one, which schedulers, scalers and checkpoints take as any optimizer."""

from __future__ import annotations

from typing import Any

import torch

from fp8engine._torch import HOOK_TABLES, model_parameter


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Every parameter that an optimizer steps, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of amp's around another, or one that has masters already."""
    return isinstance(optimizer, Wrapped) or has_masters(optimizer)


def has_masters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it steps FP32 masters in the place of a model's parameters."""
    return any(model_parameter(p) is not p for p in parameters_of(optimizer))


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another: groups, state and defaults are the inner one's."""

    inner: torch.optim.Optimizer

    def __init__(self, inner: torch.optim.Optimizer):
        self.__setstate__({"inner": inner})  # torch's __init__ would want parameters of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        hooks = {name: getattr(state["inner"], name) for name in HOOK_TABLES}  # one table each, which one of them runs
        super().__setstate__({**state, **hooks})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner optimizer's groups."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner optimizer's state, by parameter."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner optimizer's defaults."""
        return self.inner.defaults

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's parameters."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        self.inner.add_param_group(param_group)
