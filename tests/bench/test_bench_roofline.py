"""The machine's limits from times that are given, and the cost model where its numbers are known."""

import pytest
import torch

from fp8engine.bench import roofline
from fp8engine.bench.roofline import CASTS, Limits, break_even, half, limits, speedup


class EachTakes:
    """A clock on which the matmul takes 2 s and the copy 4 s."""

    def __init__(self):
        self.count = 0

    def time(self, call):
        call()
        self.count += 1

    def seconds(self):
        return [2.0, 4.0] * (self.count // 2)


def test_rates_count_two_operations_a_product_and_a_copy_twice():
    found = limits(torch.device("cpu"), EachTakes(), side=16, copied=1000)
    assert found == Limits(2 * 16**3 / 2.0, 2 * 1000 / 4.0)
    assert Limits(12.0, 3.0).intensity == 4.0


@pytest.mark.parametrize("casts", CASTS)
def test_break_even_is_where_nothing_is_won(casts: str):
    n = break_even(casts)
    assert speedup(n, n, n, casts) == pytest.approx(1.0)  # type: ignore[arg-type]
    assert speedup(2 * n, 2 * n, 2 * n, casts) > 1.0  # type: ignore[arg-type]
    assert speedup(10**9, 10**9, 10**9, casts) == pytest.approx(roofline.RHO, rel=1e-4)


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 0), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_a_v100_is_measured_in_fp16(capability, dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(roofline, "capability", lambda where: capability)
    assert half(torch.device("cuda")) == dtype
    assert half(torch.device("cpu")) == torch.bfloat16
