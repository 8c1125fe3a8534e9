"""Delayed scaling through real layers against its rule, kept by hand: a list of amaxes and the scale that follows.

s(t) = MAX / 2^margin / max(amax(t-1), ..., amax(t-H))      MAX / amax(t) where there is no history, or where
                                                            amax(t) * s(t) > MAX (the recast)
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from casts import MAX, clamped_cast, factor, values
from hypothesis import given
from hypothesis import strategies as st
from support import converted, sqnr, state_of, tables
from torch import nn

import fp8engine as fe
from fp8engine.scaling.table import ROLES

WIDTH = 16


class Slot:
    """One operand by the rule: what its history and scale should be."""

    def __init__(self, recipe: fe.Recipe, role: str):
        self.maximum = MAX[getattr(recipe, role).format.dtype]
        self.numerator = self.maximum / 2.0**recipe.margin
        self.window = recipe.history if recipe.algo == "max" else 1
        self.history = [0.0] * recipe.history
        self.recasts = 0

    def step(self, amax: float) -> float:
        """The factor this step is cast with; amax enters the history."""
        largest = max(self.history[: self.window])
        s = float(factor(largest, self.numerator)) if largest else 0.0
        if s == 0.0 or amax * s > self.maximum * (1 + 2.0**-22):
            self.recasts += s != 0.0
            s = float(factor(amax, self.maximum))
        self.history = [amax, *self.history[:-1]]
        return s


def delayed_model(**options) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    converted(model, fe.delayed(**options))
    return model


def step(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """One training forward and backward; returns the output."""
    model.zero_grad()
    y = model(x)
    y.backward(dy)
    return y.detach()


def cast(x: torch.Tensor, s: float, dtype=torch.float8_e4m3fn) -> np.ndarray:
    return values(torch.from_numpy(clamped_cast(x.detach().numpy(), s, dtype)).view(dtype)) / s


magnitudes = st.integers(-20, 20).map(lambda e: 2.0**e)


@given(
    st.lists(st.tuples(magnitudes, magnitudes, magnitudes), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(-2, 3),
    st.sampled_from(["max", "most_recent"]),
)
def test_a_layer_follows_the_rolled_window(sizes, history: int, margin: int, algo: str):
    model = delayed_model(history=history, margin=margin, algo=algo)
    slots = {role: Slot(fe.delayed(history=history, margin=margin, algo=algo), role) for role in ROLES}
    weight = model[0].weight
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        x, w, dy = (torch.randn(WIDTH, WIDTH, generator=generator) * scale for scale in size)
        with torch.no_grad():
            weight.copy_(w)
        y = step(model, x, dy)
        used = {role: slots[role].step(t.abs().max().item()) for role, t in zip(ROLES, (x, w, dy), strict=True)}
        want = cast(x, used["input"]) @ cast(w, used["weight"]).T
        assert sqnr(want, y) > 45, "BF16's rounding of products is 2^-8: 52 dB"
        want = cast(dy, used["grad_output"], torch.float8_e5m2).T @ cast(x, used["input"])
        assert sqnr(want, weight.grad) > 45
    state_of(model).fold()  # as the next forward would
    for role, slot in slots.items():
        view = fe.scaling_state(model)[f"0.{role}"]
        assert view.history.tolist() == slot.history
        assert int(view.recasts) == slot.recasts
        s = float(factor(max(slot.history[: slot.window]), slot.numerator))
        assert view.scale == torch.tensor(1.0) / torch.tensor(s)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_one_bad_step_never_freezes_a_window_of_1024(role: str, bad: float):
    model, clean = delayed_model(history=1024), delayed_model(history=1024)
    clean.load_state_dict(model.state_dict())
    for index in range(4):
        x, dy = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        if index != 2:
            step(clean, x, dy)
        else:
            (x if role == "input" else dy)[3, 3] = bad
        y = step(model, x, dy)
        assert bool(torch.isfinite(y if role == "input" else model[0].weight.grad).all()) == (index != 2)
    history = fe.scaling_state(model)[f"0.{role}"].history
    assert torch.isfinite(history).all()
    assert torch.equal(history[:2], fe.scaling_state(clean)[f"0.{role}"].history[:2]), "that step's amax is not entered"
    assert fe.scaling_state(model)[f"0.{role}"].scale == fe.scaling_state(clean)[f"0.{role}"].scale
    assert int(fe.scaling_state(model)[f"0.{role}"].nonfinite) == 1


class Branches(nn.Module):
    """Two layers, of which a step runs one or both, on one tensor or several."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *xs, which: str = "ab"):
        return sum(getattr(self, name)(x) for x in xs for name in which)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_layer_called_twice_in_a_step_records_the_larger_and_one_that_did_not_run_nothing(recipe: str):
    model = converted(Branches(), recipe)
    model(torch.randn(4, WIDTH)).sum().backward()
    small, large = torch.randn(4, WIDTH), torch.randn(4, WIDTH) * 50
    model(small, which="a").sum().backward()
    before = tables(model)
    for pair in ((small, large), (large, small)):
        model(*pair, which="a").sum().backward()
        slot = fe.scaling_state(model)["a.input"]
        assert slot.amax == large.abs().max()
    assert int(slot.calls) == 2 + 4
    for old, new in zip(before, tables(model), strict=True):
        assert torch.equal(old[:, 3:], new[:, 3:])
    if recipe == "delayed":
        assert slot.history[:2].tolist() == [large.abs().max(), small.abs().max()], "one entry a step, not one a call"


def test_frozen_weights_keep_their_scale():
    model = delayed_model()
    model[0].weight.requires_grad_(False)
    amax = model[0].weight.abs().max()
    for _ in range(20):
        model(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
    slot = fe.scaling_state(model)["0.weight"]
    assert slot.amax == amax
    assert slot.scale == 1.0 / (torch.tensor(448.0) / amax)
    x = torch.randn(64, WIDTH)
    assert sqnr(x @ model[0].weight.t(), model(x)) > 27


@pytest.mark.parametrize("ratio", [0.5, 4.0])
def test_rescaling_gradients_rescales_their_history_and_nothing_else(ratio: float):
    # A loss scale halved: the next gradients are half as large, and a stale scale would waste a bit (or saturate).
    model, twin = delayed_model(), delayed_model()
    twin.load_state_dict(model.state_dict())
    batches = [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(5)]
    for x, dy in batches[:3]:
        step(model, x, dy)
        step(twin, x, dy * ratio)
    before = fe.scaling_state(model)["0.grad_output"].scale
    state_of(model).rescale_gradients(ratio)
    assert fe.scaling_state(model)["0.grad_output"].scale == before * ratio, "for a backward before the next forward"
    for x, dy in batches[3:]:
        step(model, x, dy * ratio)
        step(twin, x, dy * ratio)
    assert torch.equal(model[0].weight.grad, twin[0].weight.grad), "powers of two: bit for bit"
    for bad in (0.0, -2.0, math.nan):
        with pytest.raises(fe.errors.StateError, match="positive"):
            state_of(model).rescale_gradients(bad)
    for found, want in zip(tables(model), tables(twin), strict=True):
        assert torch.equal(found, want)
