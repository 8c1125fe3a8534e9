"""Packed sequences ("THD"): each gives what it gives alone, forward and backward; torch's varlen call; refusals."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import sqnr
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.autograd import packed as module
from fp8engine.autograd.attention import Cache, Scores, attention
from fp8engine.autograd.packed import Packed, packed_attention, refused
from fp8engine.errors import AttentionWarning, BackendError, ShapeError, StrictError
from fp8engine.ops import device

pytestmark = pytest.mark.filterwarnings("ignore::fp8engine.errors.AttentionWarning")
LENGTHS = [(5, 3, 7), (1, 1), (9,), (4, 0, 6, 1)]
# FP32 softmax over up to 16 keys of numbers of size 1: sums in another order, each within 2^-24.
CLOSE = {"rtol": 0, "atol": 64 * 2.0**-24}


def packed_of(lengths, of_keys=None) -> Packed:
    parts: Any = [(ints([0, *itertools.accumulate(each)]), max(each)) for each in (lengths, of_keys) if each]
    return Packed(*itertools.chain(*parts))


def ints(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any),
    st.sampled_from([Scores(), Scores(True), Scores(True, 0.0, 2)]),
    st.sampled_from([1, 2, 4]),
)
def test_each_sequence_attends_as_alone(lengths, scores, of_keys):
    t = sum(lengths)
    q, k, v = (torch.randn(1, heads, t, 8).requires_grad_() for heads in (4, of_keys, of_keys))
    found = attention(q, k, v, packed_of(lengths), scores)
    alone = [
        attention(*parts, scores=scores)
        for parts in zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
        if parts[0].shape[2]
    ]
    assert torch.allclose(found, torch.cat(alone, 2), **CLOSE)
    dy = torch.randn_like(found)
    grads = (torch.autograd.grad(y, (q, k, v), dy) for y in (found, torch.cat(alone, 2)))
    assert all(torch.allclose(one, other, **CLOSE) for one, other in zip(*grads, strict=True))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("recipe", ["fp32", "rowwise", "blockwise"])
def test_a_layer_gives_each_sequence_what_it_gives_it_alone(recipe: str, lengths):
    """Rotary positions begin anew in each sequence.  Rows are cast by themselves: only sums in 16 bits differ."""
    torch.manual_seed(0)
    layer = fe.TransformerLayer(
        32, 48, fe.Heads(4, of_keys=2, theta=1e4, causal=True), "swiglu", recipe=recipe, norm="rms"
    )
    x = torch.randn(sum(lengths), 32).requires_grad_()
    y = layer(x, packed_of(lengths))
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    alone = torch.cat([layer(part[None])[0] for part in x.split(lengths) if len(part)])
    (wanted,) = torch.autograd.grad(alone, x, dy)
    assert y.shape == x.shape
    assert sqnr(alone, y) > (100 if recipe == "fp32" else 35)
    # Groups of 128 rows of a gradient's cast hold other rows where sequences run apart (blockwise): E5M2's noise once.
    assert sqnr(wanted, dx) > (100 if recipe == "fp32" else 17)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_cross_attention_of_packed_contexts(checkpointed: bool):
    layer = fe.TransformerLayer(32, 48, fe.Heads(4, causal=True), recipe="fp32", context_size=24)
    (t, s), x, context = ((4, 3), (2, 6)), torch.randn(7, 32), torch.randn(8, 24)

    def run(x):
        return layer(x, packed_of(t), context=context, context_mask=packed_of(t, s))

    leaf = x.clone().requires_grad_()
    y = checkpoint(run, leaf, use_reentrant=False) if checkpointed else run(leaf)
    alone = [
        layer(part[None], context=other[None])[0] for part, other in zip(x.split(t), context.split(s), strict=True)
    ]
    assert sqnr(torch.cat(alone), y) > 100
    y.sum().backward()
    assert leaf.grad is not None
    with pytest.raises(ShapeError, match=r"want \[S, context_size\], packed too"):
        layer(x, packed_of(t), context=context, context_mask=packed_of(t))


def test_torch_compile_traces_it_whole():
    layer = fe.Attention(32, fe.Heads(4, theta=1e4, causal=True), recipe="fp32")
    x, packed = torch.randn(8, 32), packed_of((3, 5))
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, packed)
    assert sqnr(layer(x, packed), found) > 100


def test_the_mask_of_a_cpu_is_said_once_and_reported():
    layer = fe.Attention(32, 4, recipe="rowwise")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            layer(torch.randn(8, 32), packed_of((3, 5)))
    assert [w.category for w in caught] == [AttentionWarning]
    assert "mask of all pairs of tokens, 8 x 8" in str(caught[0].message)
    layer.softmax.strict = True
    with pytest.raises(StrictError, match="mask of all pairs"):
        layer(torch.randn(8, 32), packed_of((3, 5)))


ENDS = ints([0, 3, 8])


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        *((Packed(ints(ends), 5), "want numbers that rise from 0 to 8") for ends in ([0, 3, 7], [1, 3, 8], [0, 9, 8])),
        (Packed(ints([0, 3, 9]), 5), "want numbers that rise from 0 to 8"),
        (Packed(ENDS, 4), "cu_seqlens is .*, whose longest sequence has 5 tokens, not 4"),
        (Packed(ENDS, 5, ENDS, 4), "of_keys is .*, whose longest sequence has 5 tokens, not 4"),
        (Packed(ENDS, 5, ENDS), "want longest_key beside them"),
        *((Packed(wrong, 8), "want int32") for wrong in (ints([0, 8])[None], torch.tensor([0.0, 8.0]), ints([0]))),
        (Packed(torch.tensor([0, 8], device="meta"), 8), "move it there"),
    ],
    ids=str,
)
def test_ends_that_do_not_fit_are_refused(packed: Packed, words: str):
    """A card would leave out what lies beyond the longest."""
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(ShapeError, match=words):
        packed_attention(q, q, q, packed, Scores())


def test_inputs_that_do_not_fit_are_refused():
    layer, x = fe.Attention(32, fe.Heads(4, causal=True), recipe="current"), torch.randn(8, 32)
    for wrong, cache in ((torch.randn(1, 8, 32), None), (x, Cache())):
        with pytest.raises(ShapeError, match=r"with a Packed as mask \[T, hidden_size\] and no cache"):
            layer(wrong, packed_of((3, 5)), cache=cache)
    with pytest.raises(ShapeError, match="with a Packed as mask"):
        layer(x)
    with pytest.raises(ShapeError, match="want numbers that rise from 0 to 8"):
        layer(x, Packed(ints([0, 9, 8]), 5))


class Card(torch.Tensor):
    """A tensor that says that it is on a card, and computes on the CPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)


def on_card(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype).as_subclass(Card)


@pytest.mark.parametrize("scores", [Scores(), Scores(True), Scores(True, 0.0, 3)], ids=str)
def test_what_torchs_varlen_attention_is_given(scores: Scores, monkeypatch):
    """Its documented meaning, written out: [T, heads, D], ends of both, window (left, right), keys' heads shared."""
    given = []

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa):
        given.append((cu_q.dtype, cu_k.dtype, max_q, max_k, enable_gqa))
        left, right = window_size
        out = []
        for i in range(len(cu_q) - 1):
            one, keys, values = (
                x[int(c[i]) : int(c[i + 1])].as_subclass(torch.Tensor).float()
                for x, c in ((q, cu_q), (k, cu_k), (v, cu_k))
            )
            keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (keys, values))
            back = torch.arange(len(one))[:, None] + len(keys) - len(one) - torch.arange(len(keys))
            seen = (back >= -right if right >= 0 else back > -999) & (back <= left if left >= 0 else back < 999)
            weights = torch.einsum("thd,shd->hts", one, keys) / q.shape[2] ** 0.5
            weights = weights.masked_fill(~seen, float("-inf")).softmax(-1)
            out.append(torch.einsum("hts,shd->thd", weights, values))
        return torch.cat(out).to(q.dtype)

    monkeypatch.setattr(module, "_varlen", lambda: varlen)
    monkeypatch.setattr(device, "capability", lambda where: (9, 0))
    lengths = (5, 3, 6)
    q, k, v = on_card(1, 4, 14, 16), on_card(1, 2, 14, 16), on_card(1, 2, 14, 16)
    packed = packed_of(lengths)
    ends = packed.cu_seqlens.long().as_subclass(Card)  # any integers: it is given int32
    found = packed_attention(q, k, v, Packed(ends, 6), scores)
    plain = [x.as_subclass(torch.Tensor).float() for x in (q, k, v)]
    wanted = packed_attention(plain[0], plain[1], plain[2], packed, scores)
    assert given == [(torch.int32, torch.int32, 6, 6, True)]
    assert torch.allclose(found.as_subclass(torch.Tensor).float(), wanted, atol=2.0**-7)


def test_torch_has_the_function_that_is_called():
    assert (module._varlen() is None) == (torch.__version__ < "2.13")


def test_what_a_card_refuses_by_name(monkeypatch):
    monkeypatch.setattr(device, "capability", lambda where: (9, 0))
    monkeypatch.setattr(device, "name", lambda where: "an H100")
    q = on_card(1, 2, 8, 16)
    monkeypatch.setattr(module, "_varlen", lambda: None)
    assert "install torch 2.13" in str(refused(q, 0.0))
    monkeypatch.setattr(module, "_varlen", lambda: packed_attention)
    assert refused(q, 0.0) is None
    for x, dropout, words in (
        (q.float(), 0.0, "q is torch.float32; run under torch.autocast, or pad"),
        (q, 0.1, "no dropout, and 0.1 is asked for; set Heads(dropout=0.0)"),
        (on_card(1, 2, 8, 12), 0.0, "heads of 12 columns"),
        (on_card(1, 2, 8, 264), 0.0, "heads of 264 columns"),
    ):
        assert words in str(refused(x, dropout))
    monkeypatch.setattr(device, "capability", lambda where: (7, 5))
    assert "sm_80 or later" in str(refused(q, 0.0))
    monkeypatch.setattr(device, "capability", lambda where: (9, 0))
    monkeypatch.setattr(module, "_varlen", lambda: None)
    assert "install torch 2.13" in str(refused(q, 0.0))
    with pytest.raises(BackendError, match=r"^attention: packed sequences on an H100: torch .* has no varlen_attn"):
        packed_attention(q, q, q, Packed(ints([0, 8]).as_subclass(Card), 8), Scores())
