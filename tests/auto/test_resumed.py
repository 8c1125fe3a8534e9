"""A resumed run is the uninterrupted one, bit for bit, whatever came before: a law over schedules, for every recipe."""

import io
import warnings
from typing import Any, NamedTuple

import pytest
import tiny_models
import torch
from autos import without_beta
from blocks import Net
from hypothesis import given, settings
from hypothesis import strategies as st
from support import FP8_RECIPES, converted
from torch import nn

import fp8engine as fe
from fp8engine.report.state import controllers_of

WIDTH = 64
RECIPES: dict[str, Any] = {name: name for name in FP8_RECIPES}
RECIPES |= {"auto": fe.auto(interval=2), "auto, budget": fe.auto(interval=2, budget=0.01)}
RECIPES |= {"auto, speed": fe.auto(interval=3, objective="speed"), "auto, frozen": fe.auto(interval=2, freeze_after=3)}


class Stored(nn.Module):
    """A result that a layer alone reads, so that `auto` stores it in FP8."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.last = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(torch.relu(self.down(self.up(x))))


class Kind(NamedTuple):
    """make: the model.  inputs: what it takes at a step.  example: whether it is calibrated at conversion."""

    make: Any
    inputs: Any
    example: bool = False


def numbers(step: int) -> torch.Tensor:
    """Troubled from the fourth input on, calm again from the eighth."""
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step))
    if 4 <= step < 8:
        x[:, 5] *= 3e6
        x[:, 6] = -x[:, 5]
    return x


def jumps(step: int) -> torch.Tensor:
    """Some are 20 times as large: what is stored under a predicted scale saturates."""
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step)) * (20.0 if step in (3, 6) else 1.0)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(step))


KINDS = {
    "blocks": Kind(lambda: without_beta(Net()), numbers),
    "recomputed": Kind(lambda: without_beta(Net(reentrant=True)), numbers),
    "stored": Kind(Stored, jumps, True),
    "experts": Kind(tiny_models.mixtral, tokens, True),
}


class Run:
    """A training that can be saved and gone on with in other objects."""

    def __init__(self, kind: str, recipe: str):
        self.kind, self.recipe, self.at = KINDS[kind], RECIPES[recipe], 0
        self.seen: list[Any] = []
        self.begin()

    def begin(self) -> None:
        torch.manual_seed(1)
        self.model: Any = self.kind.make()
        options = {"example_inputs": self.example()} if self.kind.example else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            converted(self.model, self.recipe, **options)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.02, momentum=0.9)

    def example(self) -> Any:
        x = self.kind.inputs(1000)
        return {"input_ids": x, "labels": x} if self.kind.inputs is tokens else (x,)

    def call(self) -> Any:
        x = self.kind.inputs(self.at)
        self.at += 1
        if self.kind.inputs is tokens:
            return tiny_models.loss_of(self.model, x)
        return self.model(x.requires_grad_()).sin().mean()

    def do(self, what: str) -> None:
        if what.startswith("train"):
            for _ in range(int(what.removeprefix("train") or 1)):
                loss = self.call()
                loss.backward()
                self.seen.append(loss.item())
            for p in self.parameters:
                if p.grad is not None and p.dim() == 2 and p.shape[1] == WIDTH:
                    p.grad[:, 5:7] = 0  # which trouble makes large
            self.optimizer.step()
            self.optimizer.zero_grad()
        elif what == "forward":  # of which no backward comes
            self.seen.append(self.call().item())
        elif what == "siamese":
            (self.call() - self.call()).square().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            with torch.no_grad() if what == "evaluate" else torch.inference_mode():
                self.model.eval()
                self.seen.append(self.call().item())
                self.model.train()

    def resume(self) -> None:
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict(), fe.scaling_state_dict(self.model)], file)
        file.seek(0)
        model, optimizer, scaling = torch.load(file, weights_only=True)
        self.begin()
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        fe.load_scaling_state_dict(self.model, scaling)

    def end(self) -> tuple:
        """Everything that a run has come to."""
        slots = fe.scaling_state_dict(self.model)["slots"]
        for name in slots:  # the copies of a weight that are kept are no state: a resumed run casts it once more
            if name.endswith(".weight"):
                del slots[name]["counts"]
        controllers = controllers_of(self.model)
        return (
            self.seen,
            [p.tolist() for p in self.parameters],
            [line for found in controllers for change in found.log for line in change.lines()],
            [found.history.trends_to_dict() for found in controllers],
            {name: {key: value.tolist() for key, value in slot.items()} for name, slot in slots.items()},
        )


def ended(kind: str, recipe: str, schedule: list[str]) -> tuple:
    run = Run(kind, recipe)
    for what in schedule:
        if what == "save":
            run.resume()
        else:
            run.do(what)
    return run.end()


def check(kind: str, recipe: str, schedule: list[str]) -> None:
    resumed = ended(kind, recipe, schedule)
    straight = ended(kind, recipe, [what for what in schedule if what != "save"])
    for mine, theirs in zip(resumed, straight, strict=True):
        assert repr(mine) == repr(theirs)  # NaN is equal to itself


CALM = ["train"] * 6
WHAT = ["train", "train", "train2", "evaluate", "infer", "forward", "siamese", "save", "save"]


# A reentrant checkpoint says it of a batch.
@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=16)
@given(kind=st.sampled_from([*KINDS]), schedule=st.lists(st.sampled_from(WHAT), min_size=3, max_size=12))
def test_resumed_is_uninterrupted(recipe: str, kind: str, schedule: list[str]):
    check(kind, recipe, [*schedule, "save", "train", "train2", "evaluate", "train"])


CASES = {
    "experts, saved at step 2": ("experts", ["train", "train", "save", *CALM]),
    "experts, saved at step 3": ("experts", ["train", "train", "train", "save", *CALM]),
    "into an evaluation": ("blocks", ["train", "save", "evaluate", "infer", *CALM]),
    "an evaluation before the first step": ("blocks", ["evaluate", "save", *CALM]),
    "evaluations before the first step": ("stored", ["evaluate", "evaluate", "save", "evaluate", *CALM]),
    "forwards before the first step": ("blocks", ["forward", "save", *CALM]),
    "a forward between steps": ("stored", ["train", "train", "forward", "save", "forward", *CALM]),
    "microbatches": ("blocks", ["train2", "save", "train2", "save", "train2", *CALM]),
}


@pytest.mark.parametrize("recipe", ["auto", "delayed"])
@pytest.mark.parametrize("case", CASES)
def test_resumed_is_uninterrupted_in_cases_that_were_not(case: str, recipe: str):
    kind, schedule = CASES[case]
    check(kind, recipe, schedule)
