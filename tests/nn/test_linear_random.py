"""A thousand random calls of fe.Linear beside nn.Linear: everything that is not a number alike, every number explained.

Shapes with 0 and 1, one to five dimensions, views, dtypes, autocast, no_grad, in-place consumers and hooks are drawn
together, because what broke was two of them at once.  Numbers are those of `products`, within its derived bound.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DTYPES, FP8_RECIPES, assert_products, products
from torch import nn

import fp8engine as fe
from fp8engine.numerics.recipe import resolve

SIZES = st.sampled_from([1, 2, 3, 16, 17, 40])
LEADING = st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=4)
VIEWS = ["plain", "sliced", "transposed", "expanded", "offset"]


def given_view(kind: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Random numbers of that shape, in memory as the kind says."""
    if kind == "sliced":
        return torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., ::2]
    if kind == "transposed":
        return torch.randn(*reversed(shape)).to(dtype).permute(*reversed(range(len(shape))))
    if kind == "expanded" and len(shape) > 1:
        return torch.randn(*shape[1:]).to(dtype).expand(shape)
    if kind == "offset":
        return torch.randn(torch.Size(shape).numel() + 3).to(dtype)[3:].view(shape)
    return torch.randn(shape).to(dtype)


def called(layer: Any, x: torch.Tensor, case: dict) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """(the layer's result times two, gradients of x, weight and bias) as the case has it."""
    leaf = x.detach()  # the same strides
    leaf.requires_grad_(case["needs_x"])
    layer.requires_grad_(case["needs_parameters"])
    hook = layer.register_forward_hook(lambda module, args, y: y.mul_(2)) if case["consumer"] == "hook" else None
    with torch.set_grad_enabled(case["grad"]), torch.autocast("cpu", torch.bfloat16, enabled=case["autocast"]):
        y = layer(leaf)
        if case["consumer"] == "in place":
            y *= 2
        elif case["consumer"] == "new":
            y = y * 2
    if hook is not None:
        hook.remove()
    if y.requires_grad:
        torch.manual_seed(1)
        y.backward(torch.randn(y.shape).to(y.dtype))
    return y, [leaf.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad]


def what(tensor: torch.Tensor | None) -> tuple | None:
    """All of a tensor that is not a number."""
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad, type(tensor))


CASE = st.fixed_dictionaries(
    {
        "view": st.sampled_from(VIEWS),
        "needs_x": st.booleans(),
        "needs_parameters": st.booleans(),
        "grad": st.sampled_from([True, True, False]),
        "autocast": st.sampled_from([False, False, True]),
        "consumer": st.sampled_from(["new", "in place", "hook"]),
    }
)


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.parametrize("recipe", FP8_RECIPES)
@settings(max_examples=1000 // len(FP8_RECIPES), deadline=None)
@given(leading=LEADING, k=SIZES, n=SIZES, dtype=st.sampled_from(DTYPES), bias=st.booleans(), case=CASE)
def test_random_calls(recipe: str, leading: list[int], k: int, n: int, dtype, bias: bool, case: dict):
    torch.manual_seed(k * 64 + n)
    plain = nn.Linear(k, n, bias, dtype=dtype)
    layer = fe.Linear(k, n, bias, recipe=recipe, dtype=dtype)
    layer.load_state_dict(plain.state_dict())
    x = given_view(case["view"], [*leading, k], dtype)
    before = x.clone()

    y, gradients = called(layer, x, case)
    y_plain, gradients_plain = called(plain, x, case)
    assert what(y) == what(y_plain)
    assert [*map(what, gradients)] == [*map(what, gradients_plain)]
    assert torch.equal(x, before), "the input was written"

    torch.manual_seed(1)
    dy = torch.randn(y.shape).to(y.dtype) * 2
    rows = x.reshape(-1, k) if x.numel() else x.reshape(0, k)
    b = layer.bias.detach() if bias else torch.zeros(n, dtype=dtype)
    want = products(resolve(recipe), rows, layer.weight.detach(), b, dy.reshape(len(rows), n))
    rounds, shape = resolve(recipe).output != fe.FP32, (len(rows), k, n)
    if recipe == "rowwise_gw_hp" and case["autocast"]:  # its 16 bits are autocast's there
        in_16_bits = products(resolve(recipe), rows.to(y.dtype), layer.weight.detach(), b, dy.reshape(len(rows), n))
        want = want._replace(dw=in_16_bits.dw, dw_abs=in_16_bits.dw_abs)
    y_MN = y.detach().reshape(len(rows), n) / 2  # twice a sum is exact, and so is half of that
    assert_products((y_MN, None, None, None), want, shape, y.dtype, rounds)
    dx, dw, db = gradients
    assert_products((None, None if dx is None else dx.reshape(rows.shape), dw, db), want, shape, dtype, rounds)
