"""Statistics of sharded weights in a step that `auto` samples.  Each rank has its own rows, and the layer sees codes.

    rows of the sample, their energies     a rank's own, zeros for the others': summed over ranks, which adds nothing
    amaxes of columns and of blocks        the largest of all ranks'

So the gather keeps its format, and the numbers are bit for bit those of the whole weight.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from fp8engine.distributed.weight_scales import Rows, Shard
from fp8engine.numerics.recipe import ROLES
from fp8engine.scaling.histogram import some_rows
from fp8engine.scaling.reads import Layout
from fp8engine.scaling.sample import ELEMENTS, SAMPLE, describe


@torch.no_grad()
def sample_weights(everything: Rows, group: dist.ProcessGroup) -> None:
    """Enter the statistics of weights whose layers this step samples, as `Numerics.observe` does for a whole weight.

    everything: the weights that are gathered as codes.  group: the ranks that share them; all of them call.
    """
    found = []
    for shard, rows_of in everything.items():
        sample = shard.numerics.columns[ROLES.index("weight")].sample
        if sample is not None:
            whole_NK = _beside_zeros(shard, rows_of())
            layout = Layout(abs(sample.rows), whole_NK.shape[1], len(whole_NK))
            layout.write(whole_NK, sample.part)
            part, some_RK = layout.part(sample.part), some_rows(whole_NK, SAMPLE)
            unknown = part.columns_C.amax() * 0.0  # NaN where this rank's rows are not finite
            slot_L = sample.row_1L[0]
            slot_L[ELEMENTS] = whole_NK.numel()
            found.append((slot_L, part, some_RK.dtype, some_RK.float(), unknown))
    if not found:
        return
    _join([t for _, part, _, *own in found for t in (part.rows_RC, part.energies_N, *own)], dist.ReduceOp.SUM, group)
    _join([t for _, part, *_ in found for t in (part.blocks_RC, part.columns_C)], dist.ReduceOp.MAX, group)
    for slot_L, part, dtype, some_RK, unknown in found:
        elements = slot_L[ELEMENTS].clone()
        slot_L.copy_(describe(some_RK.to(dtype), part.columns_C.amax() + unknown))
        slot_L[ELEMENTS] = elements


def _beside_zeros(shard: Shard, rows: torch.Tensor) -> torch.Tensor:
    """The weight [N, K] as its layer reads it, with zeros for what other ranks hold."""
    whole = rows.new_zeros(shard.shape)
    whole[shard.first : shard.first + len(rows)] = rows
    return whole.t() if shard.transposed else whole


def _join(tensors: Iterable[torch.Tensor], how: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """Reduce FP32 tensors over ranks, in place, in one message."""
    tensors = list(tensors)
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat, how, group)
    for tensor, joined in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(joined.view(tensor.shape))
