"""Quantisation of every granularity and dtype: bit for bit against NumPy and ml_dtypes, counters exactly.

Strides and empty matrices: tests/ops/test_contracts.py.

Then when a prediction is replaced, to the last bit, and what a slot is told: on the route of a CPU and on a card's.  A
card compares fl(amax * s) with fl(MAX (1 + 2^-22)), both FP32.  Near MAX = 448 one ulp is 2^-15, and 448 (1 + 2^-22)
lies 3.5 of them above it: a tie, which rounds to the even 4.  So 4 ulps above MAX still fit, and 5 do not; an exact
product of 4.5 is again a tie, and fits.  57344 = 7 * 2^13 and 448 = 7 * 2^6 have the same digits.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from casts import E4M3, E5M2, FP8, MAX, assert_same, bits, cast_of, clamped_cast, factor, values
from contracts import counted, in_bytes, slot_of

from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import Format
from fp8engine.ops.reference import decode, quantize, quantize_given, rounding
from fp8engine.ops.reference.quantize import SAMPLE_EVERY, _quantize_groups, note

GROUPS = {
    "tensor": (-1, -1),
    "row": (1, -1),
    "column": (-1, 1),
    "1x128": (1, 128),
    "128x1": (128, 1),
    "128x128": (128, 128),
    "5x7": (5, 7),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PREDICTED = {dtype: cast_of(dtype, -1, -1, delayed=True) for dtype in FP8}


def tiles(m: int, k: int, rows: int, cols: int):
    """(index of the scale, slices of its group) of every group."""
    rows, cols = (m if rows == -1 else rows), (k if cols == -1 else cols)
    for i, j in itertools.product(range(0, m, rows), range(0, k, cols)):
        yield (i // rows, j // cols), (slice(i, i + rows), slice(j, j + cols))


def expected(x_MK: torch.Tensor, how: Cast) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the codes and 1 / s, one group at a time, of a finite matrix."""
    x = x_MK.float().numpy()
    m, k = x.shape
    codes = np.empty((m, k), np.uint8)
    scale = np.empty(how.scale_shape(m, k) or (1, 1), np.float32)
    for at, group in tiles(m, k, how.rows, how.cols):
        s = factor(np.abs(x[group]).max(), MAX[how.dtype], how.power_of_2)
        codes[group] = clamped_cast(x[group], s, how.dtype)
        scale[at] = np.float32(1) / s
    return codes, scale.reshape(how.scale_shape(m, k))


def sample(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal values whose rows and columns differ in size by up to 2^12, with zeros among them."""
    x = torch.randn(m, k) * torch.exp2(torch.randint(-6, 7, (m, 1))) * torch.exp2(torch.randint(-3, 4, (1, k)))
    return torch.where(torch.rand(m, k) < 0.05, 0.0, x).to(dtype)


MATRICES = {
    **{str(shape): shape for shape in [(1, 1), (1, 7), (13, 1), (5, 3), (127, 131), (128, 256), (257, 31)]},
    **{f"amax {amax}": amax for amax in (0.0, 2.0**-149, 2.0**-126, 3.4e38)},  # zero, the smallest of both kinds, max
}


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("group", GROUPS)
def test_codes_and_scales_are_bit_exact(group, matrix):
    given = MATRICES[matrix]
    for dtype, power_of_2, source in itertools.product(FP8, (False, True), DTYPES):
        how = cast_of(dtype, *GROUPS[group], power_of_2)
        x_MK = sample(*given, source) if isinstance(given, tuple) else torch.tensor([[given, -given, 0.0]] * 3)
        before = x_MK.clone()
        q_MK, scale = quantize(x_MK, how)
        codes, wanted = expected(x_MK, how)
        assert (q_MK.dtype, scale.dtype) == (dtype, torch.float32)
        assert_same(scale, wanted, f"scale of {how} from {source}")
        assert_same(bits(q_MK), codes, f"codes of {how} from {source}")
        assert torch.equal(x_MK, before), "the input is not written"


@pytest.mark.parametrize("chunk", [1, 500, 4000])
@pytest.mark.parametrize("group", GROUPS)
def test_rounding_by_chunks_cuts_no_group(group, chunk, monkeypatch):
    """A CPU rounds a large matrix some rows at a time; here a small one, so that chunks end inside blocks."""
    for shape, held in itertools.product([(37, 131), (301, 17), (3, 1000)], (None, torch.float32)):
        how, x_MK = cast_of(E4M3, *GROUPS[group]), sample(*shape, torch.bfloat16)
        found = []
        for size in (1 << 30, chunk):
            monkeypatch.setattr(rounding, "CHUNK", size)
            found.append(in_bytes(quantize(x_MK, how, None, held)))
        assert found[0] == found[1]


@pytest.mark.parametrize("held", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_held_values_are_the_decoded_codes(group, held):
    for dtype, shape, s in itertools.product(FP8, [(5, 7), (130, 140), (520, 131)], (0.0, 1e30)):
        how = cast_of(dtype, *GROUPS[group], delayed=s > 0 and group == "tensor")
        x_MK = sample(*shape, torch.float32)
        q_MK, scale = quantize(x_MK, how, slot_of(s))
        values_MK, held_scale = quantize(x_MK, how, slot_of(s), held)
        assert values_MK.dtype == quantize(x_MK[:0], how, None, held)[0].dtype == held
        assert_same(values_MK.float(), decode(q_MK, torch.float32))
        assert_same(held_scale, scale)
        x_MK[2, 3] = float("nan")
        assert torch.isnan(quantize(x_MK, how, held=held)[0]).nonzero().tolist() == [[2, 3]]


def test_scale_is_fp32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        scales = [quantize(torch.ones(2, 2), cast_of(E4M3, *GROUPS[group]))[1] for group in GROUPS]
    finally:
        torch.set_default_dtype(torch.float32)
    assert {scale.dtype for scale in scales} == {torch.float32}


@pytest.mark.parametrize("dtype", FP8)
def test_a_prediction_is_used_as_it_is_and_saturation_under_it_is_recast_at_once(dtype):
    """s: of a third of what would just fit; of 1,000, which three of five large values do not fit; none yet."""
    x_MK = torch.randn(40, 50)
    x_MK[3, 4:9] = torch.tensor([1000.0, -2000.0, 999.0, 1001.0, 3000.0])
    current = replace(PREDICTED[dtype], scaling="current")
    for s, saturated in ((0.37 * MAX[dtype] / 3000, 0), (MAX[dtype] / 1000, 3), (0.0, 0)):
        slot = slot_of(s)
        q_MK, scale = quantize(x_MK, PREDICTED[dtype], slot)
        s = slot.live_2S[1, 1].item()
        if s and not saturated:
            wanted, wanted_scale = clamped_cast(x_MK.numpy(), s, dtype), np.float32(1) / np.float32(s)
        else:
            q, wanted_scale = quantize(x_MK, current)
            wanted = bits(q)
        assert_same(bits(q_MK), wanted)
        assert scale == float(wanted_scale)
        assert (counted(slot)["saturated"], counted(slot)["recasts"]) == (saturated, saturated > 0)
        assert slot.live_2S[:, 1].tolist() == [3000.0, s], "amax for the history; the prediction stands"


@pytest.mark.parametrize(("delayed", "count"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("group", GROUPS)
def test_what_is_not_finite_stays_visible_and_out_of_the_history(group, delayed, count):
    how = cast_of(E4M3, *GROUPS[group], delayed=delayed and group == "tensor")
    bad = {(0, 0): float("inf"), (3, 5): float("nan"), (7, 130): float("-inf")}
    for source in DTYPES:
        clean = sample(9, 140, source)
        for at in bad:
            clean[at] = 0.0
        x_MK = clean.clone()
        for at, value in bad.items():
            x_MK[at] = value
        slot = slot_of(count=count)
        q_MK, scale = quantize(x_MK, how, slot)
        found = values(q_MK)
        assert {tuple(at) for at in np.argwhere(~np.isfinite(found)).tolist()} == set(bad)
        wanted_q, wanted_scale = quantize(clean, how)
        assert_same(scale, wanted_scale, "the scale is that of the finite elements")
        assert_same(np.nan_to_num(found, nan=0.0), values(wanted_q))
        assert counted(slot)["nonfinite"] == 3 * count
        assert slot.live_2S[:, 1].tolist() == [-1.0, 0.0], "neither amax nor factor is entered"
        e5m2 = values(quantize(x_MK, replace(how, format=Format.of(E5M2)))[0])
        assert_same(np.array([e5m2[at] for at in bad]), np.array(list(bad.values())), "E5M2 keeps Inf")
    nothing, scale = quantize(torch.full((9, 140), float("nan")), how)
    assert np.isnan(values(nothing)).all()
    assert (scale == 1).all()


@pytest.mark.parametrize("group", ["tensor", "row", "128x128"])
def test_counters_are_exact_over_many_calls(group):
    how = cast_of(E4M3, *GROUPS[group])
    slot, calls, elements, underflowed, sampled, largest = slot_of(), 2 * SAMPLE_EVERY + 3, 0, 0, 0, 0.0
    for call in range(calls):
        x_MK = sample(3 + call, 17, torch.bfloat16) * torch.exp2(torch.randint(-20, 1, (3 + call, 17)))
        quantize(x_MK, how, slot)
        elements, largest = elements + x_MK.numel(), max(largest, x_MK.abs().max().item())
        if call % SAMPLE_EVERY == 0:
            sampled += x_MK.numel()
            underflowed += int(((expected(x_MK, how)[0] & 0x7F) == 0)[(x_MK != 0).numpy()].sum())
    assert underflowed > 50, "the sample is worth counting"
    assert slot.live_2S[0, 1] == largest
    seen = {"calls": calls, "elements": elements, "sampled": sampled, "underflowed": underflowed}
    assert counted(slot) == {**seen, "saturated": 0, "nonfinite": 0, "recasts": 0}
    others = slot_of()
    assert torch.equal(slot.counts_CS[:, ::2], others.counts_CS[:, ::2])
    assert torch.equal(slot.live_2S[:, ::2], others.live_2S[:, ::2])


@pytest.mark.parametrize("group", GROUPS)
def test_given_factors(group):
    how = cast_of(E4M3, *GROUPS[group], power_of_2=True)
    x_MK = sample(530, 261, torch.bfloat16)
    q_MK, scale = quantize(x_MK, how)
    factor = 1 / scale  # exact: a power of two
    assert_same(bits(quantize_given(x_MK, how, factor)), bits(q_MK), "its own scales")
    small = quantize_given(x_MK, how, factor * 333)
    s = (factor * 333).numpy().reshape(-1)[0]
    assert_same(bits(small)[0, 0], clamped_cast(x_MK[0, 0].float().numpy(), s, E4M3))
    assert np.abs(values(small)).max() == 448.0, "what does not fit saturates"
    x_MK[1, 2] = float("inf")
    assert np.argwhere(np.isnan(values(quantize_given(x_MK, how, factor)))).tolist() == [[1, 2]]


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


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
@pytest.mark.parametrize("s", [0.0, 50.0, 1e6])
def test_the_card_route_equals_the_host_route(s, bad):
    """Per tensor a CPU takes a route of its own; any other device takes the one that rows and blocks take."""
    x_MK = sample(60, 70, torch.bfloat16)
    if bad is not None:
        x_MK[5, 5] = bad
    found = []
    for route in ROUTES.values():
        slot = slot_of(s)
        q_MK, scale = route(x_MK, PREDICTED[E5M2], slot)
        found.append(in_bytes((q_MK, scale, slot.live_2S, slot.counts_CS)))
    assert found[0] == found[1]


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
