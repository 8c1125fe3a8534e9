"""Keys and values in E4M3: what is stored is a function of the tokens alone; casts against float64; refusals."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from support import sqnr

import fp8engine as fe
from fp8engine.autograd.attention import Cache
from fp8engine.autograd.fp8_cache import Blocks, Fp8Cache
from fp8engine.errors import GradientError, ShapeError, StateError, UnsupportedDtype

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kept(x: torch.Tensor, block: int, *steps: int) -> Blocks:
    """Blocks that were given x in those steps, and the rest of it token by token."""
    made = Blocks(x, block)
    for part in x.split([*steps, *[1] * (x.shape[2] - sum(steps))], 2):
        made.append(part)
        made.encode()
    return made


def same(one: Blocks, other: Blocks) -> bool:
    pairs = ((getattr(one, name), getattr(other, name)) for name in ("codes", "scale", "rest"))
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs
    )


@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_stored_does_not_tell_how_it_came(dtype: torch.dtype, block: int):
    x = torch.randn(2, 3, 37, 5).to(dtype)
    whole = kept(x, block, 37)
    for steps in ((), (20,), (7, 9, 11)):
        assert same(kept(x, block, *steps), whole)
    assert not same(kept(x.roll(1, 2), block, 37), whole)
    assert whole.codes.shape[2] == 37 // block
    assert whole.rest.shape[2] == 37 % block


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_the_nearest_of_e4m3_under_the_scale_of_their_block(dtype: torch.dtype):
    """Against float64: nothing that is normal in E4M3 is further than half a step of 2^-3, below that 2^-10 / s."""
    x = (torch.randn(2, 3, 32, 8) * torch.logspace(-3, 3, 32)[:, None]).to(dtype)
    found = kept(x, 8, 32)
    groups, values = (part.double().view(2, 3, 4, 64) for part in (x, found.values()))
    amax = groups.abs().amax(-1, keepdim=True)
    scale = found.scale.double()
    assert torch.equal(scale.log2(), scale.log2().round())
    assert (amax <= 448 * scale).all()
    assert (amax > 224 * scale).all()  # the power of two is the largest that fits
    bound = torch.maximum(groups.abs() * 2.0**-4, scale * 2.0**-10)
    assert ((values - groups).abs() <= bound).all()


def test_zeros_stay_and_what_is_not_finite_is_seen():
    x = torch.randn(1, 1, 8, 4)
    x[0, 0, :4] = 0.0
    x[0, 0, 5, 1], x[0, 0, 6, 2] = float("inf"), float("nan")
    values = kept(x, 4, 8).values()[0, 0]
    assert torch.equal(values[:4], torch.zeros(4, 4))
    assert torch.equal(values.isnan(), ~x[0, 0].isfinite())


def test_the_smallest_scale_of_fp16_is_not_lost():
    """amax 2^-24, FP16's smallest: s = 2^32, and 1 / s has no FP16 form."""
    x = torch.full((1, 1, 2, 2), 2.0**-24, dtype=torch.float16)
    assert torch.equal(kept(x, 2, 2).values(), x)


def test_nothing_of_the_caller_is_kept_or_handed_out():
    x = torch.randn(1, 2, 10, 4)
    cache: Any = Fp8Cache(block=4)
    seen = x.clone()
    cache.append(seen, seen)
    before = copy.deepcopy(cache)
    seen.zero_()
    for part in cache.append(x[:, :, :1], x[:, :, :1]):
        part.fill_(7.0)
    before.append(x[:, :, :1], x[:, :, :1])
    assert torch.equal(cache.key, before.key)


def test_bytes():
    cache = Fp8Cache(block=16)
    k = torch.randn(2, 4, 40, 8, dtype=torch.bfloat16)
    cache.append(k, k)
    codes, scales, rest = 2 * 4 * 32 * 8, 2 * 4 * 2 * 4, 2 * 4 * 8 * 8 * 2
    assert cache.nbytes == 2 * (codes + scales + rest)
    single = kept(k, 16, 40)
    assert single.nbytes == codes + scales + rest
    assert single.rest.untyped_storage().nbytes() == rest  # no view of all tokens


@pytest.mark.parametrize("taken", [0, 3, 5, 6, 13, 21])
def test_tokens_taken_back(taken: int):
    x = torch.randn(2, 3, 21, 4)
    found = kept(x, 8, 21)
    before = found.values()
    with pytest.raises(StateError, match="22 tokens to take back, and it keeps 21 of 21"):
        found.crop(22)
    found.crop(taken)
    assert torch.equal(found.values(), before[:, :, : 21 - taken])
    again = x[:, :, 21 - taken :]
    found.append(again)
    found.encode()
    # What is left of a cast block is cast once more.  Under the same power of two, as here, that changes no code.
    assert same(found, kept(x, 8, 21))


def test_blocks_at_the_front_are_let_go():
    x = torch.randn(2, 2, 21, 4)
    found, values = kept(x, 4, 21), kept(x, 4, 21).values()
    found.drop(11)
    assert (found.dropped, len(found)) == (8, 21)
    assert torch.equal(found.values(), values[:, :, 8:])


def test_refusals_change_nothing():
    k = torch.randn(2, 2, 5, 4)
    cache = Fp8Cache(block=2)
    cache.append(k, k)
    for wrong in (k[:1], k[:, :1], k[..., :2], k.bfloat16()):
        with pytest.raises(ShapeError, match="serves one batch of one model"):
            cache.append(k, wrong)
    assert len(cache) == 5
    with pytest.raises(UnsupportedDtype, match="float64"):
        Fp8Cache().append(k.double(), k.double())
    with pytest.raises(ShapeError, match="block of 0"):
        Fp8Cache(block=0)


def test_a_gradient_that_would_be_lost_is_refused():
    layer, x, cache = fe.Attention(32, 4, recipe="fp32"), torch.randn(2, 6, 32), Fp8Cache(block=2)
    layer(x, cache=cache).sum().backward()  # the first call sees its own keys, with their gradient
    assert layer.k_proj.weight.grad is not None
    with pytest.raises(GradientError, match=r"torch.no_grad\(\)"):
        layer(x, cache=cache)
    with torch.no_grad():
        layer(x, cache=cache)
    cache, k = Fp8Cache(block=2), torch.randn(2, 4, 6, 8)
    v = k.clone().requires_grad_()
    cache.append(k, v)
    with pytest.raises(GradientError):  # before the keys, which have no gradient, are kept
        cache.append(k, v)
    with torch.no_grad():
        assert [part.shape[2] for part in cache.append(k, v)] == [12, 12]


@pytest.mark.parametrize("heads", [fe.Heads(4, of_keys=2, theta=1e4, causal=True), fe.Heads(4, causal=True, window=6)])
def test_attention_decodes_as_with_the_cache_in_16_bits(heads: fe.Heads):
    layer, x = fe.Attention(32, heads, recipe="fp32").eval(), torch.randn(2, 24, 32)
    steps = x.split([10, *[1] * 14], 1)
    with torch.no_grad():
        found = [torch.cat([layer(part, cache=cache) for part in steps], 1) for cache in (Cache(), Fp8Cache(block=4))]
    assert torch.equal(found[0][:, :10], found[1][:, :10])
    # E4M3's rounding has 2^-4 / sqrt(3) relative RMS at most, 28.9 dB of keys and values; both are rounded: 25.
    assert 25 < sqnr(found[0][:, 10:], found[1][:, 10:]) < 60


def test_cross_attention_keeps_its_context_in_e4m3():
    layer = fe.Attention(32, fe.Heads(4, context_size=48), recipe="fp32").eval()
    x, context, cache = torch.randn(2, 3, 32), torch.randn(2, 16, 48), Fp8Cache(block=8)
    with torch.no_grad():
        first, later = layer(x, cache=cache, context=context), layer(x, cache=cache, context=context)
        assert torch.equal(first, layer(x, context=context))
    assert 25 < sqnr(first, later) < 60
    assert cache.nbytes == 2 * (2 * 16 * 32 + 2 * 4 * 2 * 4)


def test_a_cache_goes_through_pickle_and_torch_save():
    cache: Any = Fp8Cache(block=4)
    k = torch.randn(2, 3, 10, 5)
    cache.append(k, k.neg())
    cache.keep_context(torch.randn(2, 9, 15), torch.randn(2, 9, 15), 5)
    saved = io.BytesIO()
    torch.save(cache, saved)
    saved.seek(0)
    for again in (pickle.loads(pickle.dumps(cache)), torch.load(saved, weights_only=False), copy.deepcopy(cache)):
        for one, other in zip(again._kept + again._context, cache._kept + cache._context, strict=True):
            assert same(one, other)
        again.append(k, k)
        assert (len(again), len(cache)) == (20, 10)
