"""Length of the hot path: files, changes of file and Python calls of one training step of one fe.Linear.

The layer is the only one of a converted model, on a CPU without FP8 or BF16 products, so that its matmuls are emulated
in FP32.  Its input wants a gradient: all three matmuls run.  The steps before have warmed it up, and the weight moves
between steps, as in training.  Structural, no clock: the same numbers on every machine.  Counted the same way,
torchao's float8 linear takes 55 changes between 6 files.
"""

import gc
import itertools
import sys
import threading
from pathlib import Path

import pytest
import torch
from support import converted
from torch import nn

import fp8engine as fe
from fp8engine.ops import device

FILES, CHANGES, CALLS = 10, 43, 81
HERE = f"{Path(fe.__file__).parent}/"


def calls_of(step) -> list[tuple[str, str]]:
    """(file below fp8engine, function) of every call of a Python function of ours, of a card's backward thread too."""
    found = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(HERE):
            found.append((frame.f_code.co_filename.removeprefix(HERE), frame.f_code.co_qualname))

    gc.disable()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
        gc.enable()
    return found


def numbers_of(calls: list[tuple[str, str]]) -> tuple[int, int, int]:
    """(files, changes of file, calls)."""
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
