"""Steps of delayed scaling where compiled graphs and eager code take turns: the tables are those of eager code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import converted, same, tables
from torch import nn
from torch._dynamo import compiled_autograd

import fp8engine as fe

RECIPE = fe.delayed(history=5)
WIDTH = 16


pytestmark = pytest.mark.usefixtures("fresh")


class Twice(nn.Module):
    """A layer made by hand that is called twice."""

    def __init__(self):
        super().__init__()
        self.layer = fe.Linear(WIDTH, WIDTH, recipe=RECIPE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).tanh())


BY_HAND = lambda: fe.Linear(WIDTH, WIDTH, recipe=RECIPE)  # noqa: E731
OF_OURS = lambda: fe.LayerNormMLP(WIDTH, WIDTH, "gelu", recipe=RECIPE)  # noqa: E731


def by_convert() -> nn.Module:
    return converted(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), RECIPE)


OUTSIDE_OF_GRAPHS: Any = torch.compiler.disable(lambda layer, x: layer(x))


class PartlyInEager(nn.Module):
    """A layer that a graph leaves to eager code, between two calls of another."""

    def __init__(self):
        super().__init__()
        self.layer, self.left = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(OUTSIDE_OF_GRAPHS(self.left, self.layer(x)))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)) * 2.0**step


def trained(make: Callable[[], nn.Module], schedule: str, forwards: int = 1) -> list[torch.Tensor]:
    """The results of some steps, and the tables then.  schedule: for each step "c", compiled, or "e", eager code.

    forwards: of each step, before its backward.
    """
    torch.manual_seed(0)
    model = make()
    compiled = torch.compile(model, backend="aot_eager")
    found = []
    for step, how in enumerate(schedule):
        results = [(compiled if how == "c" else model)(batch(step + i)) for i in range(forwards)]
        torch.stack(results).square().mean().backward()
        found += [result.detach() for result in results]
    return [*found, *tables(model)[:2]]


@pytest.mark.parametrize(
    ("make", "schedule", "forwards"),
    [
        pytest.param(Twice, "ccc", 1, id="a layer that is called twice"),
        pytest.param(BY_HAND, "ccc", 2, id="two forwards before one backward"),
        pytest.param(OF_OURS, "ccc", 2, id="two forwards of a module of ours"),
        pytest.param(BY_HAND, "cece", 1, id="a layer without a root, in turns"),
    ],
)
def test_a_graph_enters_what_eager_code_enters(make: Callable[[], nn.Module], schedule: str, forwards: int):
    assert same(trained(make, schedule, forwards), trained(make, "e" * len(schedule), forwards))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_layer_that_is_left_to_eager_code_begins_no_step_a_second_time():
    def run(schedule: str) -> list[torch.Tensor]:
        return trained(lambda: converted(PartlyInEager(), RECIPE), schedule)[:-1]  # a kept copy's amax is entered later

    assert same(run("cccc"), run("eeee"))


def test_a_layer_that_goes_back_one_step_enters_the_amaxes_that_were_saved():
    layer = BY_HAND()
    compiled = torch.compile(layer, backend="aot_eager")

    def step(number: int) -> list[torch.Tensor]:
        compiled(batch(number)).square().mean().backward()
        return tables(layer)

    step(0)
    step(1)
    saved = fe.scaling_state_dict(layer)
    wanted = step(2)
    fe.load_scaling_state_dict(layer, saved)
    assert same(step(2), wanted)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_copy_of_a_weight_is_not_read_under_a_scale_that_a_graph_has_replaced(frozen: bool):
    """An answer in eager code between compiled steps, whose weight has stood still since it had a larger amax."""

    def answers(compile: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = converted(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), fe.delayed(history=2))
        weight = model[0].weight.requires_grad_(not frozen)
        call, found = torch.compile(model, backend="aot_eager") if compile else model, []
        for step in range(4):
            with torch.no_grad():
                weight[0, 0] = 8.0 if step == 0 else 0.1
                found.append(model(batch(0)))
            call(batch(0)).sum().backward()
        for _ in range(3):
            call(batch(0)).sum().backward()
            with torch.no_grad():
                found.append(model(batch(0)))
        return found

    assert same(answers(compile=True), answers(compile=False))


# torch looks at .grad of what a graph has saved.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_autograd_takes_a_forward_in_eager_code_and_refuses_a_graph_by_name():
    model, plain = by_convert(), by_convert()
    plain.load_state_dict(model.state_dict())
    plain(batch(0)).sum().backward()
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        model(batch(0)).sum().backward()
        refused = pytest.raises(fe.errors.GradientError, match="0: compiled autograd takes no compiled FP8 layer")
        with refused:
            torch.compile(model, backend="aot_eager")(batch(0))
    grads = [[p.grad for p in each.parameters()] for each in (model, plain)]
    assert same(*grads)
