"""The 16-bit matmul in every layout against float64 products (the bound: conftest.py), and its twin."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8engine.kernels import launch
from fp8engine.kernels.matmul import matmul_fp16
from fp8engine.kernels.tuning import Config, table
from fp8engine.ops.reference import Epilogue, finish
from fp8engine.ops.reference import matmul_fp16 as twin

COMMITTED = {
    config._replace(ratio=None)
    for rows in table()["matmul_fp16"].values()
    for config in rows.values()
    if config.kernel == "triton"
}
POINTERS = Config(64, 64, 64, group_m=2, descriptors=False)
DESCRIPTORS = Config(64, 64, 64, group_m=2, parts=2)
HALF = [torch.bfloat16, torch.float16]
OUTPUTS = [torch.bfloat16, torch.float16, torch.float32]
LAYOUTS = list(itertools.product(["K contiguous", "rows contiguous"], repeat=2))


def laid_out(x_MK: torch.Tensor, layout: str) -> torch.Tensor:
    return x_MK if layout == "K contiguous" else x_MK.t().contiguous().t()


def random(m: int, k: int, dtype: torch.dtype = torch.bfloat16, layout: str = "K contiguous") -> torch.Tensor:
    return laid_out(torch.randn(m, k).to(dtype), layout)


@pytest.mark.parametrize("config", sorted(COMMITTED), ids=str)
def test_every_committed_configuration(config, assert_within_bound):
    # Two tiles down, two across, three along K, the last of each ragged; rows of the result aligned, and not.
    m, k = config.block_m + 24, 2 * config.block_k + 8
    for dtype, n, out in ((HALF[0], config.block_n + 8, HALF[0]), (HALF[1], config.block_n + 3, torch.float32)):
        a, b, bias_N = random(m, k, dtype), random(n, k, dtype), torch.randn(n)
        y_MN = matmul_fp16(a, b, Epilogue(bias_N, out), config)
        assert y_MN.dtype == out
        assert_within_bound(y_MN, a.double(), b.double(), bias_N, out)


@pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=str)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("first", "second"), LAYOUTS)
def test_layouts(first, second, dtype, config, assert_within_bound):
    a, b = random(72, 80, dtype, first), random(88, 80, dtype, second)
    assert (launch.load_of(a) == launch.TRANSPOSED) == (first == "rows contiguous")
    for out in OUTPUTS:
        assert_within_bound(matmul_fp16(a, b, Epilogue(None, out), config), a.double(), b.double(), None, out)


@settings(max_examples=30)
@given(
    st.integers(0, 150), st.integers(0, 150), st.integers(0, 200), st.sampled_from(LAYOUTS), st.sampled_from(OUTPUTS)
)
def test_any_shape_and_layout_under_the_configuration_that_is_picked(assert_within_bound, m, n, k, layouts, out):
    dtype = HALF[k % 2]
    a, b = (random(rows, k, dtype, layout) for rows, layout in zip((m, n), layouts, strict=True))
    bias_N = torch.randn(n)
    assert_within_bound(matmul_fp16(a, b, Epilogue(bias_N, out)), a.double(), b.double(), bias_N)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 5), (3, 0, 5), (3, 5, 0), (0, 0, 0), (1, 1, 1), (1, 128, 127)])
def test_empty_and_single(m, n, k, assert_within_bound):
    bias_N = torch.randn(n)
    for layouts in LAYOUTS:
        a, b = (random(rows, k, torch.float16, layout) for rows, layout in zip((m, n), layouts, strict=True))
        y_MN = matmul_fp16(a, b, Epilogue(bias_N, torch.float32))
        assert_within_bound(y_MN, a.double(), b.double(), bias_N)
        assert k or torch.equal(y_MN, bias_N.expand(m, n))


def views(m: int, k: int) -> dict[str, torch.Tensor]:
    """An m x k matrix as parts of something larger."""
    x = torch.randn(2 * m + 2, 3 * k + 16).bfloat16()
    return {
        "aligned slice": x[1 : m + 1, 16 : 16 + k],
        "aligned slice, turned": torch.randn(k, m + 16).bfloat16()[:, 8 : m + 8].t(),
        "unaligned slice": x[1 : m + 1, 3 : 3 + k],
        "strided both ways": x[: 2 * m : 2, : 3 * k : 3],
        "strided both ways, turned": torch.randn(2 * k, 2 * m).bfloat16()[::2, ::2].t(),
        "one row for all": x[:1, :k].expand(m, k),
        "one column for all": x[:m, :1].expand(m, k),
        "one number for all": x[:1, :1].expand(m, k),
        "windows": x.view(-1)[: m + k].as_strided((m, k), (1, 1)),
    }


@pytest.mark.parametrize("kind", views(4, 4))
def test_views_of_any_strides(kind, assert_within_bound):
    m, n, k = 72, 88, 80
    described = kind in ("aligned slice", "aligned slice, turned")
    for a, b in ((views(m, k)[kind], random(n, k)), (random(m, k), views(n, k)[kind])):
        assert (launch.POINTER in (launch.load_of(a), launch.load_of(b))) != described
        for config in (None, DESCRIPTORS):  # one operand by descriptor beside one that cannot be
            y_MN = matmul_fp16(a, b, Epilogue(None, torch.float32), config)
            assert_within_bound(y_MN, a.double(), b.double(), None, config)


def test_what_is_not_finite_reaches_its_row_and_its_column_and_no_other():
    for bad, layouts in zip((float("nan"), float("inf"), float("-inf"), float("nan")), LAYOUTS, strict=True):
        a, b = torch.rand(72, 80) + 0.5, torch.rand(88, 80) + 0.5
        a[65, 66] = bad
        a, b = (laid_out(x.bfloat16(), layout) for x, layout in zip((a, b), layouts, strict=True))
        for config, out in ((POINTERS, torch.float16), (DESCRIPTORS, torch.bfloat16)):
            y_MN = matmul_fp16(a, b, Epilogue(None, out), config)
            yt_NM = matmul_fp16(b, a, Epilogue(None, out), config)
            for row in (y_MN[65], yt_NM[:, 65]):
                assert (row == bad).all() or (row.isnan().all() and bad != bad)
            others = torch.arange(72) != 65
            assert y_MN[others].isfinite().all()
            assert yt_NM[:, others].isfinite().all()


@pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS, Config(32, 128, 32, parts=4), Config(128, 64, 128)], ids=str)
@pytest.mark.parametrize("dtype", HALF)
def test_the_twin_agrees_bit_for_bit_where_sums_are_exact(config, dtype):
    for layouts, out in zip(LAYOUTS, itertools.cycle(OUTPUTS)):
        a, b = (torch.randint(-8, 9, (rows, 72)).to(dtype) for rows in (72, 136))
        a, b = (laid_out(x, layout) for x, layout in zip((a, b), layouts, strict=True))
        bias_N = torch.randint(-99, 100, (136,)).float()
        wanted = finish(twin(a, b, None, torch.float32), Epilogue(bias_N, out))
        assert torch.equal(matmul_fp16(a, b, Epilogue(bias_N, out), config), wanted)


@pytest.mark.parametrize("processors", [1, 3, 4, 100])
def test_any_number_of_programs_covers_every_tile(processors, monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda where: processors)
    a, b = torch.randint(-8, 9, (170, 32)).half(), torch.randint(-8, 9, (150, 32)).half()
    config = Config(32, 32, 32, group_m=4, descriptors=False)  # 6 x 5 tiles
    y_MN = matmul_fp16(a, b, Epilogue(None, torch.float32), config)
    assert torch.equal(y_MN.double(), a.double() @ b.double().t())


@pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=str)
def test_two_runs_are_equal_bit_for_bit(config):
    a, b = random(72, 72), random(88, 72, layout="rows contiguous")
    for out in OUTPUTS:
        first, second = (matmul_fp16(a, b, Epilogue(torch.ones(88), out), config) for _ in range(2))
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
