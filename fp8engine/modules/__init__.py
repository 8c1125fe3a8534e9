"""nn.Modules: parameters, a place in the scaling state, one functional call."""

from fp8engine.modules.attention import Attention, Heads
from fp8engine.modules.changed import weights_changed
from fp8engine.modules.grouped import GroupedLinear
from fp8engine.modules.layernorm_linear import LayerNormLinear
from fp8engine.modules.layernorm_mlp import LayerNormMLP
from fp8engine.modules.linear import Linear
from fp8engine.modules.transformer import TransformerLayer

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
