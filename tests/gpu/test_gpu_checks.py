"""On a card: what benchmarks/gpu.py checks without pytest, one test each."""

import pytest
import torch

from benchmarks import checks
from fp8engine.ops import device

pytestmark = pytest.mark.gpu
CARD = torch.device("cuda", 0)
EVERY = [*checks.checks(CARD), *checks.card_checks(CARD)] if device.has_fp8(CARD) else []


@pytest.mark.parametrize(("name", "one"), EVERY, ids=[name for name, _ in EVERY])
def test_a_check_finds_nothing_wrong(name: str, one):
    assert one() is None
