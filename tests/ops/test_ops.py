"""The operators as torch sees them, and which backend a matmul runs on."""

import contextlib
import threading

import numpy as np
import pytest
import torch
from casts import E4M3, E5M2
from support import FP8_RECIPES, assert_within, products, same, tables
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import fp8engine as fe
from fp8engine.errors import BackendError, UnknownName
from fp8engine.numerics.recipe import MATMULS, resolve
from fp8engine.ops import casts, matmul
from fp8engine.ops.reference import Slot
from tests.helpers.casts import cast_of

CPU = torch.device("cpu")
GROUPS = {"tensor": (-1, -1), "row": (1, -1), "column": (-1, 1), "block": (2, 4)}
OPERATORS = torch.ops.fp8engine


def chosen() -> str:
    return matmul.choose(CPU, by_block=False)


def slot(record: bool = True) -> Slot:
    return Slot(torch.tensor([[-1.0], [0.0]]), torch.zeros(7, 1, dtype=torch.int64), 0, record)


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


def test_cublas_refuses_blocks_instead_of_falling_back():
    layer = fe.Linear(16, 16, recipe="blockwise")
    with fe.backend("cublas"), pytest.raises(BackendError, match=r"'cublas' cannot multiply these: .*along K"):
        layer(torch.randn(4, 16))


@pytest.mark.parametrize("backend", ["cublas", "reference"])
def test_e5m2_by_e5m2_is_refused_on_every_backend(backend: str):
    a = casts.quantize(torch.ones(16, 16), cast_of(E5M2, -1, -1))
    for mode in (torch.no_grad(), torch.enable_grad()):  # called directly, and through the dispatcher
        with mode, fe.backend(backend), pytest.raises(BackendError, match="do not multiply E5M2 by E5M2"):
            matmul.matmul(a, a)


def test_a_compiled_graph_follows_the_backend_of_its_caller(calls: list[dict]):
    layer, x, _ = trained("current")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    assert not calls
    with fe.backend("cublas"):
        compiled(x)
    assert len(calls) == 1


def call(name: str, group: str = "tensor", codes: bool = False) -> tuple:
    """(operator, arguments): one call of each registered operator."""
    rows, cols = GROUPS[group]
    how = cast_of(E4M3, rows, cols, True)
    x_MK = torch.randn(5, 7)
    a, b = casts.quantize(x_MK, how), casts.quantize(torch.randn(3, 7), cast_of(E4M3, power_of_2=True))
    if not codes:
        a, b = (each._replace(data=each.data.bfloat16()) for each in (a, b))
    groups = [*a[2:4], -1, -1, 1]
    arguments = {
        "quantize": (x_MK, how.text),
        "cast_transpose": (x_MK, cast_of(E4M3, rows, cols, True).text, True),
        "cast_transpose_slot": (x_MK, cast_of(E5M2, delayed=True).text, False, *slot()[:5]),
        "quantize_slot": (x_MK, cast_of(E5M2, delayed=True).text, *slot()[:5]),
        "quantize_given": (x_MK, cast_of(E5M2, rows, cols).text, torch.full(how.scale_shape(5, 7), 0.5)),
        "matmul": (a.data, b.data, a.scale, b.scale, torch.randn(3), groups, torch.float16, "exact"),
        "decode": (casts.quantize(x_MK, cast_of(E4M3, -1, -1)).data, torch.bfloat16),
        "scale_update": (torch.rand(4, 2), torch.rand(2, 2), torch.tensor([[448.0, 0.0], [2.0, 4.0], [0.0, 1.0]])),
    }
    return getattr(OPERATORS, name).default, arguments[name]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ["quantize", "quantize_given", "matmul"])
def test_torchs_own_check_of_pure_operators(name: str, group: str):
    """Schema (nothing written, nothing aliased), fake against real, autograd registration, AOT with dynamic shapes."""
    torch.library.opcheck(*call(name, group))


@pytest.mark.parametrize(
    "name", ["matmul", "decode", "quantize_slot", "cast_transpose", "cast_transpose_slot", "scale_update"]
)
def test_torchs_own_check_of_the_others(name: str):
    """Without test_schema: torch cannot compare FP8 arguments; and the two that write tables do not declare it."""
    utils = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(*call(name, codes=True), test_utils=utils)


@pytest.mark.parametrize("name", ["quantize", "quantize_slot", "quantize_given", "matmul", "decode", "scale_update"])
def test_every_operator_on_meta_tensors_gives_the_real_ones_shape(name: str):
    operator, arguments = call(name, codes=True)
    meta = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in arguments]
    found, real = tree_leaves(operator(*meta)), tree_leaves(operator(*arguments))
    for ours, theirs in zip(found, real, strict=True):
        assert theirs is None or (ours.shape, ours.dtype, ours.is_meta) == (theirs.shape, theirs.dtype, True)


@pytest.mark.parametrize("which", MATMULS)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_fake_operands_and_products_have_the_shapes_of_real_ones(recipe: str, which: str):
    def run() -> list[torch.Tensor]:
        pair = resolve(recipe).operands(which)
        a, b = (casts.quantize(torch.ones(130, 129), cast) if cast.is_fp8 else None for cast in pair)
        if a is None or b is None:
            return []
        a, b = (a.t(), b.t()) if which == "wgrad" else (a, b)
        return [a.data, a.scale, b.data, b.scale, matmul.matmul(a, b, torch.ones(len(b.data)), torch.float32)]

    with FakeTensorMode():
        fake = run()
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in run()]


class Watch(TorchDispatchMode):
    """Every operator's name, by way of the dispatcher."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


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
        assert watching.names.count("fp8engine::matmul") == 3 * 3 * resolve(recipe).fp8_share


@pytest.mark.parametrize("group", GROUPS)
def test_the_operator_and_the_direct_call_are_one(group: str):
    """Gradients on: by way of the dispatcher; off: straight to the implementation."""
    x_MK, how, counted = torch.randn(5, 7), cast_of(E4M3, *GROUPS[group]), (slot(), slot())
    found = []
    for mode, where in zip((torch.no_grad(), torch.enable_grad()), counted, strict=True):
        with mode:
            a = casts.quantize(x_MK, how, where)
            plain = casts.quantize(x_MK, how)
            found.append([*(t.float() for t in (*a[:2], *plain[:2])), matmul.matmul(a, a._replace()), *where[:2]])
            assert (a.rows, a.cols, a.power_of_2) == (*GROUPS[group], False)
    assert same(*found)
    assert counted[0].counts_CS[:2, 0].tolist() == [1, 35]


@pytest.mark.parametrize("shape", [(1, 24), (24, 1), (6, 24)], ids=str)
def test_what_an_operator_returns_is_contiguous_and_its_own(shape: tuple[int, int]):
    x_MK = torch.randn(*shape[::-1]).t()
    text = "e4m3"
    data, _ = OPERATORS.quantize(x_MK, text)
    both = OPERATORS.cast_transpose(x_MK, text, True)
    assert all(t.is_contiguous() for t in (data, *both))
    storages = [t.untyped_storage().data_ptr() for t in both if t.numel()]
    assert len(set(storages)) == len(storages)
