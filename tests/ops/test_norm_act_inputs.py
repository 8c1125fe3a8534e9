"""What norms, activations and statistics refuse and in which words; who is asked."""

from typing import Any

import pytest
import torch
from activations import EXACT, OF_GATE
from casts import E4M3, E5M2, cast_of
from contracts import Given, slot_of
from operations import CASES, calls, vector

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
    "dy of other rows": (lambda: norm_backward(DY[:3]), ShapeError, r"dy is \[3, 6\]; want \[4, 6\], y's"),
    "dy of other columns": (
        lambda: norm_act.act_quantize_backward(DY, X, "swiglu"), ShapeError, r"dy is \[4, 6\]; want \[4, 3\], y's"),
    "few rows": (
        lambda: norm_backward(rows=RowStatistics(torch.ones(3), None)), ShapeError, r"rstd is \[3\]; want \[4\]"),
    "few means": (
        lambda: norm_backward(rows=ROWS._replace(mean_M=torch.ones(1))), ShapeError, r"mean is \[1\]; want \[4\]"),
    "no means": (
        lambda: norm_backward(rows=ROWS._replace(mean_M=None)), ShapeError, "have no mean, and the norm is 'layer'"),
    "means too many": (lambda: norm_backward(kind=RMS), ShapeError, "rows have a mean, and the norm is 'rms'"),
    "an odd gate": (lambda: norm_act.act_quantize(X[:, :5], "geglu"), ShapeError, r"geglu takes \[gate \| up\], an e"),
    "float64": (lambda: norm(X.double()), UnsupportedDtype, "x is torch.float64, torch.strided; it takes dense"),
    "integers": (lambda: norm_act.act_quantize(X.int(), "relu"), UnsupportedDtype, "act_quantize: x is torch.int32"),
    "codes": (lambda: norm_act.act_quantize(X.to(E5M2), "relu"), UnsupportedDtype, "x is torch.float8_e5m2"),
    "sparse": (lambda: norm(X.to_sparse()), UnsupportedDtype, "torch.sparse_coo; it takes dense float32"),
    "a wide weight": (lambda: norm(weight=vector(X).double()), UnsupportedDtype, "weight is torch.float64"),
    "an integer dy": (lambda: norm_backward(DY.int()), UnsupportedDtype, "norm_quantize_backward: dy is torch.int32"),
    "a kind of norm": (lambda: norm(kind=Norm("layr")), UnknownName, "unknown norm 'layr'; did you mean 'layer'"),
    "a kind of function": (
        lambda: norm_act.act_quantize(X, "swigl"), UnknownName, "unknown activation 'swigl'; did you mean 'swiglu'"),
    "its gradient": (
        lambda: norm_act.act_quantize_backward(DY, X, "gelu_tan"), UnknownName, "did you mean 'gelu_tanh'"),
    "up of no gate": (
        lambda: norm_act.act_quantize(X, "relu", up_MN=X), ShapeError, "act_quantize: relu has no gate; leave up out"),
    "an up of other columns": (
        lambda: norm_act.act_quantize(X, "swiglu", up_MN=X[:, 1:]), ShapeError, r"up is \[4, 5\]; want \[4, 6\], th"),
    "an up of another dtype": (
        lambda: norm_act.act_quantize(X, "swiglu", up_MN=X.float()), UnsupportedDtype, "up is torch.float32 and the g"),
    "an up elsewhere": (
        lambda: norm_act.act_quantize(X, "swiglu", up_MN=ON_META["x"]), BackendError, "is on cpu and up on meta"),
    "dy of half a gate": (
        lambda: norm_act.act_quantize_backward(DY[:, :3], X, "swiglu", up_MN=X),
        ShapeError, r"dy is \[4, 3\]; want \[4, 6\]"),
    "codes of two gradients": (
        lambda: norm_act.act_quantize_backward(DY, X, "swiglu", FP8, X), InvalidRecipe, "come in 16 bits; cast each"),
    "16 bits turned": (lambda: norm(to=Store(None, True)), InvalidRecipe, "a transposed copy is kept in FP8 only"),
    "x elsewhere": (lambda: norm(ON_META["x"], vector(X)), BackendError, "norm_quantize.* on meta and weight on cpu"),
    "a weight elsewhere": (lambda: norm(weight=ON_META["weight"]), BackendError, "is on cpu and weight on meta"),
    "dy elsewhere": (lambda: norm_backward(ON_META["dy"]), BackendError, "is on cpu and dy on meta.* move one"),
    "rows elsewhere": (
        lambda: norm_backward(rows=ROWS._replace(rstd_M=ROWS.rstd_M.to("meta"))), BackendError, "cpu and rstd on meta"),
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
