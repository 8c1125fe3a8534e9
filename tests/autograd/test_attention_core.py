"""Attention between the projections: against a softmax written out in float64, transformers' rotation, and itself."""

import math

import pytest
import torch
from transformers.models.llama import modeling_llama as llama

from fp8engine.autograd.attention import Cache, Scores, attention, rotate
from fp8engine.errors import ShapeError, UnsupportedDtype

# FP32 sums of up to 16 products and a softmax of up to 16 terms, each within (terms) 2^-24 of magnitudes around 1.
CLOSE = {"rtol": 0, "atol": 64 * 2.0**-24}


def written_out(q, k, v, seen: torch.Tensor, added=None) -> torch.Tensor:
    """softmax(q k^T / sqrt(D) + added) v over the keys seen, float64; rows that see nothing are 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.double().repeat_interleave(group, 1) for part in (k, v))
    scores = q.double() @ k.mT / math.sqrt(q.shape[-1])
    if added is not None:
        scores = scores + added
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
    return weights @ v


def triple(b: int = 2, heads: int = 4, of_keys: int = 2, t: int = 5, s: int = 7, d: int = 8):
    torch.manual_seed(0)
    return torch.randn(b, heads, t, d), torch.randn(b, of_keys, s, d), torch.randn(b, of_keys, s, d)


@pytest.mark.parametrize("of_keys", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "padding", "four", "added"])
@pytest.mark.parametrize("t", [1, 5, 7])
def test_against_a_softmax_written_out(kind: str, causal: bool, of_keys: int, t: int):
    q, k, v = triple(of_keys=of_keys, t=t)
    s = k.shape[2]
    seen = torch.ones(1, 1, t, s, dtype=torch.bool)
    if causal:
        seen = seen.tril(s - t)  # the last query is the last position
    mask = added = None
    if kind == "padding":
        mask = torch.rand(2, s) < 0.6
        mask[1] = False  # nothing but padding
        seen = seen & mask[:, None, None]
    elif kind == "four":
        mask = torch.rand(2, 1, t, s) < 0.6
        seen = seen & mask
    elif kind == "added":
        mask = added = torch.randn(1, 4, t, s)
    found = attention(q, k, v, mask, Scores(causal))
    assert torch.allclose(found.double(), written_out(q, k, v, seen, added), **CLOSE)


def test_gradients_against_float64():
    q, k, v = (part.double().requires_grad_() for part in triple(t=4, s=4))
    mask = torch.tensor([[True, True, False, True]] * 2)
    torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, mask, Scores(causal=True)), (q, k, v))


def test_rotation_is_that_of_transformers():
    q, k, _ = triple(t=6, s=6, heads=2)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 99]])
    frequency = 1e4 ** (-torch.arange(0, 8, 2, dtype=torch.float32) / 8)
    angle = (positions[..., None] * frequency).repeat(1, 1, 2)
    wanted = llama.apply_rotary_pos_emb(q, k, angle.cos(), angle.sin())
    for ours, theirs in zip((rotate(q, positions, 1e4), rotate(k, positions, 1e4)), wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=2.0**-22)  # two products and a sum, of magnitudes below 4


@pytest.mark.parametrize("pieces", [[6], [1] * 6, [2, 1, 3]])
def test_a_cache_gives_what_the_whole_sequence_gives(pieces: list[int]):
    q, k, v = triple(t=6, s=6)
    whole = attention(q, k, v, scores=Scores(causal=True))
    cache, found = Cache(), []
    parts = [part.split(pieces, 2) for part in (q, k, v)]
    for q_now, k_now, v_now in zip(*parts, strict=True):
        found.append(attention(q_now, *cache.append(k_now, v_now), scores=Scores(causal=True)))
    assert len(cache) == 6
    assert torch.allclose(torch.cat(found, 2), whole, **CLOSE)


def test_what_does_not_fit_is_refused():
    q, k, v = triple(heads=3, of_keys=2)
    with pytest.raises(ShapeError, match="3 heads of queries do not share 2 of keys"):
        attention(q, k, v)
    q, k, v = triple()
    for mask in (torch.ones(2, 6, dtype=torch.bool), torch.ones(7, dtype=torch.bool), torch.ones(5, 7, 1)):
        with pytest.raises(ShapeError, match=r"mask is .*; want \[batch, 7\]"):
            attention(q, k, v, mask)
    for mask in (torch.ones(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.uint8)):  # a tokenizer's
        with pytest.raises(UnsupportedDtype, match=r"want bool, True where a key may be seen \(mask\.bool\(\)"):
            attention(q, k, v, mask)
    with pytest.raises(ShapeError, match="heads of 7"):
        rotate(torch.randn(1, 1, 2, 7), torch.arange(2), 1e4)
