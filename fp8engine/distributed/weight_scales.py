"""Scales of weights that are sharded over ranks: one table of amaxes, joined in one all-reduce.

    amax[g] = max over ranks of max |w| over the elements of group g that a rank holds
    s[g]    = MAX / amax[g], or a predicted s[g] under which amax[g] fits      as ops/reference/quantize.py has it

A rank holds whole rows of a weight.  A group of rows that lies on two ranks, such as a 128 x 128 block, is joined as
every other.  With the same s on every rank, the codes that ranks cast of their shards are those of the whole weight.
"""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fp8engine.autograd.numerics import Numerics
from fp8engine.errors import ParallelError
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import Format
from fp8engine.ops import casts, ranks
from fp8engine.ops.library import in_backward
from fp8engine.ops.reference.quantize import SATURATES, largest
from fp8engine.ops.reference.scale import FP32_MAX, floor_power_of_2
from fp8engine.scaling.table import ROLES


@dataclass(eq=False)
class Shard:
    """This rank's rows of one weight.

    shape: of the whole parameter.  first: index of this rank's first row.  transposed: the layer multiplies by the
    parameter's transpose (Conv1D).  chosen: the cast under which it is gathered in this step; None in high precision.
    """

    numerics: Numerics
    shape: tuple[int, int]
    first: int
    transposed: bool = False
    chosen: Cast | None = None

    @property
    def cast(self) -> Cast:
        """The cast in the parameter's own coordinates."""
        cast = typing.cast(Cast, self.chosen)
        return cast.t() if self.transposed else cast

    @property
    def groups(self) -> tuple[int, int]:
        """(down, across): the groups of the whole weight that have a scale each."""
        down, across = self.cast.scale_shape(*self.shape) or (1, 1)
        return down, across

    @property
    def first_group(self) -> int:
        """Index of the group, counted down the weight, that this rank's first row is in."""
        return 0 if self.cast.rows == -1 else self.first // self.cast.rows

    def amax(self, rows: torch.Tensor) -> torch.Tensor:
        """max |w| of every group that these rows [R, K] have a part of, FP32 [groups down, groups across]."""
        padded = self._from_whole_group(rows)
        if type(rows) is torch.Tensor and rows.device.type == "cpu":  # elsewhere the host would wait for the answer
            found = largest(padded, self.cast)
            if bool(torch.isfinite(found).all()):
                return found
        return largest(torch.nan_to_num(padded, 0.0, 0.0, 0.0), self.cast)

    def encode(self, rows: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """FP8 codes of these rows; s: of all groups of the weight, in `cast.scale_shape`."""
        cast = self.cast
        if cast.rows == -1:
            return casts.encode(rows, cast, s)
        padded = self._from_whole_group(rows)
        mine = s[self.first_group : self.first_group + math.ceil(len(padded) / cast.rows)]
        return casts.encode(padded, cast, mine)[len(padded) - len(rows) :]

    def _from_whole_group(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows with zeros above them up to the first row of their group."""
        above = self.first % self.cast.rows if self.cast.rows != -1 else 0
        return torch.nn.functional.pad(rows, (0, 0, above, 0)) if above else rows


# For each weight that is gathered as codes, what gives this rank's rows in the dtype that they are gathered from.
Rows = dict[Shard, Callable[[], torch.Tensor]]


@dataclass(eq=False)
class Scales:
    """One weight's part of the table: amax of the whole weight, factor and scale of each group."""

    amax: torch.Tensor
    smallest: torch.Tensor
    s: torch.Tensor
    scale: torch.Tensor


class WeightScales:
    """Scales of all sharded weights of a model.

    group: the ranks that share a weight.  device: where they compute.  joins: how often amaxes were joined.
    current: whether a forward of the root, which has joined, is under way.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self.joins, self.current = 0, False
        self.found: dict[Shard, Scales] = {}
        self.amaxes = torch.empty(0, device=device)  # of all groups of all weights, joined
        self._rules: tuple[tuple, _Rules] | None = None

    def of(self, shard: Shard, everything: Callable[[], Rows]) -> Scales:
        """A weight's scales; joined anew outside of a forward of the root, which has done it.

        everything: gives the rows of each weight that is gathered as codes, for a gather outside of the root's forward
        (a block that is called by itself, `unshard()`): weights may have changed since, which no counter tells.
        """
        if shard not in self.found or not (self.current or in_backward()):
            self.join(everything())
        return self.found[shard]

    @torch.no_grad()
    def join(self, everything: Rows) -> None:
        """Measure the rows of every weight, one weight after the other, join the amaxes and make scales of them."""
        self.found = {}
        if not everything:
            return
        shards = list(everything)
        rules = self._rules_of(shards)
        table = torch.zeros(sum(rules.sizes), dtype=torch.float32, device=rules.most.device)
        parts = table.split(rules.sizes)
        for (shard, rows_of), part in zip(everything.items(), parts, strict=True):
            if (rows := rows_of()).numel():
                mine, start = shard.amax(rows), shard.first_group
                part.view(shard.groups)[start : start + len(mine)] = mine
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
        for shard, amax, factor, inverse, smallest in zip(rules.shards, *parts, least, strict=True):
            shape = shard.cast.scale_shape(*shard.shape)
            self.found[shard] = Scales(_one(amax, torch.max), smallest, factor.view(shape), inverse.view(shape))

    def _rules_of(self, shards: list[Shard]) -> _Rules:
        """Made once for the recipes of now: nothing is copied to a card in later steps."""
        key = (*shards, *(shard.chosen for shard in shards))
        if self._rules is None or self._rules[0] != key:
            self._rules = key, _Rules(shards, self.device)
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

    def __init__(self, shards: list[Shard], device: torch.device):
        self.shards, self.sizes = shards, [math.prod(shard.groups) for shard in shards]
        numbers = [(Format.of(shard.cast.dtype).max, float(shard.cast.power_of_2)) for shard in shards]
        wide = [pair for pair, size in zip(numbers, self.sizes, strict=True) for _ in range(size)]
        self.most, power_of_2 = torch.tensor(wide, device=device).unbind(1)
        self.power_of_2 = power_of_2 > 0
        starts = list(itertools.accumulate(self.sizes, initial=0))
        self.delayed = [
            (i, start, shard)
            for i, (start, shard) in enumerate(zip(starts, shards, strict=False))
            if shard.cast.delayed
        ]
        # Weights with one scale that tensor parallelism divides over a group of its own: their places in the table.
        places: dict[str, list[int]] = {}
        for start, shard in zip(starts, shards, strict=False):
            if shard.numerics.shard is not None and shard.cast.per_tensor:
                places.setdefault(shard.numerics.state.divided, []).append(start)
        self.divided = {group: torch.tensor(at, device=device) for group, at in places.items()}

    def factors(self, amax: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(s of every group, the smallest s of each weight or NaN where the layer's slot predicts it)."""
        s = torch.where(amax > 0, self.most / amax, 1.0).clamp_(max=FP32_MAX)
        s = torch.where(self.power_of_2, floor_power_of_2(s), s)
        smallest = [_one(part, torch.min) for part in s.split(self.sizes)]
        for i, at, shard in self.delayed:
            state, column = shard.numerics.state, len(ROLES) * shard.numerics.layer + ROLES.index("weight")
            predicted = state.live_2S[1, column]
            fits = (predicted > 0) & (amax[at] * predicted <= self.most[at] * SATURATES)
            s[at] = torch.where(fits, predicted, s[at])
            smallest[i] = torch.full_like(predicted, float("nan"))
        return s, smallest
