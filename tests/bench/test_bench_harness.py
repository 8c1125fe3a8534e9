"""The machine's limits from times that are given."""

import pytest
import torch

from fp8engine.bench.harness import Limits, half, limits
from fp8engine.ops import device


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


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 0), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_a_v100_is_measured_in_fp16(capability, dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "capability", lambda where: capability)
    assert half(torch.device("cuda")) == dtype
    assert half(torch.device("cpu")) == torch.bfloat16
