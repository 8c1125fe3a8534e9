"""Converted models in torch.fx, where their layers are leaves, and in TorchScript, which is refused by name."""

import copy
from typing import Any

import pytest
import torch
from support import FP8_RECIPES, converted, same, tables
from tiny_models import llama
from torch import fx, nn
from transformers.pytorch_utils import Conv1D

import fp8engine as fe

# torch calls all of torch.jit deprecated; a trace also warns of every shape that it compares.
DEPRECATED = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")


class Net(nn.Module):
    """A linear layer, GPT-2's, and torch functions between them."""

    def __init__(self):
        super().__init__()
        self.up, self.act = nn.Linear(32, 48), nn.GELU()
        self.down = nn.ModuleList([Conv1D(32, 48)])

    def forward(self, x):
        return x + self.down[0](self.act(self.up(x)) * 2)


def net(recipe: str = "current"):
    torch.manual_seed(0)
    return converted(Net(), recipe)


@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "auto"])
def test_layers_are_leaves_and_the_traced_model_trains_as_the_model_does(recipe: str):
    model = net(recipe)
    traced = fx.symbolic_trace(copy.deepcopy(model))
    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert calls == ["up", "act", "down.0"]
    assert not any(node.op == "get_attr" for node in traced.graph.nodes)
    for step in range(3):  # scales of "delayed" are predicted from the second on
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step)).mul(step + 1).requires_grad_()
        results = []
        for each in (model, traced):
            y = each(x)
            results.append([y.detach(), *torch.autograd.grad(y.square().mean(), [x, *each.parameters()])])
        assert same(*results)
    assert same(tables(traced), tables(model))


def test_a_model_converted_with_fuse_can_be_traced_too():
    model = converted(llama(num_hidden_layers=1), "current", fuse=True)
    mlp, x = nn.Sequential(model.model.layers[0].mlp), torch.randn(2, 3, 32)
    traced = fx.symbolic_trace(mlp)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"][-1] == "0.down_proj"
    assert torch.equal(traced(x), mlp(x))


def test_a_layer_by_itself_is_no_model_to_trace():
    with pytest.raises(fe.errors.ScriptError, match=r"Linear: .*symbolic_trace.*the module that holds it"):
        fx.symbolic_trace(fe.Linear(32, 32, recipe="current"))


@DEPRECATED
@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "auto"])
def test_torchscript_names_the_layer_and_leaves_the_model_as_it_was(recipe: str):
    model, x = net(recipe), torch.randn(4, 32)
    before = copy.deepcopy(model)
    with pytest.raises(fe.errors.ScriptError, match=r"^up: torch\.jit\.script.*torch\.export.*before fe\.convert"):
        torch.jit.script(model)
    assert torch.equal(model(x), before(x))
    with pytest.raises(fe.errors.ScriptError, match=r"^up: torch\.jit\.trace.*before fe\.convert"):
        torch.jit.trace(model, x)


@DEPRECATED
def test_a_layer_in_16_bits_can_be_traced_and_not_scripted():
    model, x = fe.Linear(32, 48, recipe="fp32"), torch.randn(4, 32)
    traced: Any = torch.jit.trace(model, x)
    assert torch.equal(traced(2 * x), model(2 * x))
    with pytest.raises(fe.errors.ScriptError, match=r"^up: torch\.jit\.script"):
        torch.jit.script(net("bf16"))
