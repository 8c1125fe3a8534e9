"""`auto` runs wherever `current` does, and nothing that it does beside the numbers raises in a user's forward."""

import itertools
from functools import partial

import pytest
import torch
from autos import controller
from support import converted
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

import fp8engine as fe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AUTOCAST = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def net(recipe, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return converted(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(dtype), recipe)


def train(model: nn.Module, call, x: torch.Tensor) -> None:
    y = call(x)
    y.float().square().mean().backward()
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.isfinite().all()


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
SLOW = [pytest.param(mode, marks=pytest.mark.slow) if mode == "compile" else mode for mode in MODES]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("mode", SLOW)
def test_auto_runs_wherever_current_runs(mode: str):
    """Model dtype x autocast's dtype: six forwards, of which compiled layers need five to decide."""
    for model_dtype, cast in itertools.product(DTYPES, AUTOCAST):
        ends = {}
        for recipe in ("current", fe.auto(interval=1)):
            model = net(recipe, DTYPES[model_dtype])
            x = torch.randn(16, 32, dtype=DTYPES[model_dtype])
            try:
                for _ in range(6):
                    with torch.autocast("cpu", AUTOCAST[cast], enabled=AUTOCAST[cast] is not None):
                        MODES[mode](model, x)
                ends[str(recipe)] = "ran"
            except Exception as error:
                ends[str(recipe)] = f"{type(error).__name__}: {error}"
        assert set(ends.values()) == {"ran"}, (model_dtype, cast, ends)
        seen = controller(model).history.samples
        assert len(seen) == (6 if mode in ("eager", "checkpoint", "compile") else 4), (model_dtype, cast)
