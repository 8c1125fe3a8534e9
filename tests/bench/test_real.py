"""benchmarks/real.py, trained.py and kv_cache.py without their models.

Paired statistics, the choice under a share of FLOPs and the predicted cost; what is paired with what in a fine-tuning,
and which text a step has; and that a text read on with a cache has the losses of the text read at once.
"""

import math
import runpy
import statistics
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn
from torch.nn import functional as F

import fp8engine as fe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TERMS, K, H, V = 24, 12, 32, 10
READ = 6  # tokens


def script(name: str) -> Any:
    """The functions of a script, which imports others that lie beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return SimpleNamespace(**runpy.run_path(str(BENCHMARKS / f"{name}.py")))


@pytest.fixture
def real() -> Any:
    return script("real")


@pytest.fixture
def tiny() -> Any:
    """A classifier in place of a real model; its likelihood is that of its labels."""
    models = script("real_models")
    torch.manual_seed(0)
    layers = {"up": nn.Linear(K, H), "act": nn.GELU(), "mix": nn.Linear(H, H), "gelu": nn.GELU()}
    model = nn.Sequential(OrderedDict(layers, lm_head=nn.Linear(H, V)))
    windows = [(torch.randn(TERMS, K), torch.randint(0, V, (TERMS,))) for _ in range(6)]

    def loss(model: nn.Module, window: tuple) -> torch.Tensor:
        return F.cross_entropy(model(window[0]), window[1])

    def outcome(model: nn.Module, window: tuple) -> torch.Tensor:
        assert not torch.is_grad_enabled(), "an evaluation takes no gradients"
        return loss(model, window)

    return models.Real(model, windows, models.LOSS, outcome, torch.sub, loss, lambda *given: (loss(*given), TERMS))


def test_the_error_of_a_mean_is_that_of_the_differences(real):
    """Windows differ by far more than the models: unpaired, the standard error would be 20 % and not 0.05 %."""
    base, found = [1.0, 2.0, 3.0, 2.0], [1.01, 2.02, 3.02, 2.03]
    percent, error = real.paired([a - b for a, b in zip(found, base, strict=True)], statistics.fmean(base))
    assert percent == pytest.approx(1.0)
    # Differences of 0.5, 1, 1 and 1.5 % of the mean: standard deviation sqrt(0.5 / 3) %, over sqrt(4).
    assert error == pytest.approx(math.sqrt(0.5 / 3) / 2)
    assert math.isnan(real.paired([0.1], 1.0).error)


def test_layers_are_chosen_in_order_until_the_share_is_full(real):
    flops = {"a": 5.0, "b": 2.0, "c": 1.0, "d": 2.0}
    assert real.chosen(["c", "a", "b", "d"], flops, 0.3) == ["c", "b"], "a does not fit and is passed over, d neither"
    assert real.chosen(["a", "b"], flops, 1.0) == ["a", "b"]
    assert real.chosen([], flops, 0.3) == []


def test_exact_scales_and_the_budget_by_name(real, monkeypatch: pytest.MonkeyPatch):
    assert real.recipe_of("blockwise_exact") == fe.blockwise(power_of_2=False)
    assert real.recipe_of("rowwise") == fe.rowwise()
    assert real.recipe_of("auto") == fe.auto(interval=1)
    monkeypatch.setattr(fe, "auto", lambda *, interval=16: None)
    with pytest.raises(SystemExit, match="takes no budget"):
        real.recipe_of("auto_budget")


def test_a_layers_cost_is_half_its_squared_gradient_times_its_squared_error(real, tiny):
    found = real.costs(tiny, tiny.windows[0])
    assert found.keys() == {"up", "mix"}, "the head stays in 16 bits"
    (x, labels), layer = tiny.windows[0], tiny.model[2]
    h = tiny.model[:2](x).detach()
    y = (h @ layer.weight.t() + layer.bias).detach().requires_grad_()
    F.cross_entropy(tiny.model[3:](y), labels).backward()
    cast = lambda t: fe.quantize(t.detach(), fe.Cast(fe.E4M3)).dequantize().double()  # noqa: E731 - two uses
    error = cast(h) @ cast(layer.weight).t() - h.double() @ layer.weight.detach().double().t()
    assert y.grad is not None
    assert found["mix"].nats == pytest.approx(0.5 * TERMS * float((error * y.grad).square().sum()), rel=1e-3)
    assert found["mix"].flops == 2 * TERMS * H * H
    assert 25 < found["mix"].sqnr_db < 35


def test_rows_of_a_comparison(real, tiny):
    options = SimpleNamespace(skip_windows=1, windows=4, steps=0)
    plain, named = real.recipes(tiny, ["rowwise"], options, lambda text: None)
    assert (plain["percent"], plain["error"], plain["fp8_flops_share"]) == (0, 0, 0)
    assert (named["percent"] != 0, len(named["apart"])) == (True, 4)
    flops = K * H + H * H
    assert named["fp8_flops_share"] == pytest.approx(flops / (flops + H * V)), "the head counts, in 16 bits"


def test_what_ranking_keeps_in_16_bits_recovers_something(real, tiny):
    rows, costs = real.rank(tiny, SimpleNamespace(skip_windows=1, windows=4, steps=0), lambda text: None)
    nothing, *ways = rows
    assert (nothing["layers"], nothing["share"]) == ([], 0)
    assert nothing["predicted_nats"] == pytest.approx(sum(cost.nats for cost in costs.values()))
    assert {tuple(way["layers"]) for way in ways} == {("up",)}, "the other layer has 73 % of the FLOPs"
    assert all(way["percent"] + way["recovered"]["percent"] == pytest.approx(nothing["percent"]) for way in ways)


def trained_row(recipe: str, seed: int, *losses: float) -> dict:
    return {"recipe": recipe, "seed": seed, "step": 100, "losses": list(losses), "fp8_flops_share": 0.75}


def test_a_recipe_is_paired_with_the_training_of_its_own_seed():
    trained = script("trained")
    losses = [("plain", 0, 1.0, 3.0), ("plain", 1, 4.0), ("plain", 2, 9.0), ("current", 1, 4.4), ("current", 0, 2.02)]
    rows = [trained_row(*each) for each in [*losses, ("rowwise", 3, 5.0)]]  # no plain one has seed 3
    plain, current = trained.summary(rows, 100)
    assert (plain["recipe"], plain["seeds"], plain["percent"], plain["error"]) == ("plain", 3, 0.0, 0.0)
    assert (current["recipe"], current["seeds"]) == ("current", 2)
    assert current["percent"] == pytest.approx((1 + 10) / 2)
    assert current["error"] == pytest.approx(4.5)  # the standard deviation of 1 and 10 is 9 / sqrt(2)
    assert trained.summary(rows, 200) == []


def test_every_window_is_trained_on_once_in_each_epoch_in_the_order_of_the_seed():
    trained = script("trained")
    text = trained.Text(torch.arange(5)[:, None], torch.empty(0, 1))
    first, again, other = (torch.cat(list(text.batches(seed, 2, 5))).flatten() for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    for epoch in first.split(5):
        assert epoch.sort().values.tolist() == list(range(5))


def test_files_of_other_trainings_are_not_joined(tmp_path):
    trained = script("trained")
    for name, steps in (("a", 100), ("b", 200)):
        (tmp_path / name).write_text(f'{{"machine": "{name}", "steps": {steps}}}\n{{"recipe": "plain"}}\n')
    assert trained.read([tmp_path / "a", tmp_path / "a"])[1] == [{"recipe": "plain"}] * 2
    with pytest.raises(SystemExit, match="not alike"):
        trained.read([tmp_path / "a", tmp_path / "b"])


def test_a_text_is_read_on_token_by_token():
    kv = script("kv_cache")
    model: Any = tiny_models.llama().eval()
    ids = torch.randint(3, 60, (2, 24 + READ + 1))
    with torch.inference_mode():
        found = kv.text_batch(model, kv.caches(model.config, "fp32", [8]), ids, READ)
        logits = model(ids).logits[:, -READ - 1 : -1]
    wanted = F.cross_entropy(logits.transpose(1, 2), ids[:, -READ:], reduction="none")
    assert set(found) == {"bf16", "fp32", "per tensor", "block 8"}
    # The prompt's keys and values come from the reference, rounded to BF16.  Of another token the loss is another.
    assert (found["fp32"]["loss"] - wanted).abs().max() < 0.01 < wanted.std() / 5
    assert found["bf16"]["agreed"].all(), "the reference agrees with itself"
    assert not torch.equal(found["block 8"]["loss"], found["bf16"]["loss"])
    rows = [kv.text_row(name, "fp32", [part], [found["bf16"]]) for name, part in found.items()]
    by_name = {row["cache"]: row for row in rows}
    assert by_name["bf16"]["more_loss"] == by_name["bf16"]["more_loss_error"] == 0.0
    apart, block = (found["block 8"]["loss"] - found["bf16"]["loss"]).mean(1), by_name["block 8"]
    assert block["more_loss"] == pytest.approx(apart.mean().item(), abs=1e-7)
    assert block["more_loss_error"] == pytest.approx((apart[0] - apart[1]).abs().item() / 2, abs=1e-7)
    assert by_name["fp32"]["perplexity"] == pytest.approx(found["fp32"]["loss"].mean().exp().item(), rel=1e-5)
