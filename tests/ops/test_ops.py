"""Which backend a matmul runs on, and dispatch modes, which change no number.

At the end: operands on two devices, and scales of another shape; the error names the tensor.
"""

import contextlib
import itertools
import threading

import pytest
import torch
from casts import E5M2, cast_of
from contracts import Watch
from support import FP8_RECIPES, same, tables
from torch.utils.flop_counter import FlopCounterMode

import fp8engine as fe
from fp8engine.errors import BackendError, ShapeError, UnknownName
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.recipe import resolve
from fp8engine.ops import casts, matmul

CPU = torch.device("cpu")
CURRENT = fe.Cast(fe.E4M3)


def chosen() -> str:
    return matmul.choose(CPU, by_block=False)


def trained(recipe: str) -> tuple[fe.Linear, torch.Tensor, torch.Tensor]:
    """(layer, x, dy) from the same random state every time."""
    torch.manual_seed(0)
    layer = fe.Linear(48, 33, recipe=recipe)
    return layer, torch.randn(20, 48).requires_grad_(), torch.randn(20, 33)


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


@pytest.mark.parametrize("backend", ["cublas", "reference"])
def test_e5m2_by_e5m2_is_refused_on_every_backend_and_blocks_by_cublas(backend: str):
    a = casts.quantize(torch.ones(16, 16), cast_of(E5M2, -1, -1))
    for mode in (torch.no_grad(), torch.enable_grad()):  # called directly, and through the dispatcher
        with mode, fe.backend(backend), pytest.raises(BackendError, match="do not multiply E5M2 by E5M2"):
            matmul.matmul(a, a)
    with fe.backend("cublas"), pytest.raises(BackendError, match=r"'cublas' cannot multiply these: .*along K"):
        fe.Linear(16, 16, recipe="blockwise")(torch.randn(4, 16))


def test_a_compiled_graph_follows_the_backend_of_its_caller(monkeypatch: pytest.MonkeyPatch):
    calls, real = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **rest: calls.append(rest) or real(*args, **rest))
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
        runs.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad, *tables(layer)])
    assert same(*runs)
    if isinstance(watching, Watch):
        assert watching.names.count("matmul") == 3 * 3 * resolve(recipe).fp8_share


def elsewhere(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_a_matmul_or_a_cast_over_two_devices_names_the_tensor():
    plain, (q, other) = torch.randn(4, 32), (fe.quantize(torch.randn(rows, 32), CURRENT) for rows in (4, 8))
    for a, b, bias, what in (
        (q, other.to("meta"), None, "b"),
        (q, other, elsewhere(8), "bias"),
        (plain, elsewhere(8, 32), None, "b"),
        (plain, torch.randn(8, 32), elsewhere(8), "bias"),
    ):
        with pytest.raises(BackendError, match=rf"^matmul: its first tensor is on cpu and {what} on meta; .*move one"):
            fe.matmul(a, b, bias_N=bias)
    with pytest.raises(BackendError, match=r"^quantize: .* on cpu and scale on meta"):
        fe.quantize(plain, CURRENT, scale=elsewhere())


@pytest.mark.parametrize("what", ["input", "weight"])
@pytest.mark.parametrize("recipe", ["current", "bf16"])
def test_a_layer_and_its_input_on_two_devices_name_the_layer(recipe: str, what: str):
    layer = fe.Linear(32, 8, recipe=recipe)
    layer.numerics.name = "blocks.3.up"
    x = torch.randn(4, 32)
    if what == "input":
        x = x.to("meta")
    else:
        layer = layer.to("meta")
    with pytest.raises(BackendError, match=r"^blocks\.3\.up: .* on (cpu|meta) and weight on (meta|cpu)"):
        layer(x)


@pytest.mark.parametrize("text", ["e4m3", "e4m3 1x-1"])
def test_a_scale_of_another_shape_is_refused_with_the_shape_it_should_have(text: str):
    x, how, want = torch.randn(4, 32), Cast.parse(text), r"\[\]" if text == "e4m3" else r"\[4, 1\]"
    for shape, quantize in itertools.product(((3,), (4, 2), (1, 4), (5, 1)), (casts.quantize_given, fe.quantize)):
        with pytest.raises(ShapeError, match=rf"^quantize: scale is .*has {want}"):
            quantize(x, how, torch.ones(shape))
    one, wanted = (casts.quantize_given(x, each, torch.tensor(0.25)) for each in (how, Cast.parse("e4m3")))
    assert torch.equal(one.data.float(), wanted.data.float()), "one number serves every group"
