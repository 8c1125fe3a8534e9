"""Table of the activations, y = f(x) or f(gate) * u(up), with their gradients in plain torch.

| kind | f(x) | source |
| --- | --- | --- |
| relu | max(x, 0) | |
| srelu | max(x, 0)^2, "squared relu" | So et al. 2021 (arXiv 2109.08668) |
| gelu | x Phi(x), Phi(x) = (1 + erf(x / sqrt 2)) / 2 | Hendrycks, Gimpel 2016 (arXiv 1606.08415) |
| gelu_tanh | x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) | the same |
| qgelu | x sigma(1.702 x), "quick gelu" | the same |
| silu | x sigma(x), sigma(x) = 1 / (1 + e^-x) | the same |
| glu | sigma(gate) * up | Shazeer 2020 (arXiv 2002.05202), with the five below |
| reglu, sreglu, geglu, geglu_tanh, qgeglu, swiglu | f(gate) * up, f: relu, srelu, gelu, gelu_tanh, qgelu, silu | |
| clamped_swiglu | qgelu(min(gate, 7)) * (clamp(up, -7, 7) + 1) | gpt-oss, TransformerEngine's defaults |

The names are TransformerEngine's (LayerNormMLP's `activation`), but that its gelu and geglu are gelu_tanh and
geglu_tanh here.  A NaN passes its gradient through every max and clamp, so that it stays visible.
The twin of kernels/activations.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

aten = torch.ops.aten  # backward formulas in one pass each
QUICK = 1.702
LIMIT = 7.0
Function = Callable[[torch.Tensor], torch.Tensor]
Gradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Activation(NamedTuple):
    """f and (dy, x) -> dy * f'(x); gated: the input is [gate | up], and `up`, `up_gradient` are those of u.

    >>> ACTIVATIONS["swiglu"](torch.tensor([[30.0, 2.0]]))
    tensor([[60.]])
    """

    forward: Function
    backward: Gradient
    gated: bool = False
    up: Function = lambda up: up
    up_gradient: Gradient = lambda dy, up: dy

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """y of x [..., N], or [..., 2 N] of a gated kind; in x's dtype, and differentiable."""
        return self.of(*x.chunk(2, dim=-1)) if self.gated else self.forward(x)

    def of(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """y of a gated kind, of its two halves."""
        return self.forward(gate) * self.up(up)

    def gradient(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dx, of x's shape."""
        if not self.gated:
            return self.backward(dy, x)
        return torch.cat(self.gradients(dy, *x.chunk(2, dim=-1)), dim=-1)

    def gradients(self, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(dgate, dup) of a gated kind."""
        return self.backward(dy * self.up(up), gate), self.up_gradient(dy * self.forward(gate), up)


def _quick(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(QUICK * x)


def _quick_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    g = torch.sigmoid(QUICK * x)
    return dy * (g * (1 + QUICK * x * (1 - g)))


# Comparisons are written so that they are false for NaN, whose gradient passes, as in torch's relu.
_PLAIN = {
    "relu": Activation(torch.relu, lambda dy, x: dy.masked_fill(x <= 0, 0.0)),
    "srelu": Activation(lambda x: torch.relu(x).square(), lambda dy, x: (dy * (2 * x)).masked_fill(x <= 0, 0.0)),
    "gelu": Activation(aten.gelu, aten.gelu_backward),
    "gelu_tanh": Activation(
        lambda x: aten.gelu(x, approximate="tanh"), lambda dy, x: aten.gelu_backward(dy, x, approximate="tanh")
    ),
    "qgelu": Activation(_quick, _quick_backward),
    "silu": Activation(aten.silu, aten.silu_backward),
}
# Plain kind -> the kind whose gate it is.
GATED = {
    "relu": "reglu",
    "srelu": "sreglu",
    "gelu": "geglu",
    "gelu_tanh": "geglu_tanh",
    "qgelu": "qgeglu",
    "silu": "swiglu",
}
ACTIVATIONS = {
    **_PLAIN,
    **{gated: _PLAIN[plain]._replace(gated=True) for plain, gated in GATED.items()},
    "glu": Activation(torch.sigmoid, lambda dy, x: dy * (g := torch.sigmoid(x)) * (1 - g), gated=True),
    "clamped_swiglu": Activation(
        lambda x: _quick(x.clamp(max=LIMIT)),
        lambda dy, x: _quick_backward(dy, x).masked_fill(x > LIMIT, 0.0),
        gated=True,
        up=lambda up: up.clamp(-LIMIT, LIMIT) + 1,
        up_gradient=lambda dy, up: dy.masked_fill(up.abs() > LIMIT, 0.0),
    ),
}
