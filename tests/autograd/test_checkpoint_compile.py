"""Activation checkpointing in and around compiled blocks: what eager code computes and writes, nothing run twice.

That a checkpoint of a whole model inside its graph changes nothing is a law (tests/laws/test_laws_of_graphs.py).
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import WIDTH, Net, net, train
from support import FP8_RECIPES, converted, same, tables
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.report.state import controllers_of

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    # torch 2.13's Dynamo looks at .grad of a block's input, which is no leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def whole(model: Any, backend: Any = "aot_eager") -> Any:
    return torch.compile(model, fullgraph=True, backend=backend)


def checkpointed(model: Any) -> Any:
    return lambda *given: checkpoint(model, *given, use_reentrant=False)


NESTED: dict[str, Callable] = {
    "each block": whole,
    "each block, and all": lambda model: whole(checkpointed(model)),
}


@pytest.mark.slow
@pytest.mark.parametrize("nested", NESTED)
def test_a_graph_of_checkpointed_blocks_equals_eager_code_without(nested: str):
    eager, plain, recomputed = net("delayed"), net("delayed"), net("delayed", reentrant=False)
    losses = train(eager)
    assert train(plain, whole(plain)) == losses
    before = counters["stats"]["unique_graphs"]
    call = NESTED[nested](recomputed)
    assert train(recomputed, call) == losses
    assert counters["stats"]["unique_graphs"] <= before + 1, "the update's graph is there already"
    assert same(list(eager.parameters()), list(recomputed.parameters()))
    assert same(tables(eager)[:2], tables(recomputed)[:2])
    assert same(tables(plain)[:2], tables(recomputed)[:2])
    before, x = tables(recomputed)[:2], torch.randn(8, WIDTH)
    with torch.no_grad():
        assert torch.equal(call(x), recomputed(x))
    assert same(before, tables(recomputed)[:2]), "without gradients nothing is recorded"


def test_no_code_is_kept_for_backward_and_only_what_writes_nothing_runs_again():
    graphs: list[Any] = []

    def keep(graph, example):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    model = net("delayed", reentrant=False)
    whole(model, aot_autograd(fw_compiler=keep, bw_compiler=keep))(torch.randn(24, WIDTH)).sum().backward()
    forward, backward = graphs[-2:]
    kept = [node.meta["val"] for node in forward.graph.output_node().args[0] if node is not None]
    assert {value.dtype for value in kept} == {torch.float32, torch.int64}, "no FP8"
    if torch.__version__ < "2.13":  # torch 2.11 runs no part of an autograd.Function again: it keeps their results
        return
    activations = [value for value in kept if value.dim() and len(value) == 24]
    assert [list(value.shape) for value in activations] == [[24, WIDTH]] * 3, "the result, and each block's input"
    again = [node.name for node in backward.graph.nodes if "_column" in node.name and "quantize" in node.name]
    assert len(again) == 2 * (2 + 3 - 1), f"of a block what its norm and its product make, two weights: {again}"
    assert "take_column" not in backward.code, backward.code
    assert "put_column" not in backward.code, backward.code


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
@pytest.mark.parametrize("needs", ["weights", "input"])
def test_gradients_of_weights_or_of_the_input_alone(recipe: str, needs: str):
    eager, plain, recomputed = net(recipe), net(recipe), net(recipe, reentrant=False)
    calls = {eager: eager, plain: whole(plain), recomputed: whole(recomputed)}
    for turn in range(3):
        found = []
        for model, call in calls.items():
            model.requires_grad_(needs == "weights")
            x = (torch.arange(8 * WIDTH).view(8, WIDTH) * 2.0**turn).requires_grad_(needs == "input")
            y = call(x)
            leaves = [x] if needs == "input" else list(model.parameters())
            found.append([y.detach(), *torch.autograd.grad(y.square().mean(), leaves)])
            for p in model.parameters():
                p.data.mul_(1.01)
        assert same(found[0], found[1])
        assert same(found[0], found[2])
    assert same(tables(eager)[:2], tables(recomputed)[:2])
    assert same(tables(plain), tables(recomputed))


def by_block(blocks: Any, inside: bool = False) -> None:
    """Compile each of them; inside: with its checkpoint in its graph."""
    for block in blocks:
        if inside:
            block.forward = checkpointed(block.forward)
        block.compile(fullgraph=True, backend="aot_eager")


WHERE = {"inside": None, "around": False, "around, reentrant": True}


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_blocks_compiled_one_by_one(recipe: str, where: str):
    """A checkpoint around a graph runs all of it again: what it counts, it counts once."""
    plain, regional = net(recipe), net(recipe, WHERE[where])
    by_block(plain.get_submodule("blocks").children())
    by_block(regional.get_submodule("blocks").children(), inside=where == "inside")
    assert train(net(recipe)) == train(plain) == train(regional)
    assert same(tables(plain), tables(regional))


class Attending(nn.Module):
    """Attention between two layers, of which each graph saves the tables for its backward."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_MK):
        q, k, v = self.qkv(x_MK).view(1, len(x_MK), 3, 4, WIDTH // 4).transpose(1, 3).unbind(2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x_MK + self.out(y.transpose(1, 2).reshape(x_MK.shape))


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("blockwise", marks=pytest.mark.slow)])
def test_attention_blocks_checkpointed_inside_of_their_graphs(recipe: str):
    """The graph of the second block writes the tables that the first one's backward has saved."""
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = converted(nn.Sequential(Attending(), Attending()), recipe)
        by_block(model if compiled else (), inside=True)
        losses.append(train(model))
    assert losses[0] == losses[1]


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_auto_decides_alike(inside: bool):
    """The clock runs outside of the blocks' graphs; what it looks at is described within them."""
    runs = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = converted(Net(False if recomputed and not inside else None), fe.auto(interval=2))
        for block in model.get_submodule("blocks").children():
            if recomputed and inside:
                block.forward = checkpointed(block.forward)
            block.compile(backend="aot_eager")
        runs.append((train(model, rows=(24,) * 6), [line for c in controllers_of(model) for line in map(str, c.log)]))
        runs[-1] += (tables(model),)
    (losses, decided, plain), (again, decided_again, recomputed) = runs
    assert losses == again
    assert decided == decided_again != []
    assert same(plain, recomputed)


def test_a_checkpoint_around_the_graph_of_a_layer_without_a_root():
    """It updates its own scales, in its graph: once a step, and not when the graph runs again."""
    plain, layer = (fe.Linear(WIDTH, WIDTH, recipe="delayed") for _ in range(2))
    layer.load_state_dict(plain.state_dict())
    assert train(plain) == train(layer, checkpointed(whole(layer)))
    assert same(tables(plain)[:2], tables(layer)[:2])


@pytest.mark.slow
def test_a_graph_for_a_card_casts_both_ways_again(monkeypatch: pytest.MonkeyPatch):
    """One cast gives an operand and its transpose there; here it is traced as there, and runs on the reference."""
    monkeypatch.setattr(sys.modules["fp8engine.autograd.operands"], "graphs_run_on", lambda where: "cublas")
    plain, recomputed = net("delayed"), net("delayed", reentrant=False)
    with fe.backend("cublas"):
        assert train(plain, whole(plain)) == train(recomputed, whole(recomputed))
    assert same(list(plain.parameters()), list(recomputed.parameters()))
    assert same(tables(plain), tables(recomputed))
