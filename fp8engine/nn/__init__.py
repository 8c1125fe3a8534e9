"""nn.Modules in FP8, each with parameters, a place in the scaling state and one autograd call."""

from fp8engine.nn.attention import Attention, Heads
from fp8engine.nn.grouped import GroupedLinear
from fp8engine.nn.layernorm_linear import LayerNormLinear
from fp8engine.nn.layernorm_mlp import LayerNormMLP
from fp8engine.nn.linear import Linear, fuse_wgrad_accumulation, weights_changed
from fp8engine.nn.outliers import clamp, smooth
from fp8engine.nn.transformer import TransformerLayer

__all__ = [
    "Attention",
    "GroupedLinear",
    "Heads",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "TransformerLayer",
    "clamp",
    "fuse_wgrad_accumulation",
    "smooth",
    "weights_changed",
]
