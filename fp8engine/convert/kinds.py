"""Classes of linear layers that are swapped: nn.Linear, subclasses that compute the same, transformers' Conv1D."""

from __future__ import annotations

from torch import nn

from fp8engine.nn.linear import Float8Module, Linear
from fp8engine.nn.serving import Served, ServedLinear

# Subclasses of nn.Linear whose code computes what nn.Linear does, up to a rounding before the bias.
LIKE_LINEAR = ("transformers.models.falcon.modeling_falcon.FalconLinear",)


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D itself; found by name, so that transformers need not be there."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_plain_linear(kind: type) -> bool:
    """Whether modules of this class compute what nn.Linear does: it, a subclass without code of its own, Falcon's."""
    if not issubclass(kind, nn.Linear):
        return False
    own_code = set(vars(kind)) - {"__init__", "__module__", "__doc__", "__parameters__"}
    return kind is nn.Linear or not own_code or f"{kind.__module__}.{kind.__qualname__}" in LIKE_LINEAR


def classes_for(module: nn.Module) -> tuple[type[Float8Module], type[Served]]:
    """The classes that a linear layer gets: with a recipe, and with codes in place of its weight."""
    if is_conv1d(module):
        from fp8engine.nn.conv1d import Float8Conv1D, ServedConv1D

        return Float8Conv1D, ServedConv1D
    return Linear, ServedLinear
