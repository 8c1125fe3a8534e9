"""Activations by torch's own functions in any dtype, for float64, and how large the terms are that FP32 rounds.

The formulas stand here a second time, by other functions than the twin's: torch.nn.functional, and for quick gelu,
squared relu and gpt-oss's clamped SwiGLU those of transformers (activations.py; modeling_gpt_oss.py, _apply_gate).
"""

from collections.abc import Callable

import torch
from torch.nn import functional


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "srelu": lambda x: torch.square(functional.relu(x)),
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "qgelu": _quick,
    "silu": functional.silu,
}
OF_GATE = {
    "reglu": PLAIN["relu"],
    "sreglu": PLAIN["srelu"],
    "geglu": functional.gelu,
    "geglu_tanh": _gelu_tanh,
    "qgeglu": _quick,
    "swiglu": functional.silu,
    "glu": torch.sigmoid,
    "clamped_swiglu": lambda x: _quick(x.clamp(max=7.0)),
}
EXACT = PLAIN | OF_GATE
SQUARED, BOUNDED = ("srelu", "sreglu"), ("glu", "clamped_swiglu")  # f grows as x^2; f is bounded
QUICK = ("qgelu", "qgeglu", "clamped_swiglu")


def exact(x: torch.Tensor, kind: str) -> torch.Tensor:
    """y of x [..., N], or of [gate | up]; differentiable."""
    if kind not in OF_GATE:
        return PLAIN[kind](x)
    gate, up = x.chunk(2, dim=-1)
    return OF_GATE[kind](gate) * (up.clamp(-7.0, 7.0) + 1 if kind == "clamped_swiglu" else up)


def size(gate: torch.Tensor, kind: str) -> torch.Tensor:
    """|f(x)| is at most that: f(x) = x g(x) with g in [0, 1], x^2, or g(x) itself."""
    return gate.square() if kind in SQUARED else torch.ones_like(gate) if kind == "glu" else gate.abs()


def steepness(gate: torch.Tensor, kind: str, slope: float | torch.Tensor = 1.0) -> torch.Tensor:
    """The size of f's derivative's terms: 1 + |x| times the slope of the sigmoid's argument, 2 |x| of x^2, or 1."""
    if kind in SQUARED:
        return 2 * gate.abs()
    return torch.ones_like(gate) if kind == "glu" else 1 + gate.abs() * slope


def factor(up: torch.Tensor, kind: str) -> torch.Tensor:
    """The size of the terms of u(up)."""
    return up.abs().clamp(max=7.0) + 1 if kind == "clamped_swiglu" else up.abs()


def terms(x: torch.Tensor, kind: str, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sizes of the terms of y and of dx, in float64."""
    x, dy = x.double(), dy.double().abs()
    gate, up = x.chunk(2, dim=-1) if kind in OF_GATE else (x, torch.ones(()))
    of_gate = dy * steepness(gate, kind, 1.702 if kind in QUICK else 1.0) * factor(up, kind)
    of_x = torch.cat([of_gate, dy * size(gate, kind)], dim=-1) if kind in OF_GATE else of_gate
    return size(gate, kind) * factor(up, kind), of_x
