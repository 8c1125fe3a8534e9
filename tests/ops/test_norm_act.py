"""Norms and activations: what they refuse and in which words, who is asked, and one graph under torch.compile."""

from typing import Any

import pytest
import torch
from activations import EXACT, OF_GATE
from casts import E4M3, E5M2, cast_of
from contracts import Given, in_bytes, slot_of
from operations import CASES, NORMS, calls, vector
from support import same
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import fp8engine as fe
from fp8engine.errors import BackendError, InvalidRecipe, ShapeError, UnknownName, UnsupportedDtype
from fp8engine.kernels import act_quantize as act_kernels
from fp8engine.ops import norm_act, triton_backend
from fp8engine.ops.reference import Norm, RowStatistics, Slot, Store

X, DY = (Given(4, 6).matrix(4, 6) for _ in "xd")
LAYER, RMS = Norm("layer"), Norm("rms")
ROWS = RowStatistics(torch.ones(4), torch.zeros(4))
FP8 = Store(cast_of(E4M3, -1, -1))
ON_META: Any = {name: tensor.to("meta") for name, tensor in {"x": X, "dy": DY, "weight": vector(X)}.items()}


def norm(x=X, weight=None, bias=None, kind=LAYER, to=FP8):
    return norm_act.norm_quantize(x, weight, bias, kind, to)


def norm_backward(dy=DY, x=X, weight=None, rows=ROWS, kind=LAYER):
    return norm_act.norm_quantize_backward(dy, x, weight, rows, kind)


REFUSED = {
    "a short weight": (lambda: norm(weight=torch.ones(5)), ShapeError, r"norm_quantize: weight is \[5\]; want \[6\]"),
    "a matrix as bias": (lambda: norm(bias=X), ShapeError, r"bias is \[4, 6\]; want \[6\], one for each column"),
    "a vector": (lambda: norm(X[0]), ShapeError, r"norm_quantize: x is \[6\]; want a matrix"),
    "three dimensions": (lambda: norm_act.act_quantize(X[None], "relu"), ShapeError, "flatten its leading dimensions"),
    "an odd gate": (lambda: norm_act.act_quantize(X[:, :5], "geglu"), ShapeError, r"geglu takes \[gate \| up\], an e"),
    "float64": (lambda: norm(X.double()), UnsupportedDtype, "x is torch.float64, torch.strided; it takes dense"),
    "integers": (lambda: norm_act.act_quantize(X.int(), "relu"), UnsupportedDtype, "act_quantize: x is torch.int32"),
    "codes": (lambda: norm_act.act_quantize(X.to(E5M2), "relu"), UnsupportedDtype, "x is torch.float8_e5m2"),
    "sparse": (lambda: norm(X.to_sparse()), UnsupportedDtype, "torch.sparse_coo; it takes dense float32"),
    "a wide weight": (lambda: norm(weight=vector(X).double()), UnsupportedDtype, "weight is torch.float64"),
    "a kind of norm": (lambda: norm(kind=Norm("layr")), UnknownName, "unknown norm 'layr'; did you mean 'layer'"),
    "a kind of function": (
        lambda: norm_act.act_quantize(X, "swigl"), UnknownName, "unknown activation 'swigl'; did you mean 'swiglu'"),
    "up of no gate": (
        lambda: norm_act.act_quantize(X, "relu", up_MN=X), ShapeError, "act_quantize: relu has no gate; leave up out"),
    "an up of other columns": (
        lambda: norm_act.act_quantize(X, "swiglu", up_MN=X[:, 1:]), ShapeError, r"up is \[4, 5\]; want \[4, 6\], th"),
    "an up of another dtype": (
        lambda: norm_act.act_quantize(X, "swiglu", up_MN=X.float()), UnsupportedDtype, "up is torch.float32 and the g"),
    "an up elsewhere": (
        lambda: norm_act.act_quantize(X, "swiglu", up_MN=ON_META["x"]), BackendError, "is on cpu and up on meta"),
    "16 bits turned": (lambda: norm(to=Store(None, True)), InvalidRecipe, "a transposed copy is kept in FP8 only"),
    "x elsewhere": (lambda: norm(ON_META["x"], vector(X)), BackendError, "norm_quantize.* on meta and weight on cpu"),
    "a weight elsewhere": (lambda: norm(weight=ON_META["weight"]), BackendError, "is on cpu and weight on meta"),
    "counters elsewhere": (
        lambda: norm(to=FP8._replace(slot=Slot(slot_of()[0], slot_of()[1].to("meta"), 1))),
        BackendError, "is on cpu and counters of the slot on meta"),
    "a slot elsewhere": (
        lambda: norm(to=FP8._replace(slot=Slot(*(t.to("meta") for t in slot_of()[:2]), index=1))),
        BackendError, "is on cpu and slot on meta"),
}  # fmt: skip


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_by_name(what: str, graded: bool):
    call, error, words = REFUSED[what]
    with torch.set_grad_enabled(graded), pytest.raises(error, match=words):
        call()


def test_what_is_refused_has_counted_nothing():
    counted, before = slot_of(), slot_of()
    with pytest.raises(ShapeError):
        norm(weight=torch.ones(5), to=FP8._replace(slot=counted))
    assert torch.equal(counted.counts_CS, before.counts_CS)


def test_a_backend_of_casts_that_is_the_reference_asks_no_launcher(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_backend, "_kernel", lambda *names: pytest.fail(f"{names} asked for"))
    for name in ("cublas", "reference"):
        with fe.backend(name):
            for operation, form in CASES:
                if operation.startswith(("norm", "act")):
                    call = next(calls(operation, form))
                    call.operation.run(*call.arguments())


def test_the_launchers_know_every_kind():
    assert {*act_kernels.FUNCTIONS} == {*EXACT}
    assert {*act_kernels.GATED} == {*OF_GATE}


FIRST, *_, LAST = NORMS.values()
PREDICTED = cast_of(E4M3, -1, -1, delayed=True)
CURRENT = cast_of(E5M2, -1, -1)
GROUPS = cast_of(E4M3, 1, 128)  # made outside of graphs: torch 2.11 does not trace how


def inputs(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    given = Given(m, k, dtype)
    return given.matrix(m, k), given.matrix(m, k)


def step(x, dy, first: Slot, second: Slot) -> tuple:
    """A norm, an activation and the way back, with codes under a slot; two results nobody reads."""
    weight, bias = vector(x), vector(x, 1)
    y, _, _, rows = norm_act.norm_quantize(x, weight, bias, LAST)
    norm_act.norm_quantize(x, None, None, FIRST, Store(CURRENT))
    made = norm_act.act_quantize(y, "swiglu", Store(PREDICTED, True, first))
    half = y.shape[1] // 2
    apart = norm_act.act_quantize(y[:, :half], "swiglu", Store(GROUPS, True), y[:, half:])
    back = norm_act.act_quantize_backward(dy[:, ::2], y, "swiglu", Store(CURRENT, True, second))
    halves = norm_act.act_quantize_backward(dy[:, ::2], y[:, ::2], "geglu", up_MN=y[:, 1::2])
    grads = norm_act.norm_quantize_backward(dy, x, weight, rows, LAST)
    norm_act.norm_quantize(x, None, None, FIRST, Store(PREDICTED, False, first._replace(index=2)))
    return made, apart, back, halves, grads, rows


@pytest.mark.usefixtures("fresh")
def test_a_graph_equals_eager_code_and_writes_slots_once():
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours, eagers = [slot_of(64.0), slot_of()], [slot_of(64.0), slot_of()]
    for rows in (24, 24, 40, 17):  # a third size and a fourth: one graph for all that is not the first
        x, dy = inputs(rows, 132)
        with torch.no_grad():
            found, wanted = compiled(x, dy, *ours), step(x, dy, *eagers)
        assert in_bytes(found) == in_bytes(wanted)
        for mine, its in zip(ours, eagers, strict=True):
            assert same(mine[:2], its[:2])
    of_others = 1 << 40  # as they were
    # The last has no reader, and is an effect all the same.
    assert ours[0].counts_CS[0].tolist() == [of_others, 4, of_others + 4]
    assert ours[1].counts_CS[0].tolist() == [of_others, 4, of_others]
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.usefixtures("fresh")
def test_a_call_without_a_slot_is_pure_and_drops_out_of_a_graph_that_does_not_read_it():
    graphs, given = [], (*inputs(8, 12), slot_of(64.0), slot_of())

    def keep(graph, example):
        graphs.append(graph.code)
        return graph.forward

    with torch.no_grad():
        torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(*given)
    (code,) = graphs
    assert code.count("fp8engine.norm_quantize.default") == 1
    assert code.count("fp8engine.norm_quantize_slot") == 1
