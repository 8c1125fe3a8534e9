"""The sums of a matrix's columns that a cast takes on its way, and the launch that adds partial sums.

With u = 2^-24, FP32's largest relative rounding error, any order of adding n numbers has an error of at most
(n - 1) u / (1 - (n - 1) u) times the sum of their magnitudes: a number goes through at most n - 1 additions (Higham,
Accuracy and Stability of Numerical Algorithms, section 4.2).  A zero beyond the matrix's end adds no error, and what
has 16 bits is exact in FP32.
"""

import pytest
import torch
from casts import E4M3, E5M2, assert_same, cast_of
from contracts import slot_of
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted.test_interpreted_quantize import GROUPS, INF, NAN, SOURCES

from fp8engine.kernels import quantize, quantize_groups
from fp8engine.kernels.cast_transpose import cast_transpose
from fp8engine.kernels.column_sums import COLUMNS, ROWS, column_sums
from fp8engine.numerics.cast import Cast
from fp8engine.ops.reference import cast_transpose as twin

EVERY = [cast_of(E4M3, *group) for group in GROUPS] + [cast_of(E5M2, -1, -1, delayed=True)]
SOME = [EVERY[0], EVERY[1], EVERY[3], EVERY[-1]]  # one for each place where sums are taken
PREDICTED = 64.0  # under which some elements saturate: both launches of a predicted cast read x


def some(m: int, k: int, source: torch.dtype) -> torch.Tensor:
    """Values of 12 binary orders of magnitude and both signs, so that sums cancel."""
    return (torch.randn(m, k) * 2.0 ** torch.randint(-8, 5, (m, k))).to(source)


def whole(m: int, k: int, source: torch.dtype) -> torch.Tensor:
    """Whole numbers up to 8: FP32 sums of fewer than 2^21 of them are exact."""
    return torch.randint(-8, 9, (m, k)).to(source)


def sums_of(x: torch.Tensor, how: Cast) -> torch.Tensor:
    """The third result; the first two, and the slot, are what they are without it."""
    with_sums, without = slot_of(PREDICTED), slot_of(PREDICTED)
    *found, sums_K = cast_transpose(x, how, with_sums, sums=True)
    for (data, scale), (wanted, wanted_scale) in zip(found, cast_transpose(x, how, without), strict=True):
        assert_same(data.view(torch.uint8), wanted.view(torch.uint8), str(how))
        assert torch.equal(scale, wanted_scale)
    assert torch.equal(with_sums.live_2S, without.live_2S)
    assert torch.equal(with_sums.counts_CS, without.counts_CS)
    assert sums_K.shape == x.shape[1:]
    assert sums_K.dtype == torch.float32
    return sums_K


def assert_within_bound(sums_K: torch.Tensor, x_MK: torch.Tensor) -> None:
    terms = (x_MK.shape[0] - 1) * 2.0**-24
    bound = terms / (1 - terms) * x_MK.double().abs().sum(0)
    assert ((sums_K.double() - x_MK.double().sum(0)).abs() <= bound).all()


@pytest.mark.parametrize("how", EVERY, ids=str)
def test_sums_are_those_of_the_source_and_the_codes_do_not_change(how):
    for m, k, source in ((5, 131, SOURCES[how.rows == 1]), (140, 33, torch.float32)):  # two tiles, across and down
        x = some(m, k, source)
        assert_within_bound(sums_of(x, how), x)
        assert_within_bound(twin(x, how, slot_of(PREDICTED), sums=True)[2], x)


@pytest.mark.parametrize("how", SOME, ids=str)
@given(m=st.integers(0, 270), k=st.integers(0, 130), source=st.sampled_from(SOURCES))
@settings(max_examples=3)
def test_sums_of_whole_numbers_are_exact_in_any_shape(how, m, k, source):
    x = whole(m, k, source)
    assert sums_of(x, how).tolist() == x.double().sum(0).tolist()


@pytest.mark.parametrize("how", SOME, ids=str)
def test_any_strides(how):
    x = whole(140, 60, torch.bfloat16)
    for view in (x.t(), x[::3, 1::2], x[5:6].expand(130, -1)):
        assert sums_of(view, how).tolist() == view.double().sum(0).tolist()


@pytest.mark.parametrize("how", EVERY, ids=str)
def test_what_is_not_finite_reaches_its_own_column_alone(how):
    x = whole(140, 75, torch.bfloat16)
    wanted = x.double().sum(0)
    for row, column, value, total in (
        (3, 5, INF, INF),
        (139, 6, -INF, -INF),
        (64, 74, NAN, NAN),
        (0, 70, INF, NAN),  # with -Inf in another tile
        (138, 70, -INF, NAN),
    ):
        x[row, column], wanted[column] = value, total
    assert_same(x.double().sum(0), wanted, "torch's own")
    assert_same(sums_of(x, how).double(), wanted, str(how))


@pytest.mark.parametrize("how", SOME, ids=str)
def test_the_order_of_additions_does_not_depend_on_the_number_of_programs(how, monkeypatch):
    x, results = some(140, 130, torch.float32), []
    for processors in (1, 3):
        for module in (quantize, quantize_groups):
            monkeypatch.setattr(module, "processors", lambda where, processors=processors: processors)
        results.append(sums_of(x, how))
    assert torch.equal(*results)


def test_a_row_wider_than_a_program_holds(monkeypatch):
    monkeypatch.setattr(quantize_groups, "WIDEST", 64)
    x = whole(140, 150, torch.float16)
    assert sums_of(x, cast_of(E5M2, 1, -1)).tolist() == x.double().sum(0).tolist()


def test_what_was_not_asked_for_is_not_there(monkeypatch):
    monkeypatch.setattr(quantize, "partial_sums", pytest.fail)
    monkeypatch.setattr(quantize_groups, "partial_sums", pytest.fail)
    for how in EVERY:
        assert len(cast_transpose(whole(5, 6, torch.bfloat16), how, slot_of())) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_partial_sums_are_added_in_fp32_and_rounded_once(dtype):
    for p, k in ((0, 5), (1, 1), (ROWS.value + 3, COLUMNS.value + 1), (2 * ROWS.value, COLUMNS.value), (5, 0)):
        part_PK = whole(p, k, torch.float32) * 33.0  # sums that 16 bits do not hold
        found = column_sums(part_PK, dtype)
        assert found.dtype == dtype
        assert found.tolist() == part_PK.double().sum(0).to(dtype).tolist()


@pytest.mark.parametrize("how", EVERY, ids=str)
def test_sums_of_nothing_are_zero(how):
    for shape in ((0, 5), (5, 0), (0, 0)):
        assert cast_transpose(torch.empty(shape), how, None, sums=True)[2].tolist() == [0.0] * shape[1]
