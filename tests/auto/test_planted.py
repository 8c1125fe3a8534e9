"""Planted trouble in training: what fixed recipes lose, and that auto stays beside the best cast and says why.

How it is measured: helpers/troubled.py.  A normal tensor has 31.6 dB in E4M3 and 25.6 in E5M2.  An outlier channel that
ordinary weights weigh makes up the result, and is harmless; where its weights are tiny, the other channels make it up.
Those fall below E4M3's smallest normal where the outlier is 28,000 times larger.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autos import controller, lines
from support import converted, dequantised
from torch import nn
from troubled import FIXED, READS, K, M, N, Scene, short_of, typical

import fp8engine as fe
from fp8engine.auto import Alarm
from fp8engine.numerics.recipe import Cast

SETTLED = 1  # steps: a sample, and what was decided is in force
OF_INPUT, OF_GRADIENT = ([read for read in READS if read[0] == role] for role in ("input", "grad_output"))


def numbers(step: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1000 * columns + step))


def planted(change: Callable, weight: Any = None, reads: list = READS) -> Scene:
    """Normal numbers, in which change(step, x, dy) plants trouble in place."""

    def tensors(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, dy = numbers(step, M, K), numbers(step, M, N)
        change(step, x, dy)
        return x, dy

    return Scene(tensors, weight, reads)


def hardly(weight: torch.Tensor) -> None:
    """The weights that channel 7 meets are tiny: what it says is no part of the result."""
    weight[:, 7] *= 1e-7


def channel(factor, weight=hardly) -> Scene:
    """One channel of x `factor(step)` times the others."""
    return planted(lambda step, x, dy: x[:, 7].mul_(factor(step)), weight, OF_INPUT)


def gradient_rows(step: int, x: torch.Tensor, dy: torch.Tensor) -> None:
    dy *= torch.logspace(-12, 0, M)[torch.randperm(M, generator=torch.Generator().manual_seed(1))][:, None]


def gradient_elements(step: int, x: torch.Tensor, dy: torch.Tensor) -> None:
    dy.sign_().mul_(10 ** (-12 * torch.rand(M, N, generator=torch.Generator().manual_seed(step))))


def exploding(step: int, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Every 16th row doubles at each step, up to 2^24 times the others."""
    x[::16] *= 2.0 ** min(step, 24)


def small_tokens(step: int, x: torch.Tensor, dy: torch.Tensor) -> None:
    """12 % of the tokens are 2^16.5 times smaller."""
    x[torch.randperm(M, generator=torch.Generator().manual_seed(step))[:15]] *= 2.0**-16.5


def tasks(step: int, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Four tasks in turns, as in gradient accumulation: an outlier channel, small tokens, gradients that spread."""
    if step % 4 == 1:
        x[:, 7] *= 3e4
    if step % 4 == 2:
        x[::7] *= 2.0**-16.5
    if step % 4 == 3:
        dy *= torch.logspace(-12, 0, M)[:, None]


def loss_scale(step: int) -> float:
    return [1.0, 2.0, 4.0, 2.0, 1.0, 0.5][step // 3 % 6]


def scaled(step: int):
    return numbers(step, M, K), numbers(step, M, N) * loss_scale(step)


def drift(step: int) -> float:
    """100 times up in 50 steps, and down again: from harmless over where E4M3 loses most, and back."""
    return 3e3 * 100 ** (1 - abs(step - 50) / 50)


class Planted:
    """A scene, how long it is trained, and after which step it is judged.

    limits: in dB short of the best single cast, in the median step and in the worst.
    lose: least loss in dB, median over steps, of the recipes that lose.
    """

    def __init__(self, scene: Scene, steps: int, limits=(1.0, 3.0), lose=None, after: int = SETTLED):
        self.scene, self.steps, self.after, self.lose = scene, steps, after, lose or {}
        self.typical, self.worst = limits
        self.interval = 4 if steps > 100 else 16

    @functools.cached_property
    def wanted(self) -> list[dict]:
        return [self.scene.best(step) for step in range(self.steps)]

    def short(self, recipe) -> tuple[nn.Module, list[float]]:
        """(the model, dB short of the best choice at each judged step)."""
        model, found = self.scene.train(recipe, self.steps)
        return model, short_of(found, self.wanted)[self.after :]


def tensorwise(least: float) -> dict[str, float]:
    return {"current": least, "delayed": least}


# Where a limit is not the rule's (1 dB in the median, 3 at the worst step):
#   a, x30000    E5M2 per tensor and E4M3 in blocks are within 1 dB in one step and 3 dB apart in another, with the amax
#   b, elements  few elements make up a row of the result, and the best cast of a step is the one that suits those
#   c            what it has lags behind the drift by a sample, on the way down
#   d            rows double at each step, and the early sample comes when they are 2^15.4 times the others
#   tasks        judged when each of the four tasks was met; and one was forgotten
# Who loses: by block, channels beside the outlier's block lose nothing, and by row less: neither helps where the
# outlier is larger still.
SCENES = {
    "a, x1000": Planted(channel(lambda step: 1e3), 18),  # it is harmless for E4M3, per tensor
    "a, x30000": Planted(channel(lambda step: 3e4), 20, (2.5, 3.5), {**tensorwise(9), "rowwise": 3}),
    "a, x1e6": Planted(channel(lambda step: 1e6), 20, lose=dict.fromkeys(FIXED, 20)),
    # but for wgrad: every channel has a row of it for itself
    "a, harmless": Planted(channel(lambda step: 3e4, None), 20, lose=tensorwise(9)),
    "b, rows": Planted(planted(gradient_rows, None, OF_GRADIENT[:1]), 20, lose=tensorwise(25)),
    "b, elements": Planted(planted(gradient_elements, None, OF_GRADIENT), 20, (2.0, 3.0), tensorwise(6)),
    "c": Planted(channel(drift), 101, (1.0, 5.0), tensorwise(9)),
    "d": Planted(planted(exploding, None, OF_INPUT[:1]), 36, (1.0, 17.0), tensorwise(25)),
    "tokens": Planted(planted(small_tokens, None, OF_INPUT), 30, lose=tensorwise(20)),
    "tasks": Planted(planted(tasks, hardly, [*OF_INPUT, *OF_GRADIENT]), 100, (1.0, 8.0), tensorwise(15), after=32),
}


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_auto_is_beside_the_best_cast_where_fixed_recipes_lose(name: str):
    planted = SCENES[name]
    model, short = planted.short(fe.auto(interval=planted.interval))
    assert typical(short) <= planted.typical
    assert max(short) <= planted.worst
    for recipe in FIXED if name == "c" else planted.lose:
        other = planted.short(recipe)[1]
        if recipe in planted.lose:
            assert typical(other) >= planted.lose[recipe], recipe
            assert typical(short) <= typical(other)
        if name == "c":
            assert max(short) <= max(other) + 0.1, recipe
    if name == "c":
        assert max(short[40:60]) <= 3, "at the peak of the drift"
    assert [line for line in lines(model) if "predicted SQNR" in line]
    if name == "a, x1000":
        assert [line.split()[2] for line in lines(model)] == ["0.grad_output"], "its first format alone"


MOVING = Planted(Scene(scaled, None, OF_GRADIENT), 40)


@pytest.mark.parametrize("objective", ["accuracy", "speed"])
def test_a_loss_scale_that_moves(objective: str):
    # By 2 or 1/2 every third step: no dB lost; told of it, predicted scales saturate a tenth as often in 16 steps.
    # Where nobody tells them, what saturates and is cast again earns them a margin.
    saturated = {}
    for rescale in (True, False):

        def before(model, step: int, rescale=rescale) -> None:
            if rescale and step and loss_scale(step) != loss_scale(step - 1):
                fe.scaling_state(model).rescale_gradients(loss_scale(step) / loss_scale(step - 1))
            if step == 16:
                saturated[rescale] = int(fe.scaling_state(model)["0.grad_output"].saturated)

        model, found = MOVING.scene.train(fe.auto(objective=objective), 40, before)
        short = short_of(found, MOVING.wanted)[SETTLED:]
        assert typical(short) <= 1
        assert max(short) <= 1.5  # the best cast of a step is that of its own numbers
        assert len(lines(model)) == (4 if objective == "speed" and not rescale else 1)
        slot = fe.scaling_state(model)["0.grad_output"]
        assert slot.nonfinite == 0
        assert (int(slot.recasts) > 0) == (objective == "speed")  # random amaxes exceed earlier ones now and then
        assert objective == "speed" or int(slot.saturated) == 0
    assert 10 * saturated[True] < saturated[False] or objective == "accuracy"


def db(x: torch.Tensor, back: torch.Tensor) -> float:
    """Median over rows of signal over noise, in dB."""
    return 10 * math.log10(float((x.square().sum(1) / (x - back).square().sum(1)).median()))


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
    harmed, ordinary = [], torch.arange(512) != 3
    for step in range(200):
        model.align(0.6 * 1.05**step)  # its output grows 10 % a step
        model(numbers(step, 128, 64).requires_grad_()).sin().sum().backward()
        model.zero_grad()
        read = model.read.detach()
        back = torch.from_numpy(dequantised(read, Cast(fe.E4M3)))
        if db(read[:, ordinary].double(), back[:, ordinary]) < 31.6 - 6:
            harmed.append(step)
    first = warned[0]
    assert first.slot == "down.input"
    assert first.step <= harmed[0] - 40, (first, harmed[0])
    assert first.growth >= 4
    assert math.isfinite(first.ratio)
    assert str(first).startswith(f"step {first.step} down.input: amax/rms x")
    assert controller(model).history.alarms == warned
