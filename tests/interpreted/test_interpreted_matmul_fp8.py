"""The FP8 matmul against float64 products of what its operands stand for (the bound: conftest.py), and its twin."""

import itertools

import faithful
import pytest
import torch
from casts import E4M3, E5M2, every_code
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from fp8engine.kernels import launch
from fp8engine.kernels import matmul as module
from fp8engine.kernels.matmul import matmul_fp8
from fp8engine.kernels.tuning import Config, table
from fp8engine.ops.reference import Epilogue, Operand, finish, quantize
from fp8engine.ops.reference import matmul_fp8 as twin
from tests.helpers.casts import cast_of

COMMITTED = {
    (operation == "matmul_fp8_promoted", config._replace(ratio=None))
    for operation in ("matmul_fp8", "matmul_fp8_promoted")
    for rows in table()[operation].values()
    for config in rows.values()
    if config.kernel == "triton"
}
POINTERS = Config(64, 64, 64, group_m=2, descriptors=False)
DESCRIPTORS = Config(64, 64, 64, group_m=2, parts=2)
FORMATS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
OUTPUTS = [torch.bfloat16, torch.float16, torch.float32]
TENSOR, ROW = -1, 1
SCALES = list(itertools.product((TENSOR, ROW), repeat=2))


def operand(x_MK: torch.Tensor, dtype: torch.dtype = E4M3, rows: int = TENSOR) -> Operand:
    return Operand(*quantize(x_MK, cast_of(dtype, rows, -1)), rows)


def random(m: int, k: int, dtype: torch.dtype = E4M3, rows: int = TENSOR) -> Operand:
    return operand(torch.randn(m, k) * torch.exp2(torch.randint(-4, 5, (m, 1))), dtype, rows)


def integers(m: int, k: int, scale: float = 1.0) -> Operand:
    """Codes of small integers: their products sum exactly, in any order."""
    return Operand(torch.randint(-8, 9, (m, k)).to(E4M3), torch.tensor(scale))


def real(x: Operand) -> torch.Tensor:
    return x.data.double() * x.scale.double()


@pytest.mark.parametrize(("promoted", "config"), sorted(COMMITTED), ids=str)
def test_every_committed_configuration(promoted, config, assert_within_bound):
    # Two tiles down, two across, three along K, the last of each ragged; rows of the result aligned, and not.
    m, k = config.block_m + 22, 2 * config.block_k + 16
    for n, out in ((config.block_n + 8, torch.bfloat16), (config.block_n + 3, torch.float32)):
        a, b, bias_N = random(m, k), random(n, k, rows=ROW), torch.randn(n)
        y_MN = matmul_fp8(a, b, Epilogue(bias_N, out), promoted, config)
        assert y_MN.dtype == out
        assert_within_bound(y_MN, real(a), real(b), bias_N, out)


@pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=str)
@pytest.mark.parametrize("promoted", [False, True], ids=["fast", "promoted"])
@pytest.mark.parametrize(("first", "second"), FORMATS)
def test_formats_and_scales(first, second, promoted, config, assert_within_bound):
    for (rows_a, rows_b), out in zip(SCALES, itertools.cycle(OUTPUTS)):
        a, b = random(70, 80, first, rows_a), random(72, 80, second, rows_b)
        y_MN = matmul_fp8(a, b, Epilogue(None, out), promoted, config)
        assert_within_bound(y_MN, real(a), real(b), None, (rows_a, rows_b, out))


@settings(max_examples=30)
@given(st.integers(0, 150), st.integers(0, 150), st.integers(0, 300), st.booleans(), st.sampled_from(OUTPUTS))
def test_any_shape_under_the_configuration_that_is_picked(assert_within_bound, m, n, k, promoted, out):
    a, b = random(m, k, E4M3, ROW if k else TENSOR), random(n, k)
    bias_N = torch.randn(n)
    assert_within_bound(matmul_fp8(a, b, Epilogue(bias_N, out), promoted), real(a), real(b), bias_N)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 5), (3, 0, 5), (3, 5, 0), (0, 0, 0), (1, 1, 1), (1, 128, 127)])
def test_empty_and_single(m, n, k, assert_within_bound):
    bias_N = torch.randn(n)
    for promoted in (False, True):
        a, b = random(m, k), random(n, k)
        y_MN = matmul_fp8(a, b, Epilogue(bias_N, torch.float32), promoted)
        assert_within_bound(y_MN, real(a), real(b), bias_N)
        assert k or torch.equal(y_MN, bias_N.expand(m, n))


def views(m: int, k: int) -> dict[str, torch.Tensor]:
    """Codes of an m x k matrix, contiguous along K, as parts of something larger."""
    codes = torch.randn(2 * m + 1, 2 * k + 48).to(E4M3)
    return {
        "aligned slice": codes[1 : m + 1, 16 : 16 + k],
        "unaligned slice": codes[1 : m + 1, 3 : 3 + k],
        "every other row": codes[: 2 * m : 2, :k],
        "one row for all": codes[:1, :k].expand(m, k),
        "windows": codes.view(-1)[: m + k].as_strided((m, k), (1, 1)),
    }


@pytest.mark.parametrize("kind", views(4, 4))
def test_parts_of_larger_matrices(kind, assert_within_bound):
    m, n, k = 70, 60, 144  # rows of 336 bytes: 21 * 16
    scale = torch.tensor(0.25)
    for a, b in ((views(m, k)[kind], random(n, k).data), (random(m, k).data, views(n, k)[kind])):
        first, second = Operand(a, scale), Operand(b, scale)
        y_MN = matmul_fp8(first, second, Epilogue(None, torch.float32))
        assert_within_bound(y_MN, real(first), real(second))
    assert launch.describable(views(m, k)[kind]) == (kind in ("aligned slice", "every other row"))


def test_what_is_not_finite_reaches_its_row_and_its_column_and_no_other():
    for dtype, bad in ((E4M3, float("nan")), (E5M2, float("nan")), (E5M2, float("inf")), (E5M2, float("-inf"))):
        for config, out in ((POINTERS, torch.float16), (DESCRIPTORS, torch.bfloat16)):
            a_MK, b_NK = torch.rand(70, 80) + 0.5, torch.rand(72, 80) + 0.5
            a_MK[65, 66] = bad
            one = torch.ones(())
            a, b = Operand(a_MK.to(dtype), one), Operand(b_NK.to(E4M3), one)
            y_MN = matmul_fp8(a, b, Epilogue(None, out), False, config)
            yt_NM = matmul_fp8(b, a, Epilogue(None, out), False, config)
            for row in (y_MN[65], yt_NM[:, 65]):
                assert (row == bad).all() or (row.isnan().all() and bad != bad)
            others = torch.arange(70) != 65
            assert y_MN[others].isfinite().all()
            assert yt_NM[:, others].isfinite().all()


@pytest.mark.parametrize(("rows_a", "rows_b"), SCALES)
def test_a_scale_near_the_end_of_fp32_makes_no_finite_result_infinite(rows_a, rows_b, assert_within_bound):
    """The scale is near 2^120 / 448, sums reach 2^17 * K: one times the other passes 2^128, the result does not."""
    large, small = torch.randn(70, 80).clamp(-4, 4) * 2.0**118, torch.randn(72, 80) * 2.0**-10
    for first, second in ((large, small), (small, large)):
        a, b = operand(first, rows=rows_a), operand(second, rows=rows_b)
        for config in (POINTERS, DESCRIPTORS):
            y_MN = matmul_fp8(a, b, Epilogue(None, torch.float32), False, config)
            assert_within_bound(y_MN, real(a), real(b))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_code_is_multiplied_as_the_value_it_stands_for(dtype):
    # One column of K at a time: y[m, n] = code[m] * code[n] has at most 8 bits, so that FP32 holds it exactly.
    codes = every_code(dtype)
    codes = codes[codes.float().isfinite()][:, None]
    a, b = Operand(codes, torch.ones(())), Operand(every_code(E4M3)[:127, None], torch.ones(()))
    assert torch.equal(matmul_fp8(a, b, Epilogue(None, torch.float32)).double(), real(a) @ real(b).t())


@pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS, Config(32, 128, 32, parts=4), Config(128, 64, 128)], ids=str)
@pytest.mark.parametrize("out", OUTPUTS)
def test_the_twin_agrees_bit_for_bit_where_sums_are_exact(config, out):
    for (rows_a, rows_b), promoted in zip(SCALES, (False, True, True, False), strict=True):
        a, b = integers(70, 80), integers(136, 80)
        a = a._replace(scale=torch.exp2(torch.randint(-3, 4, (70, 1)) * 1.0)) if rows_a == ROW else a
        b = b._replace(scale=torch.exp2(torch.randint(-3, 4, (136, 1)) * 1.0)) if rows_b == ROW else b
        bias_N = torch.randint(-99, 100, (136,)).float()
        wanted = finish(twin(a, b, None, torch.float32), Epilogue(bias_N, out))
        assert torch.equal(matmul_fp8(a, b, Epilogue(bias_N, out), promoted, config), wanted)


@pytest.mark.parametrize("card", [89, 90, 120])
@pytest.mark.parametrize("promoted", [False, True], ids=["fast", "promoted"])
def test_promotion_starts_the_tensor_core_s_sum_anew_for_each_block_of_k(promoted, card, monkeypatch):
    # The interpreter's dot sums in FP32 either way: what tells the two apart is the accumulator that it is given, and
    # where it is mma.sync that multiplies the limit that keeps Triton from taking the sum so far for it.
    monkeypatch.setattr(module, "cuda_capability_geq", lambda major, minor: card >= 10 * major + minor)
    started, limits = [], []

    def dot(self, a, b, d, precision, limit):
        started.append(bool((d.data == 0).all()))
        limits.append(limit)
        return faithful.dot(self, a, b, d, precision, limit)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    one = Operand(torch.ones(64, 192).to(E4M3), torch.ones(()))
    y_MN = matmul_fp8(one, one, Epilogue(None, torch.float32), promoted, POINTERS)
    assert (y_MN == 192).all()
    assert started == ([True] * 3 if promoted else [True, False, False])
    assert set(limits) == ({POINTERS.block_k} if promoted and card != 90 else {0})


@pytest.mark.parametrize("processors", [1, 3, 4, 100])
def test_any_number_of_programs_covers_every_tile(processors, monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda where: processors)
    a, b = integers(170, 32), integers(150, 32)
    config = Config(32, 32, 32, group_m=4, descriptors=False)  # 6 x 5 tiles
    assert launch.persistent_grid(170, 150, config, a.data.device) == (min(processors, 30),)
    y_MN = matmul_fp8(a, b, Epilogue(None, torch.float32), False, config)
    assert torch.equal(y_MN.double(), real(a) @ real(b).t())


@pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=str)
def test_two_runs_are_equal_bit_for_bit(config):
    a, b = random(70, 144, E5M2, ROW), random(72, 144, E4M3, ROW)
    for out, promoted in itertools.product(OUTPUTS, (False, True)):
        first, second = (matmul_fp8(a, b, Epilogue(torch.ones(72), out), promoted, config) for _ in range(2))
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
