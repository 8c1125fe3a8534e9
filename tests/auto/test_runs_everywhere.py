"""`auto` runs wherever `current` does, and nothing that it does beside the numbers raises in a user's forward.

Under torch.func functional_call is a step; a transform, which FP8 layers refuse, is none and not sampled.
"""

import importlib
import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from autos import batch, controller, grow, lines, loss_of, plain
from autos import train as trained
from support import DTYPES, converted, same, state_of, tables
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vjp
from torch.utils.checkpoint import checkpoint as recompute

import fp8engine as fe
from fp8engine.auto.schedule import sampled_step
from fp8engine.numerics.recipe import resolve


def net(recipe, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return converted(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(dtype), recipe)


def train(model: Any, call, x: torch.Tensor) -> None:
    y = call(x)
    y.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad()


def eager(model, x):
    train(model, model, x)


def no_grad(model, x):
    with torch.no_grad():
        assert model(x).isfinite().all()


def inference_mode(model, x):
    with torch.inference_mode():
        assert model(x).isfinite().all()


def checkpoint(model, x):
    for reentrant in (False, True):
        train(model, partial(recompute, model, use_reentrant=reentrant), x.requires_grad_())


def compile(model, x):
    if model[0]._compiled_call_impl is None:
        torch.compiler.reset()
        for layer in model:
            layer.compile(backend="aot_eager")
    train(model, model, x)


MODES = {f.__name__: f for f in (eager, no_grad, inference_mode, checkpoint, compile)}


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("mode", [*list(MODES)[:-1], pytest.param("compile", marks=pytest.mark.slow)])
def test_auto_runs_wherever_current_runs(mode: str):
    # Model dtype x autocast's dtype: six forwards, of which compiled layers need five to decide.
    for model_dtype, cast in itertools.product(DTYPES, (None, torch.bfloat16, torch.float16)):
        for recipe in ("current", fe.auto(interval=1)):
            model, x = net(recipe, model_dtype), torch.randn(16, 32, dtype=model_dtype)
            for _ in range(6):
                with torch.autocast("cpu", cast, enabled=cast is not None):
                    MODES[mode](model, x)
        seen = controller(model).history.samples
        assert len(seen) == (6 if mode in ("eager", "checkpoint", "compile") else 4), (model_dtype, cast)


def broken(*arguments, **options):
    raise RuntimeError("no memory is left")


# What `auto` calls: (module, name), what the warning names.
STATISTICS = "step 0: 0.input, 0.weight, 0.grad_output and 3 others could not be sampled"
CALLS = {
    "a tensor's statistics": ("fp8engine.scaling.sample.measure", STATISTICS),
    "trying the casts": ("fp8engine.scaling.sample.judge", "step 1"),
    "room for a sample": ("fp8engine.auto.known.StepSamples", "step 0"),
    "the copy to the host": ("fp8engine.auto.controller.start_copy", "step 0"),
    "deciding": ("fp8engine.auto.controller.decide", "step 1"),
}


@pytest.mark.parametrize("where", CALLS)
def test_sampling_that_fails_is_said_once_by_name_and_training_goes_on(where: str, monkeypatch: pytest.MonkeyPatch):
    target, named = CALLS[where]
    plain, model, strict = net("current"), net(fe.auto(interval=1)), net(fe.auto(interval=1))
    controller(strict).failures.strict = True  # as fe.convert(strict=True) leaves it where FP8 is not emulated
    module, _, name = target.rpartition(".")  # by its path: fe.auto is a function
    monkeypatch.setattr(importlib.import_module(module), name, broken)
    told = []
    for step in range(4):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = model(x)
        told += [str(each.message) for each in caught if each.category is fe.errors.SamplingWarning]
        assert torch.equal(y, plain(x))
        y.square().mean().backward()
        model.zero_grad()
    assert controller(model).step == 3
    assert len(told) == 1
    assert named in told[0]
    assert told[0].endswith("RuntimeError: no memory is left")
    assert list(fe.inspect(model).auto.failed) == told
    assert told[0] in str(fe.inspect(model)).replace("\n", " ")
    with pytest.raises(fe.errors.StrictError, match=r"^strict=True: auto: step .*no memory is left$"):
        grow(strict, 2, 32, 1.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_layer_says_it_too(backend: str, monkeypatch: pytest.MonkeyPatch):
    torch.compiler.reset()
    model = net(fe.auto(interval=1))
    for layer in model:
        layer.compile(backend=backend)
    monkeypatch.setattr("fp8engine.scaling.sample.measure", broken)
    with pytest.warns(fe.errors.SamplingWarning, match=r"0\.input.*RuntimeError: no memory is left"):
        grow(model, 6, 32, 1.0)
    assert model[0].numerics.recipe.input.is_fp8


def test_an_error_of_a_listener_is_its_users():
    model = net(fe.auto(interval=1))

    def stop(alarm):
        raise KeyError("enough")

    fe.scaling_state(model).on_alarm(stop)
    with pytest.raises(KeyError, match="enough"):
        grow(model, 12, 32)
    assert controller(model).failures.told == {}


# torch.func


def loss(model: Any, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    found = loss_of(functional_call(model, parameters, (x,)))
    fe.scaling_state(model).see_loss(found)
    return found


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


TRANSFORMS = {
    "grad": lambda model, x: grad(lambda p: loss(model, p, x))(values(model)),
    "grad_and_value": lambda model, x: grad_and_value(lambda p: loss(model, p, x))(values(model)),
    "vjp": lambda model, x: vjp(lambda p: loss(model, p, x), values(model)),
}


def looks(model: Any) -> dict:
    return {slot: list(seen) for slot, seen in controller(model).history.samples.items()}


@pytest.mark.parametrize("where", ["between steps", "between a forward and its backward"])
@pytest.mark.parametrize("what", TRANSFORMS)
def test_a_refused_transform_changes_no_sample_and_no_decision(where: str, what: str):
    quiet, disturbed = plain(), plain()

    def transform(*_: Any) -> None:
        with pytest.raises(fe.errors.GradientError, match=r"does not take torch\.func's transforms"):
            TRANSFORMS[what](disturbed, batch(0).detach())

    def call(x):
        y = disturbed(x)
        transform()
        return y

    steps = sampled_step(3, 4) + 2
    where_to: Any = {"between": transform} if where == "between steps" else {"call": call}
    assert trained(disturbed, steps, **where_to) == trained(quiet, steps)
    assert lines(quiet) == lines(disturbed) != []
    assert looks(quiet) == looks(disturbed)


@pytest.mark.parametrize("what", TRANSFORMS)
def test_layers_decided_to_be_in_16_bits_take_them_and_are_not_sampled_there(what: str):
    quiet, disturbed, fixed = plain(), plain(), plain("bf16")
    for model in (quiet, disturbed):
        for numerics in controller(model).layers:
            numerics.adopt(resolve("bf16"))
    for model in (quiet, disturbed):
        y = model(batch(0))
        samples: Any = state_of(model).samples
        if model is disturbed:
            before = [part.clone() for part in samples.parts]
            found = TRANSFORMS[what](model, 7 * batch(1).detach())
            assert same(before, samples.parts)
            if what == "grad":
                expected = TRANSFORMS[what](fixed, 7 * batch(1).detach())
                assert same(list(found.values()), list(expected.values()))
        loss_of(y).backward()
        model.zero_grad()
    assert trained(quiet, 4, start=1) == trained(disturbed, 4, start=1)
    assert lines(quiet) == lines(disturbed)
    assert looks(quiet) == looks(disturbed) != {}
    assert fe.inspect(disturbed).auto.failed == ()


def test_functional_call_without_a_transform_is_a_step():
    called, functional = plain(), plain()

    def call(x):
        return functional_call(functional, dict(functional.named_parameters()), (x,))

    assert trained(called, 9) == trained(functional, 9, call)
    assert lines(called) == lines(functional) != []
    assert same(tables(called), tables(functional))
