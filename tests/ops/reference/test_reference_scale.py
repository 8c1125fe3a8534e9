"""Scales from amaxes, and windows of amaxes to scales: bit for bit against the definitions, written independently."""

import math

import numpy as np
import pytest
import torch
from casts import FP32_MAX, MAX, assert_same, factor
from hypothesis import example, given
from hypothesis import strategies as st

from fp8engine.ops.reference import scale_factor, scale_update
from fp8engine.ops.reference.quantize import scale_factor_of_float
from fp8engine.ops.reference.scale import floor_power_of_2

SMALLEST = 2.0**-149
amaxes = st.floats(0, float(FP32_MAX), width=32, allow_subnormal=True)
maxima = st.sampled_from(sorted(MAX.values()))


@given(st.lists(amaxes, min_size=1, max_size=40), maxima, st.booleans())
@example([SMALLEST, 2.0**-126, 2.0**-126 - SMALLEST, float(FP32_MAX), 1.0, 448.0, 0.0], 448.0, False)
@example([SMALLEST, 2.0**-126, 2.0**-126 - SMALLEST, float(FP32_MAX), 1.0, 448.0, 0.0], 57344.0, True)
def test_host_and_tensor_formula_are_the_correctly_rounded_quotient(amax, maximum, power_of_2):
    # Lists, because torch's vector and scalar loops divide by different code.
    wanted = np.array([factor(a, maximum, power_of_2) for a in amax])
    tensor = scale_factor(torch.tensor(amax), maximum, power_of_2)
    assert tensor.dtype == torch.float32
    assert_same(tensor, wanted, "tensor")
    assert_same(np.array([scale_factor_of_float(a, maximum, power_of_2) for a in amax]), wanted, "host")


@pytest.mark.parametrize("maximum", MAX.values())
def test_powers_of_two_are_rounded_down_even_just_below_one(maximum):
    power = 2.0 ** np.arange(-100, 100)
    exactly = (maximum / power).astype(np.float32)  # s is the power itself
    above = np.nextafter(exactly, np.float32(np.inf))  # s is an ulp or so below: the power under it
    for amax, wanted in ((exactly, power), (above, power / 2)):
        assert_same(scale_factor(torch.from_numpy(amax), maximum, power_of_2=True), wanted.astype(np.float32))
        assert_same(np.array([scale_factor_of_float(float(a), maximum, True) for a in amax]), wanted)


def test_floor_of_the_float_below_every_power_of_two():
    power = torch.from_numpy((2.0 ** np.arange(-125, 128)).astype(np.float32))
    below = torch.nextafter(power, torch.zeros(()))
    assert_same(floor_power_of_2(power), power)
    assert_same(floor_power_of_2(below), power / 2)


class Window:
    """One slot's delayed scaling in plain Python: a list of amaxes, newest first, and the factor that follows."""

    def __init__(self, history: int, numerator: float, window: int, power_of_2: bool):
        self.amaxes, self.s = [0.0] * history, 7.0
        self.numerator, self.window, self.power_of_2 = numerator, window, power_of_2

    def step(self, amax: float | None) -> None:
        if amax is None:
            return
        self.amaxes = [amax, *self.amaxes[:-1]]
        largest = max(self.amaxes[: self.window])
        if self.numerator:
            self.s = float(factor(largest, self.numerator, self.power_of_2)) if largest else 0.0


@st.composite
def runs(draw):
    """(history, rules of each slot, for each step an amax or None per slot)."""
    history = draw(st.integers(1, 6))
    margin = st.integers(-3, 3).map(lambda m: 2.0**-m)
    rule = st.tuples(
        st.one_of(st.just(0.0), st.tuples(maxima, margin).map(math.prod)),  # 0: the slot's scale is not predicted
        st.integers(1, history + 2),  # a window longer than the table sees all of it
        st.booleans(),
    )
    rules = draw(st.lists(rule, min_size=1, max_size=5))
    amax = st.one_of(st.none(), st.just(0.0), st.floats(2.0**-100, 2.0**100, width=32))
    steps = draw(st.lists(st.lists(amax, min_size=len(rules), max_size=len(rules)), max_size=12))
    return history, rules, steps


@given(runs())
def test_update_is_the_rolled_window(run):
    history, rules, steps = run
    slots = [Window(history, *rule) for rule in rules]
    history_HS, live_2S = torch.zeros(history, len(slots)), torch.full((2, len(slots)), 7.0)
    rules_3S = torch.tensor(rules, dtype=torch.float32).T.contiguous()
    for step in steps:
        live_2S[0] = torch.tensor([-1.0 if amax is None else amax for amax in step])
        scale_update(history_HS, live_2S, rules_3S)
        for slot, amax in zip(slots, step, strict=True):
            slot.step(amax)
        assert_same(history_HS.T, np.array([slot.amaxes for slot in slots]), "history")
        assert_same(live_2S[1], np.array([slot.s for slot in slots]), "factor")
        assert (live_2S[0] == -1).all()


def test_slots_that_did_not_run_keep_every_bit():
    # Any bits, NaN and negative zero among them: the columns are not to be recomputed, but left.
    junk = torch.randint(-(2**31), 2**31, (9, 4), dtype=torch.int32).view(torch.float32)
    history_HS, live_2S = junk[:8].clone(), torch.stack([torch.full((4,), -1.0), junk[8]])
    history_HS[:, 3] = 1.0
    live_2S[0, 3] = 2.0
    before_history, before_live = history_HS.clone(), live_2S.clone()
    scale_update(history_HS, live_2S, torch.tensor([[448.0] * 4, [8.0] * 4, [0.0] * 4]))
    untouched = slice(0, 3)
    assert torch.equal(history_HS[:, untouched].view(torch.int32), before_history[:, untouched].view(torch.int32))
    assert torch.equal(live_2S[1, untouched].view(torch.int32), before_live[1, untouched].view(torch.int32))
    assert live_2S[1, 3].item() == 224.0, "the slot that ran was updated"
