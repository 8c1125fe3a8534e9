"""The FP8 matmul with scales along K against float64 products (the bound: conftest.py), and its twin."""

import itertools

import pytest
import torch
from casts import E4M3, E5M2
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8engine.kernels import launch
from fp8engine.kernels.matmul import matmul_fp8
from fp8engine.kernels.tuning import Config, table
from fp8engine.ops.reference import Epilogue, Operand, finish, quantize
from fp8engine.ops.reference import matmul_block as twin
from tests.helpers.casts import cast_of

COMMITTED = {
    config._replace(ratio=None)
    for rows in table()["matmul_block"].values()
    for config in rows.values()
    if config.kernel == "triton"
}
POINTERS = Config(64, 64, 128, group_m=2, descriptors=False)
DESCRIPTORS = Config(64, 64, 128, group_m=2, parts=2)
FORMATS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
OUTPUTS = [torch.bfloat16, torch.float16, torch.float32]
ROWS = list(itertools.product((1, 128), repeat=2))


def random(m: int, k: int, rows: int, dtype: torch.dtype = E4M3, cols: int = 128) -> Operand:
    """Values whose size changes from row to row and from one 16 of K to the next, so that every scale differs."""
    x_MK = torch.randn(m, k) * torch.exp2(torch.randint(-2, 3, (m, 1)))
    x_MK *= torch.exp2(torch.randint(-2, 3, (-(-k // 16),))).repeat_interleave(16)[:k]
    return Operand(*quantize(x_MK, cast_of(dtype, rows, cols)), rows, cols)


def integers(m: int, k: int, rows: int) -> Operand:
    """Codes of small integers under scales of 1/8 to 8: their products sum exactly, in any order."""
    scale = torch.exp2(torch.randint(-3, 4, (-(-m // rows), -(-k // 128))) * 1.0)
    return Operand(torch.randint(-8, 9, (m, k)).to(E4M3), scale, rows, 128)


def real(x: Operand) -> torch.Tensor:
    m, k = x.data.shape
    return x.data.double() * x.scale.double().repeat_interleave(x.rows, 0)[:m].repeat_interleave(x.cols, 1)[:, :k]


@pytest.mark.few(8)
@pytest.mark.parametrize(("rows_a", "rows_b"), ROWS)
@pytest.mark.parametrize("config", sorted(COMMITTED), ids=str)
def test_every_committed_configuration(config, rows_a, rows_b, assert_within_bound):
    # Two tiles down, two across, three groups of K, the last of each ragged; rows of the result aligned, and not.
    m, k = config.block_m + 75, 272
    for n, out in ((config.block_n + 8, torch.bfloat16), (config.block_n + 3, torch.float32)):
        a, b, bias_N = random(m, k, rows_a), random(n, k, rows_b), torch.randn(n)
        y_MN = matmul_fp8(a, b, Epilogue(bias_N, out), config=config)
        assert y_MN.dtype == out
        assert_within_bound(y_MN, real(a), real(b), bias_N, out)


@pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=str)
@pytest.mark.parametrize(("first", "second"), FORMATS)
def test_formats_and_scales(first, second, config, assert_within_bound):
    for (rows_a, rows_b), out in zip(ROWS, itertools.cycle(OUTPUTS)):
        a, b = random(140, 144, rows_a, first), random(56, 144, rows_b, second)
        y_MN = matmul_fp8(a, b, Epilogue(None, out), config=config)
        assert_within_bound(y_MN, real(a), real(b), None, (rows_a, rows_b, out))


@pytest.mark.parametrize(("rows_a", "rows_b"), ROWS)
def test_a_tile_that_crosses_blocks_of_scales_reads_each_row_s_own(rows_a, rows_b, assert_within_bound):
    a, b = random(300, 144, rows_a), random(280, 144, rows_b)
    y_MN = matmul_fp8(a, b, Epilogue(None, torch.float32), config=Config(256, 256, 128, descriptors=False))
    assert_within_bound(y_MN, real(a), real(b))


@pytest.mark.parametrize("cols", [32, 64])
def test_groups_of_k_of_another_width(cols, assert_within_bound):
    for rows_a, rows_b in ((1, cols), (cols, 1), (2 * cols, 2 * cols)):
        a, b = random(70, 80, rows_a, cols=cols), random(40, 80, rows_b, cols=cols)
        assert_within_bound(matmul_fp8(a, b, Epilogue(None, torch.float32), config=POINTERS), real(a), real(b))


@pytest.mark.parametrize(("rows_a", "rows_b"), ROWS)
def test_scales_of_any_strides(rows_a, rows_b, assert_within_bound):
    a, b = random(140, 272, rows_a), random(150, 272, rows_b)
    turned = a._replace(scale=a.scale.t().contiguous().t())
    wide = torch.full((b.scale.shape[0] * 2, b.scale.shape[1] + 5), float("nan"))
    wide[::2, 2:-3] = b.scale
    y_MN = matmul_fp8(turned, b._replace(scale=wide[::2, 2:-3]), Epilogue(None, torch.float32))
    assert_within_bound(y_MN, real(a), real(b))


@settings(max_examples=30)
@given(st.integers(0, 150), st.integers(0, 150), st.integers(0, 300), st.sampled_from(ROWS), st.sampled_from(OUTPUTS))
def test_any_shape_under_the_configuration_that_is_picked(assert_within_bound, m, n, k, rows, out):
    a, b, bias_N = random(m, k, rows[0]), random(n, k, rows[1]), torch.randn(n)
    assert_within_bound(matmul_fp8(a, b, Epilogue(bias_N, out)), real(a), real(b), bias_N)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 5), (3, 0, 5), (3, 5, 0), (0, 0, 0), (1, 1, 1), (1, 128, 127)])
def test_empty_and_single(m, n, k, assert_within_bound):
    bias_N = torch.randn(n)
    for rows_a, rows_b in ROWS:
        a, b = random(m, k, rows_a), random(n, k, rows_b)
        y_MN = matmul_fp8(a, b, Epilogue(bias_N, torch.float32))
        assert_within_bound(y_MN, real(a), real(b), bias_N)
        assert k or torch.equal(y_MN, bias_N.expand(m, n))


@pytest.mark.parametrize(("left", "described"), [(16, True), (3, False)])
def test_parts_of_larger_matrices(left, described, assert_within_bound):
    a, b = random(140, 272, 1), random(72, 272, 128)
    wide = torch.full((280, 336), float("nan")).to(E4M3)
    view = wide[::2, left : left + 272]
    view.copy_(a.data)
    assert launch.describable(view) == described
    for pair in ((a._replace(data=view), b), (b, a._replace(data=view))):
        assert_within_bound(matmul_fp8(*pair, Epilogue(None, torch.float32)), *map(real, pair))


def test_what_is_not_finite_reaches_its_row_and_its_column_and_no_other():
    bads = ((E4M3, float("nan")), (E5M2, float("nan")), (E5M2, float("inf")), (E5M2, float("-inf")))
    for (dtype, bad), (rows_a, rows_b) in zip(bads, ROWS, strict=True):
        for config in (POINTERS, DESCRIPTORS):
            a, b = (Operand((torch.rand(m, 144) + 0.5).to(E4M3), None, r, 128) for m, r in ((72, rows_a), (88, rows_b)))
            a, b = (x._replace(scale=torch.ones(-(-x.data.shape[0] // x.rows), 2)) for x in (a, b))
            wide = a.data.float()
            wide[65, 130] = bad
            a = a._replace(data=wide.to(dtype))
            y_MN = matmul_fp8(a, b, Epilogue(None, torch.bfloat16), config=config)
            yt_NM = matmul_fp8(b, a, Epilogue(None, torch.bfloat16), config=config)
            for row in (y_MN[65], yt_NM[:, 65]):
                assert (row == bad).all() or (row.isnan().all() and bad != bad)
            others = torch.arange(72) != 65
            assert y_MN[others].isfinite().all()
            assert yt_NM[:, others].isfinite().all()


@pytest.mark.parametrize(
    "config", [POINTERS, DESCRIPTORS, Config(32, 128, 128, parts=4), Config(128, 64, 128)], ids=str
)
def test_the_twin_agrees_bit_for_bit_where_sums_are_exact(config):
    for (rows_a, rows_b), out in zip(ROWS, itertools.cycle(OUTPUTS)):
        a, b, bias_N = integers(130, 144, rows_a), integers(136, 144, rows_b), torch.randint(-99, 100, (136,)).float()
        wanted = finish(twin(a, b, None, torch.float32), Epilogue(bias_N, out))
        assert torch.equal(matmul_fp8(a, b, Epilogue(bias_N, out), config=config), wanted)


@pytest.mark.parametrize("processors", [1, 3, 4, 100])
def test_any_number_of_programs_covers_every_tile(processors, monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda where: processors)
    a, b = integers(170, 32, 1), integers(150, 32, 128)
    config = Config(32, 32, 128, group_m=4, descriptors=False)  # 6 x 5 tiles
    y_MN = matmul_fp8(a, b, Epilogue(None, torch.float32), config=config)
    assert torch.equal(y_MN.double(), real(a) @ real(b).t())


@pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=str)
def test_two_runs_are_equal_bit_for_bit(config):
    a, b = random(72, 144, 1, E5M2), random(72, 144, 128)
    for out in OUTPUTS:
        first, second = (matmul_fp8(a, b, Epilogue(torch.ones(72), out), config=config) for _ in range(2))
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
