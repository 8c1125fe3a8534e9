"""Layers that torch moves, loads or makes in its own ways: swapped parameters, and tables made in inference mode."""

import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support import FP8_RECIPES, converted, numerics_of, same
from torch import nn

import fp8engine as fe

STORING = replace(fe.current(), stored=fe.Cast(fe.E4M3, scaling="delayed"))


def everything(name: str, module: nn.Module) -> bool:
    return False


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def train(model: nn.Module, steps: int = 4) -> list[torch.Tensor]:
    """Gradients of every step; inputs always the same, and growing."""
    generator, found = torch.Generator().manual_seed(1), []
    for step in range(steps):
        y = model(torch.randn(8, 32, generator=generator) * 1.5**step)
        found += torch.autograd.grad(y.square().mean(), list(model.parameters()))
    return found


@pytest.fixture
def swapping() -> Iterator[None]:
    """torch exchanges a parameter's contents where it would write `.data`."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_swapped_parameters_move_and_load(recipe: str, assign: bool, swapping):
    """swap_tensors refuses a parameter with a weak reference, by which a copy of it knows what it was made of."""
    model, twin = (converted(two_layers(), recipe, skip=everything) for _ in range(2))
    train(model, 1)
    with torch.no_grad():
        model(torch.randn(8, 32))  # copies are kept from here on
    model.double().float()
    model.load_state_dict(twin.state_dict(), assign=assign)
    x = torch.randn(8, 32)
    with torch.no_grad():
        fe.weights_changed(twin)
        if recipe != "delayed":  # whose scales come from the step that twin has not made
            assert torch.equal(model(x), twin(x))


def test_a_weight_that_moves_leaves_no_copy_behind():
    layer = fe.Linear(32, 32, recipe="current")
    with torch.no_grad():
        layer(torch.randn(8, 32))
    copies = weakref.ref(numerics_of(layer).weight.kept)
    assert len(numerics_of(layer).weight.kept) == 1
    layer.bfloat16()
    assert copies() is None, "the codes of the weight in FP32 (on a card: on the card) wait for a next forward"


@pytest.mark.parametrize(
    "recipe", [*FP8_RECIPES, "auto", STORING], ids=lambda each: each if isinstance(each, str) else "stored"
)
def test_a_model_converted_in_inference_mode_trains(recipe):
    """As torch's do: the tables are no inference tensors, which nothing may write outside of that mode."""
    model, usual = two_layers(), converted(two_layers(), recipe, skip=everything)
    with torch.inference_mode():
        converted(model, recipe, skip=everything)
    assert same(train(model), train(usual))


def test_a_model_that_moves_to_its_device_in_inference_mode_trains():
    """Loaded after conversion on the meta device, and first run in inference mode, where tables follow the weights."""
    with torch.device("meta"):
        model = converted(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), STORING, skip=everything)
    model.load_state_dict(two_layers().state_dict(), assign=True)
    usual = converted(two_layers(), STORING, skip=everything)
    for each in (model, usual):
        with torch.inference_mode():
            each(torch.randn(8, 32, generator=torch.Generator().manual_seed(2)))
    assert same(train(model), train(usual))
