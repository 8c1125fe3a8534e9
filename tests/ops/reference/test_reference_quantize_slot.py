"""When a prediction is replaced, to the last bit, and what a slot is told: on the route of a CPU and on that of a card.

A card compares fl(amax * s) with fl(MAX (1 + 2^-22)), both FP32.  Near MAX = 448 one ulp is 2^-15, and 448 (1 + 2^-22)
lies 3.5 of them above it: a tie, which rounds to the even 4.  So 4 ulps above MAX still fit, and 5 do not; an exact
product of 4.5 is again a tie, and fits.  57344 = 7 * 2^13 and 448 = 7 * 2^6 have the same digits.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from casts import E4M3, E5M2, FP8, MAX, cast_of
from contracts import counted, in_bytes, slot_of

from fp8engine.ops.reference import quantize
from fp8engine.ops.reference.quantize import _quantize_groups, note

CASTS = {
    "tensor": cast_of(E5M2),
    "tensor, predicted": cast_of(E5M2, delayed=True),
    "row": cast_of(E5M2, 1, -1),
    "column": cast_of(E5M2, -1, 1),
    "1x128": cast_of(E5M2, 1, 128),
}
ROUTES = {"host": quantize, "card": _quantize_groups}


def ulp(dtype: torch.dtype) -> float:
    return float(np.spacing(np.float32(MAX[dtype])))


def recast(route, amax: float, s: float, dtype: torch.dtype) -> bool:
    """Whether the prediction s was replaced; counters, codes and scale have to say the same."""
    slot, x_MK = slot_of(s), torch.tensor([[amax, -1.0]])
    q_MK, scale = route(x_MK, cast_of(dtype, -1, -1, delayed=True), slot)
    replaced = bool(counted(slot)["recasts"])
    assert counted(slot)["saturated"] == replaced
    used = np.float32(MAX[dtype]) / np.float32(amax) if replaced else np.float32(s)
    assert scale == float(np.float32(1) / used)
    assert q_MK[0, 0].float() == MAX[dtype]
    return replaced


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("ulps", "replaced"), [(0, False), (3, False), (4, False), (5, True), (6, True)])
def test_products_that_fp32_holds(route, ulps, replaced):
    for dtype in FP8:
        s = (MAX[dtype] + ulps * ulp(dtype)) / 16
        assert s == np.float32(s)
        assert recast(ROUTES[route], 16.0, s, dtype) == replaced


@pytest.mark.parametrize("dtype", FP8)
def test_both_routes_compare_as_fp32_does(dtype):
    """Beside the middle and, of 67 times 438,211 * 2^-16, on it: 14,680,064 + 4.5 ulps of 2^-15."""
    generator = np.random.default_rng(0)
    limit, seen = np.float32(MAX[dtype] * (1 + 2.0**-22)), []
    for amax in [np.float32(67), *generator.uniform(1, 2, 150).astype(np.float32)]:
        nearest = np.float32((MAX[dtype] + 4.5 * ulp(dtype)) / np.float64(amax))
        for s in (np.nextafter(nearest, np.float32(0)), nearest, np.nextafter(nearest, np.float32(1e9))):
            wanted = bool(amax * s > limit)
            in_fp64 = float(amax) * float(s) > MAX[dtype] * (1 + 2.0**-22)
            seen.append((wanted, in_fp64))
            assert [recast(route, float(amax), float(s), dtype) for route in ROUTES.values()] == [wanted] * 2
    assert {(False, False), (False, True), (True, True)} <= set(seen), "the cases that tell FP32 from FP64 are there"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("how", CASTS)
@pytest.mark.parametrize(("record", "count"), [(True, False), (False, True), (False, False)])
def test_a_slot_is_written_only_as_far_as_it_says(how, route, record, count):
    x_MK = torch.randn(33, 200)
    start, ours, full = slot_of(30000.0, record, count), slot_of(30000.0, record, count), slot_of(30000.0)
    found, wanted = (ROUTES[route](x_MK, CASTS[how], slot) for slot in (ours, full))
    assert in_bytes(found) == in_bytes(wanted)
    assert torch.equal(ours.live_2S, full.live_2S if record else start.live_2S)
    assert torch.equal(ours.counts_CS, full.counts_CS if count else start.counts_CS)
    assert full.live_2S[0, 1] == x_MK.abs().max()
    assert counted(full)["calls"] == 1


class OnCard(torch.Tensor):
    """A CPU's tensor that says it lies on a card."""

    @property
    def device(self):
        return SimpleNamespace(type="cuda")


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize(("record", "count"), [(True, True), (True, False), (False, True)])
def test_a_card_s_tables(record, count, bad):
    """Reached without a card by what writes the tables alone; that the rest runs there is for `make gpu` to show."""
    x_MK = torch.tensor([[3.0, -5.0, 1e-9, 0.0, 0.0]])
    x_MK[0, 3 : 3 + bad] = float("nan")
    q_MK, slot, s = x_MK.to(E4M3), slot_of(0.0, record, count), torch.tensor([[1.0]])
    note(x_MK.as_subclass(OnCard), q_MK, slot, cast_of(E4M3, -1, -1), (False, None, torch.tensor([[5.0]]), s))
    assert slot.live_2S[:, 1].tolist() == ([5.0, 1.0] if record and not bad else [-1.0, 0.0])
    assert slot.counts_CS[:, 1].tolist() == ([1, 5, 5, 0, 1, bad, 0] if count else [0] * 7)
