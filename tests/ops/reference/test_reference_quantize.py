"""Quantisation of every granularity, layout and dtype: bit for bit against NumPy and ml_dtypes, counters exactly."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from casts import E4M3, E5M2, FP8, MAX, assert_same, bits, clamped_cast, factor, values

from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import Format
from fp8engine.ops.reference import Slot, decode, quantize, quantize_given, rounding
from fp8engine.ops.reference.operand import COUNTERS
from fp8engine.ops.reference.quantize import SAMPLE_EVERY, _quantize_groups
from tests.helpers.casts import cast_of

GROUPS = {
    "tensor": (-1, -1),
    "row": (1, -1),
    "column": (-1, 1),
    "1x128": (1, 128),
    "128x1": (128, 1),
    "128x128": (128, 128),
    "5x7": (5, 7),
}
SHAPES = [(1, 1), (1, 7), (13, 1), (5, 3), (127, 131), (128, 256), (257, 31)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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


def new_slot(s: float = 0.0, index: int = 1) -> Slot:
    live_2S = torch.tensor([[-1.0] * 3, [0.0] * 3])
    live_2S[1, index] = s
    return Slot(live_2S, torch.zeros(len(COUNTERS), 3, dtype=torch.int64), index)


def counted(slot: Slot) -> dict[str, int]:
    return dict(zip(COUNTERS, slot.counts_CS[:, slot.index].tolist(), strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_codes_and_scales_are_bit_exact(group, shape):
    for dtype, power_of_2, source in itertools.product(FP8, (False, True), DTYPES):
        how = cast_of(dtype, *GROUPS[group], power_of_2)
        x_MK = sample(shape[0], shape[1], source)
        before = x_MK.clone()
        q_MK, scale = quantize(x_MK, how)
        codes, wanted = expected(x_MK, how)
        assert q_MK.dtype == dtype
        assert scale.dtype == torch.float32
        assert_same(scale, wanted, f"scale of {how} from {source}")
        assert_same(bits(q_MK), codes, f"codes of {how} from {source}")
        assert torch.equal(x_MK, before), "the input is not written"


VIEWS = {
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, ::3],
    "offset": lambda x: x[1:, 1:],
    "expanded rows": lambda x: x[:1].expand(130, -1),
    "expanded columns": lambda x: x[:, :1].expand(-1, 130),
    "one value": lambda x: x[:1, :1].expand(33, 140),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("group", GROUPS)
def test_any_strides_give_what_a_contiguous_copy_gives(group, view):
    for source, held in itertools.product(DTYPES, (None, torch.bfloat16)):
        how = cast_of(E4M3, *GROUPS[group])
        x_MK = VIEWS[view](sample(270, 261, source))
        q_MK, scale = quantize(x_MK, how, None, held)
        wanted_q, wanted_scale = quantize(x_MK.contiguous(), how, None, held)
        assert_same(q_MK.float(), wanted_q.float())
        assert_same(scale, wanted_scale)


@pytest.mark.parametrize("chunk", [1, 500, 4000])
@pytest.mark.parametrize("group", GROUPS)
def test_rounding_by_chunks_cuts_no_group(group, chunk, monkeypatch):
    # A CPU rounds a large matrix some rows at a time; here a small one, so that chunks end inside blocks.
    for shape, held in itertools.product([(37, 131), (301, 17), (3, 1000)], (None, torch.float32)):
        how, x_MK = cast_of(E4M3, *GROUPS[group]), sample(*shape, torch.bfloat16)
        with monkeypatch.context() as patch:
            patch.setattr(rounding, "CHUNK", 1 << 30)
            whole = quantize(x_MK, how, None, held)
            patch.setattr(rounding, "CHUNK", chunk)
            found = quantize(x_MK, how, None, held)
        assert_same(found[0].float(), whole[0].float())
        assert_same(found[1], whole[1])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("group", GROUPS)
def test_empty(group, shape):
    how, slot = cast_of(E4M3, *GROUPS[group]), new_slot()
    q_MK, scale = quantize(torch.empty(shape), how, slot)
    assert (q_MK.shape, q_MK.dtype, scale.shape) == (shape, E4M3, how.scale_shape(*shape))
    assert (scale == 1).all()
    assert slot.live_2S[0, 1] == -1, "nothing was seen: the slot did not run"
    assert quantize_given(torch.empty(shape), how, scale).shape == shape
    assert quantize(torch.empty(shape), how, held=torch.bfloat16)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "amax", [0.0, 2.0**-149, 2.0**-126, 3.4e38], ids=["zero", "smallest", "smallest normal", "max"]
)
@pytest.mark.parametrize("group", GROUPS)
def test_extreme_amaxes(group, amax):
    x_MK = torch.tensor([[amax, -amax, 0.0]] * 3)
    for dtype, power_of_2 in itertools.product(FP8, (False, True)):
        how = cast_of(dtype, *GROUPS[group], power_of_2)
        q_MK, scale = quantize(x_MK, how)
        codes, wanted = expected(x_MK, how)
        assert_same(scale, wanted)
        assert_same(bits(q_MK), codes)


@pytest.mark.parametrize("held", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_held_values_are_the_decoded_codes(group, held):
    for dtype, shape, s in itertools.product(FP8, [(5, 7), (130, 140), (520, 131)], (0.0, 1e30)):
        how = cast_of(dtype, *GROUPS[group], delayed=s > 0 and group == "tensor")
        x_MK = sample(*shape, torch.float32)
        q_MK, scale = quantize(x_MK, how, new_slot(s))
        values_MK, held_scale = quantize(x_MK, how, new_slot(s), held)
        assert values_MK.dtype == held
        assert_same(values_MK.float(), decode(q_MK, torch.float32))
        assert_same(held_scale, scale)
        x_MK[2, 3] = float("nan")
        values_MK = quantize(x_MK, how, held=held)[0]
        assert torch.isnan(values_MK).nonzero().tolist() == [[2, 3]]


def test_scale_is_fp32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        scales = [quantize(torch.ones(2, 2), cast_of(E4M3, *GROUPS[group]))[1] for group in GROUPS]
    finally:
        torch.set_default_dtype(torch.float32)
    assert {scale.dtype for scale in scales} == {torch.float32}


@pytest.mark.parametrize("dtype", FP8)
def test_a_predicted_scale_is_used_as_it_is(dtype):
    how = cast_of(dtype, -1, -1, delayed=True)
    x_MK = sample(40, 50, torch.bfloat16)
    s = 0.37 * MAX[dtype] / x_MK.float().abs().max().item()
    slot = new_slot(s)
    q_MK, scale = quantize(x_MK, how, slot)
    s = slot.live_2S[1, 1].item()
    assert_same(bits(q_MK), clamped_cast(x_MK.float().numpy(), s, dtype))
    assert scale == torch.tensor(np.float32(1) / np.float32(s))
    assert (counted(slot)["saturated"], counted(slot)["recasts"]) == (0, 0)
    assert slot.live_2S[0, 1] == x_MK.float().abs().max(), "amax goes to the history"
    assert slot.live_2S[1, 1] == s, "the prediction stands until the update"


@pytest.mark.parametrize("dtype", FP8)
def test_saturation_under_a_prediction_is_recast_at_once(dtype):
    how = cast_of(dtype, -1, -1, delayed=True)
    x_MK = torch.randn(40, 50)
    x_MK[3, 4:9] = torch.tensor([1000.0, -2000.0, 999.0, 1001.0, 3000.0])
    slot = new_slot(MAX[dtype] / 1000.0)  # 1000 just fits, three do not
    q_MK, scale = quantize(x_MK, how, slot)
    wanted_q, wanted_scale = quantize(x_MK, replace(how, scaling="current"))
    assert_same(bits(q_MK), bits(wanted_q), "as current scaling would have it")
    assert scale == wanted_scale
    assert (counted(slot)["saturated"], counted(slot)["recasts"]) == (3, 1)
    assert slot.live_2S[0, 1] == 3000.0


def test_the_first_use_of_a_slot_is_current_scaling():
    x_MK = sample(9, 11, torch.float32)
    how = cast_of(E4M3, -1, -1, delayed=True)
    found, wanted = quantize(x_MK, how, new_slot(0.0)), quantize(x_MK, replace(how, scaling="current"))
    assert_same(bits(found[0]), bits(wanted[0]))
    assert found[1] == wanted[1]


def test_a_scale_from_its_own_amax_never_counts_as_saturation():
    how = cast_of(E4M3, -1, -1, delayed=True)
    for amax in torch.rand(500).add(1).tolist():
        slot = new_slot(float(factor(amax, 448.0)))
        quantize(torch.tensor([[np.float32(amax).item()]]), how, slot)
        assert counted(slot)["recasts"] == counted(slot)["saturated"] == 0


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_what_is_not_finite_stays_visible_and_out_of_the_history(group, delayed):
    how = cast_of(E4M3, *GROUPS[group], delayed=delayed and group == "tensor")
    bad = {(0, 0): float("inf"), (3, 5): float("nan"), (7, 130): float("-inf")}
    for source in DTYPES:
        clean = sample(9, 140, source)
        for at in bad:
            clean[at] = 0.0
        x_MK = clean.clone()
        for at, value in bad.items():
            x_MK[at] = value
        slot = new_slot()
        q_MK, scale = quantize(x_MK, how, slot)
        found = values(q_MK)
        assert {tuple(at) for at in np.argwhere(~np.isfinite(found)).tolist()} == set(bad)
        wanted_q, wanted_scale = quantize(clean, how)
        assert_same(scale, wanted_scale, "the scale is that of the finite elements")
        assert_same(np.nan_to_num(found, nan=0.0), values(wanted_q))
        assert counted(slot)["nonfinite"] == 3
        assert slot.live_2S[:, 1].tolist() == [-1.0, 0.0], "neither amax nor factor is entered"
        e5m2 = values(quantize(x_MK, replace(how, format=Format.of(E5M2)))[0])
        assert_same(np.array([e5m2[at] for at in bad]), np.array(list(bad.values())), "E5M2 keeps Inf")


def test_nothing_finite_at_all():
    q_MK, scale = quantize(torch.full((2, 2), float("nan")), cast_of(E5M2, -1, -1))
    assert np.isnan(values(q_MK)).all()
    assert scale == 1.0


@pytest.mark.parametrize("group", ["tensor", "row", "128x128"])
def test_counters_are_exact_over_many_calls(group):
    how = cast_of(E4M3, *GROUPS[group])
    slot, calls, elements, underflowed, sampled = new_slot(), 2 * SAMPLE_EVERY + 3, 0, 0, 0
    for call in range(calls):
        x_MK = sample(3 + call, 17, torch.bfloat16) * torch.exp2(torch.randint(-20, 1, (3 + call, 17)))
        quantize(x_MK, how, slot)
        elements += x_MK.numel()
        if call % SAMPLE_EVERY == 0:
            sampled += x_MK.numel()
            underflowed += int(((expected(x_MK, how)[0] & 0x7F) == 0)[(x_MK != 0).numpy()].sum())
    assert underflowed > 50, "the sample is worth counting"
    assert counted(slot) == {
        "calls": calls,
        "elements": elements,
        "sampled": sampled,
        "saturated": 0,
        "underflowed": underflowed,
        "nonfinite": 0,
        "recasts": 0,
    }
    assert slot.counts_CS[:, [0, 2]].sum() == 0, "other slots"
    assert slot.live_2S[:, [0, 2]].tolist() == [[-1.0, -1.0], [0.0, 0.0]], "other slots"


def test_a_slot_shared_within_a_step_keeps_the_largest_amax():
    slot, how = new_slot(), cast_of(E4M3, -1, -1, delayed=True)
    for amax in (2.0, 5.0, 3.0):
        quantize(torch.tensor([[amax]]), how, slot)
    assert slot.live_2S[0, 1] == 5.0
    quantize(torch.tensor([[100.0]]), how, slot._replace(record=False))
    assert slot.live_2S[0, 1] == 5.0, "record=False leaves the history alone"
    assert counted(slot)["calls"] == 4


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
@pytest.mark.parametrize("s", [0.0, 50.0, 1e6])
def test_the_card_route_equals_the_host_route(s, bad):
    # Per tensor a CPU takes a route of its own; any other device takes the one that rows and blocks take.
    how = cast_of(E5M2, -1, -1, delayed=True)
    x_MK = sample(60, 70, torch.bfloat16)
    if bad is not None:
        x_MK[5, 5] = bad
    host, card = new_slot(s), new_slot(s)
    q_host, scale_host = quantize(x_MK, how, host)
    q_card, scale_card = _quantize_groups(x_MK, how, card)
    assert_same(bits(q_host), bits(q_card))
    assert_same(scale_host, scale_card)
    assert counted(host) == counted(card)
    assert_same(host.live_2S, card.live_2S)


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


@pytest.mark.parametrize("dtype", FP8)
def test_rounding_is_unbiased(dtype):
    # Over whole binades, uniform within each, the error of round-to-nearest has mean 0 and at most the spread of a
    # uniform error one ulp wide: sigma = ulp / sqrt(12), ulp = eps * 2^e.  Six sigma of the mean of n.
    n = 1 << 18
    x_MK = (torch.rand(512, n // 512) + 1) * torch.where(torch.rand(512, n // 512) < 0.5, 1.0, -1.0)
    x_MK[0, 0] = 2.0
    q_MK, scale = quantize(x_MK, cast_of(dtype, -1, -1, power_of_2=True))
    error = values(q_MK) * scale.item() - x_MK.double().numpy()
    eps = float(torch.finfo(dtype).eps)
    bound = 6 * eps / np.sqrt(12 * n)
    assert abs(error.mean()) < bound
    assert abs((error * np.sign(x_MK.numpy())).mean()) < bound, "nor towards or away from zero"


def test_the_same_call_twice_gives_the_same_bits():
    x_MK = sample(300, 261, torch.bfloat16)
    for group in GROUPS.values():
        first, second = quantize(x_MK, cast_of(E4M3, *group)), quantize(x_MK, cast_of(E4M3, *group))
        assert_same(bits(first[0]), bits(second[0]))
        assert_same(first[1], second[1])
