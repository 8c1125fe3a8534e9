"""Both orientations of a cast, bit for bit against the twin, and the transposition of codes."""

import numpy as np
import pytest
import torch
from casts import E4M3, E5M2, FP8, assert_same, bits
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8engine.kernels import quantize, quantize_groups
from fp8engine.kernels.cast_transpose import cast_transpose
from fp8engine.numerics.cast import Cast
from fp8engine.ops.reference import Slot
from fp8engine.ops.reference import cast_transpose as twin
from fp8engine.ops.reference.operand import COUNTERS
from tests.helpers.casts import cast_of

SOURCES = [torch.bfloat16, torch.float16, torch.float32]
GROUPS = [(-1, -1), (1, -1), (-1, 1), (1, 128), (128, 1), (128, 128), (64, 128), (2, 4)]
INF, NAN = float("inf"), float("nan")


def slot(predicted: float = 0.0, calls: int = 0) -> Slot:
    """calls: counted before; flushed elements are counted after none, or 16, and such a call goes another way."""
    live, counts = torch.full((2, 3), 77.0), torch.full((len(COUNTERS), 3), 1 << 40)
    live[:, 1], counts[:, 1], counts[0, 1] = torch.tensor([-1.0, predicted]), 0, calls
    return Slot(live, counts, 1)


def some(m: int, k: int, source: torch.dtype) -> torch.Tensor:
    """Values of 30 binary orders of magnitude: rows, columns and blocks differ in their scales."""
    generator = torch.Generator().manual_seed(m * 1000 + k)
    sizes = torch.randint(-7, 3, (m, 1), generator=generator) + torch.randint(-7, 3, (1, k), generator=generator)
    x = torch.randn(m, k, generator=generator) * 2.0 ** (sizes - torch.randint(0, 12, (m, k), generator=generator))
    return x.to(source)


def assert_as_twin(x: torch.Tensor, how: Cast, predicted: float = 0.0) -> Slot:
    """cast_transpose as the twin does it, slot included; return the kernel's slot after a first call."""
    if not how.per_tensor:
        _assert_call_as_twin(x, how, slot(calls=1), slot(calls=1))
    return _assert_call_as_twin(x, how, slot(predicted), slot(predicted))


def _assert_call_as_twin(x: torch.Tensor, how: Cast, ours: Slot, its: Slot) -> Slot:
    with np.errstate(over="ignore"):  # x * s may overflow FP32: the kernel saturates it
        found = cast_transpose(x, how, ours)
    for (data, scale), wanted, name in zip(found, twin(x, how, its), ("q", "its transpose"), strict=True):
        assert (wanted.rows, wanted.cols) == (how.rows, how.cols)
        assert data.dtype == how.dtype
        assert data.is_contiguous()
        assert scale.stride() == wanted.scale.stride()
        assert_same(data.float(), wanted.data.float(), f"{name}, {how}, {tuple(x.shape)}")
        assert scale.dtype == torch.float32
        assert scale.shape == wanted.scale.shape
        assert torch.equal(scale, wanted.scale), f"scale of {name}, {how}, {tuple(x.shape)}"
    assert ours.counts_CS.tolist() == its.counts_CS.tolist(), (how, tuple(x.shape))
    assert ours.live_2S.tolist() == its.live_2S.tolist(), (how, tuple(x.shape))
    return ours


@pytest.mark.parametrize("rows_cols", GROUPS[:4], ids=str)
@given(m=st.integers(0, 130), k=st.integers(0, 130), source=st.sampled_from(SOURCES), dtype=st.sampled_from(FP8))
@settings(max_examples=2)
def test_any_shape(rows_cols, m, k, source, dtype):
    assert_as_twin(some(m, k, source), cast_of(dtype, *rows_cols))


@pytest.mark.parametrize("rows_cols", [*GROUPS[:4], (2, 4)], ids=str)
def test_what_is_not_finite_stays_so_in_both_and_is_counted_once(rows_cols):
    x = some(70, 120, torch.bfloat16)
    x[3, 5], x[3, 6], x[69, 119] = INF, -INF, NAN
    how = cast_of(FP8[rows_cols[0] == 1], *rows_cols)
    ours = assert_as_twin(x, how)
    assert ours.counts_CS[COUNTERS.index("nonfinite"), 1] == 3
    assert ours.live_2S[0, 1] == -1
    for (data, scale), view in zip(cast_transpose(x, how), (x, x.t()), strict=True):
        assert scale.isfinite().all()
        assert torch.equal(data.float().isnan(), view.isnan() if how.dtype == E5M2 else ~view.isfinite())


@pytest.mark.parametrize("rows_cols", GROUPS[:4], ids=str)
def test_any_strides(rows_cols):
    x = some(140, 120, torch.bfloat16)
    for view in (x.t(), x[::3, 1::2], x[5:6].expand(20, -1)):
        assert_as_twin(view, cast_of(E4M3, *rows_cols))


@pytest.mark.parametrize("rows_cols", [(-1, -1), (128, 128)], ids=str)
def test_square_groups_make_the_transpose_the_transpose_of_the_codes(rows_cols):
    (q, scale), (q_t, scale_t) = cast_transpose(some(140, 150, torch.float32), cast_of(E4M3, *rows_cols))
    assert_same(bits(q_t), bits(q.t()))
    assert torch.equal(scale_t, scale.t() if scale.dim() else scale)


@pytest.mark.parametrize("rows_cols", GROUPS[:4], ids=str)
def test_the_result_does_not_depend_on_the_number_of_programs(rows_cols, monkeypatch):
    x, how, results = some(140, 120, torch.bfloat16), cast_of(E5M2, *rows_cols), []
    for processors in (1, 3):
        for module in (quantize, quantize_groups):
            monkeypatch.setattr(module, "processors", lambda where, processors=processors: processors)
        ours = slot()
        pairs = cast_transpose(x, how, ours)
        results.append([t.float() for pair in pairs for t in pair] + [ours.live_2S, ours.counts_CS])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
