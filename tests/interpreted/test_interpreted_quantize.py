"""Casts to FP8 with a scale per tensor, row, column and block, bit for bit against the twins: codes, scales, counters.

One orientation and both.  Each cast is a slot's first call, in which flushed elements are counted, and another, in
which they are not: by groups these are different ways through a kernel (kernels/quantize_groups.py).
"""

import itertools
import math

import faithful
import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
import triton.language as tl
from casts import E4M3, E5M2, FP8, MAX, assert_same, bits, cast_of, clamped_cast, every_value, factor
from contracts import counted, slot_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8engine.kernels import quantize as kernel
from fp8engine.kernels import quantize_groups as groups
from fp8engine.kernels import scaling
from fp8engine.kernels.cast_transpose import cast_transpose
from fp8engine.kernels.quantize import quantize, quantize_given
from fp8engine.numerics.cast import Cast
from fp8engine.ops.reference import Operand, Slot
from fp8engine.ops.reference import cast_transpose as twin_of_both
from fp8engine.ops.reference import quantize as twin
from fp8engine.ops.reference import quantize_given as twin_given
from fp8engine.ops.reference.quantize import SAMPLE_EVERY

SOURCES = [torch.bfloat16, torch.float16, torch.float32]
GROUPS = [(-1, -1), (1, -1), (-1, 1), (1, 128), (128, 1), (128, 128), (16, 16), (64, 128), (2, 4)]
SHAPES = [(1, 1), (7, 257), (131, 31)]
INF, NAN = float("inf"), float("nan")


def some(m: int, k: int, source: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values of 40 binary orders of magnitude (so that some are flushed), a few zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * 2.0 ** torch.randint(-14, 4, (m, k), generator=generator)
    x = torch.where(torch.rand(m, k, generator=generator) < 0.05, 0.0 * x.sign(), x)
    return x.to(source)


def assert_same_result(found, wanted, what: object = "") -> None:
    """(codes, scale) of kernel and twin: equal bits but for NaN's, and for the sign of a zero that the twin drops."""
    (q, scale), (q_twin, scale_twin) = found, wanted[:2]
    assert q.dtype == q_twin.dtype
    assert q.is_contiguous()
    assert_same(q.float(), q_twin.float(), f"codes, {what}")
    assert scale.dtype == torch.float32
    assert scale.shape == scale_twin.shape
    assert torch.equal(scale, scale_twin), f"scale, {what}"


def assert_as_twin(x: torch.Tensor, how: Cast, start=slot_of) -> Slot:
    """Both casts as the twins do them, with tables that end equal; return the slot of `quantize` after a first call."""
    if not how.per_tensor:
        assert_calls_as_twins(x, how, lambda: called_before(start()))
    return assert_calls_as_twins(x, how, start)


def called_before(one: Slot) -> Slot:
    one.counts_CS[0, 1] = 1
    return one


def assert_calls_as_twins(x: torch.Tensor, how: Cast, start) -> Slot:
    what = how, tuple(x.shape), x.dtype
    for run, its_twin in ((cast_transpose, twin_of_both), (quantize, twin)):
        ours, its = start(), start()
        found, wanted = run(x, how, ours), its_twin(x, how, its)
        pairs = zip(found, wanted, strict=True) if isinstance(wanted[0], Operand) else [(found, wanted)]
        for mine, twins in pairs:
            assert_same_result(mine, twins, what)
        assert ours.counts_CS.tolist() == its.counts_CS.tolist(), what
        assert ours.live_2S.tolist() == its.live_2S.tolist(), what
    return ours


@pytest.mark.parametrize("rows_cols", GROUPS, ids=str)
def test_every_granularity_is_the_twin_s(rows_cols):
    for i, (m, k) in enumerate(SHAPES):
        for dtype in FP8 if m == 7 else FP8[i % 2 :][:1]:
            assert_as_twin(some(m, k, SOURCES[i % 3], seed=i), cast_of(dtype, *rows_cols, power_of_2=i % 2 == 0))


@pytest.mark.parametrize("rows_cols", [(-1, -1), (1, -1), (-1, 1), (1, 128)], ids=str)
@given(m=st.integers(0, 40), k=st.integers(0, 300), source=st.sampled_from(SOURCES), dtype=st.sampled_from(FP8))
@settings(max_examples=4)
def test_any_shape(rows_cols, m, k, source, dtype):
    assert_as_twin(some(m, k, source), cast_of(dtype, *rows_cols))


@given(
    arrays.arrays(np.float32, (3, 130), elements=st.floats(width=32)),
    st.sampled_from([(-1, -1), (1, -1), (-1, 1), (2, 64)]),
    st.sampled_from(FP8),
    st.booleans(),
)
@settings(max_examples=8)
def test_any_values(x, rows_cols, dtype, power_of_2):
    assert_as_twin(torch.from_numpy(x), cast_of(dtype, *rows_cols, power_of_2))


@pytest.mark.few(4)
@pytest.mark.parametrize("rows_cols", [(-1, -1), (1, -1), (-1, 1), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", FP8)
def test_scales_at_the_ends_of_fp32(rows_cols, dtype):
    # All zero: 1.  Subnormal amax: s overflows and becomes the largest FP32.  Largest FP32: s is subnormal's neighbour.
    for top in (0.0, 1e-45, 1e-38, 2.0**-120, torch.finfo(torch.float32).max):
        for power_of_2 in (False, True):
            assert_as_twin(
                torch.tensor([[top, -top / 2, 0.0], [top / 4, -0.0, top]]), cast_of(dtype, *rows_cols, power_of_2)
            )


@pytest.mark.parametrize("how", [cast_of(E4M3, -1, -1), cast_of(E4M3, 1, -1), cast_of(E5M2, 1, 128)], ids=str)
def test_codes_are_ml_dtypes_own(how):
    # Not by the twin: runs of 16-bit values of every exponent, 128 of them or fewer a row, so that a block is a row.
    for source in (torch.bfloat16, torch.float16):
        x = every_value(source)
        x = x[x.isfinite()].view(-1, 128).t()[:, ::4]
        q, scale = quantize(x, how)
        wide = x.float().numpy()
        amax = np.abs(wide).max() if how.per_tensor else np.abs(wide).max(1)
        s = np.vectorize(lambda a: factor(a, MAX[how.dtype]))(amax).astype(np.float32)
        s = np.broadcast_to(s.reshape(-1, 1), wide.shape)
        wanted = np.stack([clamped_cast(row, one, how.dtype) for row, one in zip(wide, s[:, 0], strict=True)])
        assert faithful.same_codes(bits(q), wanted, how.dtype)
        assert_same(scale.expand(wide.shape), np.float32(1) / s)


SOME = [((3, 5), INF), ((3, 6), -INF), ((129, 139), NAN)]
BAD = {
    "some in E4M3": (E4M3, SOME),
    "some in E5M2": (E5M2, SOME),
    "one_that_one_program_sees": (E4M3, [((129, 139), INF)]),
    "all are NaN": (E5M2, [((...,), NAN)]),
    "all are -Inf": (E4M3, [((...,), -INF)]),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("rows_cols", [*GROUPS[:5], (2, 4)], ids=str)
def test_what_is_not_finite_is_counted_and_enters_no_history(rows_cols, bad):
    x, (dtype, places) = some(130, 140, torch.bfloat16), BAD[bad]
    for place, value in places:
        x[place] = value
    ours = assert_as_twin(x, cast_of(dtype, *rows_cols))
    assert ours.live_2S[:, 1].tolist() == [-1.0, 0.0]
    assert counted(ours)["nonfinite"] == (~x.isfinite()).sum()


@pytest.mark.parametrize(
    "how", [cast_of(E4M3, -1, -1, delayed=True), cast_of(E5M2, 128, 128), cast_of(E4M3, 1, -1)], ids=str
)
@pytest.mark.parametrize("value", [2.0**-30, NAN])
def test_a_whole_tile_that_is_flushed_or_not_finite_is_counted(how, value):
    # Both counts of a tile share an INT32: 4096 elements or more of one must not reach into the other, or overflow.
    x = torch.full((128, 128), value)
    x[0, 0] = 2.0**10
    ours = assert_as_twin(x, how, lambda: slot_of(2.0**-3))
    flushed, nonfinite = (counted(ours)[name] for name in ("underflowed", "nonfinite"))
    assert (nonfinite, flushed >= 127) == ((128 * 128 - 1, False) if value != value else (0, True))


@pytest.mark.parametrize("rows_cols", [(-1, -1), (1, -1), (-1, 1), (16, 16)], ids=str)
def test_any_strides(rows_cols):
    x = some(70, 150, torch.bfloat16)
    for view in (x.t(), x[:, 1:], x[::3, ::2], x[5:6].expand(20, -1)):
        assert_as_twin(view, cast_of(E4M3, *rows_cols))


# Of a factor that takes the amax to MAX exactly: recasts.  4 ulps above are the rounding of the factor itself, 2^-22.
OVER = {0.25: 0, 1.0: 0, 1 + 4 * 2.0**-19 / 28: 0, 1 + 5 * 2.0**-19 / 28: 1, 1 + 2.0**-7: 1, 16.0: 1}


@pytest.mark.few(8)
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "not finite"])
def test_a_prediction_holds_up_to_its_own_rounding_or_is_replaced_in_the_same_call(bad, dtype, over):
    x = some(40, 170, SOURCES[bad + (dtype == E5M2)]).clamp(-16.0, 16.0)
    x[0, 0] = -16.0
    if bad:
        x[1, :3] = torch.tensor([INF, NAN, -INF])
    predicted = MAX[dtype] / 16.0 * over  # 28 or 3584, whose ulps are 2^-19 / 28 of them
    for view in (x, x.t()):
        ours = assert_as_twin(view, cast_of(dtype, -1, -1, delayed=True), lambda: slot_of(predicted))
        assert counted(ours)["recasts"] == OVER[over]
        # The prediction is the next step's business.
        assert ours.live_2S[:, 1].tolist() == [-1.0 if bad else 16.0, np.float32(predicted)]


@pytest.mark.parametrize("how", [cast_of(E4M3, *g) for g in GROUPS[:4]], ids=str)
def test_a_second_call_in_a_step_keeps_the_larger_amax_and_adds_up(how):
    big, small = some(33, 200, torch.bfloat16), some(20, 100, torch.bfloat16) / 64
    for first, second in ((big, small), (small, big)):
        ours = slot_of()
        quantize(first, how, ours)
        quantize(second, how, ours)
        assert ours.live_2S[0, 1] == big.abs().max()
        sampled = first.numel() + (second.numel() if how.per_tensor else 0)
        assert ours.counts_CS[:3, 1].tolist() == [2, first.numel() + second.numel(), sampled]
        least = [float(twin(x, how)[1].max()) for x in (first, second)]
        assert ours.live_2S[1, 1] == pytest.approx(1 / least[1], rel=2**-22)  # the last call's: two roundings


@pytest.mark.parametrize("how", [cast_of(E4M3, *g) for g in GROUPS[1:6]], ids=str)
def test_flushed_elements_are_counted_in_one_call_of_sixteen_and_what_is_not_finite_in_each(how):
    assert scaling.SAMPLE_EVERY.value == SAMPLE_EVERY
    x = some(40, 130, torch.bfloat16)
    bad, once, ours = x.clone(), slot_of(), slot_of()
    bad[7, 9], bad[8, 9], bad[39, 129] = NAN, INF, 1e9  # the third would be the amax
    twin(x, how, once)
    flushed = counted(once)["underflowed"]
    assert flushed > 0
    for call in range(18):
        given_x = bad if call == 5 else x
        assert_same_result(quantize(given_x, how, ours), twin(given_x, how), call)
    size = x.numel()
    assert ours.counts_CS[:, 1].tolist() == [18, 18 * size, 2 * size, 0, 2 * flushed, 2, 0]
    assert ours.live_2S[0, 1] == x.abs().max()


def test_rows_wider_than_a_program_holds(monkeypatch):
    x = some(5, 300, torch.bfloat16)
    wanted = quantize(x, cast_of(E4M3, 1, -1))
    monkeypatch.setattr(groups, "WIDEST", 256)
    assert_same_result(quantize(x, cast_of(E4M3, 1, -1)), wanted)
    assert_as_twin(x, cast_of(E4M3, 1, -1))


@pytest.mark.parametrize(
    "how", [cast_of(E4M3, *g) for g in GROUPS[:4]] + [cast_of(E5M2, -1, -1, delayed=True)], ids=str
)
def test_the_result_does_not_depend_on_the_number_of_programs(how, monkeypatch):
    x = some(200, 140, torch.bfloat16)  # several tiles a program
    x[1, 2], x[199, 3] = math.inf, math.nan  # counted by programs that go on to other tiles
    results = []
    for processors in (1, 64):  # 64: a tile each
        for module in (kernel, groups):
            monkeypatch.setattr(module, "processors", lambda where, processors=processors: processors)
        slots = slot_of(1.0), slot_of(1.0)
        made = (*quantize(x, how, slots[0]), *itertools.chain(*cast_transpose(x, how, slots[1])))
        tables = (table for one in slots for table in one[:2])
        results.append((*(each.float().nan_to_num(-1.0) for each in made), *tables))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_as_many_saturate_as_32_bits_do_not_count():
    """Four programs, of which each has found 2^30 in its tiles: the sum is 2^32, in 32 bits 0."""
    x, how, ours = torch.ones(2, 8), cast_of(E4M3, -1, -1, delayed=True), slot_of(2.0**9)
    results, found = kernel.tensor_results(x, how, False), kernel.workspace(x.device)
    found[:, :4] = torch.tensor([[1.0], [0.0], [0.0], [0.0]]).view(torch.int32)
    found[1, :4] = 1 << 30
    kernel.cast_measured(x, (found, 4, None), how, ours, results)
    assert results[0].float().tolist() == [[448.0] * 8] * 2
    assert counted(ours)["saturated"] == 1 << 32


def test_no_more_programs_run_than_are_read_of(monkeypatch):
    monkeypatch.setattr(kernel, "processors", lambda where: 1 << 20)
    monkeypatch.setattr(kernel, "MOST_PROGRAMS", tl.constexpr(2))
    assert_as_twin(some(3, 5000, torch.bfloat16), cast_of(E4M3, -1, -1))


def test_the_scale_of_nothing_is_one():
    assert quantize(torch.ones(0, 5), cast_of(E4M3, -1, -1))[1].item() == 1.0


@pytest.mark.parametrize("rows_cols", [(-1, -1), (1, -1), (-1, 1), (16, 64)], ids=str)
def test_given_factors_of_any_strides(rows_cols):
    """Behind each factor lies NaN, and behind the last the memory of no tensor."""
    x, how = some(70, 150, torch.bfloat16), cast_of(E4M3, *rows_cols)
    s = torch.exp2(torch.randint(-3, 4, how.scale_shape(70, 150)).float())
    between = torch.full((*s.shape[:1], 2 * s.shape[1] - 1), NAN) if s.dim() else s
    spread = between[:, ::2] if s.dim() else s
    spread.copy_(s)
    for given_s in (s, spread, s.t().contiguous().t()):
        assert_same(quantize_given(x, how, given_s).float(), twin_given(x, how, s).float(), f"codes, {how}")


@pytest.mark.parametrize("dtype", FP8)
def test_a_finite_element_saturates_even_where_its_product_passes_fp32_s_range(dtype):
    q = quantize_given(torch.tensor([[1e30, -1e30, INF]]), cast_of(dtype, -1, -1), torch.tensor(1e30))
    assert q.float()[0, :2].tolist() == [MAX[dtype], -MAX[dtype]]
    assert not q.float()[0, 2].isfinite()


@pytest.mark.parametrize(("k", "long"), [(groups.WIDEST, False), (groups.WIDEST + 16, True)])
def test_a_row_that_no_program_holds_is_divided_among_programs(k: int, long: bool, monkeypatch: pytest.MonkeyPatch):
    launched = []
    for name in ("_short_kernel", "_line_cast_kernel"):
        real = getattr(groups, name)
        told = type(
            "Told", (), {"__getitem__": lambda _, grid, real=real, name=name: launched.append(name) or real[grid]}
        )
        monkeypatch.setattr(groups, name, told())
    x = torch.randn(2, k, dtype=torch.bfloat16)
    q, scale = quantize(x, cast_of(E4M3, 1, -1), None)
    assert launched == ["_line_cast_kernel" if long else "_short_kernel"]
    assert_same(scale, twin(x, cast_of(E4M3, 1, -1))[1], "scale")
    assert_same(q.float(), twin(x, cast_of(E4M3, 1, -1))[0].float(), "q")
