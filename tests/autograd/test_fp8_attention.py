"""FP8 attention on a CPU: against float64, its gradients, compiled, checkpointed, and what it refuses."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from support import same, sqnr
from torch.utils.checkpoint import checkpoint

from fp8engine.autograd.fp8_attention import fp8_attention
from fp8engine.errors import ShapeError
from fp8engine.ops.attention import attention_backward
from fp8engine.ops.reference.attention import Form, visible

FORMS = {
    "full": (2, 2, 130, 200, 128, Form(0.09)),
    "causal, grouped": (4, 2, 130, 130, 64, Form(0.125, True)),
    "window, keys before": (2, 1, 70, 200, 96, Form(0.1, True, 50, 130)),
    "not rotated": (1, 1, 100, 3, 128, Form(0.09, rotated=False)),
}


def inputs(name: str, outliers: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    """q, k, v and a gradient of the output."""
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


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form) -> torch.Tensor:
    """The same in float64."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    seen = visible(form, slice(0, q.shape[2]), slice(0, k.shape[2]), k.shape[2], q.device)
    return torch.softmax((q @ k.mT * form.scale).masked_fill(~seen, -math.inf), -1) @ v


CASES = [(name, outliers, torch.bfloat16) for name in FORMS for outliers in (False, True)]
CASES += [("causal, grouped", False, dtype) for dtype in (torch.float32, torch.float16)]


@pytest.mark.parametrize(("name", "outliers", "dtype"), CASES, ids=str)
def test_values_and_gradients_are_near_float64(name: str, outliers: bool, dtype: torch.dtype):
    """Rounding to E4M3 costs 31.7 dB a tensor: q and k 28.7 dB in the scores, P and v as much, 25.7 together.

    Of dQ and dK, dO and v in FP8 cost 28.7 dB; of dV only BF16's P does.
    """
    q, k, v, do, form = inputs(name, outliers, dtype)
    given, wide = (q, k, v), [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, wanted = fp8_attention(q, k, v, form), exact(wide[0], wide[1], wide[2], form)
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


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_nothing_gives_nothing(shape: tuple[int, int]):
    q, k = (cast(Any, torch.zeros(1, 2, rows, 64, requires_grad=True)) for rows in shape)
    o = fp8_attention(q, k, k, Form(0.125))
    o.sum().backward()
    assert (o == 0).all()
    assert (q.grad == 0).all()
    assert (k.grad == 0).all()


@pytest.mark.filterwarnings("ignore")
def test_compiled_without_graph_break_it_is_the_same_bit_for_bit():
    q, k, v, do, form = inputs("causal, grouped")

    def step(run):
        o = run(q, k, v)
        return o, *torch.autograd.grad(o, (q, k, v), do)

    plain = step(lambda q, k, v: fp8_attention(q, k, v, form))
    compiled = torch.compile(lambda q, k, v: fp8_attention(q, k, v, form), fullgraph=True, backend="aot_eager")
    assert same(step(compiled), plain)
    again = step(lambda q, k, v: checkpoint(fp8_attention, q, k, v, form, use_reentrant=False))
    assert same(again, plain)


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
def test_a_scale_that_is_no_positive_number_of_fp32_is_refused_both_ways(scale: float):
    """The kernels multiply the -Inf of a masked score by it: of 0 that is NaN, and the sign turns it into +Inf."""
    q, k, v, do, form = inputs("causal, grouped")
    why = "a scale of .* for the scores; FP8 attention takes 2\\^-126 to 2\\^126"
    with pytest.raises(ShapeError, match=why):
        fp8_attention(q, k, v, form._replace(scale=scale))
    with pytest.raises(ShapeError, match=why):
        attention_backward(do, q, k, v, form._replace(scale=scale))
