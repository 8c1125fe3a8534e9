"""Activation checkpointing under torch.compile: the numbers and tables of eager code without it, nothing run twice."""

import itertools
import sys
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

pytestmark = pytest.mark.usefixtures("fresh")


def cases(quick: list[tuple], *values) -> list:
    """Every combination, marked slow but for the quick ones."""
    every = list(itertools.product(*values))
    assert set(quick) <= set(every)
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in every]


def whole(model: nn.Module, backend: Any = "aot_eager") -> Any:
    return torch.compile(model, fullgraph=True, backend=backend)


def checkpointed(model: Any, reentrant: bool = False) -> Any:
    return lambda *given: checkpoint(model, *given, use_reentrant=reentrant)


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", cases([("current",), ("delayed",), ("rowwise_gw_hp",)], FP8_RECIPES))
def test_a_graph_of_checkpointed_blocks_equals_eager_code_without(recipe):
    eager, plain, recomputed = net(recipe), net(recipe), net(recipe, reentrant=False)
    losses = train(eager)
    assert train(plain, whole(plain)) == losses
    before = counters["stats"]["unique_graphs"]
    assert train(recomputed, whole(recomputed)) == losses
    assert counters["stats"]["unique_graphs"] <= before + 1, "the update's graph is there already"
    assert same(list(eager.parameters()), list(recomputed.parameters()))
    assert same(tables(eager), tables(recomputed))
    assert same(tables(plain), tables(recomputed))


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_inductor_agrees(recipe):
    """With and without a checkpoint Inductor may sum in another order: 1 FP32 ulp, see tests/nn/test_compile.py."""
    plain, recomputed = net(recipe), net(recipe, reentrant=False)
    losses = train(recomputed, torch.compile(recomputed, fullgraph=True))
    assert losses == pytest.approx(train(plain), rel=1e-3)
    assert torch.equal(tables(plain)[2][:2], tables(recomputed)[2][:2])


def test_no_code_is_kept_for_backward_and_only_what_writes_nothing_runs_again():
    graphs: list[Any] = []

    def keep(graph, example):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    model = net("delayed", reentrant=False)
    whole(model, aot_autograd(fw_compiler=keep, bw_compiler=keep))(torch.randn(24, WIDTH)).sum().backward()
    forward, backward = graphs[-2:]
    kept = [node.meta["val"] for node in forward.graph.output_node().args[0] if node is not None]
    if torch.__version__ < "2.13":  # torch 2.11 runs no part of an autograd.Function again: it keeps the codes
        assert torch.float8_e4m3fn in {value.dtype for value in kept}
        return
    assert {value.dtype for value in kept} == {torch.float32, torch.int64}, "no FP8"
    activations = [value for value in kept if value.dim() and len(value) == 24]
    assert [list(value.shape) for value in activations] == [[24, WIDTH]] * 3, "the result, and each block's input"
    again = [node.name for node in backward.graph.nodes if "_column" in node.name and "quantize" in node.name]
    assert len(again) == 2 * (2 + 3 - 1), f"of a block what its norm and its product make, two weights: {again}"
    assert "take_column" not in backward.code, backward.code
    assert "put_column" not in backward.code, backward.code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "needs"),
    cases([("delayed", "weights"), ("delayed", "input")], ["delayed", "blockwise"], ["weights", "input"]),
)
def test_gradients_of_weights_or_of_the_input_alone(recipe, needs):
    eager, plain, recomputed = net(recipe), net(recipe), net(recipe, reentrant=False)
    calls = {eager: eager, plain: whole(plain), recomputed: whole(recomputed)}
    for turn in range(3):
        found = []
        for model, call in calls.items():
            model.zero_grad()
            model.requires_grad_(needs == "weights")
            x = (torch.arange(8 * WIDTH).view(8, WIDTH) * 2.0**turn).requires_grad_(needs == "input")
            y = call(x)
            y.square().mean().backward()
            found.append([y.detach(), *(t.grad for t in (x, *model.parameters()) if t.grad is not None)])
            for p in model.parameters():
                p.data.mul_(1.01)
        assert same(found[0], found[1])
        assert same(found[0], found[2])
        assert len(found[0]) == (2 if needs == "input" else 1 + len(list(eager.parameters())))
    assert same(tables(eager)[:2], tables(recomputed)[:2])
    assert same(tables(plain), tables(recomputed))


@pytest.mark.slow
def test_without_gradients_nothing_is_recorded():
    model = net("delayed", reentrant=False)
    call = whole(model)
    train(model, call)
    before, x = tables(model)[:2], torch.randn(8, WIDTH)
    with torch.no_grad():
        assert torch.equal(call(x), model(x))
    assert same(before, tables(model)[:2])


WHERE = ["inside", "around", "around, reentrant"]


@pytest.mark.short
@pytest.mark.slow
# torch 2.13's Dynamo looks at .grad of a block's input, which is no leaf.
@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("recipe", "where"),
    cases([("delayed", where) for where in WHERE] + [("blockwise", WHERE[0])], FP8_RECIPES, WHERE),
)
def test_blocks_compiled_one_by_one(recipe, where):
    """A checkpoint around a graph runs all of it again: what it counts, it counts once."""
    plain, regional = net(recipe), net(recipe, None if where == "inside" else where != "around")
    for model in (plain, regional):
        for block in model.get_submodule("blocks").children():
            if where == "inside" and model is regional:
                block.forward = checkpointed(block.forward)
            block.compile(fullgraph=True, backend="aot_eager")
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


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("recipe", cases([("delayed",)], FP8_RECIPES))
def test_attention_blocks_checkpointed_inside_of_their_graphs(recipe):
    """The graph of the second block writes the tables that the first one's backward has saved."""
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = converted(nn.Sequential(Attending(), Attending()), recipe)
        for block in model if compiled else ():
            block.forward = checkpointed(block.forward)
            block.compile(fullgraph=True, backend="aot_eager")
        losses.append(train(model))
    assert losses[0] == losses[1]


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("inside", cases([(True,)], [True, False]))
def test_auto_decides_alike(inside):
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


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("recipe", "around"), cases([("current", False), ("delayed", True)], FP8_RECIPES, [False, True])
)
def test_a_layer_without_a_root(recipe, around):
    """It updates its own scales, in its graph: once a step, and not when the graph runs again."""
    torch.manual_seed(0)
    plain = fe.Linear(WIDTH, WIDTH, recipe=recipe)
    layer = fe.Linear(WIDTH, WIDTH, recipe=recipe)
    layer.load_state_dict(plain.state_dict())
    call = checkpointed(whole(layer)) if around else whole(checkpointed(layer))
    assert train(plain) == train(layer, call)
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


@pytest.mark.slow
def test_checkpoints_within_checkpoints():
    plain, nested = net("delayed"), net("delayed", reentrant=False)
    assert train(plain) == train(nested, whole(checkpointed(nested)))
    assert same(tables(plain)[:2], tables(nested)[:2])
