"""The scaling state over a model's life: evaluation, copies, moves, save and resume, roots that are passed by."""

import copy
import functools

import pytest
import torch
from support import Net, converted, same, state_of, tables, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.ops.reference.operand import COUNTERS

RECIPES = ["delayed", "current"]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture
def start() -> Net:
    return Net()


def evaluate_without_gradients(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


def test_evaluation_after_a_checkpointed_step_records_nothing(start: Net):
    # A reentrant checkpoint around the root runs it first without gradients, as an evaluation does.
    model, x = converted(start, "delayed"), torch.randn(6, 32, requires_grad=True)
    checkpoint(model, x, use_reentrant=True).sum().backward()
    model(torch.randn(6, 32)).sum().backward()
    before = tables(model)[:2]
    evaluate_without_gradients(model, torch.randn(6, 32) * 1000)
    assert same(tables(model)[:2], before)


@pytest.mark.parametrize("recipe", ["delayed", fe.auto(objective="speed", interval=2)], ids=["delayed", "auto"])
@pytest.mark.parametrize("through", [False, True])
def test_evaluation_between_checkpointed_steps_begins_none(start: Net, recipe: str | fe.Recipe, through: bool):
    """The model itself, or through its checkpoint: the results are those of one that is not checkpointed."""
    plain, model = converted(start, recipe), converted(start, recipe)
    recomputed = functools.partial(checkpoint, model, use_reentrant=True)
    for step in range(5):
        x = (torch.randn(6, 32) * 2**step).requires_grad_()
        for call in (plain, recomputed):
            call(x).sum().backward()
        before, y = tables(model)[:2], (x.detach() / 8).requires_grad_()
        with torch.no_grad():
            assert torch.equal((recomputed if through else model)(y), plain(y)), step
        assert same(tables(model)[:2], before)


def test_evaluation_uses_the_last_scale_and_recasts_what_is_beyond_it():
    model, x = converted(nn.Sequential(nn.Linear(16, 16)), fe.delayed(margin=1)), torch.randn(8, 16)
    assert torch.isfinite(evaluate_without_gradients(model, x)).all(), "uncalibrated: the tensor's own scale"
    for _ in range(2):
        model(x.clone()).sum().backward()
    s = state_of(model).live_2S[1, 0].item()
    assert s == pytest.approx(224 / x.abs().max().item()), "half of 448: margin 1"
    y = torch.randn(8, 16).clamp(-1, 1) * x.abs().max() / 3
    codes = fe.quantize(y, fe.Cast(fe.E4M3), torch.tensor(1 / s))
    weight = fe.quantize(model[0].weight, fe.Cast(fe.E4M3), fe.scaling_state(model)["0.weight"].scale)
    want = fe.matmul(codes, weight, bias_N=model[0].bias, out=fe.FP32)
    assert torch.allclose(evaluate_without_gradients(model, y), want, rtol=2.0**-7, atol=2.0**-7)
    before = int(fe.scaling_state(model)["0.input"].recasts)
    big = evaluate_without_gradients(model, x * 1000)
    assert (big - (x * 1000) @ model[0].weight.t()).norm() < 0.06 * big.norm()
    assert int(fe.scaling_state(model)["0.input"].recasts) == before + 1
    assert state_of(model).live_2S[1, 0].item() == s


@pytest.mark.parametrize("cast", [torch.Tensor.half, torch.Tensor.bfloat16], ids=["half", "bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_change_of_dtype_leaves_the_tables_alone(start: Net, recipe: str, cast):
    model = converted(start, recipe)
    train(model)
    before = tables(model)
    getattr(model, cast.__name__)()
    assert same(tables(model), before)
    assert [t.dtype for t in tables(model)] == [torch.float32, torch.float32, torch.int64]
    x = cast(torch.randn(8, 32))
    y = model(x)
    assert y.dtype == x.dtype
    y.float().square().mean().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {x.dtype}
    assert int(fe.scaling_state(model)["blocks.1.down.input"].calls) == int(before[2][0, 4 * 5]) + 1


def test_deferred_init_on_meta_starts_fresh_and_what_moves_no_table_keeps_it():
    with torch.device("meta"):
        model = Net()
    converted(model, "delayed")
    assert state_of(model).device.type == "meta"
    assert model(torch.empty(4, 32, device="meta")).shape == (4, 32)
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    history, live, counts = tables(model)
    assert not any(table.any() for table in (history, live[1], counts))
    assert (live[0] == -1).all()
    assert all(torch.isfinite(torch.tensor(train(model))))
    model.to("cpu")
    model.share_memory()
    train(model)
    assert int(fe.scaling_state(model)["blocks.0.up.input"].calls) == 8


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_saved_state_is_a_copy(start: Net, recipe: str):
    model = converted(start, recipe)
    train(model)
    saved = fe.scaling_state_dict(model)
    before = {name: slot["live"].clone() for name, slot in saved["slots"].items()}
    train(model)
    assert all(torch.equal(saved["slots"][name]["live"], live) for name, live in before.items())
    assert set(saved["slots"]) == set(fe.scaling_state(model))


def last_slot(saved: dict, change) -> dict:
    (name, slot), others = list(saved["slots"].items())[-1], dict(list(saved["slots"].items())[:-1])
    return {**saved, "slots": {**others, name: change(slot)}}


def of(make, recipe) -> dict:
    return fe.scaling_state_dict(converted(make(), recipe))


# What a saved state is made into, and the words with which it is refused.
WRONG = {
    "of another model": (
        lambda _: of(lambda: nn.Sequential(nn.Linear(16, 16)), "delayed"),
        r"another model: 18 slots missing \(.*blocks\.0\..*3 unknown \(0\.",
    ),
    "of another history": (
        lambda _: of(Net, fe.delayed(history=4)),
        r"history should be torch.float32 of \[16\].*another recipe or history",
    ),
    "of another recipe": (lambda _: of(Net, "current"), r"history should be torch.float32 of \[16\]"),
    "truncated": (
        lambda saved: {**saved, "slots": dict(list(saved["slots"].items())[:-1])},
        r"1 slots missing \(blocks\.1\.down\.grad_output\)",
    ),
    "a short last slot": (
        lambda saved: last_slot(saved, lambda slot: {"history": slot["history"]}),
        r"blocks\.1\.down\.grad_output: live should be",
    ),
    "a slot of another dtype": (
        lambda saved: last_slot(saved, lambda slot: {**slot, "live": slot["live"].double()}),
        r"blocks\.1\.down\.grad_output: live should be torch.float32",
    ),
    "of another version": (lambda saved: {**saved, "version": 4}, "not a scaling state dict of version 1"),
    "of weights": (lambda _: Net().state_dict(), "not a scaling state dict"),
    "nothing": (lambda _: None, "not a scaling state dict"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_state_is_refused_and_nothing_is_loaded(start: Net, wrong: str):
    model, (make, words) = converted(start, "delayed"), WRONG[wrong]
    train(model, steps=2)
    before = tables(model)
    train(trained := copy.deepcopy(model), steps=3)  # its numbers differ from the model's
    with pytest.raises(fe.errors.StateError, match=words):
        fe.load_scaling_state_dict(model, make(fe.scaling_state_dict(trained)))
    assert same(tables(model), before)


def test_slots_are_looked_up_by_name_and_a_wrong_one_names_the_nearest(start: Net):
    state = fe.scaling_state(converted(start, "delayed"))
    assert len(state) == len(list(state)) == 18
    assert state["blocks.1.down.weight"].format is fe.E4M3
    assert state["blocks.1.down.grad_output"].format is fe.E5M2
    for wrong in ("blocks.0.upp.input", "block.0.up.input", "blocks.0.up.inputs"):
        with pytest.raises(KeyError, match=r"did you mean 'blocks\.0\.up\.input'"):
            state[wrong]


class Wrapper(nn.Module):
    """Somebody's module around a converted model, which calls no hook of it."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner.forward(x)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_root_that_is_passed_by_still_updates(start: Net, recipe: str, wrapped: bool):
    model, other = (converted(copy.deepcopy(start), recipe) for _ in range(2))
    assert train(other, Wrapper(other) if wrapped else other.forward) == train(model)
    assert same(weights(other), weights(model))
    assert same(exact_tables(other), exact_tables(model))


def exact_tables(model: nn.Module) -> list[torch.Tensor]:
    """`tables` without the sampled counters: siblings share a cast, and its sample, only in a forward of the root."""
    history, live, counts = tables(model)
    return [history, live, counts[[i for i, name in enumerate(COUNTERS) if name not in ("sampled", "underflowed")]]]
