"""Attention between the projections, in 16 bits and in FP8: against a softmax written out in float64; refusals."""

import math
from typing import Any

import pytest
import torch
from support import sqnr
from transformers.models.llama import modeling_llama as llama

from fp8engine.autograd.attention import Scores, attention, rotate
from fp8engine.autograd.fp8_attention import fp8_attention
from fp8engine.errors import ShapeError, UnsupportedDtype
from fp8engine.ops.reference.attention import Form, visible

# FP32 sums of up to 16 products and a softmax of up to 16 terms, each within (terms) 2^-24 of magnitudes around 1.
CLOSE = {"rtol": 0, "atol": 64 * 2.0**-24}


def written_out(q, k, v, seen: torch.Tensor, added=None, scale: float | None = None) -> torch.Tensor:
    """softmax(q k^T scale + added) v over the keys seen, float64; rows that see nothing are 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.double().repeat_interleave(group, 1) for part in (k, v))
    scores = q.double() @ k.mT * (scale or q.shape[-1] ** -0.5)
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


def test_rotation_is_that_of_transformers():
    q, k, _ = triple(t=6, s=6, heads=2)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 99]])
    frequency = 1e4 ** (-torch.arange(0, 8, 2, dtype=torch.float32) / 8)
    angle = (positions[..., None] * frequency).repeat(1, 1, 2)
    wanted = llama.apply_rotary_pos_emb(q, k, angle.cos(), angle.sin())
    for ours, theirs in zip((rotate(q, positions, 1e4), rotate(k, positions, 1e4)), wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=2.0**-22)  # two products and a sum, of magnitudes below 4


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


FORMS = {
    "full": (2, 2, 130, 200, 128, Form(0.09)),
    "causal, grouped": (4, 2, 130, 130, 64, Form(0.125, True)),
    "window, keys before": (2, 1, 70, 200, 96, Form(0.1, True, 50, 130)),
    "not rotated": (1, 1, 100, 3, 128, Form(0.09, rotated=False)),
}


def inputs(name: str, outliers: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    heads, of_keys, t, s, d, form = FORMS[name]
    generator = torch.Generator().manual_seed(len(name))

    def of(count: int, rows: int) -> torch.Tensor:
        x = torch.randn(2, count, rows, d, generator=generator)
        if outliers:
            rare = torch.rand(x.shape, generator=generator) < 0.001
            x = x + 10 * torch.randn(x.shape, generator=generator) * rare
        return x.to(dtype).requires_grad_()

    do = torch.randn(2, heads, t, d, generator=generator).to(dtype)
    return of(heads, t), of(of_keys, s), of(of_keys, s), do, form


CASES = [(name, outliers, torch.bfloat16) for name in FORMS for outliers in (False, True)]
CASES += [("causal, grouped", False, dtype) for dtype in (torch.float32, torch.float16)]


@pytest.mark.parametrize(("name", "outliers", "dtype"), CASES, ids=str)
def test_values_and_gradients_are_near_float64(name: str, outliers: bool, dtype: torch.dtype):
    """Rounding to E4M3 costs 31.7 dB a tensor: q and k 28.7 dB in the scores, P and v as much, 25.7 together.

    Of dQ and dK, dO and v in FP8 cost 28.7 dB; of dV only BF16's P does.
    """
    q, k, v, do, form = inputs(name, outliers, dtype)
    given, wide = (q, k, v), [x.detach().double().requires_grad_() for x in (q, k, v)]
    seen = visible(form, slice(0, q.shape[2]), slice(0, k.shape[2]), k.shape[2], q.device)
    o, wanted = fp8_attention(q, k, v, form), written_out(wide[0], wide[1], wide[2], seen, scale=form.scale)
    assert sqnr(wanted, o) > (24 if outliers else 25)
    found, grads = torch.autograd.grad(o, given, do), torch.autograd.grad(wanted, wide, do.double())
    assert {x.dtype for x in (o, *found)} == {dtype}
    for x, like, least in zip(found, grads, (26, 26, 45), strict=True):
        assert sqnr(like, x) > least


def test_a_key_that_is_not_finite_reaches_the_queries_that_see_it():
    q, k, v, _, form = inputs("causal, grouped")
    with torch.no_grad():
        k[0, 0, 70, 3], v[1, 1, 90, 5] = float("nan"), float("inf")
        o = fp8_attention(q, k, v, form)
    assert o[0, 0, 70:].isnan().all()
    assert o[0, 0, :64].isfinite().all()
    assert o[0, 2:].isfinite().all()
    assert o[1, 2, 90:, 5].isnan().all()
    assert o[1, 2, :, :5].isfinite().all()


def test_queries_that_see_no_key_give_zeros_and_no_gradient():
    q, k, v, do, form = inputs("causal, grouped")
    o = fp8_attention(q, k, v, form._replace(offset=-10))
    o.backward(do)
    assert (o[:, :, :10] == 0).all()
    assert (q.grad[:, :, :10] == 0).all()
    assert (o[:, :, 10:] != 0).any(-1).all()


@pytest.mark.parametrize(
    ("q", "k", "why"),
    [
        ((1, 2, 4, 80), (1, 2, 4, 80), "heads of 80 columns; FP8 attention takes 64, 96 or 128"),
        ((2, 4, 64), (2, 4, 64), "takes \\[batch, heads, T, D\\]"),
        ((1, 3, 4, 64), (1, 2, 4, 64), "share those of k evenly"),
    ],
)
def test_what_it_does_not_take_is_named(q: tuple, k: tuple, why: str):
    with pytest.raises(ShapeError, match=why):
        fp8_attention(torch.ones(q), torch.ones(k), torch.ones(k), Form(0.1))


@pytest.mark.parametrize("scale", [0.0, -0.125, math.inf, math.nan, 1e-40], ids=str)
def test_a_scale_that_is_no_positive_number_of_fp32_is_refused(scale: float):
    """The kernels multiply the -Inf of a masked score by it: of 0 that is NaN, and the sign turns it into +Inf."""
    q, k, v, _, form = inputs("causal, grouped")
    why = "a scale of .* for the scores; FP8 attention takes 2\\^-126 to 2\\^126"
    with pytest.raises(ShapeError, match=why):
        fp8_attention(q, k, v, form._replace(scale=scale))
