"""fe.LayerNormLinear, a norm that writes the FP8 codes which its Linear reads; what all such modules here share.

The children are ordinary modules, `norm` and an fe.Linear, so that names in a state_dict, reports and scaling states
are those of the code without it.  The layer is called as a module; the norm is computed with its child's parameters,
whose hooks do not run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fp8engine.auto import attach
from fp8engine.autograd import Memory, NormOf, Numerics
from fp8engine.errors import UnknownName
from fp8engine.nn.linear import Linear
from fp8engine.nn.produce import begin_in_graph, normed
from fp8engine.numerics.names import RecipeName
from fp8engine.numerics.recipe import Recipe, resolve
from fp8engine.ops.reference import Norm
from fp8engine.ops.reference.norm_quantize import KINDS
from fp8engine.scaling.operands import Producer
from fp8engine.scaling.table import ScalingState


class ZeroCentredLayerNorm(nn.LayerNorm):
    """An nn.LayerNorm whose weight is gamma - 1, so that weight decay pulls gamma towards 1."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class ZeroCentredRMSNorm(nn.RMSNorm):
    """An nn.RMSNorm whose weight is gamma - 1, so that weight decay pulls gamma towards 1."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


NORMS = {
    ("layer", False): nn.LayerNorm,
    ("layer", True): ZeroCentredLayerNorm,
    ("rms", False): nn.RMSNorm,
    ("rms", True): ZeroCentredRMSNorm,
}


def make_norm(width: int, norm: Norm, device=None, dtype=None) -> nn.LayerNorm | nn.RMSNorm:
    """The module that holds a norm's parameters.  Raises UnknownName for its kind."""
    if norm.kind not in KINDS:
        raise UnknownName("norm", norm.kind, KINDS)
    return NORMS[norm.kind, norm.zero_centered](width, eps=norm.eps, device=device, dtype=dtype)


def norm_of(module: nn.LayerNorm | nn.RMSNorm) -> NormOf:
    """A norm's module as its formula and its parameters.

    >>> norm_of(make_norm(4, Norm("rms", 1e-6, zero_centered=True))).norm
    Norm(kind='rms', eps=1e-06, zero_centered=True)
    """
    kind = "layer" if isinstance(module, nn.LayerNorm) else "rms"
    zero_centered = isinstance(module, (ZeroCentredLayerNorm, ZeroCentredRMSNorm))
    eps = module.eps
    if eps is None:  # nn.RMSNorm's default: the rounding of what it reads
        eps = torch.finfo(torch.float32 if module.weight is None else module.weight.dtype).eps
    return NormOf(Norm(kind, eps, zero_centered), module.weight, getattr(module, "bias", None))


UNTIL_SHARED = "bf16"  # the recipe of a layer that `share_state` is about to give its own


def share_state(layers: Sequence[tuple[str, Linear]], recipe: Recipe, begins: bool = False) -> None:
    """Put layers made by hand in one scaling state; a compiled forward updates it once, at the first of them.

    begins: the module that holds them does so before, with `begin_in_graph`.
    """
    state = ScalingState([(name, recipe) for name, _ in layers], layers[0][1].weight.device)
    for index, (name, layer) in enumerate(layers):
        layer.numerics = Numerics(name, recipe, state, index, standalone=index == 0 and not begins)
    attach([layer.numerics for _, layer in layers], [tuple(layer.weight.shape) for _, layer in layers])


class LayerNormLinear(nn.Module):
    """A norm and a Linear in FP8: the norm is written once, in the format that the matmul reads.

    in_features, out_features, bias, device, dtype: of the Linear, as nn.Linear has them.  recipe: a Recipe or its name.
    norm: "layer" or "rms", with `eps`.  zero_centered: its weight holds gamma - 1.
    recompute: in backward the norm runs again, so that its result is not kept.
    store: "16 bits", or "fp8": the norm's input is kept in FP8 (E4M3, a scale per row; 1 byte of 2, 31 dB of it).
    Input [..., in_features] in FP32, BF16 or FP16; output [..., out_features] in its dtype, or autocast's.
    Children: `norm`, `linear`.  Raises UnknownName for a recipe, norm or store; for an input as fe.Linear does.

    >>> block = LayerNormLinear(32, 16, recipe="current", norm="rms")
    >>> block(torch.ones(2, 4, 32)).shape, list(block.state_dict())
    (torch.Size([2, 4, 16]), ['norm.weight', 'linear.weight', 'linear.bias'])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | RecipeName,
        norm: str = "layer",
        eps: float = 1e-5,
        zero_centered: bool = False,
        recompute: bool = False,
        store: str = "16 bits",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        recipe = resolve(recipe)
        self.memory = Memory(recompute_norm=recompute, store=store)
        self.norm = make_norm(in_features, Norm(norm, eps, zero_centered), device, dtype)
        self.linear = Linear(in_features, out_features, bias, recipe=UNTIL_SHARED, device=device, dtype=dtype)
        self.producer = Producer("norm")
        share_state([("linear", self.linear)], recipe, begins=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin_in_graph(self.linear)
        return self.linear(normed(x, norm_of(self.norm), self.linear, self.producer, self.memory))
