"""One overflow found, with its layer, operand, op and step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fp8engine.numerics.formats import word

GRADIENTS = ("grad_input", "grad_weight", "grad_output")


@dataclass(frozen=True)
class Finding:
    """One overflow: where it was made, and when.

    layer: the guilty module's name as in named_modules ("" is the model's own forward), None when it lies outside the
    model.  operand: "output", "input" (the data), "weight", "grad_input", "grad_weight" or "grad_output" (what came
    into the model's backward).  op: the function, as torch names it, or None while no pass was watched op by op.
    op_step: of the later pass that has told the op, in which the layer overflowed again; None if it was the same pass.
    step: counted from 0, calls of scaler.update where there is a scaler, else forward passes.  input_amax, output_amax:
    largest magnitudes at that step, going in (finite ones; into the op, into the layer where op_step is told) and
    coming out (NaN or Inf).  parameter: whose weight or gradient it is.  loss_scale: the scale at that step.
    exact: False for a guess of a backward that was not watched op by op.
    guilty: False while a smaller loss scale may cure it, or has: cured_by is that scale (ledger.py).
    """

    layer: str | None
    operand: str
    step: int
    op: str | None = None
    input_amax: float = math.nan
    output_amax: float = math.nan
    dtype: torch.dtype | None = None
    parameter: str | None = None
    loss_scale: float | None = None
    exact: bool = True
    guilty: bool = True
    cured_by: float | None = None
    op_step: int | None = None

    @property
    def backward(self) -> bool:
        """Whether it is a gradient."""
        return self.operand in GRADIENTS

    @property
    def in_a_layer(self) -> bool:
        """Whether an op of a layer made it, in this pass."""
        return self.layer is not None and self.operand not in ("weight", "input")

    def to_dict(self) -> dict:
        """Everything, in types that JSON knows."""
        return plain(vars(self))

    def __str__(self) -> str:
        where = "outside the model" if self.layer is None else repr(self.layer) if self.layer else "the model itself"
        kind = f" in {str(self.dtype).removeprefix('torch.')}" if self.dtype else ""
        told = {
            f"step {self.step}: {self.operand} of {where}": True,
            f"({self.parameter})": self.parameter,
            f"is {shown(abs(self.output_amax))}{kind}": True,
            f"made by {self.op}": self.op and self.op_step is None,
            f"from values up to {self.input_amax:.4g}": not math.isnan(self.input_amax),
            f"and made by {self.op} (as step {self.op_step} showed)": self.op_step is not None,
            f"at loss scale {self.loss_scale or 0:g}": self.backward and self.loss_scale is not None,
            "before it reached the model: look at the loss function and the loss scale": self.operand == "grad_output",
            "before the model saw it: look at the data": self.operand == "input",
            "(a guess until a backward is watched op by op)": not self.exact,
            '(which op: told when it comes again in the next pass, or by mode="ops")': self._op_is_open,
            self._verdict: True,
        }
        return " ".join(part for part, holds in told.items() if holds and part)

    @property
    def _op_is_open(self) -> bool:
        return self.exact and not self.op and self.guilty and self.in_a_layer

    @property
    def _verdict(self) -> str:
        """What a loss scale has to do with it."""
        if self.cured_by is not None:
            return f"- loss scale {self.cured_by:g} cures it, nothing to pin"
        if self.guilty:
            return ""
        if self.loss_scale is None:
            return "- a loss scale may be why: give find_overflow the scaler to know"
        return "- a smaller loss scale may cure it: watch until a step passes before anything is pinned"


def shown(magnitude: float) -> str:
    """A magnitude in four digits, NaN and Inf by these names.

    >>> shown(123456.0), shown(math.inf), shown(-math.inf), shown(math.nan)
    ('1.235e+05', 'Inf', '-Inf', 'NaN')
    """
    return f"{magnitude:.4g}".replace("inf", "Inf").replace("nan", "NaN")


def plain(value: Any) -> Any:
    """A value in types that JSON knows: NaN and Inf as text, a dtype as its name."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, torch.dtype):
        return word(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
