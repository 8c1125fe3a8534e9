"""What fe.distributed.fsdp refuses: on every rank, with the rule, the place and the remedy; no rank waits."""

import datetime
import re
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import converted
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8engine as fe
from benchmarks.distributed.fsdp import Net
from benchmarks.distributed.processes import run
from fp8engine.errors import ConversionError, Fp8EngineError, ParallelError

DEAD = 3.0  # seconds that ranks wait for one that does not come


def net(recipe="current", size=(16, 32), **options) -> Any:
    torch.manual_seed(0)
    return fe.convert(Net(*size), recipe, skip=lambda name, module: False, **options)


def sharded_before() -> None:
    model = Net(16, 32)
    fully_shard(model.blocks[0])
    fe.convert(model, "current")


def sharded_twice() -> None:
    fe.distributed.fsdp(fe.distributed.fsdp(net()))


def block_sharded() -> None:
    model = net()
    fully_shard(model.blocks[1])
    fe.distributed.fsdp(model)


def nameless_mesh() -> None:
    fe.distributed.fsdp(net(), mesh=dist.init_device_mesh("cpu", (1, 2)))


def other_recipes() -> None:
    fe.distributed.fsdp(net("rowwise" if dist.get_rank() else "current"))


def other_overrides() -> None:
    fe.distributed.fsdp(net(overrides={"last": "bf16"} if dist.get_rank() else {}))


def other_sizes() -> None:
    fe.distributed.fsdp(net(size=(16, 32 + dist.get_rank())))


def other_blocks() -> None:
    model = net()
    fe.distributed.fsdp(model, blocks=list(model.blocks)[dist.get_rank() :])


def other_options() -> None:
    fe.distributed.fsdp(net(), reshard_after_forward=bool(dist.get_rank()))


def reshard_to_two() -> None:
    fe.distributed.fsdp(net(), reshard_after_forward=2)


def plain_model() -> None:
    fe.distributed.fsdp(Net(16, 32))


def codes_alone() -> None:
    fe.distributed.fsdp(fe.convert(Net(16, 32).requires_grad_(False), "rowwise", skip=lambda *_: False, frozen="fp8"))


def codes_alone_sharded_by_others() -> None:
    model = fe.convert(Net(16, 32).requires_grad_(False), "rowwise", skip=lambda *_: False, frozen="fp8")
    fully_shard(model)
    fe.distributed.gather_fp8(model)


def transforms() -> None:
    model: Any = fe.distributed.fsdp(net())
    block = model.blocks[0]
    block.unshard()
    torch.func.grad(lambda x: block.up(x).sum())(torch.randn(2, 16))


def dead_rank() -> None:
    """Rank 1 does not call forward: rank 0 is told so after the group's time limit."""
    group: Any = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=DEAD))
    model = fe.distributed.fsdp(net(), mesh=dist.DeviceMesh.from_group(group, "cpu"))
    if dist.get_rank() == 0:
        model(torch.randn(2, 16))
    else:
        time.sleep(2 * DEAD)
        raise ParallelError("the dead one")


CASES = {
    sharded_before: (ConversionError, "its part 'blocks.0' is under fully_shard already: convert first, then wrap"),
    sharded_twice: (ParallelError, "the model is under fully_shard already: convert, shard once, then wrap"),
    block_sharded: (ParallelError, "its part 'blocks.1' is under fully_shard already"),
    nameless_mesh: (ParallelError, r"the mesh has 2 dimensions, named None: give one dimension, such as mesh\['dp'\]"),
    other_recipes: (ParallelError, r"ranks differ in 7 things; layer blocks.0.up is .*current.* on rank 0 .*rowwise"),
    other_overrides: (ParallelError, "ranks differ in 1 things; layer last is"),
    other_sizes: (ParallelError, r"layer blocks.0.up is .*\(32, 16\).* on rank 0 .*\(33, 16\)"),
    other_blocks: (ParallelError, "block blocks.0 is Block on rank 0 of the group and missing on rank 1"),
    other_options: (ParallelError, "option reshard_after_forward is False on rank 0 of the group and True on rank 1"),
    reshard_to_two: (ParallelError, "reshard_after_forward=2 keeps weights on 2 ranks .* give True or False"),
    plain_model: (ParallelError, "Net has no converted layers; call fe.convert first"),
    codes_alone: (ParallelError, "fsdp: 7 weights .blocks.0.up the first. are FP8 codes alone.* without frozen='fp8'"),
    codes_alone_sharded_by_others: (ParallelError, "gather_fp8: 7 weights .blocks.0.up the first. are FP8 codes alone"),
    transforms: (Fp8EngineError, "blocks\\.0\\.up: an FP8 layer does not take torch.func's transforms"),
    dead_rank: (ParallelError, "a rank did not come within the time limit|the dead one"),
}


def work(rank: int, ranks: int) -> list[tuple[str, str]]:
    """The class and the text of each case's error."""
    warnings.simplefilter("ignore")
    found = []
    for case in CASES:
        try:
            case()
            found.append(("nothing", ""))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


@pytest.fixture(scope="module")
def found() -> list[list[tuple[str, str]]]:
    return run(work, 2)


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(CASES)), ids=[case.__name__ for case in CASES])
def test_every_rank_is_told(i: int, found: list[list[tuple[str, str]]]):
    kind, text = list(CASES.values())[i]
    for rank in found:
        name, told = rank[i]
        assert issubclass(getattr(fe.errors, name, type(None)), kind), rank[i]
        assert re.search(text, told), told


def resharded_by_others(rank: int, ranks: int) -> str:
    """What gather_fp8 says of blocks that keep weights on half of the ranks after forward."""
    model = net()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=ranks // 2)
    fully_shard(model)
    with pytest.raises(ParallelError) as told:
        fe.distributed.gather_fp8(model)
    return str(told.value)


@pytest.mark.slow
def test_a_reshard_to_some_ranks_by_other_code():
    """torch's own error would be "only Tensors of floating point dtype can require gradients", in the first forward."""
    told = "fe.distributed.gather_fp8: reshard_after_forward=2 keeps weights on 2 ranks after forward, "
    assert all(text.startswith(told) and text.endswith("give True or False") for text in run(resharded_by_others, 4))


def test_without_a_process_group():
    with pytest.raises(ParallelError, match=r"fsdp: torch\.distributed is not initialised; call init_process_group"):
        fe.distributed.fsdp(converted(nn.Sequential(nn.Linear(16, 16)), "current"))


def test_a_model_without_blocks_is_one_gather():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = converted(nn.Sequential(nn.Linear(16, 16)), "current")
        with pytest.warns(fe.errors.ParallelWarning, match="Sequential has no repeated blocks: it is gathered as one"):
            fe.distributed.fsdp(model)
        assert model(torch.ones(2, 16)).shape == (2, 16)
    finally:
        dist.destroy_process_group()
