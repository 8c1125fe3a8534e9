"""Repeated blocks of a model, each of which is described, sharded, gathered and freed by itself."""

from __future__ import annotations

from torch import nn

from fp8engine.convert.kinds import is_conv1d


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The children of a model's stacks of equal modules, those that hold linear layers where any does.

    A stack is an nn.ModuleList or nn.Sequential whose children with parameters are of one class, in no other stack;
    experts inside a block are therefore part of it.  An only child counts in an nn.ModuleList if it holds linear
    layers: a model of one block has one.

    >>> [type(block).__name__ for block in repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))]
    ['Linear', 'Linear']
    """
    found = _stacked(model)
    return [block for block in found if _holds_linear(block)] or found


def _holds_linear(block: nn.Module) -> bool:
    return any(
        isinstance(module, nn.Linear) or is_conv1d(module) for child in block.children() for module in child.modules()
    )


def _stacked(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, nn.ModuleList | nn.Sequential):
        children = [child for child in model if child is not None and any(True for _ in child.parameters())]
        alone = len(children) == 1 and isinstance(model, nn.ModuleList) and _holds_linear(children[0])
        if len({type(child) for child in children}) == 1 and (len(children) > 1 or alone):
            return children
    return [block for child in model.children() for block in _stacked(child)]
