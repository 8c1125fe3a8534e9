"""A whole fe.TransformerLayer on our kernels, forward and backward, against float64."""

import pytest
import torch
from layer64 import exact_step, lively, step
from support import sqnr

import fp8engine as fe


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("current", {}), ("rowwise", {"placement": "post", "store": "fp8", "recompute": True})],
    ids=["pre", "post"],
)
def test_a_layer_on_our_kernels(recipe: str, options: dict):
    heads = fe.Heads(4, 2, theta=1e4, causal=True)
    common = {"recipe": recipe, "norm": "rms", "dtype": torch.bfloat16}
    layer = lively(fe.TransformerLayer(32, 48, heads, "swiglu", False, **common, **options))
    x, dy = torch.randn(2, 2, 8, 32).bfloat16()
    with fe.backend("triton"):
        found = step(layer, x, dy)
    assert {row["backend"] for row in fe.inspect(layer).layers} == {"triton"}
    wanted = exact_step(layer, x, dy)
    # As in test_transformer.py: four matmuls in E4M3 in what is added; a gradient passes four casts of dy beside.
    low = {n: sqnr(wanted[n], found[n]) for n in wanted if not sqnr(wanted[n], found[n]) > (19.5 if n == "y" else 13.5)}
    assert not low
