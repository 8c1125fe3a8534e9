"""decorate: what it refuses, and where it runs: a V100, no Triton, processes, threads, checkpoints, the compiler."""

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from scaled_run import decorated_step
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.distributed.processes import run
from fp8engine.amp.decorate import _check_precision, decorate
from fp8engine.amp.master import MasterWeights
from fp8engine.amp.scale_rules import ScaleRules
from fp8engine.amp.scaled import ScaledOptimizer
from fp8engine.amp.scaler import GradScaler
from fp8engine.errors import (
    BackendError,
    ConversionError,
    LossScaleError,
    OpListError,
    OptimizerError,
    UnknownName,
    UnsupportedDtype,
)

ROOT = Path(__file__).parents[2]


def net() -> Any:
    """A linear layer, a norm and a head."""
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(down=nn.Linear(8, 32), norm=nn.LayerNorm(32), relu=nn.ReLU(), up=nn.Linear(32, 1)))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def start(level: str = "O1", **given: Any) -> tuple[Any, Any]:
    model = net()
    return decorate(model, sgd(model), level=level, **given)


def patched(module: Any) -> Any:
    """As offloading hooks leave it."""
    module.forward = lambda x: x
    return module


REFUSED: list[tuple[type[Exception], str, Any]] = [
    (ConversionError, "no parameters", lambda m: decorate(nn.ReLU())),
    (ConversionError, "neither", lambda m: decorate()),
    (ConversionError, "not str", lambda m: decorate("model")),
    (UnknownName, "did you mean 'O2'", lambda m: decorate(m, sgd(m), level="O3")),
    (UnsupportedDtype, "float32", lambda m: decorate(m, sgd(m), dtype=torch.float32)),
    (UnknownName, "did you mean 'down'", lambda m: decorate(m, sgd(m), excluded_layers="dwon")),
    (ConversionError, "Conv2d is not in", lambda m: decorate(m, sgd(m), excluded_layers=nn.Conv2d)),
    (ConversionError, "this Linear is not in", lambda m: decorate(m, sgd(m), excluded_layers=nn.Linear(1, 1))),
    (OptimizerError, "none of the model's", lambda m: decorate(m, sgd(net()))),
    (OptimizerError, "no 16-bit", lambda m: decorate(m, sgd(m), master_weights=True)),
    (LossScaleError, "masters", lambda m: decorate(m, sgd(m), level="O2", master_weights=False)),
    (ConversionError, "first", lambda m: decorate(torch.compile(m), sgd(m))),
    (ConversionError, "DataParallel", lambda m: decorate(nn.DataParallel(m), sgd(m))),
    (ConversionError, "lazy", lambda m: decorate(nn.Sequential(m, nn.LazyLinear(4)), sgd(m))),
    (OptimizerError, "wrapped already", lambda m: decorate(m, decorate(sgd(m)))),
    (OptimizerError, "wrapped already", lambda m: decorate(m.half(), MasterWeights(sgd(m)))),
    (OptimizerError, "not Sequential", lambda m: decorate(m, m)),
    (OptimizerError, "give it to one", lambda m: decorate(m, [sgd(m), sgd(m.up)])),
    (ConversionError, "this Sequential was replaced .* call decorate first", lambda m: decorate(patched(m))),
    (ConversionError, "this Linear was replaced", lambda m: decorate(m, level="O2", excluded_layers=patched(m.up))),
    (ConversionError, "a model alone", lambda m: decorate(m, scaler=True)),
    (ConversionError, "or a GradScaler, not float", lambda m: decorate(m, sgd(m), scaler=cast("Any", 1024.0))),
    (
        ConversionError,
        "or a GradScaler, not ScaleRules",
        lambda m: decorate(m, sgd(m), scaler=cast("Any", ScaleRules())),
    ),
    (OpListError, "not dict", lambda m: decorate(m, sgd(m), level="O2", lists=cast("Any", {}))),
]


@pytest.mark.parametrize(("error", "word", "call"), REFUSED)
def test_refusals_leave_all_as_it_was(error, word, call):
    model = net()
    with pytest.raises(error, match=word):
        call(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in net().modules()]


def test_decorated_once_and_stepped_by_one_scaler():
    model, optimizer = start()
    for whole in (model, nn.Sequential(model)):
        with pytest.raises(ConversionError, match="decorated already"):
            decorate(whole, sgd(model))
    for other in (torch.amp.GradScaler("cpu"), GradScaler("cpu")):
        other.scale(model(torch.ones(2, 8)).sum()).backward()
        with pytest.raises(OptimizerError, match="holds its own GradScaler"):
            other.step(optimizer)
    with pytest.raises(OptimizerError, match="closure"):
        optimizer.step(lambda: 0.0)
    assert isinstance(optimizer, ScaledOptimizer)


def test_a_v100_is_told_to_take_fp16(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    card = {torch.device("cuda", 0)}
    with pytest.raises(BackendError, match=r"Tesla V100 \(sm_70\).*torch.float16"):
        _check_precision("O2", torch.bfloat16, card)
    _check_precision("O2", torch.float16, card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    _check_precision("O2", torch.bfloat16, card)


ALONE = """
import sys
import torch
import fp8engine
from fp8engine.amp.decorate import decorate
assert "triton" not in sys.modules, "imported with the package"
sys.modules["triton"] = None  # whoever imports it now fails; torch's own optimizers ask for it, and do without
seen = set()
class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        seen.update(t.dtype for t in torch.utils._pytree.tree_leaves((args, out)) if isinstance(t, torch.Tensor))
        return out
for level in ("O1", "O2"):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
    model, optimizer = decorate(model, torch.optim.AdamW(model.parameters()), level=level)
    before = model[2].weight.detach().clone()
    with Watch():
        for _ in range(8):
            optimizer.zero_grad()
            optimizer.backward(model(torch.ones(4, 8)).square().mean())
            optimizer.step()
    assert not torch.equal(before, model[2].weight)
    assert optimizer.scaler.stats.skipped < 8
assert torch.float16 in seen and torch.bfloat16 not in seen, seen
assert not [name for name in sys.modules if name.startswith("fp8engine.kernels")]
"""


def test_schedulers_made_before_or_after(level: str):
    model = net()
    optimizer = sgd(model)
    before = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer = decorate(model, optimizer, level=level, scaler=GradScaler("cpu", 16.0))
    after = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    decorated_step(optimizer, model(torch.ones(2, 8)).sum())
    before.step()
    after.step()
    assert optimizer.param_groups[0]["lr"] == 0.05 / 4


def test_hooks_of_steps_run_once_a_step_that_is_not_skipped(level: str):
    model, seen = net(), []
    plain = sgd(model)
    plain.register_step_pre_hook(lambda *_: seen.append("before"))
    model, optimizer = decorate(model, plain, level=level, scaler=GradScaler("cpu", 16.0))
    weight = model.down.weight
    optimizer.register_step_post_hook(lambda *_: seen.append(weight.detach().clone()))
    everywhere = register_optimizer_step_post_hook(lambda *_: seen.append("all"))
    for x in (1.0, torch.inf):
        decorated_step(optimizer, model(torch.full((2, 8), x)).sum())
    everywhere.remove()
    assert (seen[0], seen[2:]) == ("before", ["all"])
    assert torch.equal(seen[1], weight)


@pytest.mark.slow
def test_fp16_needs_no_triton_and_no_bf16():
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def work(rank: int, ranks: int, level: str) -> list:
    """One of two processes; rank 1's gradient overflows once, and both must skip."""
    model, optimizer = start(level, scaler=GradScaler("cpu", 256.0))
    parallel = nn.parallel.DistributedDataParallel(model)
    x = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(7))
    for step in range(4):
        optimizer.zero_grad()
        for half in x[step].chunk(2):  # two backward passes a step
            loss = (parallel(half.chunk(ranks)[rank]) - 1).square().mean() / 2
            optimizer.backward(loss * (torch.inf if step == 1 and rank == 1 else 1.0))
        optimizer.clip_grad_norm_(10.0)
        optimizer.step()
    return [optimizer.scaler.stats.skipped, *(p.detach() for p in model.parameters())]


@pytest.mark.few(1)
@pytest.mark.slow
def test_under_distributed_data_parallel(level: str):
    first, second = run(work, 2, level)
    assert first[0] == second[0] == 1
    assert all(torch.equal(a, b) for a, b in zip(first[1:], second[1:], strict=True))
    assert not torch.equal(first[1], net().down.weight.to(first[1].dtype))


def test_threads_of_data_parallel_see_their_own_replica():
    model, _ = start(scaler=GradScaler("cpu", 16.0))
    replica = model._replicate_for_data_parallel()
    replica.down = nn.Linear(8, 32)
    nn.init.zeros_(replica.down.weight)
    assert not torch.equal(replica(torch.ones(2, 8)), model(torch.ones(2, 8)))


@pytest.mark.slow
def test_under_torch_compile(level: str):
    model, optimizer = start(level, scaler=GradScaler("cpu", 64.0))
    compiled, losses = torch.compile(model, backend="aot_eager", fullgraph=True), []
    for _ in range(20):
        loss = (compiled(torch.ones(4, 8)) - 1).square().mean()
        decorated_step(optimizer, loss)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
