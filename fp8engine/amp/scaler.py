"""Dynamic loss scaler, torch's GradScaler with the rules of Paddle's, statistics and a warning of a collapse.

    gradients of S·loss are S times the loss's: those below 2^-24 come back into FP16's range

The rule for S is in scale_rules.py.  It is applied on the device, and again on the host, which waits for the device no
more often than torch does: torch's own step reads whether it must be skipped, and the host goes by that bit.  A fused
optimizer reads nothing; then the bit is copied without waiting, and the host's counts lag behind the device until they
are asked for.

Source: Micikevicius et al., Mixed Precision Training, 2017, section 3.2.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.utils.hooks import RemovableHandle

from fp8engine.amp import scale_rules
from fp8engine.amp.scale_rules import Counts, Factors, ScaleRules, ScaleStats, fp32
from fp8engine.amp.wrapped import parameters_of
from fp8engine.errors import LossScaleError, OptimizerError
from fp8engine.files import HostCopy

EXTRA = "fp8engine"  # key, in a state_dict, of what torch's scaler does not store:
STORED_RULES = ("decrease_every_n", "floor", "ceiling")


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler with the rules of `ScaleRules`, statistics and callbacks; a drop-in, state_dict both ways.

    decrease_every_n: shorthand for the rule of that name.  The other parameters are torch's.

    Raises LossScaleError for numbers that make no scale, and for FP16 gradients; OptimizerError for calls out of
    order (both are what torch raises, ValueError and RuntimeError, where torch raises those).

    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = GradScaler("cpu", decrease_every_n=2)
    >>> for x in (1.0, torch.inf, torch.inf):
    ...     optimizer.zero_grad()
    ...     scaler.scale(model(torch.full((2, 4), x)).sum()).backward()
    ...     _ = scaler.step(optimizer)
    ...     scaler.update()
    ...     print(scaler.step_skipped(), scaler.get_scale())
    False 65536.0
    True 65536.0
    True 32768.0
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        decrease_every_n: int | None = None,
        rules: ScaleRules | None = None,
    ):
        LossScaleError.unless(rules, ScaleRules | None, "GradScaler(rules=) takes fe.amp.ScaleRules")
        rules = rules or ScaleRules()
        self.rules = rules if decrease_every_n is None else replace(rules, decrease_every_n=decrease_every_n)
        if enabled:
            scale_rules.check(init_scale, growth_factor, backoff_factor, growth_interval)
            self.rules.check(init_scale, f"init_scale={init_scale}")
        kind = torch.device(device).type
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._bad_tracker: torch.Tensor | None = None
        self._counts = Counts(init_scale)  # of the rule, on the host
        self._seen: tuple[object, ...] | None = None  # the scale and tracker as this class wrote them last
        self._skips: dict[int, bool | torch.Tensor] = {}  # of the latest iteration, by optimizer
        self._ended = False  # that iteration has been updated: the next step begins another
        self._late: deque[tuple[HostCopy, Factors]] = deque()
        self._hooks: OrderedDict[int, Callable[[float], None]] = OrderedDict()
        self._stats = ScaleStats()

    # Public queries

    def step_skipped(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Whether the latest iteration's step of this optimizer (of any, if none is given) was skipped.

        Waits for the device only if the optimizer is fused.  Raises OptimizerError for one that has not stepped.
        """
        if optimizer is not None and id(optimizer) not in self._skips and self._enabled:
            raise OptimizerError(f"{type(optimizer).__name__} has taken no step with this scaler: scaler.step first")
        chosen = self._skips if optimizer is None else {k: v for k, v in self._skips.items() if k == id(optimizer)}
        return any(bool(found) for found in chosen.values())

    @property
    def stats(self) -> ScaleStats:
        """Iterations, skipped ones and changes of the scale so far; waits for the device only after a fused step."""
        self._catch_up(wait=True)
        return self._stats

    def on_scale_change(self, hook: Callable[[float], None]) -> RemovableHandle:
        """Call hook(new scale / old scale) after each update that changes it, before the next backward pass.

        For what keeps numbers of scaled gradients: `rescale_gradients` of an FP8 scaling state is such a hook.  With a
        hook, an update after a fused step waits for the device.  Raises LossScaleError for what cannot be called.

        >>> scaler, factors = GradScaler("cpu"), []
        >>> _ = scaler.on_scale_change(factors.append)
        >>> _ = scaler.scale(torch.ones(()))
        >>> scaler.update(1024.0)
        >>> factors
        [0.015625]
        """
        if not callable(hook):
            raise LossScaleError(f"on_scale_change takes a function of the factor, not {type(hook).__name__}")
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    # Calls of a training loop

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise OptimizerError(f"{funcname}() before any scale(): call scaler.scale(loss).backward() first")
        return self._scale, self._growth_tracker

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once an iteration; see torch.

        Raises OptimizerError the second time or after step(), LossScaleError for FP16 gradients, named.
        """
        if self._enabled and (stage := self._per_optimizer_states[id(optimizer)]["stage"]) is not OptState.READY:
            when = "twice" if stage is OptState.UNSCALED else "after step()"
            raise OptimizerError(
                f"unscale_() {when} for one {type(optimizer).__name__}: once an iteration, before step(),"
                " and update() ends the iteration"
            )
        super().unscale_(optimizer)

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        try:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        except ValueError:  # torch checks every gradient before it changes the first
            raise LossScaleError(
                f"{scale_rules.first_fp16(optimizer)} has an FP16 gradient: unscaled in FP16 it would underflow again;"
                " keep FP32 master weights, fe.amp.MasterWeights(optimizer), or FP32 parameters under autocast"
            ) from None

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale unless done already, then optimizer.step() or skip it; returns what that returned, or None.

        `step_skipped()` tells which.  Raises OptimizerError for a closure (its gradients would not be unscaled), a
        second step in one iteration, or an optimizer without any gradient.  Optimizers that handle the scale themselves
        (fused ones, and those whose step takes a grad_scaler) are stepped as torch's scaler steps them.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(callable(value) for value in args):
            raise OptimizerError(
                f"{type(optimizer).__name__}.step(closure) under a loss scale: the closure's gradients would not be"
                " unscaled; train in BF16, or use GradScaler(enabled=False)"
            )
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise OptimizerError(
                f"{type(optimizer).__name__} has stepped already in this iteration: scaler.update() ends the iteration"
            )
        params = parameters_of(optimizer)
        scales_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        if state["stage"] is OptState.READY and not scales_itself and all(p.grad is None for p in params):
            raise OptimizerError(
                f"no parameter of {type(optimizer).__name__} has a gradient: call scaler.scale(loss).backward() first"
            )
        if self._ended:
            self._skips, self._ended = {}, False
        result = super().step(optimizer, *args, **kwargs)
        if id(optimizer) not in self._skips:  # it scales itself: what it found is on the device, or nowhere
            self._skips[id(optimizer)] = self._combined([state]) if state["found_inf_per_device"] else False
        return result

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        # torch itself waits for the device here; the answer is kept, so that nothing waits again.
        skip = any(found.item() for found in optimizer_state["found_inf_per_device"].values())
        self._skips[id(optimizer)] = skip
        return None if skip else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """End the iteration: apply the rule, or set the scale; then call the hooks if it changed.

        Raises OptimizerError without a step before it, LossScaleError for a new scale that is none (a tensor is read).
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("update")
        checked = {key: state for key, state in self._per_optimizer_states.items() if state["found_inf_per_device"]}
        skips = {} if self._ended else self._skips  # ended: only unscaled, not stepped
        read = [skips.get(key) for key in checked]
        known = all(isinstance(one, bool) for one in read)
        found = any(read) if known else self._combined(checked.values()) > 0
        if new_scale is not None:
            value = fp32(float(new_scale))
            scale_rules.check(value)
            self.rules.check(value, f"update({value})")
            before = self._known()
            super().update(value)
            self._remember(before._replace(scale=value))
            self._skips, self._ended = skips, True
            if checked:  # a step has ended, too
                self._stats = self._stats.after(bool(found), False)
            self._changed(before.scale, value)
            return
        self._skips = skips
        if not checked:
            raise OptimizerError(
                "update() without a step that looked for Inf and NaN: call scaler.step(optimizer) before it; a step"
                " that takes a grad_scaler must call grad_scaler.unscale_(self)"
            )
        self._per_optimizer_states.clear()
        self._ended = True
        self._apply(found)

    # The rule, on the host and on the device

    @property
    def _factors(self) -> Factors:
        return Factors(self._growth_factor, self._backoff_factor, self._growth_interval)

    def _combined(self, states: Iterable[dict[str, Any]]) -> torch.Tensor:
        """Whether any of these optimizers met Inf or NaN: a number above 0 on the scale's device."""
        flags = [found for state in states for found in state["found_inf_per_device"].values()]
        device = self._check_scale_growth_tracker("update")[0].device
        return torch.stack([found.to(device, non_blocking=True) for found in flags]).sum()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._remember(self._counts._replace(scale=fp32(self._counts.scale)))

    def _written(self) -> tuple[object, ...]:
        scale, good = self._scale, self._growth_tracker
        return (scale, good) if scale is None or good is None else (id(scale), scale._version, id(good), good._version)

    def _remember(self, counts: Counts) -> None:
        """Take these as the counts on the device, now or once the flags still being copied are applied."""
        self._counts, self._seen = counts, self._written()

    def _known(self) -> Counts:
        """The state of the rule; waits for the device after a fused step, or if other code wrote the scale."""
        if self._scale is None or self._growth_tracker is None:
            return self._counts
        self._catch_up(wait=True)
        if self._seen != self._written():
            self._remember(Counts(self._scale.item(), int(self._growth_tracker.item()), self._counts.bad))
        return self._counts

    def _apply(self, found: bool | torch.Tensor) -> None:
        """Apply the rule on the device now, and on the host once it has the flag; a bool: it has it."""
        scale, good = self._check_scale_growth_tracker("update")
        if self._bad_tracker is None or self._seen != self._written():
            self._bad_tracker = torch.full((), self._known().bad, dtype=torch.int32, device=scale.device)
        flag = torch.full((), found, device=scale.device) if isinstance(found, bool) else found
        scale_rules.follow_on_device((scale, good, self._bad_tracker), flag, self._factors, self.rules)
        self._seen = self._written()
        if isinstance(found, bool):
            self._catch_up(wait=True)
            self._replay(found, self._factors)
        else:
            self._late.append((self._sent(found), self._factors))
            self._catch_up(wait=bool(self._hooks))

    def _sent(self, found: torch.Tensor) -> HostCopy:
        # A method of its own, so that a test on a CPU can behave as a GPU would.
        return HostCopy([found])

    def _catch_up(self, wait: bool) -> None:
        """Apply the rule on the host for the flags that it has; wait: for all of them."""
        while self._late and (wait or self._late[0][0].done()):
            copy, factors = self._late.popleft()
            (found,) = copy.wait()
            self._replay(bool(found.tolist()), factors)

    def _replay(self, found: bool, factors: Factors) -> None:
        before = self._counts
        self._counts, fell = scale_rules.following(before, found, factors, self.rules)
        self._stats = self._stats.after(found, fell)
        self._changed(before.scale, self._counts.scale)
        if fell and self._stats.falls_in_a_row == self.rules.collapse_after:
            (self.rules.on_collapse or warn_of_collapse)(self)

    def _changed(self, before: float, after: float) -> None:
        if after != before:
            self._stats = self._stats.moved(after)
            for hook in list(self._hooks.values()):
                hook(after / before)

    # Reading and storing

    def get_scale(self) -> float:
        """The scale; 1 when disabled.  Waits for the device only after a fused step (torch's always waits)."""
        return self._known().scale if self._enabled else 1.0

    def _get_growth_tracker(self) -> int:
        return self._known().good if self._enabled else 0

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, and one of our own that torch's scaler ignores: rules and counts."""
        state = super().state_dict()
        if self._enabled:
            rules = {name: getattr(self.rules, name) for name in STORED_RULES}
            state[EXTRA] = {"bad": self._known().bad, **rules, "stats": self._stats.to_dict()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what this class or torch's saved; a scale outside floor and ceiling is moved within, with a warning.

        Raises LossScaleError for a scale of 0, Inf or NaN or anything else that cannot be, with nothing loaded, and
        OptimizerError for the empty state of a disabled scaler.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise OptimizerError("an empty state_dict, as a disabled GradScaler saves: load it where enabled=False")
        loaded, extra = scale_rules.numbers_of(state_dict), dict(state_dict.get(EXTRA, {}))
        scale, bad = loaded["scale"], int(extra.get("bad", 0))
        rules = replace(self.rules, **{name: extra[name] for name in STORED_RULES if name in extra})
        within = min(max(scale, rules.floor), rules.ceiling)
        self._catch_up(wait=True)
        super().load_state_dict({**loaded, "scale": within})
        self.rules, self._bad_tracker = rules, None
        self._skips, self._ended = {}, False
        stats = dict(extra.get("stats", {}))
        self._stats = ScaleStats(**{**stats, "history": tuple(map(tuple, stats.get("history", ())))})
        self._remember(Counts(within, loaded["_growth_tracker"], bad))
        if within != scale:
            warnings.warn(f"the loaded loss scale {scale} is moved to {within}, within {rules}", stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        counts = self._known() if self._enabled else self._counts  # before torch's, which forgets the tensors
        return {**super().__getstate__(), "_counts": counts, "_bad_tracker": None, "_seen": None, "_skips": {}}


def warn_of_collapse(scaler: GradScaler) -> None:
    """The default of `on_collapse`."""
    warnings.warn(
        f"the loss scale fell {scaler.stats.falls_in_a_row} times in a row, to {scaler.get_scale():g}: every step is"
        " skipped, so a gradient overflows whatever the scale; fe.amp.find_overflow(model) names the layer",
        stacklevel=5,
    )
