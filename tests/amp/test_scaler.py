"""GradScaler: step by step what torch's does, Paddle's rules beside it, exact resume, and clear refusals.

Inf and NaN are put into gradients by a loss that multiplies them in.  torch's own scaler is the reference for torch's
rules; `paddle_table` below, written from Paddle's update_loss_scaling, for Paddle's.
"""

import copy
import functools
import math
import pickle
import random
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from op_counts import WAITS, Counted
from scaled_run import OnDevice, Run
from torch import nn

import fp8engine as fe
from fp8engine.amp.scaler import GradScaler, ScaleRules
from fp8engine.errors import LossScaleError, OptimizerError
from fp8engine.scaling.table import ScalingState

BAD = (math.inf, -math.inf, math.nan)
NO_RULES = (
    {"decrease_every_n": 0},
    {"decrease_every_n": 1.5},
    {"floor": 0.0},
    {"floor": 4.0, "ceiling": 2.0},
    {"collapse_after": -1},
    {"on_collapse": "warn"},
)


def values(rng: random.Random, length: int) -> list[float]:
    share = rng.choice([0.0, 0.1, 0.5, 0.9])
    return [rng.choice(BAD) if rng.random() < share else rng.uniform(-4, 4) for _ in range(length)]


def parameters(rng: random.Random) -> dict[str, Any]:
    return {
        "init_scale": rng.choice([1.0, 3.0, 65536.0, 2.0**126, rng.uniform(0.1, 1e6)]),
        "growth_factor": rng.choice([2.0, 1.5, rng.uniform(1.001, 8)]),
        "backoff_factor": rng.choice([0.5, 0.1, rng.uniform(0.05, 0.999)]),
        "growth_interval": rng.randint(1, 6),
    }


@pytest.mark.parametrize(
    ("kind", "sequences"),
    [(GradScaler, 50), pytest.param(GradScaler, 1000, marks=pytest.mark.slow), (OnDevice, 100)],
)
def test_as_torch_over_random_sequences(kind: type[GradScaler], sequences: int):
    """At most 24 iterations each: 1·0.05^24 is still above the floor of 2^-126 where torch's way would part."""
    rng = random.Random(kind.__name__)
    for _ in range(sequences):
        given = parameters(rng)
        if rng.random() < 0.5:
            given["backoff_factor"] = max(given["backoff_factor"], 0.3)
        ours, theirs = Run(kind("cpu", **given)), Run(torch.amp.GradScaler("cpu", **given))
        ours.scaler.rules = ScaleRules(collapse_after=0)
        for value in values(rng, rng.randint(1, 24)):
            ours.step(value)
            theirs.step(value)
            # bit for bit: both round the same double product to FP32
            assert ours.scaler._scale.item() == theirs.scaler.get_scale() == ours.scaler.get_scale(), given
        assert str(ours.seen()) == str(theirs.seen())


def paddle_table(scale, good, bad, found, n):
    """Paddle's table for incr 2.0 every 3 steps, decr 0.8 every n: FP32 arithmetic in NumPy."""
    good, bad = (0, bad + 1) if found else (good + 1, 0)
    if bad == n:
        return max(scale * np.float32(0.8), np.float32(1)), 0, 0
    if good == 3:
        with np.errstate(over="ignore"):
            higher = scale * np.float32(2)
        return (higher if np.isfinite(higher) else scale), 0, 0
    return scale, good, bad


@pytest.mark.parametrize("kind", [GradScaler, OnDevice])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_paddles_rule_table(kind: type[GradScaler], n: int):
    # 0.8 rounded to FP32 first, as Paddle's kernel takes it as a float
    rules = ScaleRules(floor=1.0, collapse_after=0)
    for seed in range(20):
        rng = random.Random(seed)
        start = rng.choice([2048.0, 1.5, 2.0**127])
        options: dict[str, Any] = {"growth_interval": 3, "backoff_factor": float(np.float32(0.8))}
        run = Run(kind("cpu", start, decrease_every_n=n, rules=rules, **options))
        wanted = (np.float32(start), 0, 0)
        for _ in range(40):
            value = rng.choice(BAD) if rng.random() < 0.6 else 1.0
            wanted = paddle_table(*wanted, not math.isfinite(value), n)
            run.step(value)
            assert run.scaler.get_scale() == run.scaler._scale.item() == wanted[0]
            assert run.scaler._growth_tracker.item() == wanted[1]
            assert (run.scaler._get_growth_tracker(), run.scaler.state_dict()["fp8engine"]["bad"]) == wanted[1:]


@pytest.mark.parametrize("kind", [GradScaler, OnDevice])
def test_floor_ceiling_and_patience(kind: type[GradScaler]):
    for rules, values, scales in (
        ({"floor": 4.0}, [math.inf] * 3, [8, 4, 4]),
        ({"ceiling": 24.0}, [1.0] * 3, [24, 24, 24]),
        ({"decrease_every_n": 2}, [math.inf, 1.0, math.inf, math.inf], [16, 32, 32, 16]),
    ):
        run = Run(kind("cpu", 16.0, growth_interval=1, rules=ScaleRules(**rules)))  # pyright: ignore
        for value, scale in zip(values, scales, strict=True):
            run.step(value)
            assert run.scaler.get_scale() == scale


def test_the_scale_never_reaches_zero_where_torchs_does():
    given: Any = {"init_scale": 2.0**-120, "backoff_factor": 2.0**-10}
    ours, theirs = Run(GradScaler("cpu", **given)), Run(torch.amp.GradScaler("cpu", **given))
    for run, scale in ((ours, 2.0**-126), (theirs, 0)):
        run.steps(*[math.inf] * 4, 1.0)
        assert run.scaler.get_scale() == scale
    assert theirs.weight.isnan().all(), "0·Inf after the check: torch's scaler steps with NaN"
    assert ours.weight.tolist() == [1 - 2.0**-8] * 2


@pytest.mark.parametrize("kind", [GradScaler, OnDevice])
def test_resume_in_mid_sequence_is_exact(kind: type[GradScaler]):
    rng = random.Random(5)
    for _ in range(25):
        rules = ScaleRules(decrease_every_n=rng.randint(1, 3), floor=2.0, collapse_after=0)
        run = Run(kind("cpu", rules=rules, **{**parameters(rng), "init_scale": 512.0}))
        run.steps(*values(rng, rng.randint(0, 12)))
        first, early, late = run.scaler, kind("cpu"), kind("cpu")
        late.scale(torch.ones(()))
        for other in (early, late):
            other.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
        rest, seen = values(rng, 12), set()
        for scaler in (copy.deepcopy(first), pickle.loads(pickle.dumps(first)), early, late, first):
            scaler.rules = replace(scaler.rules, collapse_after=0)
            again, scales = Run(scaler), []
            for value in rest:
                again.step(value)
                scales.append(again.seen())
            seen.add(str((scales, scaler.stats)))
        assert len(seen) == 1


def test_state_dicts_go_both_ways():
    ours, theirs = Run(GradScaler("cpu", growth_interval=3)), Run(torch.amp.GradScaler("cpu", 7.0))
    ours.steps(1.0, math.inf, 1.0, 1.0)
    theirs.scaler.load_state_dict(ours.scaler.state_dict())
    back = GradScaler("cpu")
    back.load_state_dict(theirs.scaler.state_dict())
    for name in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"):
        assert ours.scaler.state_dict()[name] == theirs.scaler.state_dict()[name] == back.state_dict()[name]
    assert isinstance(ours.scaler, torch.amp.GradScaler)


@pytest.mark.parametrize("kind", [GradScaler, OnDevice])
def test_what_was_skipped_is_told_and_counted(kind: type[GradScaler]):
    run, told = Run(kind("cpu", 16.0, growth_interval=2)), []
    for value in (1.0, 1.0, math.nan, math.inf, 1.0):
        run.step(value)
        told.append(run.scaler.step_skipped())
        assert run.scaler.step_skipped(run.optimizer) == told[-1]
    assert told == [False, False, True, True, False]
    stats = run.scaler.stats
    assert (stats.iterations, stats.skipped, stats.skipped_in_a_row, stats.falls_in_a_row) == (5, 2, 0, 0)
    assert stats.history == ((2, 32.0), (3, 16.0), (4, 8.0))
    with pytest.raises(OptimizerError, match="no step"):
        run.scaler.step_skipped(torch.optim.SGD([run.weight]))


@pytest.mark.parametrize("kind", [GradScaler, OnDevice])
def test_an_iteration_that_ends_with_a_scale_of_ones_own_counts(kind: type[GradScaler]):
    run = Run(kind("cpu", 16.0))
    run.scaler.scale(run.weight)
    run.scaler.update(16.0)  # no step: no iteration
    for value, *new_scale in ((1.0,), (math.inf,), (1.0,), (math.inf, 4.0), (1.0, 2.0)):
        run.step(value, *new_scale)
    stats = run.scaler.stats
    assert (stats.iterations, stats.skipped, stats.skipped_in_a_row, stats.falls_in_a_row) == (5, 2, 0, 0)
    assert stats.history == ((2, 8.0), (4, 4.0), (5, 2.0))


def test_each_optimizer_is_skipped_for_itself_and_the_scale_falls_for_all():
    scaler, runs = GradScaler("cpu", 16.0), [Run(torch.amp.GradScaler("cpu")) for _ in range(2)]
    for run, value in zip(runs, (1.0, math.inf), strict=True):
        scaler.scale((run.weight * value).sum()).backward()
    for run in runs:
        scaler.step(run.optimizer)
    scaler.update()
    assert [scaler.step_skipped(run.optimizer) for run in runs] == [False, True]
    assert scaler.step_skipped()
    assert scaler.get_scale() == 8.0
    assert [run.weight[0] == 1 for run in runs] == [False, True]


@pytest.mark.parametrize("kind", [GradScaler, OnDevice])
def test_hooks_hear_each_change_and_join_fp8_histories(kind: type[GradScaler]):
    state = ScalingState([("layer", fe.delayed())])
    state.history_HS += 8.0
    run, factors = Run(kind("cpu", 16.0, growth_interval=2)), []
    run.scaler.on_scale_change(state.rescale_gradients)
    handle = run.scaler.on_scale_change(factors.append)
    run.steps(1.0, 1.0, math.inf, math.inf, 1.0)
    assert factors == [2.0, 0.5, 0.5]
    assert state.history_HS[0].tolist() == [8.0, 8.0, 4.0, 8.0], "the gradient's past amaxes, and no other's"
    run.scaler.update(64.0)
    assert factors[-1] == 8.0
    handle.remove()
    run.scaler.update(32.0)
    assert len(factors) == 4


def test_collapse_is_said_once_per_collapse():
    run = Run(GradScaler("cpu", rules=ScaleRules(collapse_after=3, floor=2.0**14)))
    run.steps(math.inf, math.inf)  # 2^15, 2^14, and at the floor it would have fallen
    with pytest.warns(UserWarning, match=r"fell 3 times in a row, to 16384.*find_overflow"):
        run.step(math.inf)
    run.step(math.inf)
    heard = []
    run = Run(GradScaler("cpu", rules=ScaleRules(collapse_after=2, on_collapse=heard.append)))
    run.steps(math.inf, 1.0, math.inf, math.inf, math.inf, 1.0, math.nan, math.nan)
    assert heard == [run.scaler] * 2
    Run(GradScaler("cpu", rules=ScaleRules(collapse_after=0))).steps(*[math.inf] * 20)  # warnings are errors


@pytest.mark.parametrize("fused", [False, True])
def test_no_more_waiting_than_torch(fused: bool):
    counts = []
    for kind in (torch.amp.GradScaler, OnDevice if fused else GradScaler):
        run = Run(kind("cpu", 16.0, growth_interval=2))
        run.optimizer = torch.optim.SGD([run.weight], lr=0.1, fused=fused)
        with Counted(*WAITS) as waits:
            run.steps(1.0, 1.0, math.inf, 1.0)
        counts.append(waits.count)
    assert counts == ([0, 0] if fused else [4, 4])


@pytest.mark.parametrize("kind", [GradScaler, OnDevice])
def test_a_scale_written_by_another_hand_is_seen(kind: type[GradScaler]):
    for n, before in ((1, 1.0), (2, math.inf)):  # of two bad iterations the one before the write still counts
        run = Run(kind("cpu", 16.0, decrease_every_n=n))
        run.step(before)
        run.scaler._scale.fill_(128.0)
        run.step(math.inf)
        assert run.scaler.get_scale() == 64.0
    run.scaler._scale = torch.tensor(32.0)
    assert run.scaler.get_scale() == 32.0


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler, OnDevice])
def test_unscaled_but_not_stepped_still_moves_the_scale(kind: Any):
    run = Run(kind("cpu", 16.0))
    run.step()  # what is remembered of this step must not answer for the next
    run.weight.grad = run.scaler.scale(torch.full((2,), math.inf))
    run.scaler.unscale_(run.optimizer)
    run.scaler.update()
    assert run.scaler.get_scale() == 8.0


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, -1.0, 1e-60, 1e60])
def test_no_such_scale(scale: float):
    run = Run(GradScaler("cpu", 16.0))
    run.step()
    before = run.scaler.state_dict()
    with pytest.raises(LossScaleError, match="finite and above 0"):
        GradScaler("cpu", scale)
    with pytest.raises(LossScaleError, match="nothing was loaded"):
        run.scaler.load_state_dict({**before, "scale": scale, "growth_interval": 5})
    with pytest.raises(LossScaleError, match="finite and above 0"):
        run.scaler.update(scale)
    assert run.scaler.state_dict() == before


@pytest.mark.parametrize(
    "wrong", [{"growth_factor": 1.0}, {"growth_factor": math.nan}, {"backoff_factor": 1.0}, {"backoff_factor": 0.0}]
)
def test_factors_that_make_no_rule(wrong: dict):
    with pytest.raises(LossScaleError, match="grows by more"):
        GradScaler("cpu", **wrong)
    scaler = GradScaler("cpu")
    with pytest.raises(LossScaleError, match="nothing was loaded"):
        scaler.load_state_dict({**scaler.state_dict(), **wrong})


def test_other_states_that_are_refused_or_moved():
    scaler = GradScaler("cpu", rules=ScaleRules(ceiling=2.0**20))
    nothing, no_rules = cast("Any", None), cast("Any", {"floor": 1.0})
    for error, words, call in (
        (OptimizerError, "disabled", lambda: scaler.load_state_dict({})),
        (LossScaleError, r"growth_factor, .* missing", lambda: scaler.load_state_dict({"scale": 1.0})),
        (LossScaleError, "-1", lambda: scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": -1})),
        (LossScaleError, "outside", lambda: GradScaler("cpu", 2.0**21, rules=ScaleRules(ceiling=2.0**20))),
        (LossScaleError, "takes a function of the factor, not NoneType", lambda: scaler.on_scale_change(nothing)),
        (LossScaleError, r"takes fe\.amp\.ScaleRules, not dict", lambda: GradScaler("cpu", rules=no_rules)),
        (LossScaleError, "a whole number of", lambda: GradScaler("cpu", growth_interval=cast("int", 2.0))),
        *((LossScaleError, None, functools.partial(ScaleRules, **rules)) for rules in NO_RULES),
    ):
        with pytest.raises(error, match=words):
            call()
    with pytest.warns(UserWarning, match="moved to 1048576"):
        scaler.load_state_dict(torch.amp.GradScaler("cpu", 2.0**24).state_dict())
    assert scaler.get_scale() == 2.0**20
    scaler.scale(torch.ones(()))
    with pytest.raises(LossScaleError, match="outside"):
        scaler.update(2.0**21)


def test_fp16_gradients_are_named_and_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).half())
    for given, name in ((model.parameters(), "parameter 2 of group 0"), (model.named_parameters(), "1.weight")):
        optimizer, scaler = torch.optim.SGD(given), GradScaler("cpu")
        model.zero_grad()
        scaler.scale(model[1](model[0](torch.ones(3, 2)).half()).sum()).backward()
        before: Any = [p.grad.clone() for p in model.parameters()]  # pyright: ignore[reportOptionalMemberAccess]
        with pytest.raises(LossScaleError, match=rf"{name} \(1, 2\) has an FP16 gradient.*MasterWeights"):
            scaler.step(optimizer)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))  # pyright: ignore


def test_calls_out_of_order():
    run = Run(GradScaler("cpu"))
    scaler, optimizer = run.scaler, run.optimizer

    def refused(told: str, call: Any, *arguments: Any, **more: Any) -> None:
        with pytest.raises(OptimizerError, match=told):
            call(*arguments, **more)

    refused("before any scale", scaler.update)
    refused("before any scale", scaler.step, optimizer)
    refused("before any scale", scaler.unscale_, optimizer)
    scaler.scale(run.weight.sum())
    refused("no parameter of SGD has a gradient", scaler.step, optimizer)
    refused("without a step", scaler.update)
    scaler.scale(run.weight.sum()).backward()
    scaler.unscale_(optimizer)
    refused("twice", scaler.unscale_, optimizer)
    scaler.step(optimizer)
    refused("stepped already", scaler.step, optimizer)
    refused("after step", scaler.unscale_, optimizer)
    scaler.update()
    refused("closure", scaler.step, optimizer, lambda: 0.0)
    refused("closure", scaler.step, optimizer, closure=lambda: 0.0)


def test_a_disabled_scaler_is_out_of_the_way():
    run = Run(GradScaler("cpu", enabled=False))
    run.step(2.0)
    assert (run.weight.tolist(), run.scaler.get_scale()) == ([1 - 2.0**-7] * 2, 1.0)
    assert not run.scaler.step_skipped()
    assert run.scaler.state_dict() == {}
    run.scaler.load_state_dict({})
    assert pickle.loads(pickle.dumps(run.scaler)).is_enabled() is False
