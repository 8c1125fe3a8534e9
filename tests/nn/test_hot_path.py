"""Length of the hot path, and what a model of very many layers costs: Python calls that are counted, and no clock.

One fe.Linear: files, changes of file and Python calls of a training step.  The layer is the only one of a converted
model, on a CPU without FP8 or BF16 products, so that its matmuls are emulated in FP32.  Its input wants a gradient: all
three matmuls run.  The steps before have warmed it up, and the weight moves between steps, as in training.  Counted the
same way, torchao's float8 linear takes 55 changes between 6 files.

Many layers: calls of Python grow as the layers do, reads of the tables (operations on tensors) not at all.
"""

import functools
import gc
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import converted, state_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8engine as fe
from fp8engine.ops import device

FILES, CHANGES, CALLS = 10, 43, 81
HERE = f"{Path(fe.__file__).parent}/"


def profile(function: Callable[[], object], note: Callable) -> None:
    """Tell `note` of every call, of a card's backward thread too."""
    gc.disable()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
        gc.enable()


def calls_of(step) -> list[tuple[str, str]]:
    """(file below fp8engine, function) of every call of a Python function of ours."""
    found = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(HERE):
            found.append((frame.f_code.co_filename.removeprefix(HERE), frame.f_code.co_qualname))

    profile(step, note)
    return found


def numbers_of(calls: list[tuple[str, str]]) -> tuple[int, int, int]:
    files = [file for file, _ in calls]
    return len(set(files)), sum(one != other for one, other in itertools.pairwise(files)), len(calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_a_linear_layer_is_short(dtype: torch.dtype, monkeypatch, request):
    monkeypatch.setattr(device, "cpu_multiplies", lambda format: False)
    device.product_dtype.cache_clear()  # asked of the CPU that stands in
    request.addfinalizer(device.product_dtype.cache_clear)
    model = converted(nn.Sequential(nn.Linear(64, 32)), "current").to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(16, 64, dtype=dtype, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()

    for _ in range(3):
        step()
        optimizer.step()
        optimizer.zero_grad()
    calls = calls_of(step)
    assert isinstance(model[0], fe.Linear)
    assert [call for call in calls if call[1] == "Linear.forward"] == [("nn/linear.py", "Linear.forward")]
    found, most = numbers_of(calls), (FILES, CHANGES, CALLS)
    told = "\n".join(f"{file} {name}" for file, name in calls)
    assert all(number <= limit for number, limit in zip(found, most, strict=True)), f"{found}:\n{told}"


class Deep(nn.Module):
    """Small linear layers, each of which reads the result of the one before, and as many that stay as they are."""

    def __init__(self, layers: int, left: int = 0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.left = nn.ModuleList(nn.Linear(4, 4) for _ in range(left))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def deep(layers: int, recipe: Any = "current", left: int = 0, **options) -> Deep:
    torch.manual_seed(0)
    return converted(Deep(layers, left), recipe, skip=lambda name, module: name.startswith("left"), **options)


def step(model: nn.Module) -> None:
    model(torch.randn(8, 4)).sum().backward()
    model.zero_grad()


def calls(function: Callable[[], object]) -> int:
    """Calls of Python and C functions, resumed generators included."""
    count = 0

    def count_one(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    profile(function, count_one)
    return count


class Counting(TorchDispatchMode):
    """How many operations ran."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def report(model: Any) -> None:
    assert fe.inspect(model).table(every=True).count("\n") > len(model.layers)


def state(model: Any) -> None:
    assert len(dict(fe.scaling_state(model))) >= 3 * len(model.layers)


def begins(model: Any) -> None:
    """Step 1, which decides what step 0 has seen."""
    model(torch.randn(8, 4))
    assert len(fe.inspect(model).decisions) > len(model.layers) / 4


def stores(model: Any) -> None:
    """The same with a recorded flow: what every result is stored in too."""
    begins(model)
    assert sum(line["slot"].endswith(".output") for line in fe.inspect(model).decisions) > len(model.layers) / 2


LINEAR = 2.0  # of twice the layers; what is quadratic has 4
MOST = {report: 1000, state: 1000, begins: 10_000, stores: 10_000}  # calls for each layer
DECIDING = fe.auto(min_sqnr_db=10)
COSTS = [(f, recipe) for f in (report, state) for recipe in ("current", "delayed", "auto")]
COSTS += [(begins, DECIDING), (stores, DECIDING)]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "recipe"), COSTS, ids=lambda each: getattr(each, "__name__", str(each)[:8]))
def test_twice_the_layers_are_twice_the_calls(function, recipe):
    counted, once = [], function in (begins, stores)
    for layers in (100, 200):
        inputs = (torch.randn(8, 4),) if function is stores else None
        model = deep(layers, recipe, left=0 if once else layers, example_inputs=inputs)
        step(model)
        if not once:  # caches of recipes and casts are made once
            function(model)
        counted.append(calls(functools.partial(function, model)))
    assert counted[1] < LINEAR * counted[0]
    assert 100 < counted[0] < MOST[function] * 100, "something was counted"


def test_the_tables_are_read_as_often_for_many_layers_as_for_few():
    counted = []
    for layers in (10, 200):
        model = deep(layers, "delayed")
        step(model)
        with Counting() as counting:
            report(model)
        counted.append(counting.count)
    assert counted[0] == counted[1] < 40


def test_a_plan_repeats_what_results_are_stored_in(tmp_path):
    """The tables stay the tensors that they are."""
    inputs = (torch.randn(8, 4),)
    first = deep(60, fe.auto(min_sqnr_db=10, interval=4), example_inputs=inputs)
    tables = state_of(first).live_2S
    for _ in range(3):
        step(first)
    assert state_of(first).live_2S is tables
    stored = [layer["output"]["cast"] == "E4M3 per tensor (delayed)" for layer in fe.inspect(first).layers]
    assert sum(stored) > 30
    assert not stored[-1]  # it leaves the model
    fe.inspect(first).save_plan(tmp_path / "plan.json")
    again = deep(60, fe.auto(plan=str(tmp_path / "plan.json")), example_inputs=inputs)
    for _ in range(3):
        step(again)
    assert fe.inspect(again).decisions == fe.inspect(first).decisions
