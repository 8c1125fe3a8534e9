"""What a fused layer is made of: linear layers with their numerics, a norm with its parameters, what is kept of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8engine.functional.numerics import Numerics
from fp8engine.reference import Norm


class Layer(NamedTuple):
    """A linear layer: weight [N, K], bias [N] or None, and the numerics of the module that holds them."""

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None
    numerics: Numerics


class NormOf(NamedTuple):
    """A norm and its parameters: gamma [K] (None: ones; zero-centred where `norm` says so), beta [K] (None: zeros)."""

    norm: Norm
    weight_K: torch.Tensor | None
    bias_K: torch.Tensor | None = None


class Memory(NamedTuple):
    """What a fused layer keeps for its backward beside its matmuls' FP8 operands.

    recompute_norm: not the normalised input (FP8); the norm runs again in backward, from the input that is kept anyway.
    recompute_activation: not the activation's output (FP8); it runs again in backward, from its own input.
    store: "16 bits", or "fp8": the inputs of norms and activations are kept in FP8 too, E4M3 with a scale per row.
    """

    recompute_norm: bool = False
    recompute_activation: bool = False
    store: str = "16 bits"
