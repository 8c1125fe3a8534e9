"""fe.weights_changed: forget the FP8 copies of weights that were written in a way that torch does not count."""

from __future__ import annotations

from torch import nn

from fp8engine.errors import ConversionError
from fp8engine.nn.linear import Float8Module


def weights_changed(model: nn.Module) -> None:
    """Cast every weight of `model` again at its next use.

    Call it on a card after a write that does not move a parameter's version counter: `p.data.copy_(...)`, a collective
    into `p.data`, a CUDA graph that was captured elsewhere.  Writes that torch counts (optimizers, `load_state_dict`,
    in-place operations under `no_grad`) need no call, and on a CPU none does.  The first forward afterwards casts.
    Raises ConversionError where `model` has no converted layer.

    >>> import torch
    >>> from fp8engine.nn.linear import Linear
    >>> layer = Linear(32, 16, recipe="current")
    >>> layer.weight.data.zero_()[0, 0]
    tensor(0.)
    >>> weights_changed(layer)
    """
    layers = [module for module in model.modules() if isinstance(module, Float8Module)]
    if not layers:
        raise ConversionError(f"weights_changed: {type(model).__name__} has no converted layers; call fe.convert first")
    for layer in layers:
        layer.forget_copies()
