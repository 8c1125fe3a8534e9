"""What fe.distributed.fsdp refuses: on every rank, with the rule, the place and the remedy; no rank waits."""

import datetime
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import refusal, says
from support import converted
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8engine as fe
from benchmarks.distributed.fsdp import Net
from benchmarks.distributed.processes import run
from fp8engine.errors import ParallelError

DEAD = 3.0  # seconds that ranks wait for one that does not come
fsdp, gather_fp8 = fe.distributed.fsdp, fe.distributed.gather_fp8


def net(recipe="current", size=(16, 32), **options) -> Any:
    torch.manual_seed(0)
    return fe.convert(Net(*size), recipe, skip=lambda name, module: False, **options)


def codes_alone() -> Any:
    return fe.convert(Net(16, 32).requires_grad_(False), "rowwise", skip=lambda *_: False, frozen="fp8")


def block_sharded(model: Any) -> Any:
    fully_shard(model.blocks[1])
    return model


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
CASES: dict[str, Callable[[int], object]] = {
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
    "reshard_after_forward=2 .* on 2 ranks .* give True or False": lambda rank: fsdp(net(), reshard_after_forward=2),
    "Net has no converted layers; call fe.convert first": lambda rank: fsdp(Net(16, 32)),
    "fsdp: 7 weights .blocks.0.up the first. are FP8 codes alone.* frozen='fp8'": lambda rank: fsdp(codes_alone()),
    "gather_fp8: 7 weights .blocks.0.up the first. are FP8 codes": lambda rank: gather_fp8(fully_shard(codes_alone())),
    r"GradientError: .*blocks\.0\.up: an FP8 layer does not take torch.func's transforms": lambda rank: transforms(),
    "(a rank did not come within the time limit|the dead one)": dead,
}


def work(rank: int, ranks: int) -> dict[str, str]:
    warnings.simplefilter("ignore")
    return {wanted: refusal(functools.partial(call, rank)) for wanted, call in CASES.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return run(work, 2)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", CASES)
def test_every_rank_is_told(wanted: str, found: list[dict[str, str]]):
    for rank in found:
        assert says(rank[wanted], wanted), rank[wanted]


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
