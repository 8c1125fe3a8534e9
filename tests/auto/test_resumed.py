"""A resumed run is the uninterrupted one, bit for bit, whatever came before: a law over schedules, for every recipe."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import tiny_models
import torch
from autos import Stored, without_beta
from blocks import Net
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_programs import Run, differences
from support import FP8_RECIPES, converted
from torch import nn

import fp8engine as fe

WIDTH = 64
RECIPES: dict[str, Any] = {name: name for name in FP8_RECIPES}
RECIPES |= {"auto": fe.auto(interval=2), "auto, budget": fe.auto(interval=2, budget=0.01)}
RECIPES |= {"auto, speed": fe.auto(interval=3, objective="speed"), "auto, frozen": fe.auto(interval=2, freeze_after=3)}


def seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def numbers(step: int) -> torch.Tensor:
    """Troubled from the fourth input on, calm again from the eighth."""
    x = torch.randn(32, WIDTH, generator=seeded(step))
    if 4 <= step < 8:
        x[:, 5] *= 3e6
        x[:, 6] = -x[:, 5]
    return x


def jumps(step: int) -> torch.Tensor:
    """Some are 20 times as large: what is stored under a predicted scale saturates."""
    return torch.randn(32, WIDTH, generator=seeded(step)) * (20.0 if step in (3, 6) else 1.0)


KINDS: dict[str, tuple[Callable, Callable]] = {  # the model, and what it takes at a step
    "blocks": (lambda: without_beta(Net()), numbers),
    "recomputed": (lambda: without_beta(Net(reentrant=True)), numbers),
    "stored": (Stored, jumps),
    "experts": (tiny_models.mixtral, lambda step: torch.randint(0, 32, (2, 8), generator=seeded(step))),
}


class Kind(NamedTuple):
    """What a `Run` is made of."""

    name: str
    recipe: str

    def model(self) -> Any:
        make, inputs = KINDS[self.name]
        torch.manual_seed(1)
        x = inputs(1000)
        examples = {"stored": (x,), "experts": {"input_ids": x, "labels": x}}
        options = {"example_inputs": examples[self.name]} if self.name in examples else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return converted(make(), RECIPES[self.recipe], **options)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)

    def loss(self, model: Any, place: int) -> torch.Tensor:
        x = KINDS[self.name][1](place)
        if self.name == "experts":
            return tiny_models.loss_of(model, x)
        return model(x.requires_grad_()).sin().mean()

    def before_step(self, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            if p.grad is not None and p.dim() == 2 and p.shape[1] == WIDTH:
                p.grad[:, 5:7] = 0  # which trouble makes large


def ended(kind: Kind, schedule: list[str]) -> tuple[list[float], dict[str, Any]]:
    """Losses, and everything that a run has come to."""
    run, losses = Run(kind), []
    for what in schedule:
        if what == "save":
            run = Run.resumed(kind, run.save())
        else:
            losses += run.do(what)
    return losses, run.state()


def check(kind: Kind, schedule: list[str]) -> None:
    losses, resumed = ended(kind, schedule)
    wanted, straight = ended(kind, [what for what in schedule if what != "save"])
    assert repr(losses) == repr(wanted)  # NaN is equal to itself
    assert not differences(resumed, straight)


CALM = ["train"] * 6
WHAT = ["train", "train", "microbatch", "evaluate", "infer", "forward", "siamese", "save", "save"]


# A reentrant checkpoint says it of a batch.
@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=16)
@given(kind=st.sampled_from([*KINDS]), schedule=st.lists(st.sampled_from(WHAT), min_size=3, max_size=12))
def test_resumed_is_uninterrupted(recipe: str, kind: str, schedule: list[str]):
    check(Kind(kind, recipe), [*schedule, "save", "train", "microbatch", "train", "evaluate", "train"])


CASES = {
    "experts, saved at step 2": ("experts", ["train", "train", "save", *CALM]),
    "experts, saved at step 3": ("experts", ["train", "train", "train", "save", *CALM]),
    "into an evaluation": ("blocks", ["train", "save", "evaluate", "infer", *CALM]),
    "an evaluation before the first step": ("blocks", ["evaluate", "save", *CALM]),
    "evaluations before the first step": ("stored", ["evaluate", "evaluate", "save", "evaluate", *CALM]),
    "forwards before the first step": ("blocks", ["forward", "save", *CALM]),
    "a forward between steps": ("stored", ["train", "train", "forward", "save", "forward", *CALM]),
    "microbatches": ("blocks", [*["microbatch", "train", "save"] * 2, "microbatch", "train", *CALM]),
}


@pytest.mark.parametrize("recipe", ["auto", "delayed"])
@pytest.mark.parametrize("case", CASES)
def test_resumed_is_uninterrupted_in_cases_that_were_not(case: str, recipe: str):
    kind, schedule = CASES[case]
    check(Kind(kind, recipe), schedule)
