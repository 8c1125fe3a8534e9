"""Scales of weights that are sharded over ranks and, in a step that `auto` samples, their statistics, joined by ranks.

    amax[g] = max over ranks of max |w| over the elements of group g that a rank holds        one all-reduce for all
    s[g]    = MAX / amax[g], or a predicted s[g] under which amax[g] fits      as ops/reference/quantize.py has it

A rank holds whole rows of a weight.  A group of rows that lies on two ranks, such as a 128 x 128 block, is joined as
every other.  With the same s on every rank, the codes that ranks cast of their shards are those of the whole weight.

    rows of the sample, their energies     each rank has its own rows, and zeros for all others: the sum over ranks
    amaxes of columns and of blocks        the largest of all ranks'

So a gather keeps its format in a sampled step.  Adding zeros changes no bit, so that the numbers are bit for bit those
of the whole weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from fp8engine.distributed.sharded_weight import Scales, ShardedWeight
from fp8engine.errors import ParallelError
from fp8engine.numerics.formats import Format
from fp8engine.numerics.recipe import ROLES
from fp8engine.ops import ranks
from fp8engine.ops.reference.quantize import SATURATES
from fp8engine.ops.reference.scale import FP32_MAX, floor_power_of_2
from fp8engine.scaling.histogram import some_rows
from fp8engine.scaling.reads import Layout
from fp8engine.scaling.sample import ELEMENTS, SAMPLE, describe

WEIGHT = ROLES.index("weight")


class WeightScales:
    """Scales of all sharded weights of a model.

    group: the ranks that share a weight.  device: where they compute.  joins: how often amaxes were joined.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self.joins = 0
        self.found: dict[ShardedWeight, Scales] = {}
        self.amaxes = torch.empty(0, device=device)  # of all groups of all weights, joined
        self._rules: tuple[tuple, _Rules] | None = None

    @torch.no_grad()
    def join(self, weights: Sequence[ShardedWeight]) -> None:
        """Measure the rows of every weight, one weight after the other, join the amaxes and make scales of them."""
        self.found = {}
        if not weights:
            return
        rules = self._rules_of(weights)
        table = torch.zeros(sum(rules.sizes), dtype=torch.float32, device=rules.most.device)
        for weight, part in zip(weights, table.split(rules.sizes), strict=True):
            if (rows := weight.rows()).numel():
                mine, start = weight.amax(rows), weight.first_group
                part.view(weight.groups)[start : start + len(mine)] = mine
        self._reduce(table)
        for group, at in rules.divided.items():
            table[at] = self._reduce(table[at], ranks.named(group))
        self.amaxes = table
        self._scale(rules)

    @torch.no_grad()
    def predict(self) -> None:
        """Weights stand since the last join, and a forward has begun: predicted scales are those of now."""
        if self.found and self._rules is not None and self._rules[1].delayed:
            self._scale(self._rules[1])

    def _scale(self, rules: _Rules) -> None:
        s, least = rules.factors(self.amaxes)
        scale = torch.ones_like(s) / s
        parts = (each.split(rules.sizes) for each in (self.amaxes, s, scale))
        for weight, amax, factor, inverse, smallest in zip(rules.weights, *parts, least, strict=True):
            shape = weight.cast.scale_shape(*weight.shape)
            self.found[weight] = Scales(_one(amax, torch.max), smallest, factor.view(shape), inverse.view(shape))

    def _rules_of(self, weights: Sequence[ShardedWeight]) -> _Rules:
        """Made once for the recipes of now: nothing is copied to a card in later steps."""
        key = (*weights, *(weight.chosen for weight in weights))
        if self._rules is None or self._rules[0] != key:
            self._rules = key, _Rules(weights, self.device)
        return self._rules[1]

    def _reduce(self, table: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """The table, with the largest of all ranks' amaxes.  Raises ParallelError where a rank does not come."""
        self.joins += group is None
        try:
            dist.all_reduce(table, dist.ReduceOp.MAX, group or self.group)
        except RuntimeError as error:
            raise ParallelError(
                "fe.distributed.fsdp: amaxes of weights are joined in a forward of the model, which all ranks of "
                "the group have to call; a rank did not come within the time limit (the timeout of "
                f"init_process_group), or has died: {error}"
            ) from error
        return table


def _one(numbers: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The numbers reduced to one []; without a launch where there is one already."""
    return numbers.view(()) if len(numbers) == 1 else reduce(numbers)


class _Rules:
    """How amaxes become factors: sizes of the weights' parts of the table; for each group MAX and power of two."""

    def __init__(self, weights: Sequence[ShardedWeight], device: torch.device):
        self.weights, self.sizes = weights, [math.prod(weight.groups) for weight in weights]
        numbers = [(Format.of(weight.cast.dtype).max, float(weight.cast.power_of_2)) for weight in weights]
        wide = [pair for pair, size in zip(numbers, self.sizes, strict=True) for _ in range(size)]
        self.most, power_of_2 = torch.tensor(wide, device=device).unbind(1)
        self.power_of_2 = power_of_2 > 0
        starts = itertools.accumulate(self.sizes, initial=0)
        at = list(zip(starts, weights, strict=False))
        self.delayed = [(i, start, weight) for i, (start, weight) in enumerate(at) if weight.cast.delayed]
        # Weights with one scale that tensor parallelism divides over a group of its own: their places in the table.
        places: dict[str, list[int]] = {}
        for start, weight in at:
            if weight.numerics.shard is not None and weight.cast.per_tensor:
                places.setdefault(weight.numerics.state.divided, []).append(start)
        self.divided = {group: torch.tensor(at, device=device) for group, at in places.items()}

    def factors(self, amax: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(s of every group, the smallest s of each weight or NaN where the layer's slot predicts it)."""
        s = torch.where(amax > 0, self.most / amax, 1.0).clamp_(max=FP32_MAX)
        s = torch.where(self.power_of_2, floor_power_of_2(s), s)
        smallest = [_one(part, torch.min) for part in s.split(self.sizes)]
        for i, at, weight in self.delayed:
            state = weight.numerics.state
            predicted = state.live_2S[1, state.column(weight.numerics.layer, "weight")]
            fits = (predicted > 0) & (amax[at] * predicted <= self.most[at] * SATURATES)
            s[at] = torch.where(fits, predicted, s[at])
            smallest[i] = torch.full_like(predicted, float("nan"))
        return s, smallest


@torch.no_grad()
def sample_weights(weights: Iterable[ShardedWeight], group: dist.ProcessGroup) -> None:
    """Enter the statistics of weights whose layers this step samples, as `Numerics.observe` does for a whole weight.

    weights: that are gathered as codes.  group: the ranks that share them; all of them call.
    """
    found = []
    for weight in weights:
        sample = weight.numerics.columns[WEIGHT].sample
        if sample is not None:
            whole_NK = weight.among_zeros()
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
    amaxes = [t for _, part, *_ in found for t in (part.blocks_RC, part.amaxes_R, part.columns_C)]
    _join(amaxes, dist.ReduceOp.MAX, group)
    for slot_L, part, dtype, some_RK, unknown in found:
        elements = slot_L[ELEMENTS].clone()
        slot_L.copy_(describe(some_RK.to(dtype), part.columns_C.amax() + unknown))
        slot_L[ELEMENTS] = elements


def _join(tensors: Sequence[torch.Tensor], how: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """Reduce FP32 tensors over ranks, in place, in one message."""
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat, how, group)
    for tensor, joined in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(joined.view(tensor.shape))
