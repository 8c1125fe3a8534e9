"""Attention in FP8 from its PTX, against its twin: casts bit for bit, and all of it where sums are exact.

The card adds FP8 products as Hopper does (tests/emulator/accumulator.py), the twin in FP32.
"""

import itertools

import pytest
import torch
from attention_kernels import cast, forward, gradients

from benchmarks.checks.operands import differs
from fp8engine.ops.reference.attention import HEAD_DIMS, LOG2_E, Form
from fp8engine.ops.reference.attention import attention as twin
from fp8engine.ops.reference.attention import attention_cast as twin_cast
from fp8engine.ops.reference.attention_backward import attention_backward as backward

# batch, heads, heads of keys, queries, keys, head dim, form
SHAPES = {
    "causal, grouped": (1, 2, 1, 70, 70, 64, Form(0.125, True)),
    "window, keys before": (1, 1, 1, 70, 100, 96, Form(0.1, True, 20, 30)),
    "more queries, not rotated": (1, 1, 1, 70, 3, 128, Form(0.09, rotated=False)),
    "some see nothing": (1, 1, 1, 70, 66, 64, Form(0.09, True, 0, -64)),
}
MORE = {"one block": (1, 1, 1, 64, 64, 64, Form(0.125)), "grouped": (2, 4, 2, 130, 130, 128, Form(0.125, True, 70))}
CASES = [*((shape, 90) for shape in SHAPES), ("more queries, not rotated", 89)]


def inputs(shape: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Form]:
    """Queries, keys and values [batch, heads, rows, D], as projections leave them; normal, with a few outliers."""
    batch, heads, of_keys, t, s, d, form = (SHAPES | MORE)[shape]
    torch.manual_seed(len(shape))

    def of(count: int, rows: int) -> torch.Tensor:
        x = torch.randn(batch, rows, count, d)
        x[torch.rand(x.shape) < 0.001] *= 20
        return x.to(dtype).transpose(1, 2)

    return of(heads, t), of(of_keys, s), of(of_keys, s), form


def of_exact_sums(shape: str, dims: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Form]:
    """q, k, v, do and a form whose sums are exact in Hopper's accumulator too.

    Small integers in `dims` dimensions, under scales of powers of two, and a softmax in base 2.  The largest of v and
    do is 1.75, so that their scales are 2^-8.
    """
    q, k, v, form = inputs(shape, torch.bfloat16)
    do = torch.randn(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).bfloat16().transpose(1, 2)
    q, k, v, do = ((x.float() * 0.6).round().clamp(-1, 1).bfloat16() for x in (q, k, v, do))
    q[..., dims:] = 0
    for x in (v, do):
        x[..., ::64, 0] = 1.75
    return q, k, v, do, form._replace(scale=1 / LOG2_E, rotated=False)


def finite_or_not(head_dim: int, dtype: torch.dtype, bad: bool) -> torch.Tensor:
    """Normal numbers whose rows lie octaves apart; bad: one NaN and one Inf."""
    x = (torch.randn(2, 70, 1, head_dim) * torch.exp2(torch.randint(-9, 10, (2, 70, 1, 1)))).to(dtype).transpose(1, 2)
    if bad:
        x[0, 0, 3, 5], x[1, 0, 69, 0] = float("nan"), float("inf")
    return x


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_cast_is_its_twin_bit_for_bit(head_dim: int, dtype: torch.dtype, card, whole: bool):
    card()
    forms = itertools.product((False, True), repeat=3)  # rotated, transposed, with NaN and Inf
    for rotated, transposed, bad in forms if whole else [(True, False, False), (False, True, True)]:
        x = finite_or_not(head_dim, dtype, bad)
        wanted, scale = twin_cast(x, rotated)
        found, found_scale = cast(x, rotated, transposed)
        codes = (found.mT if transposed else found).contiguous()
        assert differs(codes.view(torch.uint8), wanted.view(torch.uint8)) is None
        assert differs(found_scale, scale) is None


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "architecture"), CASES)
def test_forward_of_exact_sums_is_its_twin_bit_for_bit(shape: str, architecture: int, card, whole: bool):
    card(architecture)
    for each in (shape, *(MORE if whole else ())):
        q, k, v, _, form = of_exact_sums(each, 3)  # p is at least 2^-6
        assert differs(forward(q, k, v, form), twin(q, k, v, form)) is None


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_is_its_twin_up_to_the_cards_sums(shape: str, card):
    """A score's sum loses some 2^-11 of itself in the card's accumulator, and p as much.

    So one code of p in 2^8 (2^-11 over the 2^-3 between two codes) is its neighbour, half of 2^-3 away on average: of
    independent terms that is 2^-4 * 2^-4.5 of the whole, and rounding p differs by less.
    """
    card()
    q, k, v, form = inputs(shape, torch.bfloat16)
    found, wanted = forward(q, k, v, form).float(), twin(q, k, v, form).float()
    assert (found - wanted).norm() <= 2.0**-8 * wanted.norm()


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "architecture"), [CASES[1], CASES[-1]])
def test_backward_of_exact_sums_is_its_twin_bit_for_bit(shape: str, architecture: int, card, whole: bool):
    card(architecture)
    for each in (shape, *(SHAPES | MORE if whole else ())):
        q, k, v, do, form = of_exact_sums(each, 8)  # p is at least 2^-16
        for name, ours, twins in zip("qkv", gradients(q, k, v, do, form), backward(do, q, k, v, form), strict=True):
            assert differs(ours, twins) is None, name


@pytest.mark.slow
@pytest.mark.short
@pytest.mark.parametrize("shape", ["causal, grouped"])
@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
def test_backward_is_its_twin_up_to_the_order_of_sums(shape: str, dtype: torch.dtype, card):
    """A row's sums of p and p dP differ by 2^-17 with their order, so one in 2^9 of what follows is rounded otherwise.

    Each such rounding is worth 2^-8 of a term in BF16: 2^-12.5 of the whole where terms are independent, twice over
    (the result is rounded as well).  FP16 rounds 2^3 times as finely, and 2^3 times as many otherwise.  The scores, in
    FP8, lose some 2^-11 of themselves in the card's accumulator, and p as much.
    """
    q, k, v, form = inputs(shape, dtype)
    do = torch.randn(q.shape).to(dtype)
    card()
    for name, ours, twins in zip("qkv", gradients(q, k, v, do, form), backward(do, q, k, v, form), strict=True):
        assert (ours.float() - twins.float()).norm() < (2.0**-11.5 + 2.0**-11) * twins.float().norm(), name
