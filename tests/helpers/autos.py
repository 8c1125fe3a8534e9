"""Small models under fe.auto, in trainings whose inputs get into trouble at a step that the tests know."""

from pathlib import Path
from typing import Any

import torch
from blocks import WIDTH, Net
from support import converted
from torch import nn

import fp8engine as fe
from fp8engine.auto import Controller
from fp8engine.numerics.recipe import Recipe
from fp8engine.report.state import controllers_of

INTERVAL = 4
TROUBLE = 5  # from this step on two channels of the input are 3,000,000 times the others
CALM = 14  # from this step on they are back to normal
OUTLIERS = slice(5, 7)


def plain(recipe: str | Recipe | None = None, reentrant: bool | None = None, seed: int = 0) -> Any:
    """blocks.Net under fe.auto with a short interval, or a recipe.

    Its layers hardly weigh the channels that get into trouble (`train` keeps it so): the outliers are harmful.
    """
    torch.manual_seed(seed)
    model: Any = without_beta(Net(reentrant))
    with torch.no_grad():
        for block in model.blocks:
            for layer in (block.up, block.gate):
                layer.weight[:, OUTLIERS] *= 1e-6
    return converted(model, fe.auto(interval=INTERVAL) if recipe is None else recipe)


def without_beta(model: nn.Module) -> nn.Module:
    """Norms' biases stay 0: added to small channels they would make them ordinary."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.bias.requires_grad_(False)
    return model


def fused(recipe: str | Recipe | None = None) -> nn.Module:
    """A norm and linear layer and a norm and MLP made by hand, each its own scaling state."""
    torch.manual_seed(0)
    recipe = fe.auto(interval=INTERVAL) if recipe is None else recipe
    first = fe.LayerNormLinear(WIDTH, WIDTH, recipe=recipe)
    with torch.no_grad():
        first.linear.weight[:, OUTLIERS] *= 1e-6
    return without_beta(nn.Sequential(first, fe.LayerNormMLP(WIDTH, 2 * WIDTH, recipe=recipe)))


class Stored(nn.Module):
    """A result that a layer alone reads, so that `auto` stores it in FP8; between: what lies between the two."""

    def __init__(self, between: nn.Module | None = None):
        super().__init__()
        self.up, self.down, self.last = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between = between or nn.Identity()

    def forward(self, x):
        return self.last(torch.relu(self.down(self.between(self.up(x)))))


def grow(model: nn.Module, steps: int, columns: int = WIDTH, factor: float = 1.4) -> None:
    """Steps in which one element of the input grows from 4: by 1.4 its amax/rms rises to 60 in 12 steps, of 64."""
    for step in range(steps):
        x = torch.randn(64, columns)
        x[0, 0] = 4.0 * factor**step
        model.zero_grad()
        model(x).square().mean().backward()


def controller(model: nn.Module) -> Controller:
    """The one that decides for a model."""
    (found,) = controllers_of(model)
    return found


def batch(step: int, rows: int = 96) -> torch.Tensor:
    """The input of a step: the same at every call."""
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 + step))
    if TROUBLE <= step < CALM:
        x[:, 5] *= 3e6
        x[:, 6] = -x[:, 5]  # so that the norm's mean stays 0
    return x.requires_grad_()


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """Bounded, whatever y is: trouble is for the formats, not for the weights."""
    return y.sin().mean()


def train(
    model: nn.Module, steps: int, call: Any = None, start: int = 0, between: Any = None, every: int = 1
) -> list[float]:
    """Losses of forwards `start` to `steps`; between(step) is called before each, SGD steps after `every` so many."""
    losses = []
    for step in range(start, steps):
        if between is not None:
            between(step)
        loss = loss_of((model if call is None else call)(batch(step)))
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None and step % every == every - 1:
                    if p.dim() == 2 and p.shape[1] == WIDTH:  # it reads the channels that get into trouble
                        p.grad[:, OUTLIERS] = 0
                    p.sub_(p.grad, alpha=0.02)
                    p.grad = None
        losses.append(loss.item())
    return losses


def lines(model: nn.Module) -> list[str]:
    """Every decision, as a person reads it."""
    return [line for found in controllers_of(model) for change in found.log for line in change.lines()]


def decided(model: nn.Module) -> list[int]:
    """The steps at which anything was decided."""
    return sorted({change.step for found in controllers_of(model) for change in found.log})


def plan_of(model: nn.Module, folder: Path) -> Recipe:
    """A recipe that repeats the model's decisions, by a file in the folder."""
    fe.inspect(model).save_plan(folder / "plan.json")
    return fe.auto(plan=folder / "plan.json")
