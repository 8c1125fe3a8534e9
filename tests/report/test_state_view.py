"""fe.scaling_state(model) as what saves optimizers sees it: an object with state_dict and load_state_dict."""

import copy
import io
import json
import math

import pytest
import torch
from chains import Chain, chain, storing
from support import Net, converted, same, state_of, tables, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe


def trained() -> torch.nn.Module:
    torch.manual_seed(0)
    model = converted(Net(), "delayed")
    train(model, steps=3)
    return model


def test_it_saves_and_restores_what_the_functions_do():
    model = trained()
    view, want, file = fe.scaling_state(model), fe.scaling_state_dict(model), io.BytesIO()
    torch.save(view.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["version"] == want["version"]
    assert list(saved["slots"]) == list(want["slots"]) == list(view)
    for name, slot in want["slots"].items():
        assert all(torch.equal(saved["slots"][name][key], value) for key, value in slot.items())
    before = tables(model)
    train(model, steps=2)
    assert not same(tables(model), before)
    view.load_state_dict(saved)
    assert same(tables(model), before)


def test_another_models_is_refused_and_nothing_is_loaded():
    model = trained()
    before, saved = tables(model), fe.scaling_state(model).state_dict()
    name = next(iter(saved["slots"]))
    wrong = copy.deepcopy(saved)
    wrong["slots"]["other.input"] = wrong["slots"].pop(name)
    train(model)
    after = tables(model)
    with pytest.raises(fe.errors.StateError, match=f"1 slots missing \\({name}\\), 1 unknown \\(other.input\\)"):
        fe.scaling_state(model).load_state_dict(wrong)
    assert same(tables(model), after)
    assert not same(after, before)


class TwoStates(nn.Module):
    """A layer that `fe.convert` makes, and one made by hand, whose forward alone is checkpointed."""

    def __init__(self):
        super().__init__()
        self.one, self.own = nn.Linear(16, 16), fe.Linear(16, 16, recipe="delayed")

    def forward(self, x):
        x = self.one(x)
        return checkpoint(self.own, x, use_reentrant=True) if torch.is_grad_enabled() else self.own(x)


def test_each_state_of_a_model_goes_on_where_it_was():
    """What a backward did to the steps of one is not said of the other: an evaluation begins a step of neither."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return converted(TwoStates(), "delayed")

    model, resumed = made(), made()
    model(torch.randn(4, 16, requires_grad=True)).sum().backward()
    resumed.load_state_dict(model.state_dict())
    fe.load_scaling_state_dict(resumed, fe.scaling_state_dict(model))
    for each in (model, resumed):
        with torch.no_grad():
            each(torch.full((4, 16), 9.0))
    mine, others = fe.scaling_state(resumed), fe.scaling_state(model)
    for name in others:
        assert torch.equal(mine[name].history, others[name].history), name
        assert torch.equal(mine[name].scale, others[name].scale), name


def test_one_flag_for_all_states_is_read():
    """As a state that was saved before there was one of each."""
    model, resumed = trained(), trained()
    saved = fe.scaling_state_dict(model)
    assert saved["backward_seen"] == [True]
    fe.load_scaling_state_dict(resumed, {**saved, "backward_seen": True})
    assert fe.scaling_state_dict(resumed)["backward_seen"] == [True]


@pytest.mark.parametrize(("flags", "wanted"), [([False, True], [True]), ([False, False, False], [False])])
def test_flags_of_layers_that_were_put_together_otherwise_are_all_states(flags: list[bool], wanted: list[bool]):
    """As of two models that were saved as parts of one: a backward that one has seen, all have."""
    model = trained()
    fe.load_scaling_state_dict(model, {**fe.scaling_state_dict(model), "backward_seen": flags})
    assert fe.scaling_state_dict(model)["backward_seen"] == wanted


@pytest.mark.parametrize("more", [-3, 5])
def test_under_auto_a_history_of_another_length_is_cut_or_filled_with_zeros(more: int):
    """As of a run that had decided on recipes with other histories; a fixed recipe refuses it."""
    model = converted(Net(), fe.auto(objective="speed"))
    saved, depth = fe.scaling_state_dict(model), len(state_of(model).history_HS)
    for slot in saved["slots"].values():
        slot["history"] = torch.arange(1.0, depth + more + 1)
    state_of(model).history_HS.fill_(7.0)  # of the run so far
    fe.load_scaling_state_dict(model, saved)
    wanted = [float(i) if i <= depth + more else 0.0 for i in range(1, depth + 1)]
    columns = state_of(model).history_HS.T.tolist()
    assert [column for i, column in enumerate(columns) if i % 4 < 3] == [wanted] * len(saved["slots"])
    with pytest.raises(fe.errors.StateError, match="of an older fp8engine: without it `auto` decides anew"):
        fe.load_scaling_state_dict(model, saved | {"version": 2})
    fixed = converted(Net(), "delayed")
    with pytest.raises(fe.errors.StateError, match="was it saved under another recipe or history length"):
        fe.load_scaling_state_dict(fixed, {key: value for key, value in saved.items() if key != "auto"})


def test_a_result_that_was_not_stored_then_finds_its_scale_anew_where_the_model_has_trained_since():
    saved = fe.scaling_state_dict(converted(Chain(), "delayed"))
    used, fresh = (chain("delayed", storing(fe.delayed()), warm=warm) for warm in (3, 0))
    fresh.load_state_dict(used.state_dict())
    found = []
    for model in (used, fresh):
        fe.load_scaling_state_dict(model, saved)
        drawn = torch.Generator().manual_seed(1)
        results = [model(torch.randn(8, 40, generator=drawn) * 2.0**-step) for step in range(3)]
        found.append([*results, *tables(model)])
    assert same(*found)


def test_a_run_resumed_behind_a_step_of_nan_decides_as_the_uninterrupted_one():
    """Nothing of that step was finite, so that no amax was recorded; its backward ends a step all the same."""

    def made() -> nn.Module:
        layers = nn.Linear(24, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 8)
        return converted(nn.Sequential(*layers), fe.auto(interval=2))

    def run(resumes: bool) -> tuple[nn.Module, list]:
        torch.manual_seed(0)
        model, scaler = made(), torch.amp.GradScaler("cpu", init_scale=2.0**14)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(6):
            for batch in (2 * step, 2 * step + 1):  # in the second copies of weights serve, which record no amax
                drawn = torch.Generator().manual_seed(100 + batch)
                x, wanted = torch.randn(12, 24, generator=drawn), torch.randn(12, 8, generator=drawn)
                with torch.autocast("cpu", torch.float16):
                    y = model(x * math.inf if step == 3 else x)
                scaler.scale((y.float() - wanted).square().mean() / 2).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 3:
                saved, weights = fe.scaling_state_dict(model), model.state_dict()
                assert max(slot["live"][0] for slot in saved["slots"].values()) == -1.0
                if resumes:
                    model, moments = made(), optimizer.state_dict()
                    model.load_state_dict(weights)
                    fe.load_scaling_state_dict(model, saved)
                    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
                    optimizer.load_state_dict(moments)
        return model, fe.inspect(model).decisions

    (whole, decided), (resumed, again) = run(False), run(True)
    assert decided == again
    assert same(list(whole.parameters()), list(resumed.parameters()))


def test_a_slot_that_is_no_slot_is_named_and_nothing_is_loaded():
    model = trained()
    before, saved = tables(model), fe.scaling_state_dict(model)
    name = next(iter(saved["slots"]))
    for wrong in (None, {}, saved["slots"][name] | {"live": torch.zeros(2, 1)}, saved["slots"][name] | {"counts": 7}):
        with pytest.raises(fe.errors.StateError, match=f"^{name}: \\w+ should be torch"):
            fe.load_scaling_state_dict(model, {**saved, "slots": saved["slots"] | {name: wrong}})
    assert same(tables(model), before)


WRONG = {
    "decided": [None, "x", '{"step": 1}'],
    "slots": [None, torch.zeros(6), torch.zeros(2, 3)],
    "reads": [-5, torch.zeros(2)],
    "loss": [None, torch.tensor(1.0), torch.empty(0)],
    "parts": [None],
    "counts": ["x", torch.zeros(7, 2)],
    "remembered": [None, torch.zeros(2), torch.zeros(2, 6, 5)],
    "moves": [None, torch.zeros(5)],
    "watched": [0, torch.zeros(2)],
    "pending_counts": [None, torch.zeros(7, 2)],
    "pending_amax": [None, torch.zeros(2)],
    "pending_rules": [None, torch.zeros(3)],
}


def bits(found) -> list:
    """All that a scaling state holds."""
    if isinstance(found, dict | list):
        each = found.items() if isinstance(found, dict) else enumerate(found)
        return [part for key, value in each for part in [key, *bits(value)]]
    return [found.shape, found.numpy().tobytes()] if isinstance(found, torch.Tensor) else [found]


@pytest.mark.parametrize("key", WRONG)
@pytest.mark.parametrize("when", ["decided", "finished", "under way"])
def test_a_damaged_part_of_auto_is_refused_and_nothing_is_loaded(key: str, when: str):
    """Saved where nothing waits, where a sampled step has ended, and where its backward is still to come.

    Of two scaling states, the second is damaged: the first is not loaded either.
    """
    model = nn.Sequential(*(fe.Linear(16, 16, recipe=fe.auto(interval=2 if when == "decided" else 1)) for _ in "ab"))
    for _ in range(5 if when == "decided" else 3):
        model(torch.randn(8, 16)).square().mean().backward()
    if when == "under way":
        model(torch.randn(8, 16))
    saved = fe.scaling_state_dict(model)
    assert ("sampled" in json.loads(saved["auto"][1]["decided"])) == (when == "under way")
    other = copy.deepcopy(model)
    other(torch.randn(8, 16)).square().mean().backward()
    before = bits(fe.scaling_state_dict(other))
    assert before != bits(saved)
    for wrong in WRONG[key]:
        damaged = {**saved, "auto": [saved["auto"][0], {**saved["auto"][1], key: wrong}]}
        if not len(saved["auto"][1][key]) and isinstance(wrong, torch.Tensor) and not wrong.numel():
            continue  # as it was
        with pytest.raises(fe.errors.StateError, match="not the state of an auto recipe"):
            fe.load_scaling_state_dict(other, damaged)
        assert bits(fe.scaling_state_dict(other)) == before, wrong
    fe.load_scaling_state_dict(other, saved)
    assert bits(fe.scaling_state_dict(other)) == bits(saved)
