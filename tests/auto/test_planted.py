"""Planted trouble in training: what fixed recipes lose, and that auto stays beside the best choice and says why.

How it is measured: helpers/troubled.py.  A normal tensor has 31.6 dB in E4M3 and 25.6 in E5M2.  Ordinary values r times
smaller than amax fall below E4M3's smallest normal at r = 28,000, and lose 6 dB at about 45,000.  An outlier 1000 times
the others is harmless there (amax is 4000 of their rms), so that (a) is planted at 30,000, where harm begins.
"""

import functools
import math

import pytest
import torch
from autos import controller, lines
from support import converted, dequantised
from torch import nn
from troubled import FIXED, K, M, N, Scene, db, short_of, typical

import fp8engine as fe
from fp8engine.auto import Alarm
from fp8engine.numerics.recipe import Cast

SETTLED = 3  # steps: a look, a closer one, and what was decided is in force


def numbers(step: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1000 * columns + step))


def channel(factor) -> Scene:
    """One channel of x `factor(step)` times the others; the others are what matters."""

    def tensors(step: int):
        x = numbers(step, M, K)
        x[:, 7] *= factor(step)
        return x, numbers(step, M, N)

    return Scene(tensors, "input", lambda x: torch.cat([x[:, :7], x[:, 8:]], 1))


def gradient_rows(step: int):
    order = torch.randperm(M, generator=torch.Generator().manual_seed(1))
    return numbers(step, M, K), numbers(step, M, N) * torch.logspace(-12, 0, M)[order][:, None]


def gradient_elements(step: int):
    size = 10 ** (-12 * torch.rand(M, N, generator=torch.Generator().manual_seed(step)))
    return numbers(step, M, K), numbers(step, M, N).sign() * size


def exploding(step: int):
    """Every 16th row doubles at each step, up to 2^24 times the others."""
    x = numbers(step, M, K)
    x[::16] *= 2.0 ** min(step, 24)
    return x, numbers(step, M, N)


def loss_scale(step: int) -> float:
    return [1.0, 2.0, 4.0, 2.0, 1.0, 0.5][step // 3 % 6]


def scaled(step: int):
    return numbers(step, M, K), numbers(step, M, N) * loss_scale(step)


def drift(step: int) -> float:
    """100 times up in 50 steps, and down again: from harmless over where E4M3 loses most, and back."""
    return 3e3 * 100 ** (1 - abs(step - 50) / 50)


class Planted:
    """A scene, how long it is trained, and after which step it is judged."""

    def __init__(self, scene: Scene, steps: int, after: int = SETTLED, interval: int = 16):
        self.scene, self.steps, self.after, self.interval = scene, steps, after, interval

    @functools.cached_property
    def wanted(self) -> list[dict[str, float]]:
        return [self.scene.best(step) for step in range(self.steps)]

    def short(self, recipe) -> tuple[nn.Module, list[float]]:
        """(the model, dB short of the best choice at each judged step)."""
        model, found = self.scene.train(recipe, self.steps)
        return model, short_of(found, self.wanted)[self.after :]


SCENES = {
    "a, x30000": Planted(channel(lambda step: 3e4), 20),
    "a, x1e6": Planted(channel(lambda step: 1e6), 20),
    "b, rows": Planted(Scene(gradient_rows, "grad_output"), 20),
    "b, elements": Planted(Scene(gradient_elements, "grad_output"), 20),
    "c": Planted(channel(drift), 101, interval=4),
    # Rows grow 2^16 times between two looks: judged after the look at step 16.
    "d": Planted(Scene(exploding, "input", lambda x: x[[i for i in range(M) if i % 16]]), 36, after=18),
}
# Least loss in dB, median over steps: of those that lose.  By block, channels beside the outlier's block lose nothing,
# and by row less: neither helps where the outlier is larger still, nor where rows spread.
LOSE = {
    "a, x30000": {"current": 9, "delayed": 9},
    "a, x1e6": dict.fromkeys(FIXED, 20),
    "b, rows": dict.fromkeys(FIXED, 25),
    "b, elements": dict.fromkeys(FIXED, 20),
    "c": {"current": 9, "delayed": 9},
    "d": dict.fromkeys(FIXED, 20),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_auto_is_beside_the_best_choice_where_fixed_recipes_lose_6_db(name: str):
    planted = SCENES[name]
    model, short = planted.short(fe.auto(interval=planted.interval))
    assert typical(short) <= 1
    if name != "c":  # there see the next test
        assert max(short) <= 1
    for recipe, least in LOSE[name].items():
        assert least >= 6
        assert typical(planted.short(recipe)[1]) >= least, recipe
    changes = [line.split()[2] for line in lines(model)]
    assert max(changes.count(slot) for slot in changes) <= 3
    role = planted.scene.role
    assert [line for line in lines(model) if f"0.{role} " in line and "flushed to zero > " in line]


def test_an_outlier_of_a_thousand_is_harmless():
    """For E4M3, per tensor, auto and fixed alike: nothing is changed but the gradient's first format."""
    planted = Planted(channel(lambda step: 1e3), 18)
    model, short = planted.short("auto")
    assert max(short) < 1
    assert max(planted.short("current")[1]) < 1
    assert [line.split()[2] for line in lines(model)] == ["0.grad_output"]


@pytest.mark.slow
def test_while_an_amax_drifts_auto_is_never_worse_than_the_best_fixed_recipe_is():
    """What it has lags behind by a look, and three changes are few for a drift through every format: at its peak auto
    has the granularity that was right before.  Its worst step is not worse than any fixed recipe's worst."""
    planted = SCENES["c"]
    _, short = planted.short(fe.auto(interval=planted.interval))
    for recipe in FIXED:
        assert max(short) <= max(planted.short(recipe)[1]) + 0.1, recipe


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("objective", ["accuracy", "speed"])
def test_a_loss_scale_that_moves(objective: str, rescale: bool):
    """By 2 or 1/2 every third step: no dB lost, and where scales are predicted and told of it, nothing saturates."""

    def before(model, step: int) -> None:
        if rescale and step and loss_scale(step) != loss_scale(step - 1):
            fe.scaling_state(model).rescale_gradients(loss_scale(step) / loss_scale(step - 1))

    scene = Scene(scaled, "grad_output")
    model, found = scene.train(fe.auto(objective=objective), 40, before)
    short = short_of(found, [scene.best(step) for step in range(40)])[SETTLED:]
    assert max(short) <= 1
    # Nobody told the predicted scales: what saturates under them and is cast again earns them a margin.
    assert len(lines(model)) == (4 if objective == "speed" and not rescale else 1)
    slot = fe.scaling_state(model)["0.grad_output"]
    assert slot.nonfinite == 0
    assert (int(slot.recasts) > 0) == (objective == "speed")  # random amaxes exceed earlier ones now and then
    if objective == "accuracy":
        assert int(slot.saturated) == 0


def test_predicted_scales_that_are_told_of_the_loss_scale_saturate_less():
    """Of elements beyond a predicted scale, in 16 steps: the scale doubles twice and halves three times."""

    def saturated(rescale: bool) -> int:
        def before(model, step: int) -> None:
            if rescale and step and loss_scale(step) != loss_scale(step - 1):
                fe.scaling_state(model).rescale_gradients(loss_scale(step) / loss_scale(step - 1))

        model, _ = Scene(scaled, "grad_output").train(fe.auto(objective="speed"), 16, before)
        return int(fe.scaling_state(model)["0.grad_output"].saturated)

    assert 10 * saturated(rescale=True) < saturated(rescale=False)


class Gated(nn.Module):
    """SwiGLU whose weight rows of channel 3 are one vector that `align` lets grow: its output grows as its square."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 512), nn.Linear(64, 512), nn.Linear(512, 64)
        self.read = torch.empty(0)

    def forward(self, x):
        self.read = nn.functional.silu(self.gate(x)) * self.up(x)
        return self.down(self.read)

    def align(self, size: float) -> None:
        with torch.no_grad():
            self.gate.weight[3] = self.up.weight[3] = size * torch.ones(64) / 8


@pytest.mark.slow
def test_aligned_swiglu_weights_raise_an_alarm_long_before_fp8_loses_by_it():
    torch.manual_seed(0)
    model = converted(Gated(), fe.auto(interval=4))
    warned: list[Alarm] = []
    controller(model).history.listeners.append(warned.append)
    harmed, steps = None, 200
    for step in range(steps):
        model.align(0.6 * 1.05**step)  # its output grows 10 % a step
        model(numbers(step, 128, 64).requires_grad_()).sin().sum().backward()
        model.zero_grad()
        read = model.read.detach()
        ordinary = torch.arange(512) != 3
        back = torch.from_numpy(dequantised(read, Cast(fe.E4M3)))
        if harmed is None and db(read[:, ordinary].double(), back[:, ordinary]) < 31.6 - 6:
            harmed = step
    assert harmed is not None
    first = warned[0]
    assert first.slot == "down.input"
    assert first.step <= harmed - 40, (first, harmed)
    assert first.growth >= 4
    assert math.isfinite(first.ratio)
    assert str(first).startswith(f"step {first.step} down.input: amax/rms x")
    assert controller(model).history.alarms == warned
