"""Fused modules, transformer blocks and losses divided over 2 ranks, against the same module in one process.

Modules are in FP32 and recipes sum in FP32: ranks.FLIPS.
"""

import contextlib

import pytest
import torch
from ranks import FLIPS, beyond, error, exact, gradients, whole
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


class NormThenDown(nn.Module):
    """LayerNormLinear and an ordinary layer that brings its result back."""

    def __init__(self, recipe):
        super().__init__()
        self.first = fe.LayerNormLinear(WIDTH, WIDE, recipe=recipe, norm="rms")
        self.down = fe.Linear(WIDE, WIDTH, recipe=recipe)

    def forward(self, x):
        return self.down(torch.relu(self.first(x)))


def block(placement: str):
    def build(recipe):
        return fe.TransformerLayer(WIDTH, WIDE, HEADS, "swiglu", recipe=recipe, norm="rms", placement=placement)

    return build


def of_block(tokens) -> dict:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    return {name: Colwise(input_layouts=tokens) for name in columns} | {
        name: Rowwise(output_layouts=tokens) for name in rows
    }


MODULES = {
    "norm linear": (
        NormThenDown,
        lambda tokens: {"first.linear": Colwise(input_layouts=tokens), "down": Rowwise(output_layouts=tokens)},
    ),
    "norm mlp": (
        lambda recipe: fe.LayerNormMLP(WIDTH, WIDE, "gelu", recipe=recipe),
        lambda tokens: {"up": Colwise(input_layouts=tokens), "down": Rowwise(output_layouts=tokens)},
    ),
    **{f"block {placement}": (block(placement), of_block) for placement in ("pre", "post", "parallel shared")},
}


def one_step(name: str, recipe: str, mesh=None, layout=None, rank: int = 0, option: str = "") -> dict:
    """y, dx and gradients of a module of MODULES; divided over a mesh where one is given."""
    build, plan = MODULES[name]
    torch.manual_seed(0)
    model = build(exact(recipe))
    torch.manual_seed(1)
    x, dy = torch.randn(BATCH, T, WIDTH), torch.randn(BATCH, T, WIDTH)
    if mesh is not None:
        fe.distributed.tensor_parallel(model, mesh, plan(layout))
        if isinstance(layout, Shard):
            x, dy = (t.chunk(RANKS, layout.dim)[rank].contiguous() for t in (x, dy))
    x.requires_grad_()
    y = checkpoint(model, x, use_reentrant=False) if option == "checkpoint" else model(x)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad}
    if mesh is not None:
        found = {key: DTensor.from_local(t, mesh, [layout], run_check=False) for key, t in found.items()}
    return {key: whole(t) for key, t in found.items()} | gradients(model)


class Head(nn.Module):
    """A norm and an output head whose result is a loss of 40 classes."""

    def __init__(self):
        super().__init__()
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40, bias=False)

    def forward(self, x):
        return self.lm_head(self.norm(x))


def head_loss(mesh=None, parallel: bool = False, rank: int = 0, plan_names_norm: bool = True) -> dict:
    torch.manual_seed(0)
    model = converted(Head(), exact("current"), skip=lambda name, module: False)
    x, labels = torch.randn(BATCH, T, WIDTH), torch.randint(0, 40, (BATCH * T,))
    if mesh is None:
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), labels)
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}
    output = {"output_layouts": Shard(-1) if parallel else Replicate(), "use_local_output": not parallel}
    of_norm = {"norm": SequenceParallel()} if plan_names_norm else {}  # else a norm that is recognised sums its own
    plan = {**of_norm, "lm_head": Colwise(input_layouts=Shard(1), **output)}
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


def siblings(mesh, rank: int) -> dict:
    """Calls of collectives of a step, and of a forward without gradients."""
    torch.manual_seed(0)
    model = converted(Siblings(), "current")
    tokens = Shard(1)
    plan = {"norm": SequenceParallel(), "[qkv]": Colwise(input_layouts=tokens), "o": Rowwise(output_layouts=tokens)}
    fe.distributed.tensor_parallel(model, mesh, plan)
    x = torch.randn(BATCH, T // RANKS, WIDTH)
    with Traffic() as step:
        model(x).sum().backward()
    with Traffic() as evaluation, torch.no_grad():
        model(x)
    reading_16_bits = fe.distributed.tensor_parallel(converted(Siblings(), "rowwise_gw_hp"), mesh, plan)
    with Traffic() as without_gradients, torch.no_grad():
        reading_16_bits(x)
    frozen = converted(Siblings(), "rowwise_gw_hp").requires_grad_(False)
    fe.distributed.tensor_parallel(frozen, mesh, plan)
    with Traffic() as without_wgrad:
        frozen(x.requires_grad_()).sum().backward()
    traffics = {"step": step, "no grad": evaluation, "gw_hp": without_gradients, "frozen": without_wgrad}
    return {key: dict(t.calls) for key, t in traffics.items()}


def predicted(mesh=None, rank: int = 0) -> list[dict]:
    """Scales and losses of four steps under delayed scaling; in the third, one rank's part of x grows 1000-fold."""
    torch.manual_seed(0)
    model = converted(nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)), fe.delayed(history=3))
    if mesh is not None:
        tokens = Shard(0)
        fe.distributed.tensor_parallel(
            model, mesh, {"0": Colwise(input_layouts=tokens), "1": Rowwise(output_layouts=tokens)}
        )
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
        slots = [f"{layer}.{role}" for layer in "01" for role in ("input", "weight", "grad_output")]
        steps.append(
            {
                "scales": {slot: state[slot].scale.item() for slot in slots},
                "recasts": state["0.input"].recasts.item(),
                "saturated": state["0.input"].saturated.item(),
                "dw": whole(model[0].weight.grad),
            }
        )
    return steps


def decided(mesh, rank: int) -> list[dict]:
    """What auto decided in six steps; only the last rank's tokens have outliers, which call for other casts."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH))
    model = converted(layers, fe.auto(interval=1, min_sqnr_db=28.0))
    tokens = Shard(0)
    fe.distributed.tensor_parallel(
        model, mesh, {"0": Colwise(input_layouts=tokens), "2": Rowwise(output_layouts=tokens)}
    )
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
    found = {}
    for name in MODULES:
        for recipe in RECIPES:
            for layout in (Shard(1), Replicate()):
                found[name, recipe, str(layout)] = one_step(name, recipe, mesh, layout, rank)
    found["checkpoint"] = one_step("block pre", "current", mesh, Shard(1), rank, "checkpoint")
    losses: dict[bool | str, dict] = {parallel: head_loss(mesh, parallel, rank) for parallel in (False, True)}
    found["loss"] = losses | {"norm not named": head_loss(mesh, False, rank, plan_names_norm=False)}
    found["siblings"] = siblings(mesh, rank)
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
    for rank in found:
        step, evaluation, frozen = (rank["siblings"][key] for key in ("step", "no grad", "frozen"))
        assert step["all-gather", "uint8"] == 2  # n for q, k and v; dy for o
        assert step["reduce-scatter", "float32"] == 2  # o's result; the sum of dx of q, k and v
        assert evaluation["all-gather", "uint8"] == rank["siblings"]["gw_hp"]["all-gather", "uint8"] == 1
        # No wgrad reads 16 bits of a frozen layer's x or dy.
        assert frozen["all-gather", "uint8"] == 2
        assert ("all-gather", "float32") not in frozen


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
