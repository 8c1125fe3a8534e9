"""Norms and activations under torch.compile: one graph, the numbers of eager code, a slot's tables written once."""

import pytest
import torch
from casts import E4M3, E5M2, fp8
from contracts import Given, in_bytes
from operations import NORMS, vector
from support import same
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from fp8engine.ops import casts, norm_act
from fp8engine.ops.reference import RowStatistics, Slot, Store
from fp8engine.ops.reference.operand import COUNTERS
from tests.helpers.casts import cast_of

pytestmark = pytest.mark.usefixtures("fresh")

RMS, _, SMALL, LAYER = NORMS.values()
PREDICTED = cast_of(E4M3, -1, -1, delayed=True)
CURRENT = cast_of(E5M2, -1, -1)


def slot(predicted: float = 0.0) -> Slot:
    live = torch.tensor([[-1.0] * 3, [predicted] * 3])
    return Slot(live, torch.zeros(len(COUNTERS), 3, dtype=torch.int64), 1)


def inputs(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    given = Given(m, k, dtype)
    return given.matrix(m, k), given.matrix(m, k)


def step(x, dy, first: Slot, second: Slot) -> tuple:
    """A norm, an activation and the way back, with codes under a slot; two results nobody reads."""
    weight, bias = vector(x), vector(x, 1)
    y, _, _, rows = norm_act.norm_quantize(x, weight, bias, LAYER)
    norm_act.norm_quantize(x, None, None, RMS, Store(CURRENT))
    made = norm_act.act_quantize(y, "swiglu", Store(PREDICTED, True, first))
    half = y.shape[1] // 2
    apart = norm_act.act_quantize(y[:, :half], "swiglu", Store(cast_of(E4M3, 1, 128), True), y[:, half:])
    back = norm_act.act_quantize_backward(dy[:, ::2], y, "swiglu", Store(CURRENT, True, second))
    halves = norm_act.act_quantize_backward(dy[:, ::2], y[:, ::2], "geglu", up_MN=y[:, 1::2])
    grads = norm_act.norm_quantize_backward(dy, x, weight, rows, LAYER)
    norm_act.norm_quantize(x, None, None, RMS, Store(PREDICTED, False, first._replace(index=2)))
    return made, apart, back, halves, grads, rows


def test_a_graph_equals_eager_code_and_writes_slots_once():
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours, eagers = [slot(64.0), slot()], [slot(64.0), slot()]
    for rows in (24, 24, 40, 17):  # a third size and a fourth: one graph for all that is not the first
        x, dy = inputs(rows, 132)
        with torch.no_grad():
            found, wanted = compiled(x, dy, *ours), step(x, dy, *eagers)
        assert in_bytes(found) == in_bytes(wanted)
        for mine, its in zip(ours, eagers, strict=True):
            assert same(mine[:2], its[:2])
    assert ours[0].counts_CS[0].tolist() == [0, 4, 4]  # the last has no reader, and is an effect all the same
    assert ours[1].counts_CS[0].tolist() == [0, 4, 0]
    assert counters["stats"]["unique_graphs"] <= 2


def test_a_call_without_a_slot_is_pure_and_drops_out_of_a_graph_that_does_not_read_it():
    graphs = []

    def keep(graph, example):
        graphs.append(graph.code)
        return graph.forward

    with torch.no_grad():
        torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(*inputs(8, 12), slot(64.0), slot())
    (code,) = graphs
    assert code.count("fp8engine.norm_quantize.default") == 1
    assert code.count("fp8engine.norm_quantize_slot") == 1


class _Norm(torch.autograd.Function):
    """What functional code looks like: both directions are operations."""

    @staticmethod
    def forward(ctx, x, weight, forward: Slot, backward: Slot):
        y, q, q_t, rows = norm_act.norm_quantize(x, weight, None, SMALL, Store(PREDICTED, True, forward))
        ctx.save_for_backward(x, weight, *rows)
        ctx.slot = backward
        read, read_t = (casts.decode(fp8(each).data, torch.float32) * fp8(each).scale for each in (q, q_t))
        return y + read + read_t.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight, *rows = ctx.saved_tensors
        found = norm_act.norm_quantize_backward(dy, x, weight, RowStatistics(*rows), SMALL)
        dx, q, *_ = norm_act.act_quantize_backward(dy, found.dx_MK, "silu", Store(CURRENT, False, ctx.slot))
        return dx + casts.decode(fp8(q).data, x.dtype) * fp8(q).scale, found.dweight_K, None, None


def test_in_an_autograd_function_forward_and_backward_are_compiled_alike():
    x, dy = inputs(12, 40, torch.float32)
    runs = []
    for call in (_Norm.apply, torch.compile(_Norm.apply, fullgraph=True, backend="aot_eager")):
        leaf, weight, slots = x.clone().requires_grad_(), vector(x).requires_grad_(), (slot(), slot())
        for _ in range(2):
            y = call(leaf, weight, *slots)
            y.backward(dy)
        runs.append([y.detach(), leaf.grad, weight.grad, *slots[0][:2], *slots[1][:2]])
        assert slots[0].counts_CS[0].tolist() == slots[1].counts_CS[0].tolist() == [0, 2, 0]
    assert same(*runs)
