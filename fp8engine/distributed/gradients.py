"""Gradients reduced over ranks in FP8: half of BF16's bytes on the wire, under FSDP2 and DistributedDataParallel.

    sent        E4M3 codes of what each other rank will sum, and a power of two for every 128 numbers (packed.py)
    sum         own + sum over the other ranks of codes * scale        in FP32, in the order of the ranks

What a rank keeps for itself is not rounded.  NaN and Inf arrive as NaN.  Bytes of a rank, against BF16's:

    FSDP2       reduce-scatter: one all-to-all                                     (1 + 1/128) / 2        = 0.504
    DDP         the same in place of the first half of the all-reduce, then an
                all-gather of the means in 16 bits                                 (0.504 + 1) / 2        = 0.752

Error: one E4M3 cast has 31.6 dB, so that a sum G of g_1 ... g_w has 31.6 dB + 10 log10(w |G|^2 / ((w - 1) sum |g|^2)).
Independent gradients are the worst case: 34.6 dB for 2 ranks, 32.8 for 4, 32.2 for 8; those of one model have more.
The means are not gathered in FP8: a second rounding, of all of the sum, would leave less than 31.6 dB.

An all-to-all sends each number straight to the rank that sums it.  Across nodes a ring sends less: it sums on the way,
so that a gradient leaves a node once, and not once for each of its ranks.  A group that spans nodes is refused.
The idea is that of VeOmni's pull request 1167 and LoongForge's 223.
"""

# Annotations are not postponed here: DistributedDataParallel compares those of a hook with its own classes.

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8engine import _torch, environment
from fp8engine._torch import Model
from fp8engine.distributed.agree import agree
from fp8engine.distributed.packed import pack, unpack
from fp8engine.errors import ParallelError
from fp8engine.numerics.cast import Cast

GROUP = 128  # numbers that share a scale
ON_THE_WIRE = Cast.parse(f"e4m3 1x{GROUP} p2")
ONE_NODE = (
    "between nodes an all-to-all sends more than a ring in BF16 does: reduce in BF16 "
    "(MixedPrecisionPolicy(reduce_dtype=torch.bfloat16); bf16_compress_hook for DDP), or shard within a node and "
    "replicate between nodes (fully_shard with a mesh of two dimensions)"
)


def fp8_gradients(model: Model) -> Model:
    """Let `model` reduce its gradients in FP8 from now on, and return it.  Every rank has to call it.

    model: after `fully_shard` (every module of it that was given to fully_shard), or a DistributedDataParallel, before
    its first backward.  Gradient accumulation, mixed precision policies, HSDP (whose all-reduce between replicas is
    left as it is), `no_sync` and loss scalers work as before.
    Raises ParallelError, on every rank, where the model is neither, or where a group that reduces gradients spans
    several nodes.

    >>> fp8_gradients(nn.Linear(2, 2))
    Traceback (most recent call last):
    fp8engine.errors.ParallelError: fp8_gradients: Linear reduces no gradients; call fully_shard on it, or ...
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        group: Any = model.process_group
        on_one_node(group)
        model.register_comm_hook(group, fp8_gradient_hook)
        return model
    sharded = [module for module in model.modules() if _torch.wrapper_of(module) == "fully_shard"]
    groups = {group.group_name: group for module in sharded for group in _torch.reduce_scatter_groups(module)}
    if not groups:
        raise ParallelError(
            f"fp8_gradients: {type(model).__name__} reduces no gradients; call fully_shard on it, or wrap it in "
            "DistributedDataParallel, first (FullyShardedDataParallel, FSDP1, has no such hook)"
        )
    for group in groups.values():
        on_one_node(group)
    for module in sharded:
        module.set_custom_reduce_scatter(Fp8ReduceScatter())  # pyright: ignore[reportCallIssue] - an FSDPModule
    return model


def fp8_gradient_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook of DistributedDataParallel: the mean of a bucket over the ranks, sent in FP8.

    For frameworks that register hooks themselves, as Lightning's DDPStrategy(ddp_comm_hook=...); `fp8_gradients` does
    it otherwise, and compares the ranks' nodes.  state: the process group, or None for the default one, as torch's own
    hooks take it: ddp.register_comm_hook(None, fe.distributed.fp8_gradient_hook).
    Raises ParallelError where torchrun says (LOCAL_WORLD_SIZE) that the group has more ranks than a node has processes.
    """
    group: Any = dist.group.WORLD if state is None else state
    ranks, rank = group.size(), group.rank()
    if (here := environment.local_world_size() or ranks) < ranks:
        raise ParallelError(f"FP8 gradients: {ranks} ranks, and {here} processes run on this node: {ONE_NODE}")
    bucket_N = bucket.buffer()
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    if ranks == 1:
        done.set_result(bucket_N)
        return done
    part = GROUP * -(-len(bucket_N) // (GROUP * ranks))  # numbers that each rank sums; the last parts may be short
    x_RN = nn.functional.pad(bucket_N, (0, ranks * part - len(bucket_N))).view(ranks, part)
    work, received_RB = _exchange(x_RN, group, wait=False)

    def sum_and_gather(_=None) -> torch.Tensor:
        # Of the bucket, not of x_RN: on a card this runs on another stream, and only the bucket's memory outlives it.
        own_N = bucket_N[rank * part : (rank + 1) * part]
        mean_N = _sum(received_RB, nn.functional.pad(own_N, (0, part - len(own_N))), rank).div_(ranks)
        mean_N = mean_N.to(torch.bfloat16 if bucket_N.dtype == torch.float32 else bucket_N.dtype)
        whole = mean_N.new_empty(ranks * part)
        dist.all_gather_into_tensor(whole, mean_N, group=group)
        return bucket_N.copy_(whole[: len(bucket_N)])

    if bucket_N.device.type != "cpu":
        return work.get_future().then(sum_and_gather)  # at once, on a stream of its own: the host does not wait
    # Gloo's threads would run it in any order, and each rank's collectives must come in the same one.
    work.wait()
    done.set_result(sum_and_gather())
    return done


class Fp8ReduceScatter:
    """What FSDP2's `set_custom_reduce_scatter` takes: a reduce-scatter as one all-to-all of FP8 codes.

    Raises ParallelError for a reduction that is no sum or mean.
    """

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of a reduction's input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group, op, async_op=False) -> None:
        """output [n] = this rank's part of the sum over ranks of input [w * n], times what `op` says."""
        factor = _factor(op, group.size())
        x_RN = input_tensor.view(group.size(), -1)
        _, received_RB = _exchange(x_RN, group, wait=True)
        output_tensor.copy_(_sum(received_RB, x_RN[group.rank()], group.rank()).mul_(factor).view_as(output_tensor))


def on_one_node(group: dist.ProcessGroup) -> None:
    """Raise ParallelError on every rank of the group where its ranks run on several nodes.  A collective."""
    agree("FP8 gradients", {"the node": socket.gethostname()}, group, remedy=ONE_NODE)


def _factor(op: Any, ranks: int) -> float:
    """What the sum is multiplied by for a ReduceOp of FSDP2."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if op == dist.ReduceOp.PREMUL_SUM:
        return float(op.__getstate__()[1])
    raise ParallelError(f"FP8 gradients: a reduction by {op} is no sum or mean; leave the reduce-scatter to torch")


def _exchange(x_RN: torch.Tensor, group: dist.ProcessGroup, wait: bool) -> tuple[Any, torch.Tensor]:
    """Send row r of x to rank r, as codes and then scales: (the work, what came from each rank, bytes [R, B]).

    wait: the result may be read at once on the current stream; else after the work.
    """
    sent_RB, _ = pack(x_RN, ON_THE_WIRE)
    received_RB = torch.empty_like(sent_RB)
    work = dist.all_to_all_single(received_RB.view(-1), sent_RB.view(-1), group=group, async_op=not wait)
    return work, received_RB


def _sum(received_RB: torch.Tensor, own_N: torch.Tensor, rank: int) -> torch.Tensor:
    """The sum over ranks, FP32 [n]: what came from each other one, and this one's own."""
    n = len(own_N)
    total_N = torch.zeros(n, dtype=torch.float32, device=own_N.device)
    for other, bytes_B in enumerate(received_RB):
        total_N += own_N if other == rank else unpack(bytes_B[None], n, ON_THE_WIRE, torch.float32).values()[0]
    return total_N
