"""fp8engine/auto/controller.py: when tensors are looked at, when decisions follow, what must not move them."""

import copy
import types
from typing import Any

import pytest
import torch
from autos import CALM, INTERVAL, TROUBLE, batch, controller, decided, fused, lines, loss_of, plain, train
from blocks import WIDTH, Net
from support import converted, same, state_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.auto import host_copy
from fp8engine.auto.schedule import sampled_step
from fp8engine.errors import InvalidRecipe
from fp8engine.numerics.recipe import ROLES
from fp8engine.ops import ranks
from fp8engine.report.state import controllers_of


def watched(model: nn.Module, steps: int) -> list[int]:
    """The steps in which tensors were looked at."""
    found = []

    def note(module, *_):
        if state_of(model).samples is not None:
            found.append(controller(model).step)

    handle = model.register_forward_hook(note)
    train(model, steps)
    handle.remove()
    return found


def test_samples_once_in_each_interval_and_once_more_where_an_amax_has_moved():
    model = plain()
    regular = [sampled_step(number, INTERVAL) for number in range(4)]
    assert regular == [0, 7, 11, 14]
    # Trouble begins at step 5, which is seen when it has ended: step 6 is sampled early.
    assert watched(model, 16) == sorted({*regular, 6})
    assert 7 in decided(model)


def ranks_on(card: bool, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The model's layers as divided over several ranks, of which this one stands for all; the steps of collectives.

    card: copies to the host arrive later, at another time on each rank.
    """
    state_of(model).divided = "columns"
    agreed = []

    def agree(table: torch.Tensor, group: str) -> bool:
        agreed.append(controller(model).step)
        return group == "columns"

    monkeypatch.setattr(ranks, "several", lambda group: group == "columns")
    monkeypatch.setattr(ranks, "agree", agree)
    if card:
        pending = host_copy.PendingSample
        monkeypatch.setattr(host_copy, "PendingSample", lambda step, copy, _: pending(step, copy, several_ranks=True))
    return agreed


@pytest.mark.parametrize("card", [False, True])
def test_several_ranks_look_for_moves_at_the_same_steps(card: bool, monkeypatch: pytest.MonkeyPatch):
    """Trouble begins at step 5.  Ranks look when step 4 and step 8 begin, where the amaxes of step 7 have moved: step 8
    is sampled early, on cards step 9, as all of them wait for their copies when the step after the look begins."""
    model = plain(fe.auto(interval=32))
    agreed = ranks_on(card, model, monkeypatch)
    assert watched(model, 12) == [0, 9 if card else 8]
    sampled = [1, 10] if card else [1, 9]
    assert sorted({step for step in agreed if agreed.count(step) > 2}) == sampled
    assert set(agreed) - set(sampled) == {4, 8}, "no collective in another step"


def test_a_look_that_is_under_way_is_saved(monkeypatch: pytest.MonkeyPatch):
    model, resumed = (plain(fe.auto(interval=32)) for _ in range(2))
    ranks_on(True, model, monkeypatch)
    train(model, 9)
    assert controller(model).watched is not None
    resumed.load_state_dict(model.state_dict())
    fe.load_scaling_state_dict(resumed, fe.scaling_state_dict(model))
    ranks_on(True, resumed, monkeypatch)
    train(resumed, 10, start=9)
    assert [controller(resumed).step, state_of(resumed).samples is not None] == [9, True]


def test_what_is_seen_at_step_0_is_decided_before_step_1():
    model = plain()
    train(model, 1)
    assert decided(model) == []
    seen = []
    model.blocks[0].up.register_forward_pre_hook(lambda layer, _: seen.append(layer.numerics.recipe.grad_output.format))
    train(model, 2, start=1)
    assert seen == [fe.E4M3]
    assert decided(model) == [1]
    assert len([line for line in lines(model) if "grad_output E5M2/tensor -> E4M3/" in line]) == 6


@pytest.mark.parametrize("zeros", [False, True])
def test_layers_that_read_one_tensor_change_together(zeros: bool):
    model = plain()
    for steps, start, weight in ((1, 0, 0.0 if zeros else 1.0), (12, 1, 1.0)):
        for block in model.blocks:
            block.norm.weight.data.fill_(weight)
        train(model, steps, start=start)
    choices = controller(model).choices
    at = {name: choices[i] for i, (name, _) in enumerate(state_of(model).layers)}
    up, gate = (model.blocks[0].get_submodule(name).numerics.recipe.input for name in ("up", "gate"))
    assert at["blocks.0.up"] is at["blocks.0.gate"]
    assert at["blocks.0.up"] is not at["blocks.1.up"]
    assert at["blocks.0.down"] is not at["blocks.0.up"]
    assert up == gate
    assert up.format != fe.E4M3


@pytest.mark.parametrize(("freeze", "steps"), [(0, []), (1, [0]), (4, [0]), (7, [0, 6]), (9, [0, 6, 7])])
def test_nothing_changes_after_freeze_after(freeze: int, steps: list[int]):
    model = plain(fe.auto(interval=INTERVAL, freeze_after=freeze))
    assert watched(model, 20) == steps
    assert max(decided(model), default=0) <= freeze
    assert bool(decided(model)) == bool(freeze)


def test_trouble_that_comes_and_goes_is_remembered():
    model = plain()
    for _ in range(8):
        assert all(torch.tensor(train(model, CALM + 8, start=TROUBLE - 3)).isfinite())
    slots = [line.split()[2] for line in lines(model)]
    samples = max(map(len, controller(model).history.samples.values()))
    # Changes to a cheaper cast are paid from a budget of 4 that refills by one in 16 samples, and each is followed by
    # at most one to a safer one: the changes of a matmul, of which two read a slot, are at most twice the cheaper ones.
    assert max(slots.count(slot) for slot in slots) <= 2 * 2 * (4 + samples / 16) + 1


def test_recipes_of_one_model_share_a_clock():
    refused = Net()
    with pytest.raises(InvalidRecipe, match="interval 16, 8"):
        converted(refused, fe.auto(), overrides={"blocks.0.*": fe.auto(interval=8)})
    assert type(refused.blocks[0].up) is nn.Linear
    assert not refused._forward_pre_hooks
    model = converted(Net(), fe.auto(), overrides={"blocks.0.*": fe.auto(min_sqnr_db=31.6)})
    train(model, 3)
    share = {name: recipe.fp8_share for name, recipe in state_of(model).layers}
    # On these rows a normal gradient has 31.6 dB and more, or less: some matmuls of block 0 leave FP8, none of block 1.
    assert [share[f"blocks.1.{name}"] for name in ("up", "gate", "down")] == [1, 1, 1]
    assert sum(share[f"blocks.0.{name}"] for name in ("up", "gate", "down")) < 3


def test_half_a_model_copied_keeps_its_own_controller():
    model = plain()
    train(model, 3)
    part = copy.deepcopy(model.blocks[1])
    (found,) = controllers_of(part)
    assert any(part.up.numerics is numerics for numerics in found.layers)


def test_a_recipe_that_changes_between_a_forward_and_its_backward():
    changing, found = plain(), []
    for model in (copy.deepcopy(changing), changing):
        y = model(batch(2))
        for numerics in controller(model).layers if model is not changing else []:
            numerics.adopt(fe.rowwise())
        loss_of(y).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == 14  # two blocks of three weights, three biases, a norm's weight
    assert same(*found)


def test_a_model_whose_root_is_passed_by_is_seen_from_its_first_step():
    model = converted(nn.ModuleDict({"inner": Net()}), fe.auto(interval=INTERVAL))
    train(model, 4, model["inner"])
    assert {look.step for look in controller(model).history.samples["inner.blocks.0.up.input"]} == {0}


def test_a_layer_made_by_hand_leaves_fp8_and_comes_back():
    """It begins its steps itself.  An outlier channel that no weight weighs is too much for every cast of the forward;
    when it is gone, and the noise that was seen has faded by 3 dB a sample, FP8 comes back."""
    layer = fe.Linear(WIDTH, WIDTH, recipe=fe.auto(interval=1))
    with torch.no_grad():
        layer.weight[:, 0] = 0
    shares = []
    for step in range(20):
        x = batch(0).detach()
        x[:, 0] *= 1e12 if step < 3 else 1.0
        layer(x.requires_grad_()).sin().sum().backward()
        shares.append(layer.numerics.recipe.input.is_fp8)
    (found,) = controllers_of(layer)
    assert (found.step, found.log[0].step) == (19, 1)
    assert "Linear.input" in found.history.samples
    assert shares[1:9] == [False] * 8
    assert shares[-1]


def test_fused_layers_are_seen_and_change():
    model = fused()
    train(model, 16)
    changes = [line for line in lines(model) if "forward" in line and "< 2" in line]
    assert "linear.input" in {line.split(" ")[2] for line in changes}
    slots = {slot for each in controllers_of(model) for slot in each.history.samples}
    assert slots == {f"{name}.{role}" for name in ("linear", "up", "down") for role in ROLES}


def test_a_wrapped_on_step_loses_no_decision():
    model, fixed = plain(), state_of(plain("delayed"))
    assert (fixed.on_step, fixed.controller) == (None, None)
    state = state_of(model)
    found, wrapped = state.controller, state.on_step
    assert isinstance(wrapped, types.MethodType)
    state.on_step = lambda backward: wrapped(backward)
    train(model, 2)
    assert controllers_of(model) == [found]
    assert found.step == 1


def test_the_report_says_that_nothing_was_looked_at_until_a_step_was():
    model = plain()

    def reasons() -> list[str]:
        return [layer["reason"] for layer in fe.inspect(model).layers if layer["rows"]]

    # the second forward decides on what the first has shown
    for formats in ("formats are those it begins with", "formats are those that it has decided on without one"):
        with torch.no_grad():
            model(batch(0))
        assert all("auto has seen no training step" in reason for reason in reasons())
        assert any(formats in reason for reason in reasons())
    assert all(formats in reason for reason in reasons())
    train(model, 1)
    assert not any("auto has seen" in layer["reason"] for layer in fe.inspect(model).layers)


@pytest.mark.parametrize("evaluating", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("after", ["", "saved"])
def test_an_evaluation_between_two_steps_decides_nothing(evaluating, after: str):
    # Its inputs lie 1.3 times beyond the window, so that a sixth of what was cast since the last sample saturates.

    def made() -> Any:
        torch.manual_seed(0)
        return converted(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), recipe)

    def trained(evaluated: bool) -> tuple[nn.Module, list[torch.Tensor]]:
        model = made()
        for step in range(8):
            x = torch.rand(16, 32, generator=torch.Generator().manual_seed(step)) * 2 - 1
            x[0, 0] = 1.0
            if evaluated and step == 4:
                with evaluating():
                    model(torch.full((15, 32), 1.3))
                assert counted(model) > 0
            if after and step == 5:
                saved, weights, model = fe.scaling_state_dict(model), model.state_dict(), made()
                model.load_state_dict(weights)
                fe.load_scaling_state_dict(model, saved)
            model(x).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 1e-3 * p.grad
                    p.grad = None
        return model, [p.detach() for p in model.parameters()]

    def counted(model: nn.Module) -> int:
        return int(fe.scaling_state(model)["0.input"].saturated)

    recipe = fe.auto(interval=2, objective="speed")
    (plain_model, wanted), (model, found) = trained(False), trained(True)
    assert lines(model) == lines(plain_model)
    assert same(found, wanted)
    assert counted(model) > counted(plain_model)  # the report has them


def test_saturation_is_seen_where_a_checkpoint_runs_the_first_forward_without_gradients():
    found = []
    for again in (lambda model, x: model(x), lambda model, x: checkpoint(model, x, use_reentrant=True)):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        model = converted(layers, fe.auto(interval=4, objective="speed"))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(12):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * 1.3**step
            (again(model, x.requires_grad_()) / 1.3**step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(lines(model))
    assert any("saturated" in line for line in found[0])
    assert found[0] == found[1]
