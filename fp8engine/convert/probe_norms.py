"""Norms by what they compute: RMSNorm and LayerNorm of rows of several scales, and the eps that the smallest show."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import nn

from fp8engine.convert.twin import IN_BACKWARD, TOLERANCES, Draw, Mode, own_attributes, pulled, run, twin_of
from fp8engine.ops.reference import Norm
from fp8engine.ops.reference.norm_quantize import KINDS


def _width(module: nn.Module, own: dict[str, nn.Parameter]) -> int:
    """Features that a norm is over: of its weight, or as it says, or any; 0 if that cannot be."""
    if (weight := own.get("weight")) is not None:
        return weight.numel() if weight.dim() == 1 else 0
    said = vars(module).get("normalized_shape", (64,))
    return said[-1] if isinstance(said, tuple | list) and len(said) == 1 and isinstance(said[-1], int) else 0


class _Rows(NamedTuple):
    """What a norm was given, in float64: rows of ever larger scale, its weight and bias, or ones and zeros."""

    x_MK: torch.Tensor
    weight_K: torch.Tensor
    bias_K: torch.Tensor

    def gamma(self, norm: Norm) -> torch.Tensor:
        return self.weight_K + norm.zero_centered

    def centred(self, norm: Norm) -> torch.Tensor:
        return self.x_MK - self.x_MK.mean(-1, keepdim=True) if norm.kind == "layer" else self.x_MK

    def rstd(self, norm: Norm) -> torch.Tensor:
        return (self.centred(norm).square().mean(-1, keepdim=True) + norm.eps).rsqrt()

    def scaled(self, norm: Norm) -> torch.Tensor:
        return self.centred(norm) * self.rstd(norm) * self.gamma(norm)

    def agree(self, norm: Norm, y_MK: torch.Tensor, tolerance: float) -> bool:
        """Whether y is the norm of x."""
        scaled = self.scaled(norm)
        size = (scaled.abs() + self.bias_K.abs()).amax(-1, keepdim=True)
        return norm.eps >= 0 and bool(((scaled + self.bias_K - y_MK).abs() <= tolerance * size).all())

    def agree_backward(self, norm: Norm, dy_MK: torch.Tensor, found: dict[str, torch.Tensor]) -> bool:
        """Whether these are the gradients of the norm's input, and of its parameters by name."""
        leaves = {key: value.detach().requires_grad_() for key, value in self._asdict().items()}
        with torch.enable_grad():
            own = _Rows(**leaves)
            y_MK = own.scaled(norm) + own.bias_K
        wanted = torch.autograd.grad(y_MK, [leaves[key] for key in found], dy_MK)
        terms = {"x_MK": dy_MK * self.gamma(norm) * self.rstd(norm)}  # from which dx takes their means
        for (key, grad), want in zip(found.items(), wanted, strict=True):
            size = (want.abs() + terms.get(key, want).abs()).amax(-1, keepdim=True)
            if not bool(((grad - want).abs() <= IN_BACKWARD * size).all()):
                return False
        return True

    def with_eps(self, norm: Norm, y_MK: torch.Tensor, said: list[float]) -> Norm:
        """The norm with the eps that the first row speaks for, whose eps is nearly all that is under the root.

        Said by an attribute, it is that number; else the number of two digits that is as near, or as it was measured.
        """
        z = self.centred(norm)[0]
        scaled, squares = z * self.gamma(norm), z.square().mean()
        eps = float(((scaled @ scaled) / (scaled @ (y_MK[0] - self.bias_K))).square() - squares)
        near = 1e-4 * (abs(eps) + float(squares))
        return norm._replace(eps=next((v for v in (*said, float(f"{eps:.2g}")) if abs(v - eps) <= near), eps))


def norm(module: nn.Module) -> Callable | None:
    """A look at a norm; None: the module cannot be one."""
    own = {key: value for key, value in module._parameters.items() if value is not None}
    width = _width(module, own)
    plain = own.keys() <= {"weight", "bias"} and all(value.shape == (width,) for value in own.values())
    if width < 2 or not plain or module._buffers or module._modules:
        return None
    return functools.partial(_run_norm, module, width, own.keys())


def _run_norm(module: nn.Module, width: int, own: Collection[str], modes: tuple[Mode, ...]) -> Norm | None:
    draw, scale = Draw(), [1e-6, 1e-4, 1e-2, 1, 30, 1e3, 1e7]
    x = (2 * draw(7, width) + 0.5) * torch.tensor(scale, dtype=torch.float64, device="cpu")[:, None]
    affine, dy = {"weight": draw(width).abs() + 0.5, "bias": 0.01 * draw(width)}, draw(7, width)
    said = [value for _, value in own_attributes(module) if isinstance(value, float)]
    twin, norms = twin_of(module), [Norm(*each) for each in itertools.product(KINDS, (0.0,), (False, True))]
    for mode in modes:
        given = mode.given(x[None])
        for key in own:
            twin._parameters[key] = nn.Parameter(affine[key].to(mode.dtype), requires_grad=mode.grad)
        weight, bias = (twin._parameters.get(key) for key in affine)
        weight = torch.ones_like(x[0]) if weight is None else weight.double()
        rows = _Rows(given[0].double(), weight, torch.zeros_like(x[0]) if bias is None else bias.double())
        y = run(twin, mode, given)
        if type(y) is not torch.Tensor or y.dtype != mode.dtype or y.shape != (1, *x.shape):
            return None
        if len(norms) > 1:
            norms = [rows.with_eps(norm, y[0].double(), said) for norm in norms]
        norms = [norm for norm in norms if rows.agree(norm, y[0].double(), TOLERANCES[mode.dtype])]
        if norms and mode.compares_gradients:
            leaves = {"x_MK": given} | {f"{key}_K": twin._parameters[key] for key in own}
            grads = dict(zip(leaves, pulled([y], [dy[None]], list(leaves.values())), strict=True))
            norms = [norm for norm in norms if rows.agree_backward(norm, dy, grads)]
        if not norms or (norms[0].kind == "rms" and "bias" in own):  # ours has none
            return None
    return norms[0]
