"""Effect of every cast on a matmul's result, measured by trying the casts on rows of a sampled step.

    forward   y[M, N]  = x[M, K] w[N, K]^T      sums over K       reads x and w along their rows
    dgrad     dx[M, K] = dy[M, N] w[N, K]       sums over N       reads dy along its rows, w along its columns
    wgrad     dw[N, K] = dy[M, N]^T x[M, K]     sums over M       reads dy and x along their columns

Along the sum only energy counts; across it every row of an operand makes a row (or a column) of the result by itself.
So each of these six reads is judged by the rows r of the operand as the matmul reads it, with c along the sum:

    SQNR_r = sum_c A_rc^2 p_c / sum_c E_rc^2 p_c          E: error of the cast, p_c: energy of the other operand at c

The noise of a row of the result is the sum in the denominator where errors and the other operand are uncorrelated
(Widrow and Kollar, Quantization Noise, 2008, chapter 5).  p tells a harmless outlier channel from a harmful one: the
weights that it meets are small in the second case.  Judged are the SQNR of all rows together ("whole"), of the median
row, and of the 10th percentile; the read is worth the least of the three.

The cost of a cast in nats of the loss, of the forward's operands, is the diagonal of the empirical Fisher information:

    cost = 1/2 T sum_t sum_j var(dy_tj) g_tj^2            T tokens in the mean loss, g = grad_output
    var = sum_k E_tk^2 w_jk^2 of the input's cast,  sum_k x_tk^2 E_jk^2 of the weight's

All of this is computed on the tensors' device, from samples of whole rows, without waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8engine import _numpy as numpy
from fp8engine.numerics.formats import E4M3, E5M2, Format
from fp8engine.ops.reference.rounding import round_to_grid

BLOCK = 128
READS = (
    ("input", "forward"), ("weight", "forward"), ("grad_output", "dgrad"), ("weight", "dgrad"),
    ("grad_output", "wgrad"), ("input", "wgrad"),
)  # fmt: skip
OPTIONS = (("tensor", E4M3), ("row", E4M3), ("block", E4M3), ("tensor", E5M2), ("row", E5M2))
NUMBERS = ("whole", "median", "low", "flushed", "cost")  # three in dB, a share of the elements, nats
WORDS = ("the whole result", "the rows' median", "the rows' 10th percentile")
FLUSHED, COST = (NUMBERS.index(name) for name in ("flushed", "cost"))
GOLDEN = 0.6180339887498949  # (sqrt(5) - 1) / 2: its multiples spread most evenly over the circle
SHAPE = (len(READS), len(OPTIONS), len(NUMBERS))
LOW = 0.06  # the place of the 10th percentile in a sample of 16 to 64 rows, so that a tenth of bad rows is not missed
MOST_RATIO = 1e10  # of signal over noise: a cast without error has 100 dB
FADES_DB = 3.0  # by which noise that a sample has shown fades until the next one
AVERAGED = 8  # samples over which costs are averaged
TINY = 1e-30
WIDEST = 128  # rows of a result from which percentiles are taken
THIN = 4  # every so many rows are counted for the share flushed
UNSURE = 1.55  # standard deviations from a normal distribution's median to that place
SAMPLE, FEWEST, MOST = 16384, 16, 64  # elements of a slot that are sampled; rows


class Part(NamedTuple):
    """Rows of a tensor [M, C], and what the casts of the whole tensor depend on.

    rows_RC: R sampled rows, zeros where the tensor has fewer.  blocks_RC: amax of the 128 x 1 block of each of their
    elements.  amaxes_R: of the tensor that each is of, because the calls of a layer in one step share the rows.
    columns_C: amax of each column, of all calls.  energies_N: of a weight's rows.  total: M, on the device.
    """

    rows_RC: torch.Tensor
    blocks_RC: torch.Tensor
    amaxes_R: torch.Tensor
    columns_C: torch.Tensor
    energies_N: torch.Tensor
    total: torch.Tensor


class Layout(NamedTuple):
    """Where a slot's Part lies in one flat buffer.  rows: R.  columns: C.  energies: of a weight's rows, else 0."""

    rows: int
    columns: int
    energies: int = 0

    @property
    def length(self) -> int:
        """Numbers in the buffer."""
        return 1 + (2 * self.rows + 1) * self.columns + self.rows + self.energies

    def part(self, flat: torch.Tensor) -> Part:
        """Views of a buffer."""
        r, c = self.rows, self.columns
        sizes = [1, r * c, r * c, r, c, self.energies]
        total, rows, blocks, amaxes, columns, energies = flat[: self.length].split(sizes)
        return Part(rows.view(r, c), blocks.view(r, c), amaxes, columns, energies, total[0])

    def write(self, x_MC: torch.Tensor, flat: torch.Tensor, mine_R: torch.Tensor | None = None) -> torch.Tensor:
        """Sample a tensor of M rows into a buffer, without waiting for the device; returns its amax.

        mine_R: which rows of the sample are to be of this tensor, others stay those of earlier calls; None: all.
        """
        m, part = len(x_MC), self.part(flat)
        r = min(self.rows, m)
        full, groups = m // BLOCK, []
        if full:
            groups.append(x_MC[: full * BLOCK].unflatten(0, (full, BLOCK)).abs().amax(1))
        if m % BLOCK:
            groups.append(x_MC[full * BLOCK :].abs().amax(0, keepdim=True))
        amax_GC = torch.cat(groups).float()
        place_R, columns_C = strata(m, r, x_MC.device), amax_GC.amax(0)
        mine_R = torch.ones(self.rows, dtype=torch.bool, device=x_MC.device) if mine_R is None else mine_R
        part.total.fill_(m)
        for into_RC, rows_RC in (
            (part.rows_RC, x_MC.index_select(0, place_R)),
            (part.blocks_RC, amax_GC.index_select(0, place_R // BLOCK)),
        ):
            rows_RC = torch.nn.functional.pad(rows_RC, (0, 0, 0, self.rows - r))
            into_RC.copy_(torch.where(mine_R[:, None], rows_RC, into_RC))
        part.amaxes_R.copy_(torch.where(mine_R, columns_C.amax(), part.amaxes_R))
        before_C = torch.where(mine_R.all(), 0.0, part.columns_C)
        part.columns_C.copy_(torch.where(mine_R.any(), torch.maximum(columns_C, before_C), before_C))
        if self.energies:
            part.energies_N.copy_(x_MC.float().square().sum(1))
        return columns_C.amax()  # NaN and Inf reach it


def layout_of(shape: Sequence[int], role: str) -> Layout:
    """The layout of a slot of a layer whose weight is [N, K] or [E, N, K]: as many rows for each of its slots.

    >>> layout_of((1536, 512), "grad_output")
    Layout(rows=16, columns=1536, energies=0)
    """
    n, k = shape[-2:]
    rows = min(max(SAMPLE // max(n, k, 1), FEWEST), MOST)
    return Layout(rows, n if role == "grad_output" else k, math.prod(shape[:-1]) if role == "weight" else 0)


def strata(size: int, count: int, device: torch.device) -> torch.Tensor:
    """`count` places in 0..size-1, one in each of as many equal parts, at irrational offsets."""
    i = torch.arange(count, dtype=torch.float64, device=device)
    return (i + (i * GOLDEN).frac()).mul_(size / max(count, 1)).long()


class Tried(NamedTuple):
    """A tensor's rows in units of its amax, and squared errors of its casts, [casts, R, C].

    fine: to E4M3 per row, 1 x 128, tensor, column, 128 x 1.  coarse: to E5M2 per row, tensor, column.
    The first three (two) are for a matmul that reads it along its rows, the last three (two) for one along its columns.
    flushed: shares of the elements, for both readings in the order of OPTIONS, [2, 5].
    """

    rows_RC: torch.Tensor
    amax: torch.Tensor
    fine: torch.Tensor
    coarse: torch.Tensor
    flushed: torch.Tensor

    def noise(self, p: torch.Tensor, reading: int) -> torch.Tensor:
        """Noise of each row of the result under every option, [5, rows]; p: energies of the other operand."""
        if reading:
            return _across(p @ self.fine, p @ self.coarse)
        return _along(self.fine[:3] @ p, self.coarse[:2] @ p)


def try_casts(part: Part, square: bool = False) -> Tried:
    """Every option of `part`'s tensor.  square: its blocks are 128 x 128."""
    amax = part.columns_C.amax() if part.columns_C.numel() else part.total.new_zeros(())
    unit = torch.where(amax > 0, amax, 1.0)
    x_RC = part.rows_RC / unit
    size_RC, blocks_RC = x_RC.abs(), part.blocks_RC / unit
    by_line = _groups_of(blocks_RC if square else size_RC)
    amaxes = [size_RC.amax(1, keepdim=True), by_line, part.amaxes_R[:, None] / unit]
    amaxes += [part.columns_C / unit, by_line if square else blocks_RC]
    amaxes = [each.clamp(min=TINY) for each in amaxes]
    fine, coarse = _errors(x_RC, amaxes, E4M3), _errors(x_RC, [amaxes[0], *amaxes[2:4]], E5M2)
    some = x_RC[::THIN]
    nonzero = (some != 0).sum().clamp(min=1)
    lost = [((e[:, ::THIN] == some) & (some != 0)).sum((1, 2)) / nonzero for e in (fine, coarse)]
    return Tried(x_RC, amax, fine.square_(), coarse.square_(), torch.stack([_along(*lost), _across(*lost)]))


def _along(fine: torch.Tensor, coarse: torch.Tensor) -> torch.Tensor:
    """What belongs to the casts along rows, in the order of OPTIONS."""
    return torch.cat([fine[2:3], fine[:2], coarse[1:2], coarse[:1]])


def _across(fine: torch.Tensor, coarse: torch.Tensor) -> torch.Tensor:
    """What belongs to the casts along columns, in the order of OPTIONS."""
    return torch.cat([fine[2:], coarse[1:]])


def _groups_of(x_RC: torch.Tensor) -> torch.Tensor:
    """The amax of 128 neighbours in a row, for each of them."""
    c = x_RC.shape[1]
    padded = torch.nn.functional.pad(x_RC, (0, -c % BLOCK)).unflatten(1, (-1, BLOCK))
    return padded.amax(2, keepdim=True).expand(padded.shape).flatten(1)[:, :c]


def _errors(x_RC: torch.Tensor, amaxes: Sequence[torch.Tensor], format: Format) -> torch.Tensor:
    """x less its cast under each amax: x s rounded to the nearest number of the format, s = MAX / amax."""
    y = torch.stack([x_RC * (format.max / amax) for amax in amaxes])
    y = round_to_grid(y, y, format.dtype, finite=True)
    for each, amax in zip(y, amaxes, strict=True):
        torch.addcmul(x_RC, each, amax / format.max, value=-1, out=each)
    return y


def judge(x: Part, w: Part, dy: Part | None, rows: float = 1.0, tokens: float = 1.0) -> torch.Tensor:
    """The numbers of every read under every option, [6, 5, 5] FP32 as READS, OPTIONS and NUMBERS; NaN for none.

    x: the input [M, K].  w: the weight [N, K].  dy: the gradient of the output [M, N], of the same rows as x; None
    where no backward came: of the forward's reads then, without costs.  rows: of all calls, which share the sampled
    ones; tokens: in the mean loss; both for each row of the largest call, which is x.total.
    """
    table = torch.full(SHAPE, math.nan, device=x.rows_RC.device)
    tried_x, tried_w = try_casts(x), try_casts(w, square=True)
    x2_RK, w2_JK = tried_x.rows_RC.square(), tried_w.rows_RC.square()
    reads = [(x2_RK, tried_x, w2_JK.sum(0), 0), (w2_JK, tried_w, x2_RK.sum(0), 0)]
    if dy is None:
        _rate(table[:2], reads)
        return table
    tried_dy, n = try_casts(dy), dy.rows_RC.shape[1]
    dy2_RN, sampled = tried_dy.rows_RC.square(), min(len(w.rows_RC), len(w.energies_N))
    place_J = strata(len(w.energies_N), sampled, w.rows_RC.device) % max(n, 1)  # output features of the weight's rows
    dy2_RJ = torch.nn.functional.pad(dy2_RN.index_select(1, place_J), (0, len(w.rows_RC) - sampled))
    energies_N = w.energies_N.view(-1, n).sum(0) / tried_w.amax.square().clamp(min=TINY)
    _rate(table[:3], [*reads, (dy2_RN, tried_dy, energies_N, 0)])
    reads = [
        (w2_JK, tried_w, dy2_RJ.sum(0), 1),
        (dy2_RN, tried_dy, x2_RK.sum(1), 1),
        (x2_RK, tried_x, dy2_RN.sum(1), 1),
    ]
    _rate(table[3:], reads)
    drawn = x.total / x.total.clamp(min=1, max=len(x.rows_RC)) * (len(w.energies_N) / max(sampled, 1))
    unit = 0.5 * x.total * tokens * rows * drawn * (tried_x.amax * tried_w.amax * tried_dy.amax).square()
    unit = torch.where(dy.total > 0, unit, math.nan)
    table[0, :, COST] = unit * _summed(tried_x, dy2_RJ @ w2_JK)
    table[1, :, COST] = unit * _summed(tried_w, dy2_RJ.t() @ x2_RK)
    return table


def _summed(tried: Tried, weight_RC: torch.Tensor) -> torch.Tensor:
    """Sums of the weighted squared errors of a forward's operand under every option, [5]."""
    flat = weight_RC.flatten()
    return _along(tried.fine[:3].flatten(1) @ flat, tried.coarse[:2].flatten(1) @ flat)


def _rate(out: torch.Tensor, reads: Sequence[tuple[torch.Tensor, Tried, torch.Tensor, int]]) -> None:
    """Write "whole", "median", "low" and "flushed" of several reads, [reads, 5, 5].

    reads: (squares of the operand's rows, its casts, the other operand's energies, 1 for reading its columns).

    The SQNR of a row that sums few elements is spread by chance, with a standard deviation of sqrt(2 / elements): by
    that the 10th percentile is too low, up to the median.
    """
    signals, noises, wholes, unsure = [], [], [], []
    for a2_RC, tried, p, reading in reads:
        p = p / p.amax().clamp(min=TINY) if p.numel() else p
        signal_R, noise_OR = (p @ a2_RC if reading else a2_RC @ p), tried.noise(p, reading)
        wholes.append(signal_R.sum() / noise_OR.sum(1))
        unsure.append(10 * (1 + UNSURE * (2 / (p > 0).sum().clamp(min=1)).sqrt()).log10())
        if reading:  # columns may be many, and differ in number
            r = signal_R.shape[0]
            place = torch.arange(WIDEST, device=signal_R.device) * r // WIDEST
            signal_R, noise_OR = signal_R.index_select(0, place), noise_OR.index_select(1, place)
        signals.append(signal_R)
        noises.append(noise_OR)
    signal = torch.stack(signals)[:, None]
    some = signal > 0
    ratio = (signal / torch.stack(noises).clamp(min=TINY * TINY)).clamp(max=MOST_RATIO)
    ratio = torch.where(some, ratio, math.inf).sort(2).values  # rows of zeros come last
    last = some.sum(2, keepdim=True) - 1
    at = torch.cat([(last * share).long().clamp(min=0) for share in (0.5, LOW)], 2).expand(-1, len(OPTIONS), -1)
    db = 10 * torch.cat([torch.stack(wholes).clamp(max=MOST_RATIO)[..., None], ratio.gather(2, at)], 2).log10()
    db[..., 2] = torch.minimum(db[..., 2] + torch.stack(unsure)[:, None], db[..., 1])
    out[..., :3] = torch.where(last >= 0, db, math.nan)
    out[..., 3] = torch.stack([tried.flushed[reading] for _, tried, _, reading in reads])


@dataclass(frozen=True, eq=False)
class Reads:
    """What `judge` found, on the host.  table: [6, 5, 5], NaN for reads that were not sampled.  count: of samples."""

    table: numpy.ndarray
    count: int = 1

    def seen(self, read: int) -> bool:
        """Whether the read was sampled, and anything but zeros was there."""
        return bool(numpy.isfinite(self.table[read, :, :3]).all())

    def value(self, read: int, option: int) -> float:
        """In dB: the least of the whole, the median row and the 10th percentile."""
        return float(self.table[read, option, :3].min())

    def which(self, read: int, option: int) -> str:
        """Which of the three that is, in words.

        >>> table = numpy.full(SHAPE, 30.0)
        >>> table[0, 0, 2] = 19.0
        >>> Reads(table).which(0, 0), Reads(table).value(0, 0)
        ("the rows' 10th percentile", 19.0)
        """
        return WORDS[int(self.table[read, option, :3].argmin())]

    def flushed(self, read: int, option: int) -> float:
        """Share of the operand's elements that become zero."""
        return float(self.table[read, option, FLUSHED])

    def cost(self, read: int, option: int) -> float:
        """In nats of the loss; 0 where it is not known, as for all reads but the forward's."""
        found = float(self.table[read, option, COST])
        return found if math.isfinite(found) else 0.0

    def knows_cost(self, read: int) -> bool:
        """Whether the cost of a read is known."""
        return bool(numpy.isfinite(self.table[read, :, COST]).all())

    def after(self, before: Reads | None, fades_db: float = FADES_DB) -> Reads:
        """What is remembered after this sample: the noise seen before has faded by so many dB, costs are averaged.

        >>> low, high = (Reads(numpy.full(SHAPE, db)) for db in (10.0, 30.0))
        >>> [round(seen.value(0, 0)) for seen in (low, high.after(low), high.after(high.after(low)), low.after(high))]
        [10, 13, 16, 10]
        """
        if before is None:
            return self
        old, new = before.table, self.table.copy()
        new[..., :COST] = numpy.where(numpy.isfinite(new[..., :COST]), new[..., :COST], old[..., :COST])
        new[..., :3] = numpy.fmin(new[..., :3], old[..., :3] + fades_db)
        known = [numpy.isfinite(each[..., COST]) for each in (old, new)]
        count = min(before.count + 1, AVERAGED)
        mean = old[..., COST] + (new[..., COST] - old[..., COST]) / count
        new[..., COST] = numpy.where(known[0] & known[1], mean, numpy.where(known[1], new[..., COST], old[..., COST]))
        return Reads(new, count)
