"""benchmarks/kv_cache.py --text on a small model: the loss of each token is that of the whole text read at once."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from torch.nn import functional as F

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOKENS = 6


@pytest.fixture
def kv(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script's functions."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "kv_cache.py")))


def test_a_text_is_read_on_token_by_token(kv: Any):
    torch.manual_seed(0)
    model: Any = tiny_models.llama().eval()
    ids = torch.randint(3, 60, (2, 24 + TOKENS + 1))
    with torch.inference_mode():
        found = kv.text_batch(model, kv.caches(model.config, "fp32", [8]), ids, TOKENS)
        logits = model(ids).logits[:, -TOKENS - 1 : -1]
    wanted = F.cross_entropy(logits.transpose(1, 2), ids[:, -TOKENS:], reduction="none")
    assert set(found) == {"bf16", "fp32", "per tensor", "block 8"}
    # The prompt's keys and values come from the reference, rounded to BF16.  Of another token the loss is another.
    assert (found["fp32"]["loss"] - wanted).abs().max() < 0.01 < wanted.std() / 5
    assert found["bf16"]["agreed"].all(), "the reference agrees with itself"
    assert not torch.equal(found["block 8"]["loss"], found["bf16"]["loss"])
    rows = [kv.text_row(name, "fp32", [part], [found["bf16"]]) for name, part in found.items()]
    by_name = {row["cache"]: row for row in rows}
    assert by_name["bf16"]["more_loss"] == by_name["bf16"]["more_loss_error"] == 0.0
    apart = (found["block 8"]["loss"] - found["bf16"]["loss"]).mean(1)
    assert by_name["block 8"]["more_loss"] == pytest.approx(apart.mean().item(), abs=1e-7)
    assert by_name["block 8"]["more_loss_error"] == pytest.approx((apart[0] - apart[1]).abs().item() / 2, abs=1e-7)
    assert by_name["fp32"]["perplexity"] == pytest.approx(found["fp32"]["loss"].mean().exp().item(), rel=1e-5)
