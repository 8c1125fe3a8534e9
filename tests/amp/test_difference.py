"""Captured calls come in the order of finishing, hooks do not stay, and differences are those of float64."""

import math

import pytest
import torch
from torch import nn

from fp8engine.amp.difference import Call, Difference, on_calls, run_both


def test_every_call_is_numbered_and_no_hook_stays():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x, *, plus=0.0):
            return self.inner(self.inner(x)) + plus, x.int()

    model, calls = Twice(), []
    with on_calls(dict(model.named_modules()), calls.append):
        model(torch.ones(1, 2), plus=1.0)
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 3))
    assert [call.key for call in calls] == [("inner", 0), ("inner", 1), ("", 0)]
    last: Call = calls[-1]
    assert last.module is model
    assert last.kwargs == {"plus": 1.0}
    (y,) = last.tensors()  # the integers are none of the floating tensors
    assert not y.requires_grad
    assert not any(module._forward_hooks for module in model.modules())


def test_two_runs_are_paired_call_by_call():
    """The second run calls one module less often than the first, and another one more often."""
    inner, outer = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    modules, x, matched = {"inner": inner, "outer": outer}, torch.ones(1, 2), []
    high, low, only_high = run_both(
        (modules, lambda: outer(inner(inner(x)))),
        (modules, lambda: outer(outer(inner(x)))),
        keep=lambda call: call.key[0] * 2,
        match=lambda call, kept: matched.append((call.key, kept)),
    )
    assert matched == [(("inner", 0), "innerinner"), (("outer", 0), "outerouter"), (("outer", 1), None)]
    assert only_high == {("inner", 1): "innerinner"}
    assert torch.equal(high, outer(inner(inner(x))))
    assert torch.equal(low, outer(outer(inner(x))))
    assert not inner._forward_hooks


def test_a_tensor_without_its_counterpart_compares_nothing():
    found = Difference()
    assert found.sqnr_db_or_none is None
    found.add(torch.ones(2), torch.ones(2))
    assert found.sqnr_db_or_none == math.inf
    for missing in (None, torch.ones(3)):
        apart = Difference()
        apart.add(torch.ones(2), torch.ones(2))
        apart.add(torch.ones(2), missing)
        assert apart.sqnr_db_or_none is None


def test_differences_add_up_over_tensors():
    high = [torch.randn(3, 4), torch.randn(7)]
    low = [tensor + 1e-3 * torch.randn_like(tensor) for tensor in high]
    found = Difference()
    for rows, pair in zip((None, 2), zip(low, high, strict=True), strict=True):
        found.add(*pair, rows=rows)
    want, got = (torch.cat([tensor.double().flatten() for tensor in tensors]) for tensors in (high, low))
    error = ((got - want).norm() / want.norm()).item()
    assert found.error == pytest.approx(error, rel=64 * 2.0**-53)  # two sums of 19 squares, in another order
    assert found.sqnr_db == pytest.approx(-20 * math.log10(error))


@pytest.mark.parametrize(
    ("low", "high", "error", "sqnr"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, math.inf),
        ([0.0, 0.0], [0.0, 0.0], 0.0, math.inf),
        ([1.0, 0.0], [0.0, 0.0], math.inf, -math.inf),
        ([0.0, math.nan], [3.0, 1.0], 1.0, math.nan),
    ],
)
def test_limits(low: list[float], high: list[float], error: float, sqnr: float):
    found = Difference()
    found.add(torch.tensor(low), torch.tensor(high))
    assert (found.error, found.sqnr_db) == pytest.approx((error, sqnr), rel=0, abs=0, nan_ok=True)
    assert found.nonfinite_low == sum(map(math.isnan, low))
    assert found.nonfinite_high == 0
