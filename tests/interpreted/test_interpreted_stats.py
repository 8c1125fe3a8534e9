"""Statistics in one pass: amax and histogram equal to the twin's, the sum of squares exact where sums of integers are.

Elsewhere the sum errs by at most (n + 1) u S, u = 2^-24, S the exact sum: each square and each of n additions rounds
once, nothing is negative; and by 2^-150 a square, where squares are FP32 subnormals.
"""

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from casts import assert_same, every_value
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import DTYPES

from fp8engine.kernels import stats as kernel
from fp8engine.ops.reference import stats as twin

NAN, INF = float("nan"), float("inf")
FP32_MAX = torch.finfo(torch.float32).max
# Around a tile of 2048 elements, and around one tile for each of the 20 programs that the interpreter is given.
SHAPES = [
    (), (0,), (1,), (11,), (2047,), (2048,), (2049,), (0, 5), (5, 0), (1, 1), (7, 13), (31, 257),
    (3, 5, 7), (2, 3, 4, 5), (97, 101), (20, 2048), (3, 2051), (29, 2049),
]  # fmt: skip


@pytest.fixture(autouse=True)
def unwritten_integers(unwritten, monkeypatch):
    """Let integer results start as junk too."""
    plain = torch.empty

    def empty(*size, dtype=None, **options):
        y = plain(*size, dtype=dtype, **options)
        return y if y.is_floating_point() else y.fill_(-77_777)

    monkeypatch.setattr(torch, "empty", empty)


def run(x: torch.Tensor, every: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with np.errstate(over="ignore", invalid="ignore"):  # a square that overflows: no GPU remarks on that
        return kernel.stats(x, every)


def sample(shape: tuple[int, ...], dtype: torch.dtype, odd: float = 0.0, seed: int = 0) -> torch.Tensor:
    """Normal numbers over many exponents, a share of them zero or not finite."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=make) * torch.exp2(torch.randint(-14, 10, shape, generator=make).float())
    picked = torch.tensor([0.0, -0.0, INF, -INF, NAN])[torch.randint(0, 5, shape, generator=make)]
    return torch.where(torch.rand(shape, generator=make) < odd, picked, x).to(dtype)


def assert_as_twin(x: torch.Tensor, every: int = 1) -> None:
    before = x.clone()
    amax, sum_sq, histogram = found = run(x, every)
    wanted = twin(x, every)
    for y, same in zip(found, wanted, strict=True):
        assert (y.shape, y.dtype) == (same.shape, same.dtype)
    assert_same(histogram, wanted.histogram, "histogram")
    assert_same(amax, wanted.amax, "amax")
    seen = torch.atleast_1d(x)[::every].double()
    finite = torch.where(seen.isfinite(), seen, 0.0)
    exact, n = finite.square().sum(), seen.numel()
    if exact < 1e38:
        assert abs(sum_sq.double() - exact) <= (n + 1) * 2.0**-24 * exact + n * 2.0**-150
    assert_same(x.float(), before.float(), "the input was written")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype):
    assert_as_twin(sample(shape, dtype, odd=0.2))


@settings(max_examples=50)
@given(
    arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=17), st.sampled_from(DTYPES),
    st.sampled_from([1, 2, 3, 100]), st.sampled_from([0.0, 0.3, 1.0]), st.randoms(use_true_random=False),
)  # fmt: skip
def test_any_view(shape, dtype, every, odd, random):
    # Slices, a permutation, and a dimension expanded: the order of memory is not the order of the shape.
    x = sample(shape, dtype, odd, random.randrange(1000))
    x = x[tuple(slice(random.randrange(2), None, random.choice([1, 1, 2, 3])) for _ in shape)]
    x = x.permute(random.sample(range(x.dim()), x.dim()))
    if random.random() < 0.3:
        x = x.unsqueeze(random.randrange(x.dim() + 1))
        x = x.expand(
            [
                random.choice([3, 9]) if stride == 0 or n == 1 else n
                for n, stride in zip(x.shape, x.stride(), strict=True)
            ]
        )
    assert_as_twin(x, every)


@settings(max_examples=50)
@given(arrays.arrays(np.float32, 50, elements=st.floats(width=32)))
@example(np.array([FP32_MAX, -FP32_MAX, 1.0], np.float32))
@example(np.array([2.0**-149, -(2.0**-127), 2.0**-126], np.float32))
def test_any_fp32_value(x):
    assert_as_twin(torch.from_numpy(x.copy()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value(dtype):
    assert_as_twin(every_value(dtype).view(256, 256))


def test_bins_of_every_bf16_value_are_alike():
    # BF16 has FP32's exponent field: two signs and 128 mantissas for each.
    assert_same(run(every_value(torch.bfloat16))[2], np.full(256, 256))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (13, 11), (9, 4097), (700, 101)], ids=str)
def test_sums_of_small_integers_are_exact(shape, dtype):
    # The sum stays below 2^24, so that no order of additions rounds.
    x = torch.randint(-15, 16, shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    amax, sum_sq, histogram = run(x)
    assert sum_sq.item() == x.double().square().sum().item() < 2**24
    assert amax.item() == x.abs().max().item()
    assert histogram.sum().item() == x.numel()
    assert histogram[0].item() == (x == 0).sum().item()


def test_the_sum_is_not_added_up_one_by_one():
    # 2^20 times 1/9: one by one FP32 loses 2e-3 of it.  26 tiles of a program, 2048 lanes and 20 programs, the last two
    # in pairs or in runs of at most 128 (NumPy, in the interpreter): fewer than 256 additions in a row.
    x = torch.full((1 << 20,), 1 / 3)
    exact = x.double().square().sum().item()
    assert abs(run(x)[1].item() - exact) <= 256 * 2.0**-24 * exact


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_counted_and_left_out(dtype):
    x = torch.tensor([[1.0, -3.0], [INF, NAN], [-INF, 0.0]], dtype=dtype)
    amax, sum_sq, histogram = run(x)
    assert (amax.item(), sum_sq.item()) == (3.0, 10.0)
    assert histogram[[0, 127, 128, 255]].tolist() == [1, 1, 1, 3]
    nothing = run(torch.full((70, 70), NAN, dtype=dtype))
    assert (nothing[0].item(), nothing[1].item(), nothing[2][255].item()) == (0.0, 0.0, 4900)


def test_a_sum_that_overflows_is_infinite_as_the_twin_s():
    x = torch.tensor([1e30, 2.0])
    assert run(x)[1].item() == twin(x).sum_sq.item() == INF
    assert run(x)[0].item() == np.float32(1e30)


@pytest.mark.parametrize("every", [1, 2, 3, 16, 100])
def test_sampled_rows(every):
    for shape in ((70, 130), (9, 4100), (40,), (17, 3, 5)):
        x = sample(shape, torch.bfloat16, odd=0.1)
        assert_as_twin(x, every)
        assert run(x, every)[2].sum().item() == x[::every].numel()


def test_views_are_read_where_they_lie(monkeypatch):
    x = sample((60, 80), torch.float32)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    for view in (
        x.t(),
        x[::2, ::3],
        x[:, 3:70],
        x[:1].expand(9, 80),
        x.view(3, 20, 80)[:, :, :7],
        x.view(3, 4, 5, 80).permute(3, 1, 0, 2),
    ):
        matrix = kernel._matrix(view)
        assert matrix.data_ptr() == view.data_ptr()
        assert matrix.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert kernel._matrix(x.t()).shape == (1, 4800)
    assert kernel._matrix(x[::2]).shape == (30, 80)
    assert kernel._matrix(x[:, ::2]).shape == (1, 2400)
    assert kernel._matrix(x[:, :1].expand(60, 6)).shape == (6, 60)  # what is repeated is the outer dimension


def test_the_same_every_time():
    x = sample((130, 257), torch.float32)
    first = run(x)
    for _ in range(2):
        for again, once in zip(run(x), first, strict=True):
            assert torch.equal(again, once)


def test_more_programs_than_the_second_launch_takes_in_one_turn(monkeypatch):
    monkeypatch.setattr(kernel, "processors", lambda where: 30)
    x = sample((151, 2048), torch.bfloat16, odd=0.1)  # 151 tiles for at most 150 programs, 128 in a turn
    assert_as_twin(x)
    x.zero_()[149] = 3.0  # of the last program, in the second turn
    amax, sum_sq, histogram = run(x)
    assert (amax.item(), sum_sq.item(), histogram[128].item()) == (3.0, 9.0 * 2048, 2048)
    x[0] = -5.0  # of the first program
    amax, sum_sq, histogram = run(x)
    assert (amax.item(), sum_sq.item()) == (5.0, (9.0 + 25.0) * 2048)
    assert histogram[[128, 129]].tolist() == [2048, 2048]
