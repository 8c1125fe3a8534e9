"""Converted models in torch's tools: torch.fx, TorchScript, which is refused by name, torch.export, FlopCounterMode.

torch.export: the graph computes what the model does, with gradients on too, and says that it has none.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from scenarios import INNER, WIDTH, Gated, stack
from support import EVERY_FP8_RECIPE, FP8_RECIPES, converted, same, tables
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

import fp8engine as fe
from fp8engine.errors import GradientError

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
    model = converted(tiny_models.llama(num_hidden_layers=1), "current", fuse=True)
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


MODELS = {
    "linear": lambda recipe: nn.Sequential(fe.Linear(32, 48, recipe=recipe), fe.Linear(48, 32, recipe=recipe)),
    "norm and linear": lambda recipe: fe.LayerNormLinear(32, 48, recipe=recipe),
    "norm and MLP": lambda recipe: fe.LayerNormMLP(32, 64, recipe=recipe),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_an_exported_graph_computes_what_the_model_does(recipe: str, kind: str):
    model, x = MODELS[kind](recipe), torch.randn(16, 32)
    exported = torch.export.export(model, (x,)).module()
    for given in (x, torch.randn(16, 32)):
        found = exported(given)
        with torch.no_grad():
            assert torch.equal(found, model(given))
            assert torch.equal(found, exported(given))
    with pytest.raises(GradientError, match=r"torch\.export holds the forward of FP8 layers alone; run it under"):
        found.sum().backward()


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "dtype"), [("current", torch.float32), ("rowwise", torch.bfloat16)])
@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
def test_a_whole_model_for_other_sizes(recipe: str, dtype: torch.dtype):
    model: Any = fe.convert(tiny_models.llama().to(dtype), recipe).eval()
    model.config.use_cache = False
    sizes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=32)}}
    given = {"input_ids": tiny_models.tokens(2)}
    with torch.no_grad():
        exported = torch.export.export(model, (), kwargs=given, dynamic_shapes=sizes).module()
        ids = torch.randint(3, 60, (3, 21))
        assert torch.equal(exported(input_ids=ids).logits, model(ids).logits)


def test_a_bias_alone_is_trained_where_nothing_in_fp8_lies_behind_it():
    """The gradient that an exported graph has is right: nothing is refused that nobody asked for."""
    layer, x = fe.Linear(32, 48, recipe="rowwise"), torch.randn(16, 32)
    layer.weight.requires_grad_(False)
    exported = torch.export.export(layer, (x,)).module()
    (db,) = torch.autograd.grad(exported(x).sum(), exported.get_parameter("bias"))
    assert torch.equal(db, torch.full((48,), 16.0))


ROWS = 24


def flops(model: Callable, x: torch.Tensor) -> int:
    """What torch's FlopCounterMode counts of a forward and a backward, to the input too."""
    with FlopCounterMode(display=False) as counter:
        model(x.requires_grad_()).square().mean().backward()
    return counter.get_total_flops()


def experts(recipe: str) -> Callable:
    layer = fe.GroupedLinear(3, WIDTH, INNER, recipe=recipe)
    return lambda x: layer(x, [5, 0, ROWS - 5])


COUNTED: dict[str, tuple[int, Callable]] = {  # matmuls of a forward
    "mlp": (2, lambda recipe: converted(stack(), recipe)),
    "gated": (3, lambda recipe: converted(nn.Sequential(nn.LayerNorm(WIDTH), Gated()), recipe)),
    "experts": (1, experts),
}


COUNTS = [(kind, recipe) for kind in COUNTED for recipe in EVERY_FP8_RECIPE]
COUNTS += [(kind, recipe) for kind in ("mlp", "gated") for recipe in ("auto", "bf16")]


@pytest.mark.parametrize(("kind", "recipe"), COUNTS)
def test_a_model_has_the_flops_of_its_matmuls(kind: str, recipe: str):
    matmuls, make = COUNTED[kind]
    wanted = 3 * matmuls * 2 * ROWS * WIDTH * INNER  # forward, dgrad, wgrad
    assert flops(make(recipe), torch.randn(ROWS, WIDTH)) == wanted


def test_attention_in_fp8_has_the_flops_of_torchs():
    layer = fe.Attention(128, fe.Heads(2, width=64, causal=True, softmax="fp8"), recipe="current")
    projections = 4 * 3 * 2 * 30 * 128 * 128
    product = 2 * 3 * 2 * 10 * 10 * 64  # of 3 x 2 heads; 2 in forward, and 5 in backward, one of which is made again
    assert flops(layer, torch.randn(3, 10, 128)) == projections + 7 * product
