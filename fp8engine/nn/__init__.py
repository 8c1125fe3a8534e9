"""nn.Modules in FP8, each with parameters, a place in the scaling state and one autograd call."""

from fp8engine.nn.attention import Attention, Heads
from fp8engine.nn.grouped import GroupedLinear
from fp8engine.nn.layernorm_linear import LayerNormLinear
from fp8engine.nn.layernorm_mlp import LayerNormMLP
from fp8engine.nn.linear import Linear, weights_changed
from fp8engine.nn.transformer import TransformerLayer

__all__ = [
    "Attention",
    "GroupedLinear",
    "Heads",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "TransformerLayer",
    "weights_changed",
]
