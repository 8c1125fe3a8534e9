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
from fp8engine.report.compare import Comparison, compare_recipes, run_training_steps
from fp8engine.report.compare.batches import BYTES, batches
from fp8engine.report.compare.result import RecipeResult
from fp8engine.report.compare.run import chosen
from fp8engine.report.compare.show import choices
from fp8engine.report.state import controllers_of
from fp8engine.scaling.choice import begin

TEXTS = [[5, 9, 33, 2, 7], [17, 2, 50]]


def with_outliers(factor: float) -> nn.Module:
    """Embeddings of which one channel is larger than the others by a factor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    with torch.no_grad():
        model[0].weight[:, 3] *= factor  # pyright: ignore
        model[1].weight[:, 3] /= factor  # pyright: ignore - it counts no more than any other
    return model


def test_fp32_against_itself_is_equal():
    """Asked for beside others, the model's own precision once ended the whole comparison with an error."""
    model = tiny_models.llama()
    own, current = compare_recipes(model, batches(model, TEXTS, BYTES), ["fp32", "current"]).results
    assert (own.change, own.top1, own.sqnr_db, own.fp8_flops_share) == ((0, 0), (1, 0), math.inf, 0)
    assert own.worst() is None
    assert {layer.sqnr_db for layer in own.layers} == {math.inf}
    assert {layer.reason for layer in own.layers if layer.name != "lm_head"} == {
        "recipe: fp32, which it computes in already"
    }
    assert 0 < current.sqnr_db < math.inf


def test_a_model_in_bf16_is_compared_with_its_fp32_copy():
    """Its bf16 row is the model itself, and an FP8 row the model converted in BF16: both against the FP32 copy."""
    model: Any = tiny_models.llama().to(torch.bfloat16).eval()
    (batch,) = made = batches(model, TEXTS, BYTES)
    inputs: Any = batch.inputs
    found = compare_recipes(model, made, ["bf16", "current"])
    assert found.dtype == "bfloat16"
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert batch.targets is not None
    asked = batch.targets != -100
    twins = {"bf16": model, "current": converted(copy.deepcopy(model), "current", fuse=False)}
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(**inputs).logits[asked].double()
        loss = F.cross_entropy(exact, batch.targets[asked]).item()
        # FP32 losses of about 4 nats: roundings of 2^-22
        assert found.loss == pytest.approx(loss, abs=1e-6)
        for result in found.results:
            low = twins[result.recipe](**inputs).logits[asked].double()
            assert result.change is not None
            change = F.cross_entropy(low, batch.targets[asked]).item() - loss
            assert result.change.value == pytest.approx(change, abs=1e-6)
            assert change != 0
            noise = (low - exact).square().sum() / exact.square().sum()
            assert result.sqnr_db == pytest.approx(-10 * math.log10(noise), abs=1e-6)
    own = {result.recipe: [block.own_sqnr_db or 0 for block in result.blocks] for result in found.results}
    assert min(own["bf16"]) > 45 > 35 > max(own["current"][:2])  # 2^-9 against 2^-4 of each value


def test_delayed_predicts_its_scales_from_the_text():
    """The first text's amax is 3e6 times the second's, and half of E4M3's smallest value is 448 * 2^10 = 4.6e5 times
    below its largest: under a scale that remembers the first text, all of the second becomes 0, and its output the
    bias.  Under a scale of its own it keeps 3 bits.  Without a history `delayed` gave what `current` gives."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight.uniform_(-1, 1)
        model[0].weight[ord("!")] *= 3e6
    text: Any = batches(model, [list(b"!!!"), list(b"plain words")], BYTES, size=1)
    current, delayed = compare_recipes(model, text, ["current", "delayed"]).results
    assert (current.least_cosine or 0) > 0.99
    with torch.no_grad():
        second = model(text[1].inputs[0]).double().mean(1)
    flat = F.cosine_similarity(second, model[1].bias.detach().double()[None]).item()
    assert delayed.least_cosine == pytest.approx(flat, abs=1e-6)
    assert 0 < (delayed.least_cosine or 0) < 0.9


def test_auto_decides_before_it_is_judged_and_what_it_chose_is_counted_by_matmuls():
    """Under one E4M3 scale 63 of 64 channels vanish: 3e5 is 18 powers of two, all that E4M3 has (MAX 448, least 2^-9).
    Wider formats keep them: E5M2 rounds to 2 bits, 25 dB, 3 less where both operands and the weight's error add up.
    Every layer is counted once in each matmul, as the layers' own recipes say it."""
    model = with_outliers(3e5)
    text = batches(model, [list(b"an embedding of bytes, one channel of which outweighs all")], BYTES)
    found = compare_recipes(model, text, ["current", "auto"])
    fixed, auto = found.results
    assert (fixed.layers[0].own_sqnr_db or 0.0) < 6
    assert (auto.layers[0].own_sqnr_db or 0.0) > 20
    twin = converted(model, "auto")
    run_training_steps(twin, text)
    recipes = [numerics.recipe for numerics in controllers_of(twin)[0].layers]
    assert fixed.chosen is None
    assert auto.chosen is not None
    assert auto.chosen["not_sampled"] == 0
    matmuls = auto.chosen["matmuls"]
    assert {matmul: sum(count.values()) for matmul, count in matmuls.items()} == {"forward": 2, "dgrad": 2, "wgrad": 2}
    assert matmuls["forward"].get("BF16", 0) == sum(not recipe.input.is_fp8 for recipe in recipes)
    per_tensor = sum(str(recipe.input).endswith("per tensor") for recipe in recipes)
    assert sum(count for cast, count in matmuls["forward"].items() if cast.endswith("/tensor")) == per_tensor
    (line,) = choices(found)
    assert line.startswith("auto chose, by layers: forward ")
    assert all(f"{cast} {count}" in line for counts in matmuls.values() for cast, count in counts.items())
    assert line.endswith(f"; {auto.fp8_flops_share:.0%} of linear FLOPs in FP8")


@pytest.mark.parametrize("fails", [False, True])
def test_frozen_parameters_are_sampled_and_stay_frozen_even_where_the_model_fails(fails: bool):
    """Without gradients a frozen weight would have no wgrad to decide on, and a frozen model no backward."""
    model: Any = converted(with_outliers(1.0), "auto")
    model[3].bias.requires_grad_(False)
    model[1].weight.requires_grad_(False)
    if fails:
        model[2].register_full_backward_hook(lambda *_: 1 / 0)
    text = batches(model, [list(b"frozen")], BYTES)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    if fails:
        with pytest.raises(ZeroDivisionError):
            run_training_steps(model, text)
    else:
        run_training_steps(model, text)
        assert chosen(controllers_of(model))["not_sampled"] == 0  # pyright: ignore
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    model.requires_grad_(False)
    if not fails:
        run_training_steps(model, text)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert all(parameter.grad is None for parameter in model.parameters())


def test_forwards_in_16_bits_and_layers_that_never_ran_are_counted_as_layers():
    """Three layers, of which the third has not run and the second multiplies its forward in 16 bits."""
    start = begin([0, 1], fe.auto())
    choice = replace(start, matmuls={key: casts for key, casts in start.matmuls.items() if key != (1, "forward")})
    controller: Any = SimpleNamespace(layers=[None] * 3, choices={0: choice, 1: choice})
    made = chosen([controller])
    backward = {"E5M2·E4M3/tensor": 2}  # of the gradient, and of the other operand
    matmuls = {"forward": {"E4M3/tensor": 1, "BF16": 1}, "dgrad": backward, "wgrad": backward}
    assert made == {"matmuls": matmuls, "not_sampled": 1}
    assert chosen([]) is None
    controller.choices = {}  # of a plan that is repeated
    assert chosen([controller]) is None
    result = RecipeResult("auto", None, None, None, None, None, 30.0, 0.5, True, [], [], made)
    (line,) = choices(Comparison("Model", "float32", None, 1, 2, [result]))
    assert line == (
        "auto chose, by layers: forward E4M3/tensor 1, BF16 1; dgrad E5M2·E4M3/tensor 2; wgrad E5M2·E4M3/tensor 2; "
        "not sampled 1; 50% of linear FLOPs in FP8"
    )


def test_rare_casts_are_summed_in_the_line():
    made = {"matmuls": {"forward": {f"cast{i}": 20 - i for i in range(10)}}, "not_sampled": 0}
    result = RecipeResult("auto", None, None, None, None, None, 30.0, 1.0, True, [], [], made)
    comparison = Comparison("Model", "float32", None, 1, 2, [result])
    (line,) = choices(comparison)
    assert "cast7 13, others 23; 100% of" in line  # 12 + 11 of the last two
    assert comparison.to_dict()["results"][0]["chosen"] == made
