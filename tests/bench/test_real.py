"""benchmarks/real.py without its models: paired statistics, the choice under a share of FLOPs, the predicted cost."""

import math
import runpy
import statistics
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8engine as fe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TERMS, K, H, V = 24, 12, 32, 10


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script's functions."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "real.py")))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A classifier in place of a real model; its likelihood is that of its labels."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    models = SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "real_models.py")))
    torch.manual_seed(0)
    layers = {
        "up": nn.Linear(K, H),
        "act": nn.GELU(),
        "mix": nn.Linear(H, H),
        "gelu": nn.GELU(),
        "lm_head": nn.Linear(H, V),
    }
    model = nn.Sequential(OrderedDict(layers))
    windows = [(torch.randn(TERMS, K), torch.randint(0, V, (TERMS,))) for _ in range(6)]

    def loss(model: nn.Module, window: tuple) -> torch.Tensor:
        return F.cross_entropy(model(window[0]), window[1])

    def outcome(model: nn.Module, window: tuple) -> torch.Tensor:
        assert not torch.is_grad_enabled(), "an evaluation takes no gradients"
        return loss(model, window)

    return models.Real(model, windows, models.LOSS, outcome, torch.sub, loss, lambda *given: (loss(*given), TERMS))


def test_the_error_of_a_mean_is_that_of_the_differences(real):
    """Windows differ by far more than the models: unpaired, the standard error would be 20 % and not 0.05 %."""
    base = [1.0, 2.0, 3.0, 2.0]
    found = [1.01, 2.02, 3.02, 2.03]
    apart = [a - b for a, b in zip(found, base, strict=True)]
    percent, error = real.paired(apart, statistics.fmean(base))
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
    assert named["percent"] != 0
    flops = K * H + H * H
    assert named["fp8_flops_share"] == pytest.approx(flops / (flops + H * V)), "the head counts, in 16 bits"
    assert len(named["apart"]) == 4


def test_what_ranking_keeps_in_16_bits_recovers_something(real, tiny):
    rows, costs = real.rank(tiny, SimpleNamespace(skip_windows=1, windows=4, steps=0), lambda text: None)
    nothing, *ways = rows
    assert (nothing["layers"], nothing["share"]) == ([], 0)
    assert nothing["predicted_nats"] == pytest.approx(sum(cost.nats for cost in costs.values()))
    assert {tuple(way["layers"]) for way in ways} == {("up",)}, "the other layer has 73 % of the FLOPs"
    assert all(way["percent"] + way["recovered"]["percent"] == pytest.approx(nothing["percent"]) for way in ways)
