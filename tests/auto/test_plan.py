"""Decisions saved and repeated, and a controller's state in a checkpoint: the same losses, bit for bit, ever after."""

import copy
import functools
import json

import pytest
import torch
from autos import INTERVAL, TROUBLE, batch, controller, decided, fused, lines, plain, plan_of, train, without_beta
from blocks import WIDTH, Net
from support import converted
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.auto import Plan
from fp8engine.errors import ReportError, StateError
from fp8engine.report.state import controllers_of

STEPS = 16


class Attentive(nn.Module):
    """q, k and v of one tensor, and a projection: four layers, three of which share their input."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        weights = (self.q(h) @ self.k(h).mT / WIDTH).softmax(-1)
        return self.proj(weights @ self.v(h))


def attentive(recipe) -> nn.Module:
    torch.manual_seed(0)
    return converted(without_beta(Attentive()), recipe)


def attention_by_hand(recipe) -> nn.Module:
    torch.manual_seed(0)
    block = fe.Attention(WIDTH, 4, recipe=recipe)
    return without_beta(nn.Sequential(nn.LayerNorm(WIDTH), nn.Unflatten(0, (2, -1)), block, nn.Flatten(0, 1)))


MODELS = {
    "blocks": plain,
    "recomputed, reentrant": lambda recipe: plain(recipe, reentrant=True),
    "recomputed": lambda recipe: plain(recipe, reentrant=False),
    "shared q, k, v": attentive,
    "fused norm and MLP": lambda recipe: without_beta(fe.LayerNormMLP(WIDTH, 2 * WIDTH, recipe=recipe)),
    "two parts made by hand, of which each finds its own layers": fused,
    "attention": attention_by_hand,
}


@pytest.mark.parametrize("objective", ["accuracy", "speed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_repeats_every_loss(name: str, objective: str, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name](fe.auto(interval=INTERVAL, objective=objective))
    losses = train(model, STEPS)
    recipe = plan_of(model, tmp_path)  # which knows the objective
    torch.manual_seed(0)
    again = MODELS[name](recipe)
    assert train(again, STEPS) == losses
    assert lines(again) == lines(model)
    # Something was repeated, the first step's and more; what reads one tensor without trouble changes once.
    assert len(decided(model)) >= 1 + (name != "shared q, k, v")
    assert all(not found.history.samples for found in controllers_of(again))  # and nothing measured
    # Without it the losses are others, so that the above says something.
    torch.manual_seed(0)
    assert train(MODELS[name](fe.current()), 4) != losses[:4]


@pytest.mark.parametrize("how", ["recomputed", "recomputed, reentrant", "accumulated", "of another order"])
def test_a_plan_repeats_every_loss_however_the_model_is_trained(how: str, tmp_path):
    # Where gradients are accumulated, each forward is a step of the clock, and weights move after every third.
    model, every = plain(), 3 if how == "accumulated" else 1
    losses = train(model, STEPS, every=every)
    recipe, path = plan_of(model, tmp_path), tmp_path / "plan.json"
    plan = Plan.load(path)
    if how == "of another order":
        whole = json.loads(path.read_text())
        assert len({change["step"] for change in whole["changes"]}) > 1
        path.write_text(json.dumps(whole | {"changes": sorted(whole["changes"], key=lambda change: -change["step"])}))
    again = plain(recipe)
    with torch.no_grad():
        again(batch(TROUBLE))  # an evaluation of another input, which begins nothing that counts
    recomputed = lambda x: checkpoint(again, x, use_reentrant="reentrant" in how)  # noqa: E731
    assert train(again, STEPS, recomputed if "recomputed" in how else None, every=every) == losses
    assert lines(again) == lines(model) != []
    fe.inspect(again).save_plan(tmp_path / "again.json")
    assert Plan.load(tmp_path / "again.json") == plan


def test_going_back_to_an_earlier_state_forgets_later_decisions():
    model = plain()
    saved = fe.scaling_state_dict(model)
    older = {**saved, "auto": [{**saved["auto"][0], "moves": torch.empty(0)}]}  # without a table of moves
    for state in (saved, older):
        train(model, 12)
        assert model.blocks[0].up.numerics.recipe.input.format != fe.E4M3
        fe.load_scaling_state_dict(model, state)
        assert model.blocks[0].up.numerics.recipe == fe.auto(interval=INTERVAL)
        assert lines(model) == []
        assert controller(model).moves.ranges.shape == (3, 0, 3)
        assert controller(model).step == -1


@functools.cache
def trained(steps: int) -> tuple[list[float], nn.Module]:
    model = plain()
    return train(model, steps), model


SPOILT_STATES = {
    "no controller": lambda auto: auto.clear(),
    "no decisions": lambda auto: auto[0].pop("decided"),
    "half of JSON": lambda auto: auto[0].update(decided="{"),
    "moves of another shape": lambda auto: auto[0].update(moves=torch.zeros(5)),
    **{
        f"{word!r} for {right!r}": lambda auto, right=right, word=word: auto[0].update(
            decided=auto[0]["decided"].replace(right, word)
        )
        for right, word in (
            *(('"matmuls"', '"matches"'), ("blocks.0.up", "blocks.9.up")),
            *(('"trends"', '"friends"'), ('"taken"', '"token"')),
        )
    },
}


@pytest.mark.parametrize("spoil", SPOILT_STATES.values(), ids=SPOILT_STATES)
def test_a_spoilt_state_is_refused_with_nothing_loaded(spoil):
    losses, model = trained(12)
    saved = fe.scaling_state_dict(model)
    spoil(saved["auto"])
    fresh = plain()
    with pytest.raises(StateError, match="auto"):
        fe.load_scaling_state_dict(fresh, saved)
    assert (lines(fresh), controller(fresh).step) == ([], -1)
    assert train(fresh, 12) == losses


def test_a_plan_is_of_one_model(tmp_path):
    _, model = trained(2)
    recipe = plan_of(model, tmp_path)
    other = Net()
    other.blocks.append(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(StateError, match=r"of another model.*blocks\.2"):
        converted(other, recipe)
    assert type(other.blocks[0].up) is nn.Linear  # nothing was converted
    assert not other._forward_pre_hooks
    with pytest.raises(StateError, match="of another model"):
        fe.Linear(3, 4, recipe=recipe)


SPOILT_PLANS = {
    "half of it": lambda text: text[: len(text) // 2],
    "nothing": lambda text: "",
    "a list": lambda text: "[]",
    "an empty dict": lambda text: "{}",
    "a step too few": lambda text: text.replace('"step": 1,', ""),
    "no layers": lambda text: json.dumps({**json.loads(text), "layers": []}),
    "a key that no plan has": lambda text: json.dumps({**json.loads(text), "chagnes": []}),
    "a key that no change has": lambda text: text.replace('"step": 1,', '"step": 1, "stpe": 2,'),
    "an empty change": lambda text: json.dumps({**json.loads(text), "changes": [{}]}),
    **{
        f"{word!r} for {right!r}": lambda text, right=right, word=word: text.replace(right, word)
        for right, word in (
            *(('"version": 1', '"version": 2'), ('"E4M3"', '"E4M4"'), ('"PerTensor"', '"PerHaps"')),
            *(('"step": 1', '"step": "one"'), ('"step": 1', '"step": -1'), ('"why"', '"because"')),
            *(('"start"', '"begin"'), ('"layer": "blocks.0.up"', '"layer": "blocks.9.up"')),
        )
    },
}


@pytest.mark.parametrize("spoil", SPOILT_PLANS.values(), ids=SPOILT_PLANS)
def test_a_spoilt_plan_is_refused_and_named(spoil, tmp_path):
    _, model = trained(2)
    recipe, path = plan_of(model, tmp_path), tmp_path / "plan.json"
    text = path.read_text()
    assert spoil(text) != text
    path.write_text(spoil(text))
    net = Net()
    with pytest.raises(StateError, match=r"plan\.json"):
        converted(net, recipe)
    assert type(net.blocks[0].up) is nn.Linear


def test_a_plan_is_whole_or_not_there(tmp_path):
    for path in ("nowhere.json", "."):
        with pytest.raises(StateError, match="save_plan"):
            converted(Net(), fe.auto(plan=tmp_path / path))
    model = fused()
    train(model, 2)
    with pytest.raises(ReportError, match="nowhere"):
        fe.inspect(model).save_plan(tmp_path / "nowhere" / "plan.json")
    with pytest.raises(StateError, match='no layer is under "auto"'):
        fe.inspect(plain("current")).save_plan(tmp_path / "plan.json")
    twice = nn.Sequential(fe.LayerNormLinear(WIDTH, WIDTH, recipe="auto"), fe.LayerNormLinear(WIDTH, 8, recipe="auto"))
    with pytest.raises(StateError, match=r"several layers, made by hand or copied after .*, are called linear"):
        fe.inspect(twice).save_plan(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_a_part_that_was_copied_after_conversion_has_a_state_of_its_own_and_messages_say_so(tmp_path):
    model: nn.Sequential = converted(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "auto")
    model.append(copy.deepcopy(model[0]))
    with pytest.raises(StateError, match=r"copied after fe.convert, are called 0, .* or copy before fe.convert"):
        fe.inspect(model).save_plan(tmp_path / "plan.json")
    fresh = converted(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))), "auto")
    with pytest.raises(StateError, match=r"2 states of \"auto\" saved, 1 wanted: convert, and copy parts, as then"):
        fe.load_scaling_state_dict(fresh, fe.scaling_state_dict(model))
