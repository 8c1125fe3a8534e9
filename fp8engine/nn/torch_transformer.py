"""torch's nn.TransformerEncoder and its layers, kept from the fast path that reads weights past their layers.

In evaluation, torch's forward of an encoder layer hands all its weights to one FP32 or 16-bit operator, and never calls
linear1 and linear2.  Two attributes, which torch sets when the module is made, say whether it may; a class that answers
for them leaves the attributes themselves, and every other module of the process, as they are.
"""

from __future__ import annotations

from torch import nn

from fp8engine.nn.linear import Float8Module
from fp8engine.nn.mixed import Mixin, mix


class CallsItsLayers(Mixin):
    """An encoder or an encoder layer whose forward calls each layer, in evaluation as in training."""

    @property
    def activation_relu_or_gelu(self) -> int:
        """Of an encoder layer: 0, an activation that the fast path does not know."""
        return 0

    @property
    def use_nested_tensor(self) -> bool:
        """Of an encoder: no nested tensors, which only the fast path takes."""
        return False


def call_layers(model: nn.Module) -> None:
    """Keep every encoder and encoder layer with a converted layer in it from the fast path."""
    for module in list(model.modules()):
        if isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer) and any(
            isinstance(part, Float8Module) for part in module.modules()
        ):
            mix(module, CallsItsLayers)


def uncalled(model: nn.Module) -> set[int]:
    """ids of the output projections whose weight nn.MultiheadAttention's forward reads and never calls."""
    forward = nn.MultiheadAttention.forward
    attentions = (m for m in model.modules() if isinstance(m, nn.MultiheadAttention) and type(m).forward is forward)
    return {id(attention.out_proj) for attention in attentions}
