"""What saturates under a predicted output scale: counted, never hidden, answered by a margin at the next step."""

import math
from typing import Any

import pytest
import torch
from chains import Chain, chain, storing
from support import converted, same, state_of

import fp8engine as fe
from fp8engine.ops.tensor import Float8Tensor
from fp8engine.scaling.output_slots import MOST


def step(model: Chain, x: torch.Tensor) -> Float8Tensor:
    """One training step; what `up` made in it."""
    state_of(model).begin_step()
    h = model.up(x)
    model.down(h).sum().backward()
    assert isinstance(h, Float8Tensor)
    return h


def output_of(model: Chain) -> Any:
    return fe.scaling_state(model)["up.output"]


def test_a_jump_saturates_once_and_leaves_room_for_the_next():
    model, x = chain(bias=False), torch.randn(64, 40)
    with torch.no_grad():
        y = x @ model.up.weight.t()
    step(model, x)
    before = output_of(model)
    assert before.margin == 0
    jump = step(model, 3 * x)
    after = output_of(model)
    top = 448 * jump.scale
    # FP8 operands move a value by 2 %, seldom by 10.
    least, most = ((3 * y.abs() > factor * top).sum() for factor in (1.1, 0.9))
    assert 0 < least <= after.saturated - before.saturated <= most
    assert jump.dequantize().detach().abs().max().item() == pytest.approx(top.item())
    later = step(model, 9 * x)  # three times more again: within the margin of 2^2
    last = output_of(model)
    assert last.margin == fe.inspect(model).layers[0]["output"]["margin"] == 2
    assert later.scale.item() == pytest.approx(4 * after.amax.item() / 448, rel=1e-5)
    assert last.saturated == after.saturated


# Factors of one input from step to step; the third widens no more than the second asked for.
MARGINS = {
    "a quarter more is no trend": ([1.0, 1.1, 1.2, 1.0], 0),
    "it ends somewhere": ([100.0**i for i in range(8)], MOST),
    "room that was left is used before there is more": ([1.0, 3.0, 9.0, 9.0], 2),
}


@pytest.mark.parametrize("case", MARGINS)
def test_the_margin_follows_a_trend(case: str):
    model, x = chain(), torch.randn(64, 40)
    factors, margin = MARGINS[case]
    tops = set()
    for factor in factors:
        step(model, factor * x)
        tops.add(output_of(model).history[0].item())
    assert len(tops) > 1, "its scale moved meanwhile"
    state_of(model).begin_step()
    assert output_of(model).margin == margin


def test_nan_and_inf_stay_visible_and_freeze_nothing():
    model, x = chain(), torch.randn(64, 40)
    bad = x.clone()
    bad[3, 5] = math.inf
    h = step(model, bad)
    assert h.dequantize()[3].isnan().all()
    assert h.dequantize()[4:].isfinite().all()
    slot = output_of(model)
    assert int(slot.nonfinite) == 50
    assert slot.amax.isfinite()
    scale = step(model, x).scale.item()
    assert 0.5 * h.scale.item() <= scale <= 2 * h.scale.item()


def test_zeros_alone_give_no_scale():
    model = converted(Chain(bias=False), overrides={"up": storing()})
    weight = model.up.weight.detach().clone()
    x = torch.randn(64, 40)
    with torch.no_grad():
        model.up.weight.zero_()
    for _ in range(2):
        model(x).sum().backward()
    with torch.no_grad():
        model.up.weight.copy_(weight)
    state_of(model).begin_step()
    assert type(model.up(x)) is torch.Tensor
    model(x).sum().backward()
    assert step(model, x).dequantize().abs().max() > 0


def test_a_frozen_clock_widens_nothing():
    model, x = chain(), torch.randn(64, 40)
    step(model, x)
    state_of(model).outputs.widen = False
    step(model, 10 * x)
    step(model, x)
    assert output_of(model).margin == 0


def test_saved_and_loaded_its_margin_goes_on():
    """That a resumed run is the uninterrupted one is a law, of a row whose outputs never jump."""
    model, x = chain(), torch.randn(64, 40)
    for factor in (1.0, 5.0, 1.0):
        step(model, factor * x)
    twin = converted(Chain(), overrides={"up": storing()})
    twin.load_state_dict(model.state_dict())
    fe.load_scaling_state_dict(twin, fe.scaling_state_dict(model))
    for factor in (2.0, 20.0, 1.0):
        ours, theirs = step(model, factor * x), step(twin, factor * x)
        assert same([ours.data.view(torch.uint8), ours.scale], [theirs.data.view(torch.uint8), theirs.scale])
    assert output_of(model).to_dict() == output_of(twin).to_dict()


def test_a_state_without_outputs_loads_and_the_output_begins_again():
    saved = fe.scaling_state_dict(converted(Chain(), fe.delayed()))
    assert (saved["version"], fe.scaling_state_dict(chain())["version"]) == (1, 2)
    model = converted(Chain(), fe.delayed(), overrides={"up": storing(fe.delayed())})
    fe.load_scaling_state_dict(model, saved)
    assert type(model.up(torch.randn(4, 40))) is torch.Tensor
    with pytest.raises(fe.errors.StateError, match=r"1 unknown \(up.output\)"):
        fe.load_scaling_state_dict(converted(Chain(), fe.delayed()), fe.scaling_state_dict(model))


def test_a_loss_scale_leaves_outputs_alone():
    model = converted(torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)]), storing(fe.delayed()))
    for _ in range(2):
        model(torch.randn(8, 16)).sum().backward()
    names = [f"{i}.output" for i in range(3)]
    before = [fe.scaling_state(model)[name] for name in names]
    fe.scaling_state(model).rescale_gradients(1024.0)
    for name, was in zip(names, before, strict=True):
        now = fe.scaling_state(model)[name]
        assert now.amax == was.amax > 0
        assert torch.equal(now.history, was.history)
