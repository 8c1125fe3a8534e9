"""What a layer keeps between calls: quantised once while nothing has changed, and never used once something has."""

import pytest
import torch
from support import FP8_RECIPES, converted, state_of
from torch import nn
from transformers.pytorch_utils import Conv1D

import fp8engine as fe
from fp8engine.numerics.recipe import resolve


def doubled(weight: torch.Tensor) -> None:
    weight.mul_(2)


def by_optimizer(layer: nn.Linear) -> None:
    (layer.weight.sum() * 1).backward()  # a gradient of ones
    torch.optim.SGD([layer.weight], lr=0.5).step()


def by_load_state_dict(layer: nn.Linear) -> None:
    layer.load_state_dict({"weight": layer.weight * 2, "bias": layer.bias})


def by_data(layer: nn.Linear) -> None:
    layer.weight.data.mul_(2)


def by_data_of_another_tensor(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 2


def by_no_grad(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight[3, 5] += 100


def by_init(layer: nn.Linear) -> None:
    nn.init.xavier_uniform_(layer.weight)


def by_new_parameter(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def by_dtype(layer: nn.Linear) -> None:
    layer.bfloat16().float()  # rounds every weight, through .data


CHANGES = [
    by_optimizer,
    by_load_state_dict,
    by_data,
    by_data_of_another_tensor,
    by_no_grad,
    by_init,
    by_new_parameter,
    by_dtype,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("recipe", ["current", "rowwise", "blockwise"])
def test_a_changed_weight_is_seen_by_the_next_forward(recipe: str, change):
    layer, x = fe.Linear(48, 32, recipe=recipe), torch.randn(6, 48)
    before = layer(x)
    change(layer)
    fresh = fe.Linear(48, 32, recipe=recipe)
    fresh.load_state_dict(layer.state_dict())
    after = layer(x)
    assert torch.equal(after, fresh(x))
    assert not torch.equal(after, before)


def test_a_changed_conv1d_is_seen_though_its_weight_is_a_transposed_view():
    model = converted(nn.Sequential(Conv1D(32, 48)))
    x = torch.randn(6, 48)
    y = model(x)
    model[0].weight.data.mul_(2)
    assert torch.allclose(model(x), 2 * y, rtol=2.0**-7, atol=1e-6), "its bias is zero"


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_weight_is_cast_once_a_version(recipe: str, casts):
    layer = fe.Linear(48, 32, recipe=recipe)
    # Once for the forward, and once more for dgrad where that reads it along the other dimension or in another group.
    forward, dgrad = resolve(recipe).weight, resolve(recipe).operands("dgrad")[1]
    once = 1 if forward == dgrad else 2
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(3):
        for _ in range(4):  # microbatches
            layer(torch.randn(6, 48, requires_grad=True)).sum().backward()
        # The second microbatch of all casts once more: it shows that versions are read again; then they stay.  Under a
        # predicted scale each microbatch casts, because its scale is another.
        made = 4 * (step + 1) if resolve(recipe).delayed else step + 2
        assert casts.count(("quantize", (32, 48))) == once * made
        assert int(fe.scaling_state(layer)["weight"].calls) == made
        optimizer.step()


class Attention(nn.Module):
    """Three layers that read one tensor."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(48, 16) for _ in range(3))

    def forward(self, x):
        return self.q(x) + self.k(x) + self.v(x)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_an_input_of_three_layers_is_cast_once_and_seen_in_all_their_slots(recipe: str, casts):
    model, x = converted(Attention(), recipe), torch.randn(6, 48, requires_grad=True)
    model(x).sum().backward()
    once = 1 if resolve(recipe).input == resolve(recipe).operands("wgrad")[1] else 2
    assert casts.count(("quantize", (6, 48))) == (1 if recipe == "rowwise_gw_hp" else once)
    amax = x.detach().abs().max()
    for name in "qkv":
        slot = fe.scaling_state(model)[f"{name}.input"]
        assert (slot.amax, int(slot.calls), int(slot.elements)) == (amax, 1, x.numel())
    if recipe != "delayed":
        assert len({fe.scaling_state(model)[f"{name}.input"].scale.item() for name in "qkv"}) == 1


class Changed(nn.Module):
    """Two layers, the input changed in place between them."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(48, 16, bias=False), nn.Linear(48, 16, bias=False), how

    def forward(self, x):
        first = self.a(x)
        self.how(x)
        return first, self.b(x)


@pytest.mark.parametrize("how", [doubled, lambda x: x[0].fill_(7.0), lambda x: x.t().neg_()], ids=["x", "row", "view"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_an_input_changed_in_place_between_two_layers_is_cast_again(recipe: str, how):
    model, x = converted(Changed(how), recipe), torch.randn(6, 48)
    _, second = model(x)
    assert torch.equal(second, model.b(x.clone()))
    assert fe.scaling_state(model)["b.input"].amax == x.abs().max()


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_the_same_tensor_in_the_next_step_enters_that_steps_history(recipe: str):
    # A benchmark, or a full-batch training, passes one tensor again and again.
    model, x = converted(nn.Sequential(nn.Linear(48, 16)), recipe), torch.randn(6, 48)
    for step in range(1, 4):
        model(x).sum().backward()
        slot = fe.scaling_state(model)["0.input"]
        assert (int(slot.calls), slot.amax) == (step, x.abs().max())
        if recipe == "delayed":
            assert slot.history[: step - 1].tolist() == [slot.amax.item()] * (step - 1)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_an_evaluation_on_the_training_batch_does_not_hide_the_training_step(recipe: str):
    model, x = converted(nn.Sequential(nn.Linear(48, 16)), recipe), torch.randn(6, 48)
    with torch.no_grad():
        model(x)
    model(x).sum().backward()
    assert state_of(model).live_2S[0, 0] == x.abs().max(), "recorded, though the operand was there already"
