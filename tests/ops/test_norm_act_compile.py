"""Norms and activations under torch.compile: one graph, the numbers of eager code, a slot's tables written once."""

import pytest
import torch
from casts import E4M3, E5M2, cast_of
from contracts import Given, in_bytes, slot_of
from operations import NORMS, vector
from support import same
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from fp8engine.ops import norm_act
from fp8engine.ops.reference import Slot, Store

pytestmark = pytest.mark.usefixtures("fresh")

RMS, _, SMALL, LAYER = NORMS.values()
PREDICTED = cast_of(E4M3, -1, -1, delayed=True)
CURRENT = cast_of(E5M2, -1, -1)


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
