"""Repeated blocks of a model, each of which is sharded, gathered and freed by itself."""

from __future__ import annotations

from torch import nn

from fp8engine.convert.describe import describe
from fp8engine.errors import ConversionError


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of `model`: those of a known Hugging Face family, and the children of its stacks of equal modules.

    A stack is an nn.ModuleList or nn.Sequential of two or more children of one class with parameters, in no other
    stack; experts inside a block are therefore part of it.  Beside a family's blocks, stacks of modules that hold
    linear layers count: the vision blocks of a language model that sees.

    >>> [type(block).__name__ for block in repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))]
    ['Linear', 'Linear']
    """
    try:
        named = dict(model.named_modules())
        found = [named[block.name] for block in describe(model).blocks]
    except ConversionError:  # no model of transformers
        found = []
    inside = {id(module) for block in found for module in block.modules()}
    beside = [block for block in _stacked(model) if not inside & {id(module) for module in block.modules()}]
    return found + [block for block in beside if not found or _holds_linear(block)]


def _holds_linear(block: nn.Module) -> bool:
    return any(isinstance(module, nn.Linear) for child in block.children() for module in child.modules())


def _stacked(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, nn.ModuleList | nn.Sequential):
        children = [child for child in model if any(True for _ in child.parameters())]
        if len(children) > 1 and len({type(child) for child in children}) == 1:
            return children
    return [block for child in model.children() for block in _stacked(child)]
