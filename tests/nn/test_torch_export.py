"""torch.export of FP8 layers: the graph computes what the model does, with gradients on too, and says it has none."""

from typing import Any

import pytest
import tiny_models
import torch
from support import FP8_RECIPES
from torch import nn

import fp8engine as fe
from fp8engine.errors import GradientError

MODELS = {
    "linear": lambda recipe: nn.Sequential(
        fe.Linear(32, 48, recipe=recipe), nn.ReLU(), fe.Linear(48, 32, recipe=recipe)
    ),
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
