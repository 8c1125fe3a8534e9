"""fp8engine compare under `auto`: a copy has seen a few steps before it is judged."""

import copy

import torch
from torch import nn

import fp8engine as fe
from fp8engine.report.compare import compare_recipes
from fp8engine.report.compare_text import BYTES, batches


def with_outliers(factor: float) -> nn.Module:
    """Embeddings of which one channel is larger than the others by a factor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    with torch.no_grad():
        model[0].weight[:, 3] *= factor  # pyright: ignore
        model[1].weight[:, 3] /= factor  # pyright: ignore - it counts no more than any other
    return model


def test_auto_decides_before_it_is_judged():
    """Under one E4M3 scale 63 of 64 channels vanish: 3e5 is 18 powers of two, all that E4M3 has (MAX 448, least 2^-9).
    Wider formats keep them: E5M2 rounds to 2 bits, 25 dB, 3 less where both operands and the weight's error add up."""
    model = with_outliers(3e5)
    text = batches(model, [list(b"an embedding of bytes, one channel of which outweighs all")], BYTES)
    found = {result.recipe: result for result in compare_recipes(model, text, ["current", "auto"]).results}
    first = {name: result.layers[0].own_sqnr_db or 0.0 for name, result in found.items()}
    assert first["current"] < 6
    assert first["auto"] > 20


def test_the_model_itself_is_left_as_it_was():
    model = with_outliers(1.0)
    model[3].weight.requires_grad_(False)  # pyright: ignore
    before = copy.deepcopy(model.state_dict())
    compare_recipes(model, batches(model, [list(b"some text")], BYTES), ["auto"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, True, True, False, True]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert fe.inspect(model).totals["converted"] == 0
