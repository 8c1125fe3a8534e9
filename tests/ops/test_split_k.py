"""Into how many parts K is cut: the rule of kernels/split_k.py, and what it does to a card's multiprocessors."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8engine.kernels import split_k
from fp8engine.kernels.split_k import depth_of, parts_of
from fp8engine.kernels.tuning import Config, pick, table

H100 = 132
SMALL = table()["matmul_fp8"]["sm_90"]["small"]


@pytest.mark.parametrize("operation", table())
@pytest.mark.parametrize("m", [1, 16, 64])
def test_a_decode_step_keeps_most_of_a_card_busy(operation: str, m: int):
    """M <= 64 by N 1024 by K 4096: 8 or 16 programs without split-K, and 64 or 128 with it."""
    config = pick(operation, (9, 0), m, 1024)
    tiles = math.ceil(m / config.block_m) * math.ceil(1024 / config.block_n)
    assert (tiles, tiles * parts_of(m, 1024, 4096, config, H100)) in ((8, 64), (16, 128))
    assert tiles * parts_of(m, 1024, 8192, config, H100) == 128


@pytest.mark.parametrize(
    ("m", "n", "k", "parts"),
    [
        (64, 1024, 2047, 1),  # too short: the second launch costs more
        (64, 1024, 2048, 4),
        (512, 512, 16384, 4),  # wgrad of a small layer: 32 tiles
        (1024, 1024, 16384, 1),  # 128 tiles
        (64, 128, 1 << 20, 16),  # no more than the configuration allows
        (64, 67 * 128, 8192, 1),  # 67 tiles: twice as many would not run at once
        (64, 66 * 128, 8192, 2),
        (0, 1024, 8192, 1),
        (64, 1024, 0, 1),
    ],
)
def test_the_rule(m: int, n: int, k: int, parts: int):
    """A large result and an old row are never split."""
    assert parts_of(m, n, k, SMALL, H100) == parts
    unsplit = [rows["sm_90"][name] for rows in table().values() for name in ("large", "medium")]
    for config in (*unsplit, Config(64, 128, 128)):
        assert parts_of(m, n, k, config, H100) == 1


@given(
    st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 1 << 18), st.integers(1, 200), st.sampled_from([32, 128])
)
def test_every_k_is_in_one_part_and_no_part_is_empty(m, n, k, multiprocessors, block_k):
    config = SMALL._replace(block_k=block_k)
    parts = parts_of(m, n, k, config, multiprocessors)
    assert 1 <= parts <= max(config.split_k, 1)
    if parts > 1:
        tiles = math.ceil(m / config.block_m) * math.ceil(n / config.block_n)
        depth = depth_of(k, config, parts)
        assert math.ceil(k / depth) == parts  # what the kernel makes of the depth
        assert depth % block_k == 0
        assert depth >= split_k.SHORTEST_PART - block_k
        assert tiles * parts <= multiprocessors
