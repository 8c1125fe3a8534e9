"""What tensor parallelism does not take is an error on every rank, which says rule, place and remedy; nobody waits."""

import re
import warnings
from typing import Any

import pytest
import torch
from support import converted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fp8engine as fe
from benchmarks.distributed.processes import run

RANKS, K, N = 2, 16, 32
Colwise, Rowwise = fe.distributed.Colwise, fe.distributed.Rowwise
divide = fe.distributed.tensor_parallel


def net(recipe: Any = "current", n: int = N) -> nn.Module:
    return converted(nn.Sequential(nn.Linear(K, n), nn.GELU(), nn.Linear(n, K)), recipe)


def plan(**tokens) -> dict:
    return {"0": Colwise(**tokens), "2": Rowwise()}


def twice(mesh):
    divide(divide(net(), mesh, plan()), mesh, plan())


def unequal_tokens(mesh, rank: int):
    divide(net("rowwise"), mesh, plan(input_layouts=Shard(0)))(torch.randn(5 + rank, K))


def uneven_result(mesh):
    divide(net(), mesh, {"0": Colwise(), "2": Rowwise(output_layouts=Shard(0))})(torch.randn(5, K))


def uneven_dtensor(mesh):
    x = distribute_tensor(torch.randn(5, K), mesh, [Shard(0)])
    divide(net(), mesh, plan())(x)


def torch_style_by_itself(mesh):
    parallelize_module(net(), mesh, {"0": ColwiseParallel()})(torch.randn(4, K))


def stacked(mesh):
    divide(fe.LayerNormMLP(K, N, "swiglu", recipe="current"), mesh, {"gate_up": Colwise(), "down": Rowwise()})


def half_of_a_fused_mlp(mesh):
    mlp = fe.LayerNormMLP(K, N, "gelu", recipe="current")
    divide(mlp, mesh, {"down": Rowwise()})(torch.randn(4, K))


def half_of_a_norms_layers(mesh):
    block = fe.TransformerLayer(K, N, 4, recipe="current")
    names = ("self_attn.q_proj", "self_attn.k_proj")
    divide(block, mesh, {name: Colwise() for name in names})(torch.randn(1, 4, K))


def heads(mesh):
    attention = fe.Attention(12, fe.Heads(6, of_keys=3), recipe="current")
    divide(attention, mesh, {"[qkv]_proj": Colwise(), "o_proj": Rowwise()})


def converted_after(mesh):
    model = nn.Sequential(nn.Linear(K, N))
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    converted(model, "current")


def stored(mesh):
    recipe = fe.Recipe(
        input=fe.Cast(fe.E4M3),
        weight=fe.Cast(fe.E4M3),
        grad_output=fe.Cast(fe.E5M2),
        stored=fe.Cast(fe.E4M3, scaling="delayed"),
    )
    divide(net(recipe), mesh, plan())


def cases(rank: int) -> dict:
    """By name, a call that has to raise on every rank."""
    mesh = init_device_mesh("cpu", (RANKS,))
    square = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("tp", "dp"))
    return {
        "no such dimension": lambda: divide(net(), square, plan(), dim="pp"),
        "two dimensions": lambda: divide(net(), square, plan()),
        "two dimensions, torch's function": lambda: parallelize_module(net(), square, plan()),
        "no dimension has a name": lambda: divide(net(), mesh, plan(), dim="tp"),
        "names no layer": lambda: divide(net(), mesh, {"0": Colwise(), "3": Rowwise()}),
        "empty": lambda: divide(net(), mesh, {}),
        "model not converted": lambda: divide(nn.Sequential(nn.Linear(K, N)), mesh, {"0": Colwise()}),
        "layer not converted": lambda: divide(net(), mesh, {"1": Colwise()}),
        "layer not converted, torch's function": lambda: parallelize_module(nn.Linear(K, N), mesh, Colwise()),
        "named twice": lambda: divide(net(), mesh, {"0": Colwise(), "*": Rowwise()}),
        "not divisible": lambda: divide(net(n=33), mesh, plan()),
        "not divisible, torch's function": lambda: parallelize_module(net(n=33), mesh, plan()),
        "divided twice": lambda: twice(mesh),
        "torch's style": lambda: divide(net(), mesh, {"0": ColwiseParallel()}),
        "torch's style by itself": lambda: torch_style_by_itself(mesh),
        "one rank's plan": lambda: divide(net(), mesh, plan() if rank else {"9": Colwise()}),
        "plans differ": lambda: divide(net(), mesh, plan(use_local_output=bool(rank))),
        "recipes differ": lambda: divide(net("rowwise" if rank else "current"), mesh, plan()),
        "layers differ": lambda: divide(net(n=32 + 32 * rank), mesh, plan()),
        "unequal tokens": lambda: unequal_tokens(mesh, rank),
        "uneven result": lambda: uneven_result(mesh),
        "uneven DTensor": lambda: uneven_dtensor(mesh),
        "layout": lambda: divide(net(), mesh, {"0": Colwise(input_layouts=Partial())}),
        "stacked": lambda: stacked(mesh),
        "half of a fused MLP": lambda: half_of_a_fused_mlp(mesh),
        "half of a norm's layers": lambda: half_of_a_norms_layers(mesh),
        "heads": lambda: heads(mesh),
        "converted after": lambda: converted_after(mesh),
        "stored": lambda: stored(mesh),
        "reverted": lambda: fe.revert(divide(net(), mesh, plan())),
        "wrong width": lambda: divide(net(), mesh, plan())(torch.randn(4, K + 1)),
        "no dimensions": lambda: divide(net(), mesh, plan(input_layouts=Shard(0)))(torch.tensor(1.0)),
        "float64": lambda: divide(net(), mesh, plan(input_layouts=Shard(0)))(torch.randn(4, K).double()),
        "another mesh": lambda: divide(net(), mesh, plan())(
            distribute_tensor(torch.randn(4, K), square["dp"], [Shard(0)])
        ),
    }


# Rule, place and remedy of each.
SAID = {
    "no such dimension": r"no dimension 'pp', only \('tp', 'dp'\).*mesh_dim_names",
    "two dimensions": r"mesh of 2 dimensions \('tp', 'dp'\).*mesh\['tp'\].*dim='tp'",
    "two dimensions, torch's function": r"Colwise: a mesh of 2 dimensions.*pass one",
    "no dimension has a name": r"no dimension 'tp', only dimensions without names.*mesh_dim_names",
    "names no layer": r"part in the plan '3'.*known: 0, 2; nothing was divided",
    "empty": "names no layer",
    "model not converted": "no converted layers: call fe.convert first",
    "layer not converted": r"1: Colwise divides layers that fe\.convert has converted, and it is a ProducingGELU",
    "layer not converted, torch's function": r"Linear: Colwise divides layers that fe\.convert.*ColwiseParallel",
    "named twice": r"0: '0' and '\*' of the plan both divide it",
    "not divisible": r"0: out_features=33 is not divisible by 2 ranks.*fewer",
    "not divisible, torch's function": r"0: out_features=33 is not divisible by 2 ranks.*fewer",
    "divided twice": r"0: its weight is divided already.*once",
    "torch's style": r"0: torch's ColwiseParallel divides no FP8 layer: use fe\.distributed\.Colwise",
    "torch's style by itself": r"0: its input is a DTensor.*fe\.distributed\.Colwise or Rowwise",
    "one rank's plan": r"on ranks \[0\]\): unknown part in the plan '9'",
    "plans differ": r"the plan's '0' is .*=False\) on rank 0 .* and .*=True\) on rank 1.*same model and options",
    "recipes differ": r"layer 0 is .*current: .*on rank 0 .* and .*rowwise: .*on rank 1",
    "layers differ": r"layer 0 is .*\(32, 16\).*on rank 0 .* and .*\(64, 16\).*on rank 1",
    "unequal tokens": r"0: ranks hold different numbers of tokens.*\[6, .*\[5, .*equal part of dimension 0",
    "uneven result": r"2: dimension 0 of its output \[5, 16\] is not divisible by 2 ranks.*Replicate\(\)",
    "uneven DTensor": r"0: its input is a DTensor whose 5 tokens 2 ranks do not divide.*pad",
    "layout": r"0: Colwise\(input_layouts=P.*\): want Replicate\(\) or Shard",
    "stacked": r"gate_up: its rows are several matrices.*fe\.TransformerLayer",
    "half of a fused MLP": r"up: it works on the same parts as up, down, and is not .*up as fe\.distributed\.Colwise",
    "half of a norm's layers": r"v_proj: it works on the same parts as .*q_proj, .*v_proj, .*not divided.*Colwise",
    "heads": r"6 heads, 3 of keys, are not divisible by 2 ranks",
    "converted after": r"its part '0' has a weight that is divided over ranks already.*convert first",
    "stored": r"2: it has results stored in FP8, and cannot have results summed over ranks.*stored=None",
    "reverted": r"revert: its part '0' has a weight that is divided.*before",
    "wrong width": r"0: mat1 and mat2 shapes cannot be multiplied \(4x17 and 16x16\): in_features is 16",
    "no dimensions": r"0: both arguments to linear need to be at least 1D",
    "float64": r"0: input is torch\.float64.*convert it first",
    "another mesh": r"0: its input is a DTensor on .* divided over .*that mesh",
}


KINDS = {
    "converted after": "ConversionError",
    "reverted": "ConversionError",
    "wrong width": "ShapeError",
    "no dimensions": "ShapeError",
    "float64": "UnsupportedDtype",
}


def work(rank: int, ranks: int) -> dict:
    warnings.simplefilter("ignore")
    said = {}
    for name, call in cases(rank).items():
        try:
            call()
            said[name] = None
        except Exception as error:
            said[name] = (type(error).__name__, str(error))
    return said


@pytest.fixture(scope="module")
def said() -> list[dict]:
    return run(work, RANKS)


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", SAID)
def test_it_is_an_error_on_every_rank(name: str, said: list[dict]):
    for rank, messages in enumerate(said):
        kind, message = messages[name] or ("nothing", "")
        assert kind == KINDS.get(name, "ParallelError"), (rank, message)
        assert re.search(SAID[name], message), (rank, message)


def test_every_case_is_named(said: list[dict]):
    assert set(said[0]) == set(SAID)
