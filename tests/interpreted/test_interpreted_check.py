"""What `make gpu` will ask of a card, asked of the interpreter: the checks themselves work, and find nothing wrong."""

import pytest
import torch

from fp8engine import native
from fp8engine.bench import check

CPU = torch.device("cpu")
EVERY = list(check.checks(CPU))


@pytest.mark.parametrize(("name", "one"), EVERY, ids=[name for name, _ in EVERY])
def test_a_check_finds_nothing_wrong(name: str, one):
    assert one() is None


FAULTS = {
    "a scale too large": lambda y: y * 2,
    "one element": lambda y: y.index_put((torch.tensor([0]), torch.tensor([0])), y[0, 0] + 1),
    "NaN": lambda y: y * float("nan"),
    "another dtype": lambda y: y.double(),
    "rows exchanged": lambda y: y.flip(0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_check_finds_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("matmul", "matmul_fp16"):
        right = getattr(native, name)
        monkeypatch.setattr(native, name, lambda *args, right=right, **rest: FAULTS[fault](right(*args, **rest)))
    shape = (16, 24, 32)
    assert check.integers_fp8(CPU, shape)
    assert check.integers_fp16(CPU, shape)
    assert check.integers_block(CPU, shape)


def test_the_check_of_casts_finds_a_cast_that_hides_infinity(monkeypatch: pytest.MonkeyPatch):
    right = native.matmul_fp16
    monkeypatch.setattr(native, "matmul_fp16", lambda a, b, end: right(a.nan_to_num(posinf=1e4), b, end))
    for format in (check.E4M3, check.E5M2):
        assert "inf the first" in (check.rounding(CPU, format) or "")
