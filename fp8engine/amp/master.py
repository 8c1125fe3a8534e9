"""FP32 master weights behind FP16 or BF16 parameters, for any optimizer of torch.

    m <- step(m, fp32(g))        p <- round(m), to nearest, ties to even

In FP16 an update below 2^-11 of its weight (BF16: 2^-8) rounds to nothing; on the master it counts.  The model keeps
its 16-bit parameters p and their 16-bit gradients g; the optimizer knows only the masters m, so its own state, foreach
and fused kernels, weight decay and clipping are FP32.  FP32 parameters are their own masters.

Memory per 16-bit parameter: 4 bytes for m and 4 for its gradient; with Adam 8 more for its moments, in all 20 with p
and g (plain FP32 training: 16).  What is saved is in the activations and the matmuls' operands.

The masters are the weights and p their rounding.  Writes to p (a checkpoint loaded into the model, an EMA swapped in)
are followed: a master whose rounding is no longer p takes p's value, the others keep the bits below.

Source: Micikevicius et al., Mixed Precision Training, 2017, section 3.1.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from fp8engine._torch import is_dtensor, model_parameter, step_without_hooks
from fp8engine.amp.pair import Pair, Pairs
from fp8engine.amp.tensors import SIXTEEN_BIT
from fp8engine.amp.wrapped import Wrapped, is_wrapped, parameters_of
from fp8engine.errors import OptimizerError
from fp8engine.numerics.formats import word

MASTERS = "masters"  # key in the state_dict, beside torch's own two


class MasterWeights(Wrapped):
    """An optimizer whose 16-bit parameters are stepped in FP32; itself an optimizer, so schedulers and scalers take it.

    originals: FP32 values to start from instead of the rounded parameters, where the caller still has them.

    `param_groups` hold the masters, with their gradients up to date: GradScaler unscales those in FP32, and clipping
    takes them too: `clip_grad_norm_(optimizer.master_parameters(), 1.0)`.  state_dict is the inner optimizer's with
    the masters added: a resumed run goes on bit for bit, and an optimizer without masters loads it as well.

    Raises OptimizerError: wrapped already, no 16-bit parameters, DTensors, originals under names or of other shapes, or
    a model moved or cast since.

    >>> model = nn.Linear(1, 1, bias=False).half()
    >>> _ = nn.init.ones_(model.weight)
    >>> optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=2.0**-13))
    >>> for _ in range(8):  # each update is a quarter of FP16's step below 1
    ...     optimizer.zero_grad()
    ...     model(torch.ones(1, 1).half()).sum().backward()
    ...     optimizer.step()
    >>> model.weight.item(), model.weight.dtype
    (0.9990234375, torch.float16)
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, originals: Mapping[nn.Parameter, torch.Tensor] | None = None
    ):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptimizerError(f"MasterWeights takes a torch.optim optimizer, not {type(optimizer).__name__}")
        if is_wrapped(optimizer):
            raise OptimizerError(f"this {type(optimizer).__name__} is wrapped already: wrap an optimizer once")
        for p, value in (originals or {}).items():
            if not isinstance(p, nn.Parameter) or getattr(value, "shape", None) != p.shape:
                found = p if isinstance(p, str) else f"a {type(p).__name__} of shape {list(p.shape)}"
                raise OptimizerError(f"MasterWeights: originals= is {{parameter: values of its shape}}; got {found}")
        parameters = parameters_of(optimizer)
        if not any(p.dtype in SIXTEEN_BIT for p in parameters):
            found = ", ".join(sorted({word(p.dtype) for p in parameters})) or "no parameters"
            raise OptimizerError(
                f"none of the {type(optimizer).__name__}'s {len(parameters)} parameters is FP16 or BF16 ({found}):"
                " cast the model first, or use the optimizer as it is"
            )
        if any(is_dtensor(p) for p in parameters):
            raise OptimizerError(
                "MasterWeights takes no DTensors, as fully_shard makes them: keep the model in FP32, and let it compute"
                " in 16 bits by fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
            )
        super().__init__(optimizer)
        self._pairs: Pairs
        state = optimizer.state_dict() if optimizer.state else None
        for group in optimizer.param_groups:
            self._put_masters(group, originals or {})
        if state is not None:
            optimizer.state.clear()
            optimizer.load_state_dict(state)  # moments kept so far, now FP32 and under the masters

    def _put_masters(self, group: dict[str, Any], originals: Mapping[nn.Parameter, torch.Tensor]) -> None:
        params = group["params"]
        for i, p in enumerate(params):
            if p.dtype in SIXTEEN_BIT:
                value = originals[p] if p in originals else p.detach()
                master = nn.Parameter(value.detach().to(torch.float32), requires_grad=p.requires_grad)
                self._pairs[p] = Pair(p, master)
                params[i] = master  # in place: LBFGS keeps this list object

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner optimizer's groups: masters, whose .grad is the parameter's gradient in FP32."""
        self._pairs.show()
        return self.inner.param_groups

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # An inner step(grad_scaler=...) would ask the scaler for its own gradients: the scaler unscales the masters'
        takes_scaler = "grad_scaler" in inspect.signature(self.inner.step).parameters
        return getattr(self.inner, "_step_supports_amp_scaling", False) and not takes_scaler

    def master_parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizer steps, group by group: masters, and FP32 parameters themselves; .grad up to date."""
        self._pairs.follow()  # an average of the weights is made of these
        yield from parameters_of(self)

    def model_parameters(self) -> Iterator[torch.Tensor]:
        """The model's own parameters, in the optimizer's order."""
        return map(model_parameter, parameters_of(self.inner))

    def refresh(self) -> None:
        """Follow parameters that were written since the last step: only a write through `.data` needs this call."""
        self._pairs.follow(every=True)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step the masters, then round them into the parameters; a closure sees the parameters of each evaluation.

        Raises OptimizerError if a 16-bit gradient was changed after its FP32 copy had been (clipped after unscale_),
        and for a parameter that was moved or cast after this optimizer was made.
        """
        self._pairs.follow()
        self._check_dtypes()
        self._pairs.gather()
        self._pairs.gather_unversioned(fused=self.__dict__.get("grad_scale") is not None)
        self._pairs.check()

        def evaluate() -> Any:
            self._pairs.scatter()
            with torch.enable_grad():
                loss = cast(Callable[[], Any], closure)()
            self._pairs.gather()
            return loss

        mine = vars(self)
        given = {name: mine[name] for name in ("grad_scale", "found_inf") if name in mine}  # by a scaler, if fused
        vars(self.inner).update(given)
        try:
            loss = step_without_hooks(self.inner, *(() if closure is None else (evaluate,)))
        finally:
            for name in given:
                delattr(self.inner, name)
        self._pairs.scatter()
        return loss

    def _check_dtypes(self) -> None:
        """Raise OptimizerError for an FP32 parameter, its own master so far, that was cast to 16 bits since."""
        for p in parameters_of(self.inner):
            if p.dtype in SIXTEEN_BIT:
                raise OptimizerError(
                    f"a parameter {tuple(p.shape)} was FP32 when MasterWeights was made, so it has no master, and is"
                    f" {p.dtype} now: cast the model first, then wrap the optimizer"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's parameters and of the masters."""
        for pair in self._pairs.values():
            pair.forget()
            if pair.parameter.grad is not None:
                pair.parameter.grad = None if set_to_none else torch.zeros_like(pair.parameter.grad)
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; 16-bit parameters get masters."""
        given = param_group["params"]
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        if any((p[1] if isinstance(p, tuple) else p) in self._pairs for p in given):
            raise OptimizerError("add_param_group: some of these parameters are in another group already")
        self.inner.add_param_group({**param_group, "params": given})
        self._put_masters(self.inner.param_groups[-1], {})

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, with {"masters": {index of the parameter: FP32 values}} added."""
        self._pairs.follow()
        masters = {i: m.detach() for i, m in self._numbered()}
        return {**self.inner.state_dict(), MASTERS: masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load optimizer state and masters, and round these into the parameters, before or after the model's state.

        State of an optimizer without masters is taken too, with a warning: then masters follow the parameters.  Raises
        OptimizerError if the masters are another model's; nothing is loaded then.
        """
        masters = state_dict.get(MASTERS)
        mine = dict(self._numbered())
        if masters is not None and {i: m.shape for i, m in masters.items()} != {i: m.shape for i, m in mine.items()}:
            raise OptimizerError(
                f"the state holds {len(masters)} masters that are not those of this optimizer's {len(mine)} 16-bit"
                " parameters (number, order or shapes differ): nothing was loaded"
            )
        self.inner.load_state_dict({name: value for name, value in state_dict.items() if name != MASTERS})
        if masters is None:
            warnings.warn("the optimizer state holds no FP32 masters: they follow the 16-bit parameters", stacklevel=2)
            self.refresh()
            return
        for i, master in mine.items():
            master.copy_(masters[i])
        self._pairs.scatter()

    def _numbered(self) -> Iterator[tuple[int, nn.Parameter]]:
        return ((i, p) for i, p in enumerate(parameters_of(self.inner)) if model_parameter(p) is not p)

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "pairs": [(pair.parameter, pair.master) for pair in self._pairs.values()]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pairs = state.pop("pairs", ())
        super().__setstate__(state)
        self._pairs = Pairs({parameter: Pair(parameter, master) for parameter, master in pairs})
