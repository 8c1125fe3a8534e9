"""Fused modules, transformer blocks and losses divided over 2 ranks, against the same module in one process.

Modules are in FP32 and recipes sum in FP32: ranks.FLIPS.
"""

import contextlib
import functools
import itertools
from typing import Any

import pytest
import torch
from ranks import FLIPS, beyond, error, exact, gradients, holds_on_every_rank, outcomes, whole
from support import converted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, loss_parallel
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.distributed.parallelize import _halves
from fp8engine.distributed.traffic import Traffic

RANKS, BATCH, T, WIDTH, WIDE = 2, 2, 12, 64, 96
RECIPES = ("current", "rowwise", "rowwise_gw_hp")
Colwise, Rowwise = fe.distributed.Colwise, fe.distributed.Rowwise
HEADS = fe.Heads(4, of_keys=2, theta=1e4, causal=True, qk_norm=1e-6)


def plan_of(columns: str, rows: str, tokens: Any) -> dict:
    """Layers divided by columns and by rows; tokens: their layout before and after both."""
    plan: dict = {name: Colwise(input_layouts=tokens) for name in columns.split()}
    return plan | {name: Rowwise(output_layouts=tokens) for name in rows.split()}


def norm_linear(recipe: fe.Recipe) -> nn.Module:
    first = fe.LayerNormLinear(WIDTH, WIDE, recipe=recipe, norm="rms")
    return nn.Sequential(first, nn.ReLU(), fe.Linear(WIDE, WIDTH, recipe=recipe))


def block(recipe: fe.Recipe, placement: str) -> nn.Module:
    return fe.TransformerLayer(WIDTH, WIDE, HEADS, "swiglu", recipe=recipe, norm="rms", placement=placement)


OF_BLOCK = "self_attn.[qkv]_proj mlp.gate_proj mlp.up_proj", "self_attn.o_proj mlp.down_proj"
# What is made, and its layers that are divided by columns and by rows.
MODULES: dict[str, tuple[Any, tuple[str, str]]] = {
    "norm linear": (norm_linear, ("0.linear", "2")),
    "norm mlp": (lambda recipe: fe.LayerNormMLP(WIDTH, WIDE, "gelu", recipe=recipe), ("up", "down")),
    "block pre": (functools.partial(block, placement="pre"), OF_BLOCK),
    "block post": (functools.partial(block, placement="post"), OF_BLOCK),
    "block parallel shared": (functools.partial(block, placement="parallel shared"), OF_BLOCK),
}


def one_step(name: str, recipe: str, mesh=None, layout=None, rank: int = 0, option: str = "") -> dict:
    build, layers = MODULES[name]
    torch.manual_seed(0)
    model = build(exact(recipe))
    torch.manual_seed(1)
    x, dy = torch.randn(BATCH, T, WIDTH), torch.randn(BATCH, T, WIDTH)
    if mesh is not None:
        fe.distributed.tensor_parallel(model, mesh, plan_of(*layers, layout))
        if isinstance(layout, Shard):
            x, dy = (t.chunk(RANKS, layout.dim)[rank].contiguous() for t in (x, dy))
    x.requires_grad_()
    y = checkpoint(model, x, use_reentrant=False) if option == "checkpoint" else model(x)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad}
    if mesh is not None:
        found = {key: DTensor.from_local(t, mesh, [layout], run_check=False) for key, t in found.items()}
    return {key: whole(t) for key, t in found.items()} | gradients(model)


def head_loss(mesh=None, parallel: bool = False, rank: int = 0, plan_names_norm: bool = True) -> dict:
    """Loss and gradients of a norm and an output head of 40 classes."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40, bias=False))
    model = converted(head, exact("current"), skip=lambda name, module: False)
    x, labels = torch.randn(BATCH, T, WIDTH), torch.randint(0, 40, (BATCH * T,))
    if mesh is None:
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), labels)
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}
    output = {"output_layouts": Shard(-1) if parallel else Replicate(), "use_local_output": not parallel}
    of_norm = {"0": SequenceParallel()} if plan_names_norm else {}  # else a norm that is recognised sums its own
    plan = {**of_norm, "1": Colwise(input_layouts=Shard(1), **output)}
    fe.distributed.tensor_parallel(model, mesh, plan)
    logits = model(x.chunk(RANKS, 1)[rank].contiguous()).flatten(0, 1)
    with loss_parallel() if parallel else contextlib.nullcontext():
        loss = nn.functional.cross_entropy(logits, labels)
        loss.backward()
    return {"loss": whole(loss), **gradients(model)}


class Siblings(nn.Module):
    """q, k and v behind a norm that torch's SequenceParallel makes a DTensor of."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, 32) for _ in "qkv")
        self.o = nn.Linear(32, WIDTH)

    def forward(self, x):
        n = self.norm(x)
        return self.o(self.q(n) * self.k(n) + self.v(n))


def siblings_gather_once(mesh) -> None:
    """Calls of collectives of a step, of a forward without gradients, and of a frozen model."""

    def calls(model: Any, backward: bool) -> dict:
        fe.distributed.tensor_parallel(model, mesh, plan)
        with Traffic() as traffic, torch.set_grad_enabled(backward):
            y = model(torch.randn(BATCH, T // RANKS, WIDTH, requires_grad=not model.o.weight.requires_grad))
            if backward:
                y.sum().backward()
        return dict(traffic.calls)

    plan = {"norm": SequenceParallel()} | plan_of("[qkv]", "o", Shard(1))
    step = calls(converted(Siblings(), "current"), True)
    assert step["all-gather", "uint8"] == 2  # n for q, k and v; dy for o
    assert step["reduce-scatter", "float32"] == 2  # o's result; the sum of dx of q, k and v
    for recipe in ("current", "rowwise_gw_hp"):
        assert calls(converted(Siblings(), recipe), False)["all-gather", "uint8"] == 1
    # No wgrad reads 16 bits of a frozen layer's x or dy.
    frozen = calls(converted(Siblings(), "rowwise_gw_hp").requires_grad_(False), True)
    assert frozen["all-gather", "uint8"] == 2
    assert ("all-gather", "float32") not in frozen


def predicted(mesh=None, rank: int = 0) -> list[dict]:
    """Scales and losses of four steps under delayed scaling; in the third, one rank's part of x grows 1000-fold."""
    torch.manual_seed(0)
    model = converted(nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)), fe.delayed(history=3))
    if mesh is not None:
        fe.distributed.tensor_parallel(model, mesh, plan_of("0", "1", Shard(0)))
    steps = []
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(T, WIDTH)
        x[-1] *= 1000.0 if step == 2 else 1.0
        x = x if mesh is None else x.chunk(RANKS)[rank]
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        state = fe.scaling_state(model)
        found: dict[str, Any] = {key: getattr(state["0.input"], key).item() for key in ("recasts", "saturated")}
        slots = [f"{layer}.{role}" for layer in "01" for role in ("input", "weight", "grad_output")]
        found["scales"] = {slot: state[slot].scale.item() for slot in slots}
        steps.append(found | {"dw": whole(model[0].weight.grad)})
    return steps


def decided(mesh, rank: int) -> list[dict]:
    """What auto decided in six steps; only the last rank's tokens have outliers, which call for other casts."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH))
    model = converted(layers, fe.auto(interval=1, min_sqnr_db=28.0))
    fe.distributed.tensor_parallel(model, mesh, plan_of("0", "2", Shard(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # its steps are where decisions are adopted
    torch.manual_seed(rank)
    for _ in range(6):
        x = torch.randn(T, WIDTH) * (torch.logspace(0, 4, WIDTH) if rank else 1.0)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return fe.inspect(model).decisions


def work(rank: int, ranks: int) -> dict:
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[Any, Any] = {}
    for name, recipe, layout in itertools.product(MODULES, RECIPES, (Shard(1), Replicate())):
        found[name, recipe, str(layout)] = one_step(name, recipe, mesh, layout, rank)
    found["checkpoint"] = one_step("block pre", "current", mesh, Shard(1), rank, "checkpoint")
    losses: dict[bool | str, dict] = {parallel: head_loss(mesh, parallel, rank) for parallel in (False, True)}
    found["loss"] = losses | {"norm not named": head_loss(mesh, False, rank, plan_names_norm=False)}
    found |= outcomes({"siblings": siblings_gather_once}, mesh)
    found["delayed"] = predicted(mesh, rank)
    found["decided"] = decided(mesh, rank)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run(work, RANKS)


pytestmark = pytest.mark.slow


@pytest.mark.few(12)
@pytest.mark.parametrize("layout", ["S(1)", "R"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_fused_modules_are_those_of_one_process(name: str, recipe: str, layout: str, found: list[dict]):
    reference = one_step(name, recipe)
    for rank in found:
        assert beyond(rank[name, recipe, layout], reference) == {}


def test_a_block_recomputed_by_a_checkpoint_is_the_same(found: list[dict]):
    first, again = found[0]["block pre", "current", "S(1)"], found[0]["checkpoint"]
    assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize("parallel", [False, True, "norm not named"])
def test_loss_of_a_divided_head(parallel: bool | str, found: list[dict]):
    reference = head_loss()
    for rank in found:
        assert beyond(rank["loss"][parallel], reference) == {}


def test_siblings_gather_once(found: list[dict]):
    holds_on_every_rank("siblings", found)


def test_predicted_scales_are_those_of_one_process(found: list[dict]):
    for step, (alone, *ranks) in enumerate(zip(predicted(), *(rank["delayed"] for rank in found), strict=True)):
        for theirs in ranks:
            # One of FP32's order of summation may move an amax by an ulp.
            assert theirs["scales"] == pytest.approx(alone["scales"], rel=2.0**-22), step
            assert error(theirs["dw"], alone["dw"]) < FLIPS
            assert theirs["recasts"] == alone["recasts"] == (step >= 2)
        assert sum(theirs["saturated"] for theirs in ranks) == alone["saturated"], step


def test_ranks_decide_alike(found: list[dict]):
    first, *others = (rank["decided"] for rank in found)
    assert first, "the case is one where auto decides something"
    assert all(other == first for other in others)


def test_results_that_are_gathered_fit_a_layer_that_is_whole():
    attention = fe.Attention(32, 4, recipe="current")
    names = [f"{name}_proj" for name in "qkv"]
    assert list(_halves(attention, {name: Colwise(output_layouts=Replicate()) for name in names})) == []
    assert list(_halves(attention, {"o_proj": Rowwise(input_layouts=Replicate())})) == []
    (told,) = _halves(attention, {name: Colwise() for name in names})
    assert told.startswith("o_proj: it works on the same parts as q_proj, k_proj, v_proj, o_proj, and is not divided")
