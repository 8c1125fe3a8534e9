"""What a copy runs before fp8engine compare judges it (steps of `auto`, a history of `delayed`), what auto chose."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from support import converted
from torch import nn
from torch.nn import functional as F

import fp8engine as fe
from fp8engine.report.compare import Comparison, RecipeResult, compare_recipes, run_training_steps
from fp8engine.report.compare.batches import BYTES, batches
from fp8engine.report.compare.chosen import chosen
from fp8engine.report.compare.show import choices
from fp8engine.report.state import controllers_of
from fp8engine.scaling.choice import begin


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


def test_what_auto_chose_is_counted_by_casts():
    """Every slot once, as the layers' own recipes say it."""
    model = with_outliers(3e5)
    text = batches(model, [list(b"an embedding of bytes, one channel of which outweighs all")], BYTES)
    found = compare_recipes(model, text, ["current", "auto"])
    twin = converted(model, "auto")
    run_training_steps(twin, text)
    recipes = [numerics.recipe for numerics in controllers_of(twin)[0].layers]
    fixed, auto = found.results
    assert fixed.chosen is None
    assert auto.chosen is not None
    assert sum(auto.chosen["slots"].values()) == 2 * 3
    assert auto.chosen["forward_in_16_bits"] == sum(not recipe.input.is_fp8 for recipe in recipes)
    assert auto.chosen["not_sampled"] == 0
    forward = [count for cast, count in auto.chosen["slots"].items() if "forward BF16" in cast]
    assert sum(forward) == 2 * auto.chosen["forward_in_16_bits"]  # of both operands
    (line,) = choices(found)
    assert line.startswith("auto chose, by slots: ")
    assert all(f"{cast} {count}" in line for cast, count in auto.chosen["slots"].items())
    assert line.endswith(f"; {auto.fp8_flops_share:.0%} of linear FLOPs in FP8")


def test_forwards_in_16_bits_and_layers_that_never_ran_are_counted_as_layers():
    """Three layers, of which the third has not run and the second multiplies its forward in 16 bits."""
    start = begin([0, 1], fe.auto())
    choice = replace(start, matmuls={key: casts for key, casts in start.matmuls.items() if key != (1, "forward")})
    controller: Any = SimpleNamespace(layers=[None] * 3, choices={0: choice, 1: choice})
    made = chosen([controller])
    slots = {"E4M3/tensor": 2, "E4M3/tensor (forward BF16)": 2, "E5M2/tensor": 2}
    assert made == {"slots": slots, "forward_in_16_bits": 1, "not_sampled": 1}
    assert chosen([]) is None
    controller.choices = {}  # of a plan that is repeated
    assert chosen([controller]) is None
    result = RecipeResult("auto", None, None, None, None, 30.0, 0.5, True, [], made)
    (line,) = choices(Comparison("Model", "float32", None, 1, 2, [result]))
    assert line == (
        "auto chose, by slots: E4M3/tensor 2, E5M2/tensor 2, E4M3/tensor (forward BF16) 2; "
        "forward in 16 bits: 1 layer; not sampled: 1 layer; 50% of linear FLOPs in FP8"
    )


def test_rare_casts_are_summed_in_the_line():
    made = {"slots": {f"cast{i}": 20 - i for i in range(10)}, "forward_in_16_bits": 0, "not_sampled": 0}
    result = RecipeResult("auto", None, None, None, None, 30.0, 1.0, True, [], made)
    comparison = Comparison("Model", "float32", None, 1, 2, [result])
    (line,) = choices(comparison)
    assert "cast7 13, other casts 23; 100% of" in line  # 12 + 11 of the last two
    assert comparison.to_dict()["results"][0]["chosen"] == made
