"""A run that is resumed without its scaling state is told so, once; no other run is."""

import copy
import gc
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import converted
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

import fp8engine as fe

WIDTH = 32
OPTIMIZERS: dict[str, Callable] = {
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,  # which has a state when it is made, of no step
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
}


def made(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    return converted(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)), recipe)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[str]:
    """The ResumeWarnings of these steps."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", fe.errors.ResumeWarning)
        for step in range(steps):
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in found if each.category is fe.errors.ResumeWarning]


@pytest.fixture(autouse=True)
def no_hook_is_left():
    """Nothing of ours stays in torch when the models are gone."""
    before = len(hooks)
    yield
    gc.collect()
    assert len(hooks) == before


def saved(recipe: str, optimizer: str = "adamw") -> dict[str, Any]:
    model = made(recipe)
    stepping = OPTIMIZERS[optimizer](model.parameters())
    assert train(model, stepping) == []
    kept = {"model": model.state_dict(), "optimizer": stepping.state_dict(), "scaling": fe.scaling_state_dict(model)}
    return copy.deepcopy(kept)


def resumed(model: nn.Module, kept: dict[str, Any], optimizer: str = "adamw", scaling: str = "") -> list[str]:
    """The warnings of a run that goes on from what was saved.  scaling: when its state is loaded, if at all."""
    stepping = OPTIMIZERS[optimizer](model.parameters())
    if scaling == "first":
        fe.load_scaling_state_dict(model, kept["scaling"])
    model.load_state_dict(kept["model"])
    stepping.load_state_dict(kept["optimizer"])
    if scaling == "last":
        fe.load_scaling_state_dict(model, kept["scaling"])
    told = train(model, stepping)
    model.load_state_dict(kept["model"])  # back to the checkpoint in the middle of a run
    assert train(model, stepping) == []
    return told


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("recipe", ["auto", "delayed"])
def test_a_resumed_run_is_told_once(recipe: str, optimizer: str):
    (told,) = resumed(made(recipe), saved(recipe, optimizer), optimizer)
    assert "Sequential: " in told
    assert " 2 layers begin anew" in told
    assert ("decisions of auto" in told) == (recipe == "auto")


def test_masters_are_known_for_the_models_parameters():
    def decorated() -> Any:
        model = made("delayed")
        return fe.amp.decorate(model, torch.optim.AdamW(model.parameters()), level="O2", dtype=torch.bfloat16)

    first, second = decorated(), decorated()
    assert train(*first) == []
    for old, new in zip(first, second, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    assert len(train(*second)) == 1


def test_resumed_by_torchs_distributed_checkpoint():
    """Which steps an empty optimizer once, so that it has a state to be written to."""
    kept, model = saved("delayed"), made("delayed")
    optimizer = torch.optim.AdamW(model.parameters())
    set_model_state_dict(model, kept["model"])
    names, state = [name for name, _ in model.named_parameters()], kept["optimizer"]
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    found = {"state": {names[i]: of for i, of in state["state"].items()}, "param_groups": groups}
    set_optimizer_state_dict(model, optimizer, found)
    assert len(train(model, optimizer)) == 1


def test_evaluated_or_calibrated_before_the_weights_were_loaded():
    kept, x, evaluated = saved("auto"), torch.randn(16, WIDTH), made("auto")
    with torch.no_grad():
        evaluated(x)
    for model in (evaluated, converted(fe.revert(made("auto")), "auto", example_inputs=(x,))):
        assert len(resumed(model, kept)) == 1


@pytest.mark.parametrize(
    ("recipe", "scaling"),
    [*itertools.product(["auto", "delayed"], ["first", "last"]), ("rowwise", "")],  # rowwise has none to load
)
def test_with_its_scaling_state_it_is_not(recipe: str, scaling: str):
    assert resumed(made(recipe), saved(recipe), scaling=scaling) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("recipe", ["auto", "delayed"])
def test_a_run_that_begins_is_not(recipe: str, optimizer: str):
    model, other = made(recipe), nn.Linear(WIDTH, WIDTH)
    model.load_state_dict(saved(recipe)["model"])
    for each in (other, model):
        assert train(each, OPTIMIZERS[optimizer](each.parameters())) == []
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    stepping = OPTIMIZERS[optimizer](plain.parameters())
    train(plain, stepping)
    assert train(converted(plain, recipe), stepping) == []


def test_nor_is_a_model_that_was_reverted():
    kept, model = saved("auto"), fe.revert(made("auto"))
    assert not model._load_state_dict_post_hooks
    assert resumed(model, kept) == []
