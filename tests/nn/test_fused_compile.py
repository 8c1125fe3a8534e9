"""torch.compile takes fused layers whole and computes what eager code computes, bit for bit, scales included."""

import copy
from typing import Any

import pytest
import torch
from fused import NORMS, Model, assert_equal, batches, like, train, with_root
from support import same, tables
from torch import nn

import fp8engine as fe

pytestmark = pytest.mark.usefixtures("fresh")

K, F = 48, 40


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("two", [False, True], ids=["one layer", "gate and up"])
@pytest.mark.parametrize("norm", [None, NORMS[0]], ids=str)
def test_an_mlp_without_norm_and_of_three_layers(norm, two):
    model = Model("delayed", norm, [(K, F), (K, F), (F, K)] if two else [(K, 2 * F), (F, K)], kind="geglu")
    eager, compiled = (with_root(like(model, model.call)) for _ in range(2))
    compiled.compile(fullgraph=True, backend="aot_eager")
    for x, dys in batches((24, 24), K, (K,)):
        assert_equal(train(compiled, x, dys), train(eager, x, dys))
        assert all(torch.equal(a, b) for a, b in zip(tables(eager)[:2], tables(compiled)[:2], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_layer_of_its_own_begins_steps_in_its_graph_and_counts_what_is_shared_for_each(placement):
    """Two of them: the last norm behind a post-norm layer writes no codes for one whose step has not begun."""
    options: dict[str, Any] = {"recipe": "delayed", "norm": "rms", "placement": placement}
    eager = nn.Sequential(*(fe.TransformerLayer(K, F, 4, "swiglu", **options) for _ in range(2)))
    compiled = copy.deepcopy(eager)
    in_graph = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for i in range(4):
        x = 3.0**i * torch.randn(2, 12, K)
        for model, run in ((eager, eager), (compiled, compiled if i < 2 else in_graph)):  # told first who reads
            model.zero_grad()
            run(x).square().sum().backward()
        assert same([p.grad for p in eager.parameters()], [p.grad for p in compiled.parameters()])
        for one, other in zip(eager, compiled, strict=True):
            assert same(tables(one)[:2], tables(other)[:2])
    slots = [fe.scaling_state(compiled[1])[f"self_attn.{name}_proj.input"] for name in "qkv"]
    assert [(int(slot.calls), int(slot.elements)) for slot in slots] == [(4, 4 * 24 * K)] * 3
    assert len({float(slot.history[0]) for slot in slots}) == 1


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_inductor_agrees(recipe):
    """Inductor orders sums of an FP32 add otherwise; what it may move is one FP8 code in few, far below 1e-2."""
    model = Model(recipe, NORMS[2], [(K, 2 * F), (F, K)], kind="swiglu")
    eager, compiled = like(model, model.call), like(model, model.call)
    compiled.compile(fullgraph=True)
    for x, dys in batches((24, 24), K, (K,)):
        found, wanted = train(compiled, x, dys), train(eager, x, dys)
        for name in wanted:
            assert (found[name] - wanted[name]).norm() <= 1e-2 * wanted[name].norm(), name


ALONE = {
    "LayerNormLinear": lambda: fe.LayerNormLinear(K, 16, recipe="current"),
    "LayerNormLinear rms, no bias": lambda: fe.LayerNormLinear(K, 16, bias=False, recipe="current", norm="rms"),
    "LayerNormMLP": lambda: fe.LayerNormMLP(K, F, "swiglu", recipe="current"),
    "TransformerLayer": lambda: fe.TransformerLayer(K, F, 4, recipe="current"),
}


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("kind", ALONE)
def test_every_fused_layer_compiles_with_and_without_gradients(kind: str, inference):
    layer, x = ALONE[kind](), torch.randn(2, 8, K)
    with inference():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
