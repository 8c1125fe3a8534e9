"""What a copy runs before fp8engine compare judges it: steps under `auto`, a history under `delayed`, else nothing."""

import copy
import math

import pytest
import tiny_models
import torch
from torch import nn
from torch.nn import functional as F

import fp8engine as fe
from fp8engine.report.compare import compare_recipes
from fp8engine.report.compare.batches import BYTES, batches


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


@pytest.mark.parametrize(("recipe", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_the_models_own_precision_is_compared_too(recipe: str, dtype: torch.dtype):
    """It is the baseline; asked for beside others, it once ended the whole comparison with an error."""
    model = tiny_models.llama().to(dtype)
    found = compare_recipes(model, batches(model, [[5, 9, 33, 2, 7], [17, 2, 50]], BYTES), [recipe, "current"])
    own, current = found.results
    assert (own.loss, own.top1, own.sqnr_db, own.fp8_flops_share) == (found.loss, 1.0, math.inf, 0.0)
    assert own.worst() is None
    assert {layer.sqnr_db for layer in own.layers} == {math.inf}
    assert {layer.reason for layer in own.layers if layer.name != "lm_head"} == {
        f"recipe: {recipe}, which it computes in already"
    }
    assert 0 < current.sqnr_db < math.inf


def test_delayed_predicts_its_scales_from_the_text():
    """The first text's amax is 3e6 times the second's, and half of E4M3's smallest value is 448 * 2^10 = 4.6e5 times
    below its largest: under a scale that remembers the first text, all of the second becomes 0, and its output the
    bias.  Under a scale of its own it keeps 3 bits.  Without a history `delayed` gave what `current` gives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight.uniform_(-1, 1)  # pyright: ignore
        model[0].weight[ord("!")] *= 3e6  # pyright: ignore
    text = batches(model, [list(b"!!!"), list(b"plain words")], BYTES, size=1)
    current, delayed = compare_recipes(model, text, ["current", "delayed"]).results
    assert (current.least_cosine or 0) > 0.99
    with torch.no_grad():
        second = model(text[1].inputs[0]).double().mean(1)  # pyright: ignore
    bias = model[1].bias.detach().double()  # pyright: ignore
    assert delayed.least_cosine == pytest.approx(F.cosine_similarity(second, bias[None]).item(), abs=1e-6)
    assert 0 < (delayed.least_cosine or 0) < 0.9
