"""find_overflow under a loss scaler: the search for the scale blames no layer, a gradient that grows does.

A model's gradients are planted: `Gain` multiplies them by a factor that the test sets, in FP16, and the largest that
enters it is the loss scale itself; with a factor of 2^e it overflows where the scale is 2^(16 - e) or more.
"""

import json
import logging
from typing import Any

import pytest
import torch
from overflow_cases import Part, Times, first, watched
from torch import nn

from fp8engine.amp.decorate import decorate
from fp8engine.amp.overflow import find_overflow
from fp8engine.amp.scaler import GradScaler
from fp8engine.errors import ConversionError


class Gain(Part):
    """x itself, in FP16 (or FP32) between FP32 neighbours."""

    def __init__(self, dtype: torch.dtype = torch.float16):
        super().__init__(lambda x: Times.apply(x.to(dtype), self.factor).float())
        self.factor = 1.0


class Run:
    """A linear layer, two gains, and a scaler of torch's rule."""

    def __init__(self, init_scale: float = 2.0**16, mode: str = "counters", dtype: torch.dtype = torch.float16):
        self.gain = Gain(dtype)
        self.model: Any = nn.Sequential(nn.Linear(4, 4), Gain(dtype), self.gain)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.0)
        self.scaler = GradScaler("cpu", init_scale, growth_interval=4)
        self.watch = find_overflow(self.model, self.scaler, mode=mode)

    def steps(self, *exponents: int, passes: int = 1) -> None:
        """One step each, with a factor of 2 to this power in the second gain."""
        for exponent in exponents:
            self.gain.factor = 2.0**exponent
            for _ in range(passes):
                self.scaler.scale(self.model(torch.ones(1, 4)).sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def row(self) -> Any:
        return next(layer for layer in self.watch.report().layers if layer.name == "2")


@pytest.mark.parametrize("passes", [1, 2])
def test_a_healthy_model_is_not_blamed_for_the_search(mode: str, passes: int, caplog):
    run = Run(mode=mode)
    with run.watch:
        run.steps(6, 6, passes=passes)  # 2^16, 2^15: over
        assert first(run.watch, "layer", "guilty", "cured_by", "loss_scale") == ("2", False, None, 2.0**16)
        assert "watch until a step passes" in str(run.watch.first())
        assert run.watch.pin(1) == [], "undecided"
        run.steps(6, 6, 6, 6, 6, 6, passes=passes)  # 2^14 ... 2^10: over; 2^9 passes
    assert first(run.watch, "layer", "guilty", "cured_by") == ("2", False, 2.0**9)
    assert str(run.watch.first()).endswith("loss scale 512 cures it, nothing to pin")
    with caplog.at_level(logging.WARNING):
        assert run.watch.pin(3) == []
    assert "nothing: step 0: " in caplog.text
    assert "512 cures it" in caplog.text
    row = run.row()
    assert (row.guilty, row.scaled, row.grad_made) == (0, 7 * passes, torch.inf)
    text = str(run.watch.report())
    assert "loss scale" in next(line for line in text.splitlines() if " Gain " in line)
    assert "guilty" not in text
    assert json.loads(json.dumps(run.watch.report().to_dict(), allow_nan=False))["findings"][0]["cured_by"] == 512.0


SEARCHES = {  # of a healthy layer: the first scale, factors of its gradient, skipped steps, the scale that cures it
    # 2^11 and 2^10 over; then 2^9 four times, 2^10 once over: as torch's scaler goes on for ever
    "growing back to a scale that failed": (11, [6] * 22, 6, 9),
    # gradients between 2^6 and 2^8: 2^9 passes and is over, then 2^8, then each again
    "batches that differ near the last scale": (9, [6, 7, 7, 8, *[6] * 8, 7, 7, 8], 4, None),
    # 2^8 passes; then it, 2^7 and 2^6 are over, and 2^5 passes
    "one search that passes scales that were fine counts once": (8, [6, 10, 10, 10, 10], 3, 5),
}


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_blames_nobody(search: str, mode: str):
    start, factors, skipped, cure = SEARCHES[search]
    run = Run(init_scale=2.0**start, mode=mode)
    with run.watch:
        run.steps(*factors)
    assert run.scaler.stats.skipped == skipped
    guilty, cured_by = first(run.watch, "guilty", "cured_by")
    assert not guilty
    assert cure is None or cured_by == 2.0**cure
    assert run.watch.pin() == []


def test_a_gradient_that_grows_is_guilty(mode: str):
    run = Run(init_scale=2.0**8, mode=mode)
    with run.watch:
        run.steps(6, 10, 10, 10)  # 2^8 passes; then it, 2^7 and 2^6 are over
        assert run.row().guilty == 0, "once is noise"
        run.steps(10, 12)  # 2^5 passes, and is over now
        assert first(run.watch, "layer", "guilty", "cured_by") == ("2", True, None)
        assert run.watch.pin(1) == ["2"]
    assert (run.row().guilty, run.row().scaled) == (4, 0)
    assert "guilty x4, pinned" in str(run.watch.report())


@pytest.mark.parametrize(
    ("dtype", "start", "factor", "passes"),
    [(torch.float16, 4.0, 18, 3), (torch.float32, 2.0**26, 127, 2)],  # 4, 2, 1 and 0.5; 2^26, 2^25 and 2^24
    ids=["beyond FP16 without any scale", "beyond FP32 once the scale is no excuse"],
)
def test_a_gradient_beyond_its_dtype_is_guilty(dtype: torch.dtype, start: float, factor: int, passes: int, mode: str):
    run = Run(init_scale=start, mode=mode, dtype=dtype)
    with run.watch:
        run.steps(*[factor] * passes)
        assert run.row().guilty == 0
        run.steps(factor, factor)  # and the pass that finds the op
        assert run.watch.pin(1) == ["2"]


def test_an_inf_that_reaches_no_weight_does_not_hide_that_a_step_has_passed(mode: str):
    run, fc, root = Run(init_scale=2.0**11), nn.Linear(4, 4), Part(torch.sqrt)
    nn.init.constant_(fc.bias, -10.0)
    inner = run.model
    with find_overflow(
        Part(lambda x: inner(x) + root(fc(x).relu()), inner=inner, fc=fc, root=root), run.scaler, mode=mode
    ) as watch:
        run.model = watch.model
        run.steps(6, 6, 6)  # 2^11 and 2^10 over, 2^9 passes
    assert watch.pin() == []
    assert {one.cured_by for one in watch.findings} == {512.0}


@pytest.mark.parametrize("told", [True, False], ids=["with the scaler", "without"])
def test_an_op_in_fp32_is_guilty_at_once(told: bool):
    run = Run(mode="ops", dtype=torch.float32)
    with run.watch if told else find_overflow(run.model, mode="ops") as watch:
        run.steps(127)
        assert first(watch, "layer", "guilty", "dtype") == ("2", True, torch.float32)
        assert watch.pin(1) == ["2"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_scale_beyond_any_search_is_cured_in_a_wide_dtype_too(mode: str, dtype: torch.dtype):
    """2^40 times 2^90 is beyond FP32; 2^37 times 2^90 is not: no layer is at fault."""
    run = Run(init_scale=2.0**40, mode=mode, dtype=dtype)
    with run.watch:
        run.steps(*[90] * 4)
        assert first(run.watch, "layer", "guilty", "cured_by") == ("2", False, 2.0**37)
        assert run.row().guilty == 0
        assert run.watch.pin() == []


def test_without_the_scaler_no_layer_is_blamed_for_a_gradient(mode: str, caplog):
    run = Run()  # the loss is scaled by 2^16, which the watch is not told: the layer is healthy
    with find_overflow(run.model, mode=mode) as watch, caplog.at_level(logging.WARNING):
        run.steps(6, 6)
        assert first(watch, "layer", "guilty", "cured_by") == ("2", False, None)
        assert str(watch.first()).endswith("- a loss scale may be why: give find_overflow the scaler to know")
        assert watch.pin(1) == []
    assert "give find_overflow the scaler" in caplog.text


def test_without_a_scaler_a_gradient_that_spoils_weights_is_guilty(mode: str):
    run = Run()
    with find_overflow(run.model, mode=mode) as watch:
        for factor in (6, 18):
            run.gain.factor = 2.0**factor
            run.model(torch.ones(1, 4)).sum().backward()
            found: Any = watch.first()
            run.optimizer.step()
            run.optimizer.zero_grad()
        assert (found.layer, found.guilty) == ("2", False), "a hidden scaler may skip this step"
        run.model(torch.ones(1, 4))
        assert first(watch, "layer", "guilty", "loss_scale") == ("2", True, None)
        assert watch.pin(1) == ["2"]


def test_pins_repeat_until_nothing_overflows(caplog):
    """Each pin lets the overflow through to the next layer; the last call finds nothing and pins nothing."""
    square, halve = (lambda x: x * x), (lambda x: (x.float().abs() ** 0.5).half())  # 600 -> 360,000 -> 600
    near = lambda x: x.half() * 0 + 8000  # noqa: E731  an eighth of FP16's range: pinned after the guilty, with them
    model = nn.Sequential(*map(Part, (square, halve, square, halve, nn.Identity(), square, halve, near)))
    x, rounds = torch.full((2, 2), 600.0, dtype=torch.float16), []
    with find_overflow(model) as watch, torch.autocast("cpu", torch.float16), torch.no_grad():
        for _ in range(6):
            model(x)
            rounds.append(watch.pin(1))
    assert [*filter(None, rounds)] == [["0"], ["2"], ["5"]]
    assert rounds[3:] == [[]] * 3
    assert "nothing: no layer is guilty" in caplog.text
    with torch.autocast("cpu", torch.float16):
        assert model(x).isfinite().all()


@pytest.mark.parametrize("made", ["Inf", "NaN"])
def test_the_row_of_a_guilty_layer_shows_what_it_found(made: str):
    large = lambda x: (x * 0).half().exp() * 6e4 * 6e4  # noqa: E731
    ill = Part(large if made == "Inf" else lambda x: large(x) - large(x))
    watch = watched(nn.Sequential(nn.Linear(4, 4), ill), torch.ones(2, 4), "counters", 2, torch.no_grad)
    row = next(layer for layer in watch.report().layers if layer.name == "1")
    assert (row.peak, row.guilty) == (0.0, 2)
    line = next(line for line in str(watch.report()).splitlines() if " Part " in line)
    assert [cell.strip() for cell in line.strip("│ ").split("│")][3:6] == [made, "over", "2"]
    assert row.to_dict()["made"] == made.lower()


def test_the_scaler_inside_a_decorated_optimizer():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 1e-3), scaler=GradScaler("cpu", 2.0**24))
    with find_overflow(model, optimizer) as watch:
        while optimizer.scaler.stats.iterations == optimizer.scaler.stats.skipped:
            optimizer.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.scaler.stats.skipped > 0
    assert watch.pin() == []
    assert "cures it, nothing to pin" in str(watch.first())
    with pytest.raises(ConversionError, match="SGD is no loss scaler: give the GradScaler, or"):
        find_overflow(model, torch.optim.SGD(model.parameters(), 1e-3))
