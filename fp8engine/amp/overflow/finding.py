"""One overflow found, with its layer, operand, op and step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fp8engine.numerics.formats import word

GRADIENTS = ("grad_input", "grad_weight", "grad_output")


@dataclass(frozen=True)
class Finding:
    """One overflow: where it was made, and when.

    layer: the guilty module's name as in named_modules ("" is the model's own forward), None when it lies outside the
    model.  operand: "output", "input" (the data), "weight", "grad_input", "grad_weight" or "grad_output" (what came
    into the model's backward).  op: the function, as torch names it, or None while no pass was watched op by op.
    step: counted from 0, calls of scaler.update where there is a scaler, else forward passes.  input_amax, output_amax:
    largest magnitudes going in (finite ones) and coming out (NaN or Inf).  parameter: whose weight or gradient it is.
    loss_scale: the scale at that step.  exact: False for a guess of a backward that was not watched op by op.
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
        numbers = {"input_amax": number(self.input_amax), "output_amax": number(self.output_amax)}
        return vars(self) | numbers | {"dtype": word(self.dtype) if self.dtype else None}

    def __str__(self) -> str:
        where = "outside the model" if self.layer is None else repr(self.layer) if self.layer else "the model itself"
        parts = [f"step {self.step}: {self.operand} of {where}"]
        if self.parameter:
            parts.append(f"({self.parameter})")
        kind = f" in {str(self.dtype).removeprefix('torch.')}" if self.dtype else ""
        parts.append(f"is {'NaN' if math.isnan(self.output_amax) else 'Inf'}{kind}")
        if self.op:
            parts.append(f"made by {self.op}")
        if not math.isnan(self.input_amax):
            parts.append(f"from values up to {self.input_amax:.4g}")
        if self.backward and self.loss_scale is not None:
            parts.append(f"at loss scale {self.loss_scale:g}")
        if self.operand == "grad_output":
            parts.append("before it reached the model: look at the loss function and the loss scale")
        elif self.operand == "input":
            parts.append("before the model saw it: look at the data")
        if not self.exact:
            parts.append("(a guess until a backward is watched op by op)")
        elif not self.op and self.guilty and self.operand not in ("weight", "input", "grad_output"):
            parts.append('(which op: told when it comes again in the next pass, or by mode="ops")')
        if self.cured_by is not None:
            parts.append(f"- loss scale {self.cured_by:g} cures it, nothing to pin")
        elif not self.guilty and self.loss_scale is None:
            parts.append("- a loss scale may be why: give find_overflow the scaler to know")
        elif not self.guilty:
            parts.append("- a smaller loss scale may cure it: watch until a step passes before anything is pinned")
        return " ".join(parts)


def number(value: float) -> float | str:
    """JSON has no NaN and no Inf."""
    return value if math.isfinite(value) else str(value)
