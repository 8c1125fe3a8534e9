"""What tensor parallelism and fsdp refuse: an error on every rank, which says rule, place and remedy; nobody waits."""

import datetime
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from chains import storing
from ranks import refusal, says
from support import converted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fp8engine as fe
from benchmarks.distributed.fsdp import Net
from benchmarks.distributed.processes import run
from fp8engine.errors import ParallelError

RANKS, K, N = 2, 16, 32
DEAD = 3.0  # seconds that ranks wait for one that does not come
Colwise, Rowwise = fe.distributed.Colwise, fe.distributed.Rowwise
divide, fsdp, gather_fp8 = fe.distributed.tensor_parallel, fe.distributed.fsdp, fe.distributed.gather_fp8


def two_layers(recipe: Any = "current", n: int = N) -> nn.Module:
    return converted(nn.Sequential(nn.Linear(K, n), nn.GELU(), nn.Linear(n, K)), recipe)


def plan(**tokens) -> dict:
    return {"0": Colwise(**tokens), "2": Rowwise()}


def mlp(activation: str) -> Any:
    return fe.LayerNormMLP(K, N, activation, recipe="current")


def of_two_layers(mesh) -> Any:
    """Of three that read one norm."""
    names = ("self_attn.q_proj", "self_attn.k_proj")
    return divide(fe.TransformerLayer(K, N, 4, recipe="current"), mesh, {name: Colwise() for name in names})


def of_tensor_parallel(rank: int) -> dict[str, Callable[[], object]]:
    """What is said, place, rule and remedy, of a call that has to raise on every rank: ParallelError, or as it says."""
    mesh = init_device_mesh("cpu", (RANKS,))
    square = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("tp", "dp"))
    x, xs, ids = torch.randn(4, K), torch.randn(6, K), torch.zeros(1, 7, dtype=torch.long)
    plain, down = nn.Sequential(nn.Linear(K, N)), {"down": Rowwise()}
    attention, of_attention = fe.Attention(12, fe.Heads(6, of_keys=3), recipe="current"), {"[qkv]_proj": Colwise()}
    by_torch = parallelize_module(two_layers(), mesh, {"0": ColwiseParallel()})
    other = parallelize_module(nn.Sequential(nn.Linear(K, N)), mesh, {"0": ColwiseParallel()})

    def divided(plan: dict, recipe: Any = "current", n: int = N) -> Any:
        return divide(two_layers(recipe, n), mesh, plan)

    def decoder(**options: Any) -> Any:
        model = converted(tiny_models.llama(**options))
        return divide(model, mesh, fe.distributed.decoder_plan(model))

    def of_tokens(given: torch.Tensor, recipe: str = "current") -> Any:
        return divided(plan(input_layouts=Shard(0)), recipe)(given)

    def of_rows(given: torch.Tensor) -> Any:
        return divided({"0": Colwise(), "2": Rowwise(output_layouts=Shard(0))})(given)

    def spread(over: Any) -> Any:
        return distribute_tensor(xs[:5], over, [Shard(0)])

    return {
        r"no dimension 'pp', only \('tp', 'dp'\).*mesh_dim_names": lambda: divide(
            two_layers(), square, plan(), dim="pp"
        ),
        r"mesh of 2 dimensions \('tp', 'dp'\).*mesh\['tp'\].*dim='tp'": lambda: divide(two_layers(), square, plan()),
        "Colwise: a mesh of 2 dimensions.*pass one": lambda: parallelize_module(two_layers(), square, plan()),
        "no dimension 'tp', only dimensions without names": lambda: divide(two_layers(), mesh, plan(), dim="tp"),
        "part in the plan '3'.*known: 0, 2; nothing was divided": lambda: divided({"0": Colwise(), "3": Rowwise()}),
        "names no layer": lambda: divided({}),
        "no converted layers: call fe.convert first": lambda: divide(plain, mesh, {"0": Colwise()}),
        r"1: Colwise divides layers that fe\.convert.* ProducingGELU": lambda: divided({"1": Colwise()}),
        r"Linear: Colwise divides layers that.*ColwiseParallel": lambda: parallelize_module(plain[0], mesh, Colwise()),
        r"0: '0' and '\*' of the plan both divide it": lambda: divided({"0": Colwise(), "*": Rowwise()}),
        "0: out_features=33 is not divisible by 2 ranks.*fewer": lambda: divided(plan(), n=33),
        "out_features=33 is not divisible by 2 ranks": lambda: parallelize_module(two_layers(n=33), mesh, plan()),
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
        r"layers\.0\.self_attn: 2 heads, 1 of keys, are not divisible by 2 ranks": decoder,
        "sequences of 7 tokens are not divisible by 2 ranks: pad them": lambda: decoder(num_key_value_heads=2)(ids),
        "6 heads, 3 of keys, are not divisible by 2 ranks": lambda: divide(attention, mesh, of_attention),
        "ConversionError: .*'0' has a weight that is divided .*already.*convert first": lambda: fe.convert(other),
        "2: it has results stored in FP8, and cannot have results summed": lambda: divided(plan(), storing()),
        "ConversionError: .*revert: its part '0' has a weight.* divided": lambda: fe.revert(divided(plan())),
        r"ShapeError: .*0: mat1 and mat2 .*\(4x17 and 16x16\)": lambda: divided(plan())(torch.randn(4, K + 1)),
        "ShapeError: .*0: both arguments to linear need to be at least 1D": lambda: of_tokens(torch.tensor(1.0)),
        r"UnsupportedDtype: .*0: input is torch\.float64.*convert it first": lambda: of_tokens(x.double()),
        "0: its input is a DTensor on .* divided over .*that mesh": lambda: divided(plan())(spread(square["dp"])),
    }


def net(recipe="current", size=(16, 32), **options) -> Any:
    torch.manual_seed(0)
    return fe.convert(Net(*size), recipe, skip=lambda name, module: False, **options)


def codes_alone() -> Any:
    return fe.convert(Net(16, 32).requires_grad_(False), "rowwise", skip=lambda *_: False, frozen="fp8")


def block_sharded(model: Any) -> Any:
    fully_shard(model.blocks[1])
    return model


def gathered(model: Any) -> None:
    gather_fp8(fully_shard(model))(torch.randn(2, 16)).sum().backward()


def transforms() -> None:
    model: Any = fsdp(net())
    block = model.blocks[0]
    block.unshard()
    torch.func.grad(lambda x: block.up(x).sum())(torch.randn(2, 16))


def other_blocks(rank: int) -> None:
    model = net()
    fsdp(model, blocks=list(model.blocks)[rank:])


def dead(rank: int) -> None:
    """Rank 1 does not call forward: rank 0 is told so after the group's time limit."""
    group: Any = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=DEAD))
    model = fsdp(net(), mesh=dist.DeviceMesh.from_group(group, "cpu"))
    if rank == 0:
        model(torch.randn(2, 16))
    time.sleep(2 * DEAD)
    raise ParallelError("the dead one")


# What is said, place, rule and remedy, of a call on a rank that has to raise.
OF_FSDP: dict[str, Callable[[int], object]] = {
    "ConversionError: .*its part 'blocks.1' is under fully_shard already: convert first": lambda rank: fe.convert(
        block_sharded(Net(16, 32)), "current"
    ),
    "the model is under fully_shard already: convert, shard once, then wrap": lambda rank: fsdp(fsdp(net())),
    "its part 'blocks.1' is under fully_shard already": lambda rank: fsdp(block_sharded(net())),
    r"the mesh has 2 dimensions.*such as mesh\['dp'\]": lambda rank: fsdp(
        net(), mesh=dist.init_device_mesh("cpu", (1, 2))
    ),
    "7 things; layer blocks.0.up is .*current.* on rank 0 .*rowwise": lambda rank: fsdp(
        net(("current", "rowwise")[rank])
    ),
    "ranks differ in 1 things; layer last is": lambda rank: fsdp(net(overrides={"last": "bf16"} if rank else {})),
    r"layer blocks.0.up is .*\(32, 16\).* on rank 0 .*\(33, 16\)": lambda rank: fsdp(net(size=(16, 32 + rank))),
    "block blocks.0 is Block on rank 0 of the group and missing on rank 1": other_blocks,
    "option reshard_after_forward is False .*and True": lambda rank: fsdp(net(), reshard_after_forward=bool(rank)),
    "reshard_after_forward=2 keeps": lambda rank: fsdp(net(), reshard_after_forward=2 if rank else True),
    r"fsdp( \(on ranks \[0\]\))?: Net has no converted layers": lambda rank: fsdp(net() if rank else Net(16, 32)),
    r"gather_fp8: under auto .*: call fe\.distributed\.reduce_amax\(model\) before": lambda rank: gathered(net("auto")),
    "reshard_after_forward=2 .* on 2 ranks .* give True or False": lambda rank: fsdp(net(), reshard_after_forward=2),
    "Net has no converted layers; call fe.convert first": lambda rank: fsdp(Net(16, 32)),
    "fsdp: 7 weights .blocks.0.up the first. are FP8 codes alone.* frozen='fp8'": lambda rank: fsdp(codes_alone()),
    "gather_fp8: 7 weights .blocks.0.up the first. are FP8 codes": lambda rank: gather_fp8(fully_shard(codes_alone())),
    r"GradientError: .*blocks\.0\.up: an FP8 layer does not take torch.func's transforms": lambda rank: transforms(),
    "(a rank did not come within the time limit|the dead one)": dead,
}


def work(rank: int, ranks: int) -> dict[str, str]:
    warnings.simplefilter("ignore")
    cases = of_tensor_parallel(rank) | {wanted: functools.partial(call, rank) for wanted, call in OF_FSDP.items()}
    return {wanted: refusal(call) for wanted, call in cases.items()}


@pytest.mark.slow
def test_it_is_an_error_on_every_rank(subtests: pytest.Subtests):
    for rank, found in enumerate(run(work, RANKS)):
        assert len(found) == 36 + len(OF_FSDP)
        for wanted, told in found.items():
            with subtests.test(wanted, rank=rank):
                assert says(told, wanted), told


def resharded_by_others(rank: int, ranks: int) -> str:
    """What gather_fp8 says of blocks that keep weights on half of the ranks after forward."""
    model = net()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=ranks // 2)
    return refusal(lambda: gather_fp8(fully_shard(model)))


@pytest.mark.slow
def test_a_reshard_to_some_ranks_by_other_code():
    """torch's own error would be "only Tensors of floating point dtype can require gradients", in the first forward."""
    told = "ParallelError: fe.distributed.gather_fp8: reshard_after_forward=2 keeps weights on 2 ranks after forward, "
    assert all(text.startswith(told) and text.endswith("give True or False") for text in run(resharded_by_others, 4))


def test_without_a_process_group():
    with pytest.raises(ParallelError, match=r"fsdp: torch\.distributed is not initialised; call init_process_group"):
        fsdp(converted(nn.Sequential(nn.Linear(16, 16)), "current"))


@pytest.mark.usefixtures("group")
def test_a_model_without_blocks_is_one_gather():
    model = converted(nn.Sequential(nn.Linear(16, 16)), "current")
    with pytest.warns(fe.errors.ParallelWarning, match="Sequential has no repeated blocks: it is gathered as one"):
        fsdp(model)
    assert model(torch.ones(2, 16)).shape == (2, 16)
