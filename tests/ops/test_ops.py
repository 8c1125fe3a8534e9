"""Which backend a matmul runs on, and dispatch modes, which change no number."""

import contextlib
import threading

import numpy as np
import pytest
import torch
from casts import E5M2
from contracts import Watch
from support import FP8_RECIPES, assert_within, products, same, tables
from torch.utils.flop_counter import FlopCounterMode

import fp8engine as fe
from fp8engine.errors import BackendError, UnknownName
from fp8engine.numerics.recipe import resolve
from fp8engine.ops import casts, matmul
from tests.helpers.casts import cast_of

CPU = torch.device("cpu")


def chosen() -> str:
    return matmul.choose(CPU, by_block=False)


def trained(recipe: str) -> tuple[fe.Linear, torch.Tensor, torch.Tensor]:
    """(layer, x, dy) from the same random state every time."""
    torch.manual_seed(0)
    layer = fe.Linear(48, 33, recipe=recipe)
    return layer, torch.randn(20, 48).requires_grad_(), torch.randn(20, 33)


def results(layer: fe.Linear, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    grads = [x.grad, layer.weight.grad, layer.bias.grad]
    return [y.detach(), *(grad for grad in grads if grad is not None)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The keywords of every call of torch's scaled matmul."""
    seen, real = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **rest: seen.append(rest) or real(*args, **rest))
    return seen


def test_a_backend_holds_within_its_block_and_blocks_nest():
    default = chosen()
    with fe.backend("cublas"):
        with fe.backend("reference"):
            assert chosen() == "reference"
            assert matmul.choose(CPU, by_block=True) == "reference"
        assert chosen() == "cublas"
        with pytest.raises(ZeroDivisionError), fe.backend("reference"):
            raise ZeroDivisionError
        assert chosen() == "cublas"
    assert chosen() == default


def test_a_backend_is_its_threads_own():
    inside, seen = threading.Barrier(2, timeout=60), {}

    def other():
        seen["at first"] = chosen()
        with fe.backend("reference"):
            inside.wait()
            seen["own"] = chosen()
            inside.wait()

    default = chosen()
    with fe.backend("cublas"):
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait()
        assert chosen() == "cublas"
        inside.wait()
        thread.join()
    assert seen == {"at first": default, "own": "reference"}


def test_a_backend_that_is_not_there_says_so_and_changes_nothing():
    default = chosen()
    with pytest.raises(
        UnknownName, match=r"unknown backend 'cublass'; did you mean 'cublas'\? known: triton, cublas, "
    ):
        fe.backend("cublass").__enter__()
    assert chosen() == default


@pytest.mark.parametrize("recipe", [name for name in FP8_RECIPES if name != "blockwise"])
def test_cublas_on_a_cpu_computes_the_same_products(recipe: str, calls: list[dict]):
    """Against products in float64: K additions and 3 factors in FP32, one BF16 rounding, one to FP32 with the bias."""
    layer, x, dy = trained(recipe)
    with fe.backend("cublas"):
        y = layer(x)
        y.backward(dy)
    want = products(resolve(recipe), x, layer.weight, layer.bias, dy)
    for name, value, sums in zip(("y", "dx", "dw"), results(layer, x, y)[:3], (48, 33, 20), strict=True):
        wanted, absolute = getattr(want, name), getattr(want, f"{name}_abs")
        product = wanted - layer.bias.detach().double().numpy() if name == "y" else wanted
        bound = 2.0**-8 * np.abs(product) + (sums + 3) * 2.0**-24 * absolute + 2.0**-23 * np.abs(wanted)
        assert_within(value, wanted, 1.01 * bound, name)
    assert len(calls) == 3 * resolve(recipe).fp8_share
    assert [rest["use_fast_accum"] for rest in calls] == [True, True, False][: len(calls)]  # wgrad promotes
    row = fe.inspect(layer).layers[0]
    assert (row["backend"], row["emulated"]) == ("cublas", True)  # a CPU's scaled matmul is no Tensor Core
    with fe.backend("reference"):
        layer(x)
    assert fe.inspect(layer).layers[0]["backend"] == "reference"


@pytest.mark.parametrize("backend", ["cublas", "reference"])
def test_e5m2_by_e5m2_is_refused_on_every_backend_and_blocks_by_cublas(backend: str):
    a = casts.quantize(torch.ones(16, 16), cast_of(E5M2, -1, -1))
    for mode in (torch.no_grad(), torch.enable_grad()):  # called directly, and through the dispatcher
        with mode, fe.backend(backend), pytest.raises(BackendError, match="do not multiply E5M2 by E5M2"):
            matmul.matmul(a, a)
    with fe.backend("cublas"), pytest.raises(BackendError, match=r"'cublas' cannot multiply these: .*along K"):
        fe.Linear(16, 16, recipe="blockwise")(torch.randn(4, 16))


def test_a_compiled_graph_follows_the_backend_of_its_caller(calls: list[dict]):
    layer, x, _ = trained("current")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    assert not calls
    with fe.backend("cublas"):
        compiled(x)
    assert len(calls) == 1


@pytest.mark.parametrize("mode", [Watch, lambda: FlopCounterMode(display=False)], ids=["Watch", "FlopCounterMode"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_dispatch_mode_changes_no_number(recipe: str, mode):
    runs = []
    for watching in (None, mode()):
        layer, x, dy = trained(recipe)
        for _ in range(3):  # delayed: measured, then predicted
            x.grad = layer.weight.grad = layer.bias.grad = None
            layer.weight.data.mul_(1.25)  # a new version, so that no step reuses the last one's weight
            with watching or contextlib.nullcontext():
                y = layer(x)
                y.backward(dy)
        runs.append([*results(layer, x, y), *tables(layer)])
    assert same(*runs)
    if isinstance(watching, Watch):
        assert watching.names.count("matmul") == 3 * 3 * resolve(recipe).fp8_share
