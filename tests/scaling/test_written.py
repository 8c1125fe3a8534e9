"""Writes in place between a producer and its reader, as a graph's nodes tell of them."""

import copy
import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8engine as fe
from fp8engine.scaling.written import _writes

FUNCTIONS = {
    True: (operator.iadd, operator.iand, operator.setitem, torch.Tensor.add_, torch._foreach_mul_),
    False: (operator.and_, operator.or_, operator.not_, operator.is_, torch.add, torch.Tensor.masked_fill),
}
METHODS = {True: ("add_", "__iand__", "__setitem__", "masked_fill_"), False: ("__and__", "masked_fill", "__getitem__")}


@pytest.mark.parametrize("writes", [True, False])
def test_what_writes_is_told_from_what_is_named_alike(writes: bool):
    nodes: list[Any] = [SimpleNamespace(op="call_function", target=each) for each in FUNCTIONS[writes]]
    nodes += [SimpleNamespace(op="call_method", target=each) for each in METHODS[writes]]
    for node in nodes:
        assert _writes(SimpleNamespace(**vars(node), args=(), kwargs={})) == writes, node.target


def test_a_mask_that_is_joined_to_another_takes_no_codes_away():
    """`mask & causal` stands between the norm and the MLP of a parallel block: its graph computes what eager code does.

    Under "fp8" with `recompute` gradients of the MLP's weights are of the norm of x as FP8 stores it, 2.6 % from those
    of x itself, which a graph kept where it took `&` for a write.
    """
    torch.manual_seed(0)
    heads = fe.Heads(2, of_keys=1, width=8, causal=True)
    options: dict[str, Any] = {"norm": "rms", "placement": "parallel shared", "recompute": True, "store": "fp8"}
    plain = fe.TransformerLayer(32, 64, heads, "swiglu", True, recipe="rowwise_gw_hp", **options)
    traced = copy.deepcopy(plain)
    x, mask = torch.randn(2, 5, 32, dtype=torch.bfloat16).float(), torch.arange(5) < torch.tensor([[5], [3]])
    for run in (plain, torch.compile(traced, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            run(x, mask=mask).square().mean().backward()
    for (name, one), other in zip(plain.named_parameters(), traced.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # pyright: ignore[reportArgumentType]
