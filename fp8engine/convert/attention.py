"""Attention of a converted model in FP8: which modules compute one, and what computes it (convert's `attention`).

A module computes attention where its class's forward names torch's scaled_dot_product_attention, or transformers' table
of attention functions while its config says "sdpa"; and fe.Attention does.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType

from torch import nn

from fp8engine.errors import ConversionError, UnknownName
from fp8engine.nn.attention import Attention
from fp8engine.nn.class_swap import mix
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
    if not found:
        raise ConversionError(
            f"attention={asked!r}: no module of {type(model).__name__} calls torch's {SDPA} in its forward "
            '(nn.MultiheadAttention calls it elsewhere; transformers does with attn_implementation="sdpa"): leave '
            "`attention` out"
        )
    return found


def put(found: list[tuple[str, nn.Module]], asked: str, strict: bool) -> None:
    """Let these modules compute attention in that format."""
    for name, module in found:
        if not isinstance(module, Attention):
            mix(module, Float8Sdpa)
        object.__setattr__(module, "softmax", Softmax(asked, name or type(module).__name__, strict))


def computes_attention(module: nn.Module) -> bool:
    """Whether the module's own forward computes attention by torch's function.

    >>> computes_attention(nn.Linear(2, 2))
    False
    """
    if isinstance(module, Attention):
        return True
    names = set(_names(getattr(inspect.unwrap(type(module).forward), "__code__", None)))
    config = getattr(module, "config", None)
    return SDPA in names or (TABLE in names and getattr(config, "_attn_implementation", None) == "sdpa")


def _names(code: CodeType | None) -> Iterator[str]:
    """The names that a function's code uses, and those of functions inside of it."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _names(constant)
