"""fe.scaling_state(model) as what saves optimizers sees it: an object with state_dict and load_state_dict."""

import copy
import io

import pytest
import torch
from support import Net, converted, same, tables, train

import fp8engine as fe


def trained() -> torch.nn.Module:
    torch.manual_seed(0)
    model = converted(Net(), "delayed")
    train(model, steps=3)
    return model


def test_it_saves_and_restores_what_the_functions_do():
    model = trained()
    view = fe.scaling_state(model)
    file = io.BytesIO()
    torch.save(view.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    want = fe.scaling_state_dict(model)
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
