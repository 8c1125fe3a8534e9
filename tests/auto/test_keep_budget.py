"""fe.keep_budget: the measured cost of all forward casts stays within the budget, whatever was predicted."""

import copy
import functools
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from autos import controller, fused, lines, plan_of
from blocks import WIDTH, Net
from support import converted, same, tables
from torch import nn
from torch.utils.data import DataLoader

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.auto.budget import Spent
from fp8engine.auto.measured import LEAST, NEAR, TRIES, Cost, search
from fp8engine.errors import BudgetWarning, StateError
from fp8engine.report.state import controllers_of
from fp8engine.scaling.reads import COST


class Taught(nn.Module):
    """Returns as its loss how far it is from targets round what it computes in FP32: any error raises it."""

    def __init__(self):
        super().__init__()
        self.net, self.drop = Net(), nn.Dropout(0.1)

    def forward(self, x, target):
        return {"loss": (self.drop(self.net(x)) - target).square().mean()}


def taught() -> Taught:
    torch.manual_seed(0)
    return Taught()


@torch.no_grad()
def text(seed: int, rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    y = taught().net(x)
    return x, y + 0.3 * y.std() * torch.randn(y.shape, generator=generator)


def calibrated(budget: float | None, factor: float = 1.0, **options: Any) -> Any:
    """A model under a budget whose costs are known; factor: by which its predictions are wrong."""
    model = converted(taught(), fe.auto(budget=budget, interval=1, **options), example_inputs=text(0))
    found = controller(model)
    for i, seen in found.reads.items():
        table = seen.table.copy()
        table[..., COST] *= factor
        found.reads[i] = replace(seen, table=table)
    return model


def in_16_bits(model: nn.Module) -> Any:
    plain = copy.deepcopy(model).eval()
    for layer in controller(plain).layers:
        layer.adopt(fe.high_precision())
    return plain


def plain_loss(model: nn.Module, batches: list) -> float:
    plain = in_16_bits(model)
    return statistics.fmean(float(plain(*batch)["loss"].detach()) for batch in batches)


def costs(model: nn.Module, batches: list) -> list[float]:
    """What the forward casts cost on each batch, by another road: a copy whose layers are all in BF16."""
    plain, model = in_16_bits(model), copy.deepcopy(model).eval()
    with torch.no_grad():
        return [float(model(*batch)["loss"].double() - plain(*batch)["loss"].double()) for batch in batches]


def forwards(model: nn.Module) -> list[str]:
    return [str(layer.recipe.forward) for layer in controller(model).layers]


SHARE = 1e-3  # of the loss: less than what all casts cost here
BATCHES = [text(seed) for seed in range(1, 17)]
OTHERS = [text(seed) for seed in range(100, 132)]


@functools.cache
def cost_of_all(other: bool = True) -> tuple[float, float]:
    """(mean cost of all casts without a budget, loss without any cast), on other text than the budget is kept on."""
    free, batches = calibrated(None), OTHERS if other else BATCHES
    return statistics.fmean(costs(free, batches)), plain_loss(free, batches)


def budget(share: float, other: bool = True) -> float:
    """The budget that pays for that share of what all casts cost."""
    whole, loss = cost_of_all(other)
    return share * whole / loss


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_the_cost_on_other_text_is_within_the_budget_however_wrong_predictions_are(factor: float, share: float):
    whole, _ = cost_of_all()
    assert whole > 0
    model = calibrated(budget(share), factor)
    spent = fe.keep_budget(model, BATCHES)
    assert spent.kept
    assert (spent.batches, spent.tokens) == (len(BATCHES) // 2, 64 * len(BATCHES) // 2)
    found = costs(model, OTHERS)
    error = statistics.stdev(found) / math.sqrt(len(found))
    # What was measured on 8 batches has an error of its own: the two are compared within three of both together.
    assert abs(statistics.fmean(found) - spent.cost) <= 3 * math.hypot(error, spent.error)
    assert statistics.fmean(found) <= share * whole + 3 * error
    # A tenth is not much more than the standard error on 8 batches; of half, something is spent on FP8.
    if share == 0.5:
        assert any("E4M3" in each for each in forwards(model))
        assert spent.bound > 0.1 * share * whole


@pytest.mark.parametrize("times", [4.0, 1e6])
def test_what_decides_does_not_check(times: float):
    # Every second batch costs more than those that decide: half of the layers' cost would have fitted.
    model = calibrated(budget(0.5, other=False))

    def dearer(model: nn.Module, batch: int) -> torch.Tensor:
        """Its value in 16 bits is that of every batch; what the casts add counts more in those that check."""
        found, plain = (net(*BATCHES[batch])["loss"] for net in (model, in_bits))
        return plain + (times if batch % 2 else 1.0) * (found - plain)

    in_bits = in_16_bits(model)
    spent = fe.keep_budget(model, range(len(BATCHES)), dearer)
    assert spent.kept
    if times > 1e3:
        assert not any("E4M3" in each for each in forwards(model))
        assert spent.cost == 0
    else:
        # Of forwards in 16 bits of a layer whose backward is in FP8, results are rounded to BF16: 3e-6 of this loss.
        wanted = times * statistics.fmean(costs(model, BATCHES[1::2]))
        assert spent.cost == pytest.approx(wanted, abs=times * 1e-5)


def test_any_batches_and_a_loss_as_a_float():
    of_loader = (DataLoader(BATCHES, batch_size=None), lambda model, batch: model(*batch)["loss"].item())  # pyright: ignore[reportArgumentType]
    given: list[tuple] = [(BATCHES,), (iter(BATCHES),), of_loader]
    every = [fe.keep_budget(calibrated(0.01), *each) for each in given]
    assert every[1:] == every[:1] * 2


def test_layers_of_several_scaling_states_share_one_budget():
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - targets[id(x)]).square().mean()

    model = fused(fe.auto(budget=1e-9, interval=1))
    batches = [text(seed)[0] for seed in range(8)]
    with torch.no_grad():
        targets = {id(x): fused("fp32")(x) + torch.randn(64, WIDTH) for x in batches}
    for x in batches[:3]:
        now = loss(model, x)
        fe.scaling_state(model).see_loss(now)
        now.backward()
        model.zero_grad()
    assert len(controllers_of(model)) > 1
    for found in controllers_of(model):
        found.recipe = replace(found.recipe, budget=0.5)
    spent = fe.keep_budget(model, batches, loss)
    assert spent.kept
    assert spent.predicted == pytest.approx(1e-3 * fe.inspect(model).totals["cost_millinats"])
    rates = [found.spent.rate for found in controllers_of(model) if found.spent]
    assert sum(rates) == pytest.approx(spent.rate)


def _on_rank(rank: int, ranks: int) -> tuple[list[str], Spent]:
    """A rank whose batches are its own."""
    model = calibrated(1e-2)
    found = controller(model)
    found.recipe = replace(found.recipe, budget=SHARE)
    spent = fe.keep_budget(model, [text(100 * rank + seed) for seed in range(8)])
    return forwards(model), spent


@pytest.mark.slow
def test_ranks_decide_alike_on_the_first_ones_losses():
    one, other = run(_on_rank, 2)
    assert one == other


def test_budgets_that_pay_for_everything_and_for_nothing():
    model = calibrated(1.0, factor=1e4)  # by its predictions alone it would take something
    spent = fe.keep_budget(model, BATCHES)
    assert forwards(model) == forwards(calibrated(None))
    assert spent.kept
    assert str(spent) in str(fe.inspect(model))
    model = calibrated(1e-9)
    spent = fe.keep_budget(model, BATCHES)
    assert not any("E4M3" in each for each in forwards(model))
    assert (spent.cost, spent.kept) == (0.0, True)
    assert controller(model).layers[0].recipe.grad_output.is_fp8  # a loss says nothing of gradients' casts


def test_each_change_is_logged_with_what_was_measured_and_a_plan_repeats_it(tmp_path):
    model = calibrated(1e-2, factor=1e-6)  # predictions alone would take nothing
    assert not [line for line in lines(model) if "measured" in line]
    before = forwards(model)
    found = controller(model)
    found.recipe = replace(found.recipe, budget=budget(0.2))
    fe.keep_budget(model, BATCHES)
    assert forwards(model) != before
    assert [line for line in lines(model) if "measured: the casts cost" in line]
    repeats: Any = converted(taught(), plan_of(model, tmp_path))
    losses = [float(net.eval()(*text(200))["loss"].detach()) for net in (model, repeats)]
    assert losses[0] == losses[1]
    assert forwards(repeats) == forwards(model)


def test_everything_but_the_recipes_stays_as_it_was():
    model = calibrated(1.0, objective="speed")  # predicted scales, whose histories an evaluation must not enter
    for seed in range(3):
        model(*text(seed))["loss"].backward()
        model.zero_grad()
    model.train()

    def held() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *tables(model), *(value.clone() for value in model.state_dict().values())]

    found, before = controller(model), held()
    step, on_step = found.step, found.state.on_step
    fe.keep_budget(model, BATCHES)
    assert same(held(), before)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert (found.step, found.state.on_step) == (step, on_step)


def test_an_error_in_the_loss_leaves_the_recipes_as_they_were():
    model = calibrated(1e-4)
    before = [layer.recipe for layer in controller(model).layers]
    calls = itertools.count(1)

    def fails(model, batch):
        if next(calls) > len(BATCHES) + 2:  # the first losses under FP8
            raise RuntimeError("no memory")
        return model(*batch)["loss"]

    with pytest.raises(RuntimeError, match="no memory"):
        fe.keep_budget(model, BATCHES, fails)
    assert [layer.recipe for layer in controller(model).layers] == before
    assert controller(model).spent is None


def test_training_goes_on_with_what_was_measured_and_so_does_a_resumed_run():
    model, fresh = calibrated(budget(0.2), factor=1e-6), calibrated(budget(0.2))
    fe.keep_budget(model, BATCHES)
    found: Any = controller(model)
    rate = found.spent.rate
    assert rate < budget(0.2) * 1e-5  # of the predicted nats, a millionth of the true ones
    fe.load_scaling_state_dict(fresh, fe.scaling_state_dict(model))
    assert controller(fresh).spent == found.spent
    assert forwards(fresh) == forwards(model)
    found.loss = 2.0
    assert found.allowed == pytest.approx(2.0 * rate)
    found.spent = None
    assert found.allowed == pytest.approx(2.0 * budget(0.2))


REFUSED: dict[str, tuple[Callable[[], Any], tuple, str]] = {
    "too few batches": (lambda: calibrated(0.01), (BATCHES[: LEAST - 1],), f"{LEAST - 1} batches; want at least"),
    "no loss": (lambda: nn.Sequential(calibrated(0.01).net), ([(x,) for x, _ in BATCHES],), "no loss of one number"),
    "logits": (
        lambda: calibrated(0.01),
        (BATCHES, lambda model, batch: model.net(batch[0])),
        r"a loss of shape \[64, .*; want one number",
    ),
    "None": (lambda: calibrated(0.01), (BATCHES, lambda model, batch: None), "a loss of type NoneType"),
    "one batch": (lambda: calibrated(0.01), ({"x": 1},), "batches=dict; want a list of batches"),
    "a number": (lambda: calibrated(0.01), (8,), "batches=int; want a list of batches, or a DataLoader"),
    "NaN": (lambda: calibrated(0.01), (BATCHES, lambda model, batch: model(*batch)["loss"] * math.nan), "to be finite"),
    "below 0": (lambda: calibrated(0.01), (BATCHES, lambda model, batch: -model(*batch)["loss"]), "of a loss above 0"),
    "no budget": (lambda: calibrated(None), (BATCHES,), "no layer has a budget"),
    "nothing predicted": (lambda: converted(Taught(), fe.auto(budget=0.01)), (BATCHES,), "no predicted cost is known"),
    "no auto": (lambda: converted(Taught(), "current"), (BATCHES,), "no layer is under `auto`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_measured_is_refused(case: str):
    make, given, why = REFUSED[case]
    model = make()
    with pytest.raises(StateError, match=why):
        fe.keep_budget(model, *given)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("nats", [1e-6, 1e-2, 1.0])
def test_search_finds_the_largest_sum_that_fits(power: float, nats: float):
    # Of measured costs that grow as a power of the predicted sum, with a factor that nobody knows.
    tried: list[float] = []

    def bound(allowed: float) -> float:
        tried.append(allowed)
        return 3.0 * allowed**power

    found = search(bound, 1.0, nats)
    assert len(tried) <= TRIES
    assert found == 0 or 3.0 * found**power <= nats
    right = (nats / 3.0) ** (1 / power)
    if right > 8.0 ** (3 - TRIES):  # each try lowers the sum to an eighth at most
        assert found >= min(right, 1.0) / (NEAR * 8.0)


def test_the_bound_is_students():
    # T90 of the tables (Abramowitz and Stegun, table 26.10)
    for batches, t90 in {2: 3.078, 3: 1.886, 4: 1.638, 8: 1.415, 16: 1.341, 10**6: 1.282}.items():
        assert Cost(1.0, 2.0, batches).bound == pytest.approx(1.0 + 2.0 * t90, rel=0.04)


def test_a_budget_that_cannot_be_kept_is_warned_of():
    model = calibrated(budget(1e-3))
    reads = controller(model).reads
    unknown = reads[0].table.copy()
    unknown[..., COST] = float("nan")
    reads[0] = replace(reads[0], table=unknown)
    with pytest.warns(BudgetWarning, match="is not kept.*costs are not known"):
        spent = fe.keep_budget(model, BATCHES)
    assert not spent.kept
    assert "is not kept" in str(spent)
