"""Attention of a converted model in FP8: which modules compute one, and what computes it (convert's `attention`).

A module computes attention where the code of its forward, or of a method that this names, names torch's
scaled_dot_product_attention or transformers' table of attention functions; and fe.Attention does.  What then does not
call torch's function stays in 16 bits, said once: by its first forward; or by fe.convert, of an nn.MultiheadAttention,
which calls it elsewhere, and of a module on which another forward was set.
"""

from __future__ import annotations

from torch import nn

from fp8engine.convert.twin import codes_of
from fp8engine.errors import ConversionError, UnknownName
from fp8engine.nn.attention import Attention
from fp8engine.nn.class_swap import bound_forwards, mix
from fp8engine.nn.fp8_attention import FORMATS, Float8Sdpa, Softmax

SDPA, TABLE = "scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS"


def attentions(model: nn.Module, asked: str | None) -> list[tuple[str, nn.Module]]:
    """(name, module) of each attention of the model; none where no format is asked for.

    Raises UnknownName for a format, ConversionError where the model has no attention that could run in it.
    """
    if asked is None:
        return []
    if asked not in FORMATS:
        raise UnknownName("format of attention", asked, FORMATS)
    found = [(name, module) for name, module in model.named_modules() if computes_attention(module)]
    if not any(takes_fp8(module) for _, module in found):
        raise ConversionError(
            f"attention={asked!r}: no module of {type(model).__name__} calls torch's {SDPA} in its forward "
            '(nn.MultiheadAttention calls it elsewhere; transformers does with attn_implementation="sdpa"): leave '
            "`attention` out"
        )
    return found


def put(found: list[tuple[str, nn.Module]], asked: str, strict: bool) -> None:
    """Let these modules compute attention in that format."""
    for name, module in found:
        softmax = Softmax(asked, name or type(module).__name__, strict)
        if isinstance(module, Attention):
            module.softmax = softmax
            continue
        if isinstance(module, nn.MultiheadAttention):
            softmax.leave(f"nn.MultiheadAttention calls torch's {SDPA} elsewhere")
        elif "forward" in vars(module) and not bound_forwards(module):
            softmax.leave("a forward of its own was set on the module, which hides that of its class")
        else:
            mix(module, Float8Sdpa)
        object.__setattr__(module, "fp8_softmax", softmax)


def computes_attention(module: nn.Module) -> bool:
    """Whether the module's own code computes attention, by torch's function or another.

    >>> computes_attention(nn.Linear(2, 2)), computes_attention(nn.MultiheadAttention(2, 1))
    (False, True)
    """
    return isinstance(module, (Attention, nn.MultiheadAttention)) or not {SDPA, TABLE}.isdisjoint(_names(module))


def takes_fp8(module: nn.Module) -> bool:
    """Whether one that computes attention calls torch's function in its own code."""
    if isinstance(module, Attention):
        return True
    config, names = getattr(module, "config", None), _names(module)
    return SDPA in names or (TABLE in names and getattr(config, "_attn_implementation", None) == "sdpa")


def _names(module: nn.Module) -> set[str]:
    """The names that the code of a module's forward uses, and that of its methods that this names."""
    return {name for code in codes_of(module) for name in code.co_names}
