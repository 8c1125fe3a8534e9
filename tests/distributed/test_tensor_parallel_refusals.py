"""What tensor parallelism does not take is an error on every rank, which says rule, place and remedy; nobody waits."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chains import storing
from ranks import refusal, says
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


def mlp(activation: str) -> Any:
    return fe.LayerNormMLP(K, N, activation, recipe="current")


def of_two_layers(mesh) -> Any:
    """Of three that read one norm."""
    names = ("self_attn.q_proj", "self_attn.k_proj")
    return divide(fe.TransformerLayer(K, N, 4, recipe="current"), mesh, {name: Colwise() for name in names})


def cases(rank: int) -> dict[str, Callable[[], object]]:
    """What is said, place, rule and remedy, of a call that has to raise on every rank: ParallelError, or as it says."""
    mesh = init_device_mesh("cpu", (RANKS,))
    square = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("tp", "dp"))
    x, xs = torch.randn(4, K), torch.randn(6, K)
    plain, down = nn.Sequential(nn.Linear(K, N)), {"down": Rowwise()}
    attention, of_attention = fe.Attention(12, fe.Heads(6, of_keys=3), recipe="current"), {"[qkv]_proj": Colwise()}
    by_torch = parallelize_module(net(), mesh, {"0": ColwiseParallel()})
    other = parallelize_module(nn.Sequential(nn.Linear(K, N)), mesh, {"0": ColwiseParallel()})

    def divided(plan: dict, recipe: Any = "current", n: int = N) -> Any:
        return divide(net(recipe, n), mesh, plan)

    def of_tokens(given: torch.Tensor, recipe: str = "current") -> Any:
        return divided(plan(input_layouts=Shard(0)), recipe)(given)

    def of_rows(given: torch.Tensor) -> Any:
        return divided({"0": Colwise(), "2": Rowwise(output_layouts=Shard(0))})(given)

    def spread(over: Any) -> Any:
        return distribute_tensor(xs[:5], over, [Shard(0)])

    return {
        r"no dimension 'pp', only \('tp', 'dp'\).*mesh_dim_names": lambda: divide(net(), square, plan(), dim="pp"),
        r"mesh of 2 dimensions \('tp', 'dp'\).*mesh\['tp'\].*dim='tp'": lambda: divide(net(), square, plan()),
        "Colwise: a mesh of 2 dimensions.*pass one": lambda: parallelize_module(net(), square, plan()),
        "no dimension 'tp', only dimensions without names": lambda: divide(net(), mesh, plan(), dim="tp"),
        "part in the plan '3'.*known: 0, 2; nothing was divided": lambda: divided({"0": Colwise(), "3": Rowwise()}),
        "names no layer": lambda: divided({}),
        "no converted layers: call fe.convert first": lambda: divide(plain, mesh, {"0": Colwise()}),
        r"1: Colwise divides layers that fe\.convert.* ProducingGELU": lambda: divided({"1": Colwise()}),
        r"Linear: Colwise divides layers that.*ColwiseParallel": lambda: parallelize_module(plain[0], mesh, Colwise()),
        r"0: '0' and '\*' of the plan both divide it": lambda: divided({"0": Colwise(), "*": Rowwise()}),
        "0: out_features=33 is not divisible by 2 ranks.*fewer": lambda: divided(plan(), n=33),
        "out_features=33 is not divisible by 2 ranks": lambda: parallelize_module(net(n=33), mesh, plan()),
        "0: its weight is divided already.*once": lambda: divide(divided(plan()), mesh, plan()),
        r"0: torch's ColwiseParallel.*: use fe\.distributed\.Colwise": lambda: divided({"0": ColwiseParallel()}),
        r"0: its input is a DTensor.*fe\.distributed\.Colwise or Rowwise": lambda: by_torch(x),
        r"on ranks \[0\]\): unknown part in the plan '9'": lambda: divided(plan() if rank else {"9": Colwise()}),
        "the plan's '0' is .*=False.* rank 0 .*=True.*same model": lambda: divided(plan(use_local_output=bool(rank))),
        "layer 0 is .*current: .*rank 0 .*rowwise: .*rank 1": lambda: divided(plan(), "rowwise" if rank else "current"),
        r"layer 0 is .*\(32, 16\).*rank 0 .*\(64, 16\).*rank 1": lambda: divided(plan(), n=32 + 32 * rank),
        r"0: ranks hold different numbers of tokens.*\[6, .*\[5, .*equal": lambda: of_tokens(xs[: 5 + rank], "rowwise"),
        r"2: dimension 0 of its output \[5, 16\] is not divisible by 2 ranks.*Replicate\(\)": lambda: of_rows(xs[:5]),
        "0: its input is a DTensor whose 5 tokens 2 ranks do not divide.*pad": lambda: divided(plan())(spread(mesh)),
        r"Colwise\(input_layouts=P.*\): want Replicate\(\) or Shard": lambda: divided(plan(input_layouts=Partial())),
        "gate_up: its rows are several matrices": lambda: divide(mlp("swiglu"), mesh, {"gate_up": Colwise(), **down}),
        r"up: it works on the same parts as up, down.*\.Colwise": lambda: divide(mlp("gelu"), mesh, down)(x),
        "v_proj: it works on the same parts as .*q_proj.*not divided": lambda: of_two_layers(mesh)(x[None]),
        "6 heads, 3 of keys, are not divisible by 2 ranks": lambda: divide(attention, mesh, of_attention),
        "ConversionError: .*'0' has a weight that is divided .*already.*convert first": lambda: fe.convert(other),
        "2: it has results stored in FP8, and cannot have results summed": lambda: divided(plan(), storing()),
        "ConversionError: .*revert: its part '0' has a weight.* divided": lambda: fe.revert(divided(plan())),
        r"ShapeError: .*0: mat1 and mat2 .*\(4x17 and 16x16\)": lambda: divided(plan())(torch.randn(4, K + 1)),
        "ShapeError: .*0: both arguments to linear need to be at least 1D": lambda: of_tokens(torch.tensor(1.0)),
        r"UnsupportedDtype: .*0: input is torch\.float64.*convert it first": lambda: of_tokens(x.double()),
        "0: its input is a DTensor on .* divided over .*that mesh": lambda: divided(plan())(spread(square["dp"])),
    }


def work(rank: int, ranks: int) -> dict[str, str]:
    warnings.simplefilter("ignore")
    return {wanted: refusal(call) for wanted, call in cases(rank).items()}


@pytest.mark.slow
def test_it_is_an_error_on_every_rank(subtests: pytest.Subtests):
    for rank, found in enumerate(run(work, RANKS)):
        assert len(found) == 34
        for wanted, told in found.items():
            with subtests.test(wanted, rank=rank):
                assert says(told, wanted), told
