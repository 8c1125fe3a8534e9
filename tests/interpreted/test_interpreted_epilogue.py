"""The epilogue by itself on any FP32 values, and at the end of each matmul, against its twin.

Matmuls get operands of small integers, whose sums are exact in any order: then `none` and `relu` agree with the twin
bit for bit, statistics included.  The other activations are compared in float64, with

    |error| <= 16 u |x|, u = 2^-24: f(x) = x g(x) with g in [0, 1], and g's error is at most a few u: where g is small
               its argument's rounding is magnified by |z| e^-|z| <= 0.37
"""

import itertools

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from activations import PLAIN, size
from casts import E4M3, E5M2, FP8, MAX
from hypothesis import given
from hypothesis import strategies as st
from interpreted.test_interpreted_matmul import multiply, of_each

from fp8engine.kernels import epilogue as kernel
from fp8engine.kernels.launch import triton_dtype
from fp8engine.kernels.tuning import Config
from fp8engine.ops.reference import Epilogue, Operand, finish
from fp8engine.ops.reference.epilogue import KINDS

OUTPUTS = [torch.bfloat16, torch.float16, torch.float32, E4M3, E5M2]
SMOOTH = [kind for kind in PLAIN if kind != "relu"]
CONFIGS = [
    Config(64, 64, 64, group_m=2, descriptors=False),
    Config(64, 128, 64, parts=2),
    Config(32, 64, 64, parts=4),
]


def run(kind: str, a: torch.Tensor, b: torch.Tensor, *end) -> torch.Tensor:
    """A matmul of these values as codes, or in FP16, under scales of one."""

    def given(x: torch.Tensor, rows: int) -> Operand:
        if kind != "block":
            return Operand(x.half() if kind == "fp16" else x.to(E4M3), torch.ones(()))
        return Operand(x.to(E4M3), torch.ones(-(-x.shape[0] // rows), -(-x.shape[1] // 128)), rows, 128)

    return multiply(kind, given(a, 1), given(b, 128), *end)


@triton.jit
def _finish(
    y, bias, output_scale, stored, amax_ptr, counts_ptr, M, N,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = rows[:, None] * COLUMNS + columns[None, :]
    value, amax, saturated, nonfinite = kernel.finish(
        tl.load(y + at), rows, columns, M, N, bias, output_scale, ACTIVATION, OUT, amax_ptr is not None
    )
    tl.store(stored + at, value)
    if amax_ptr is not None:
        kernel.publish(amax_ptr, counts_ptr, amax, saturated, nonfinite)


def finished(y_MN: torch.Tensor, epilogue: Epilogue, size: tuple[int, int] | None = None) -> torch.Tensor:
    """The kernels' `finish` of a tile whose sides are powers of two, of which `size` belongs to the matrix."""
    stored = torch.zeros(y_MN.shape, dtype=epilogue.out)
    _finish[(1,)](
        y_MN, epilogue.bias_N, epilogue.scale, stored, epilogue.amax, epilogue.counts, *(size or y_MN.shape),
        *y_MN.shape, ACTIVATION=epilogue.activation, OUT=triton_dtype(epilogue.out),
    )  # fmt: skip
    return stored


def statistics() -> dict[str, torch.Tensor]:
    """Slots that already hold something: amax may only rise, counts are added to."""
    return {"amax": torch.full((1,), 0.125), "counts": torch.tensor([5, 7])}


def scale_for(out: torch.dtype, scale: float = 0.75) -> torch.Tensor | None:
    return torch.tensor(scale) if out in FP8 else None


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal bits, or both NaN."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.itemsize]
    nan = found.float().isnan() & wanted.float().isnan()
    return bool(((found.view(integer) == wanted.view(integer)) | nan).all()) and found.dtype == wanted.dtype


def assert_same_as_twin(found: torch.Tensor, epilogue: Epilogue, y_MN: torch.Tensor) -> None:
    """found and its statistics (in `epilogue`) against the twin of y, which starts from the same `statistics`."""
    expected = epilogue._replace(**statistics())
    wanted = finish(y_MN.clone(), expected)
    if epilogue.activation == "relu":  # the twin's keeps the sign of zero, the kernel's does not: no matmul can tell
        assert torch.equal(found.float().nan_to_num(-1.0), wanted.float().nan_to_num(-1.0)), epilogue
    else:
        assert same_bits(found, wanted), epilogue
    if epilogue.amax is not None:
        assert torch.equal(epilogue.amax, expected.amax), (epilogue.amax, expected.amax)
        assert torch.equal(epilogue.counts, expected.counts), (epilogue.counts, expected.counts)


def integers(m: int, n: int, k: int = 80) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(-8, 9, (m, k)).float(), torch.randint(-8, 9, (n, k)).float()


@pytest.mark.few(18)
@of_each
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("out", OUTPUTS)
def test_result_and_statistics_of_every_matmul_are_the_twin_s(kind, config, out):
    for (m, n), activation, bias in zip(
        ((70, 136), (33, 67)), ("none", "relu"), (torch.float32, torch.bfloat16), strict=True
    ):
        a, b = integers(m, n)
        # Some rows large, for E4M3 to saturate; bias alone larger than any result, which must not reach amax by the
        # rows beyond M: every real sum has the opposite sign.
        a[:, 0], b[:, 0] = 8.0, torch.randint(-448, -400, (n,)).float()
        b[:, 0] = b[:, 0].to(E4M3).float()
        bias_N = (-8.0 * b[:, 0] + torch.randint(-99, 100, (n,))).to(bias)
        epilogue = Epilogue(bias_N, out, activation, scale_for(out), **statistics())
        y_MN = run(kind, a, b, epilogue, config)
        assert_same_as_twin(y_MN, epilogue, (a.double() @ b.double().t()).float())


@pytest.mark.few(8)
@of_each
@pytest.mark.parametrize("activation", SMOOTH)
def test_activations_of_every_matmul(kind, activation):
    for out, config in itertools.product((torch.float32, E4M3), CONFIGS):
        a, b = integers(40, 72)
        a, b = a / 16, b / 8  # sums around 10: through the bend of every activation, and far to both sides
        bias_N = torch.randint(-8, 9, (72,)) / 4
        epilogue = Epilogue(bias_N, out, activation, scale_for(out, 2.0**-7), **statistics())
        y_MN = run(kind, a, b, epilogue, config)
        x = a.double() @ b.double().t() + bias_N
        wanted, error = PLAIN[activation](x), 16 * 2.0**-24 * size(x, activation)
        limit = MAX[out] * 2.0**-7 if out in FP8 else float("inf")
        assert ((wanted.abs() - limit).abs() > error).all(), "no element so close to saturation that rounding decides"
        over = int((wanted.abs() > limit).sum())
        assert epilogue.counts.tolist() == [5 + over, 7]
        assert abs(epilogue.amax.item() - wanted.abs().max().item()) <= error.max()
        if out in FP8:
            # Half of the last of 3 mantissa bits, or of the smallest subnormal; saturated beyond the limit.
            error += 2.0**-4 * wanted.abs() + 2.0**-10 * 2.0**-7
            wanted = wanted.clamp(-limit, limit)
            y_MN = y_MN.float() * 2.0**-7
        assert ((y_MN.double() - wanted).abs() <= error).all()


@of_each
def test_what_lies_beyond_the_matrix_is_not_counted(kind):
    # Beyond M the rows hold the bias alone, here larger than every result, then Inf; beyond N scale by Inf makes NaN.
    for config in CONFIGS:
        a, b = torch.ones(5, 16), torch.full((9, 16), -8.0)
        epilogue = Epilogue(torch.full((9,), 129.0), E4M3, "none", torch.tensor(0.25), **statistics())
        assert (run(kind, a, b, epilogue, config).float() == 4).all()
        assert (epilogue.amax.item(), epilogue.counts.tolist()) == (1.0, [5, 7])
        epilogue = Epilogue(torch.full((9,), float("inf")), E5M2, "none", torch.tensor(0.25), **statistics())
        assert run(kind, a, b, epilogue, config).float().isinf().all()
        assert (epilogue.amax.item(), epilogue.counts.tolist()) == (0.125, [5, 7 + 45])


def test_an_infinite_scale_is_counted_once_an_element():
    one, infinite = torch.ones(()), torch.tensor(float("inf"))
    for config in CONFIGS:
        a, b = Operand(torch.ones(5, 16).to(E4M3), infinite), Operand(torch.ones(9, 16).to(E4M3), one)
        epilogue = Epilogue(None, torch.float32, **statistics())
        assert multiply("fp8", a, b, epilogue, config).isinf().all()
        assert (epilogue.amax.item(), epilogue.counts.tolist()) == (0.125, [5, 7 + 45])


@of_each
def test_one_statistic_may_be_asked_for_alone(kind):
    a, b = torch.ones(40, 16), torch.full((72, 16), 64.0)
    epilogue = Epilogue(None, E4M3, scale=torch.tensor(1.0), **statistics())
    for left_out in ("amax", "counts"):
        run(kind, a, b, epilogue._replace(**{left_out: None}), CONFIGS[1])
    assert (epilogue.amax.item(), epilogue.counts.tolist()) == (1024.0, [5 + 40 * 72, 7])


@of_each
def test_a_single_extreme_is_found_wherever_it_is(kind):
    for (row, column), config in itertools.product(((0, 0), (3, 66), (39, 17), (37, 33), (39, 71)), CONFIGS[1:]):
        a, b = torch.zeros(40, 16), torch.zeros(72, 16)
        a[row, 3], b[column, 3] = -448.0, 2.0
        epilogue = Epilogue(None, E4M3, scale=torch.tensor(1.0), **statistics())
        y_MN = run(kind, a, b, epilogue, config)
        assert y_MN[row, column].item() == -448
        assert (epilogue.amax.item(), epilogue.counts.tolist()) == (896.0, [6, 7])


@given(
    arrays.arrays(np.float32, (4, 16), elements=st.floats(width=32)),
    st.sampled_from(["none", "relu"]),
    st.sampled_from(OUTPUTS),
    st.floats(2.0**-126, 2.0**126, width=32),
    st.tuples(st.integers(0, 4), st.integers(0, 16)),
)
def test_any_value_of_any_tile_is_finished_as_the_twin_does(values, activation, out, scale, size):
    y_MN = torch.from_numpy(values.copy())
    epilogue = Epilogue(None, out, activation, scale_for(out, scale), **statistics())
    found = finished(y_MN, epilogue, size)
    assert_same_as_twin(found[: size[0], : size[1]], epilogue, y_MN[: size[0], : size[1]])


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.3, 1 / 3, 123.4, 2.0**-100, 2.0**100])
@pytest.mark.parametrize("out", FP8)
def test_saturation_begins_where_the_twin_s_does(out, scale):
    # The FP32 values around MAX * scale, to which the rounding of 1 / scale adds its own step.
    edge = np.float32(MAX[out]) * np.float32(scale)
    points = (edge.view(np.uint32) + np.arange(-8, 8)).astype(np.uint32).view(np.float32)
    for sign in (1, -1):
        y_MN = torch.from_numpy(points).reshape(1, 16) * sign
        epilogue = Epilogue(None, out, "none", torch.tensor(scale), **statistics())
        assert_same_as_twin(finished(y_MN, epilogue), epilogue, y_MN)
        assert 0 < epilogue.counts[0] - 5 < 8


@pytest.mark.parametrize("out", FP8)
def test_a_finite_result_saturates_even_where_its_scale_takes_it_beyond_fp32(out):
    y_MN = torch.tensor([[1e30, -1e30, 1e-9, 0.0]])
    epilogue = Epilogue(None, out, "none", torch.tensor(2.0**-126), **statistics())
    assert finished(y_MN, epilogue).float().tolist() == [[MAX[out], -MAX[out], MAX[out], 0.0]]
    assert (epilogue.amax.item(), epilogue.counts.tolist()) == (y_MN[0, 0].item(), [5 + 3, 7])


@pytest.mark.few(12)
@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize("activation", KINDS)
def test_nan_and_inf_pass_every_activation(activation, out):
    # Not held against the twin: torch 2.13's gelu of Inf is NaN where it is vectorised.
    nan, inf = float("nan"), float("inf")
    y_MN = torch.tensor([[nan, inf, 1.0, 0.0], [nan, 2.0, inf, -1.0]])
    epilogue = Epilogue(None, out, activation, scale_for(out), **statistics())
    found = finished(y_MN, epilogue).float()
    assert found[[0, 1], [0, 0]].isnan().all()
    assert found[[0, 1], [1, 2]].isnan().all() if out == E4M3 else (found[[0, 1], [1, 2]] == inf).all()
    assert found[y_MN.isfinite()].isfinite().all()
    assert 0.125 < epilogue.amax.item() <= (4.0 if activation == "srelu" else 2.0)
    assert epilogue.counts.tolist() == [5, 7 + 4]


@pytest.mark.parametrize("activation", KINDS)
def test_statistics_are_left_out_where_nobody_asked(activation):
    y_MN = torch.randn(4, 16)
    with_statistics = Epilogue(torch.randn(16), torch.bfloat16, activation, **statistics())
    without = with_statistics._replace(amax=None, counts=None)
    assert same_bits(finished(y_MN, without), finished(y_MN, with_statistics))
