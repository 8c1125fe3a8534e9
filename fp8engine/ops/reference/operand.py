"""Values that kernels and twins take and give: Operand (the result of a cast) and Slot (its scale and counters).

A matrix is divided into groups of rows x cols elements that share a scale; -1 means all of that dimension:

    per tensor -1 x -1    per row 1 x -1    per column -1 x 1    per block 1 x 128, 128 x 128, 128 x 1
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8engine.numerics.cast import Cast

COUNTERS = ("calls", "elements", "sampled", "saturated", "underflowed", "nonfinite", "recasts")


class Operand(NamedTuple):
    """A quantised matrix: codes (or values held on the FP8 grid), FP32 scale, and the rows x cols one scale covers.

    power_of_2: every scale is known to be one, so that folding it into 16-bit values is exact.
    """

    data: torch.Tensor
    scale: torch.Tensor
    rows: int = -1
    cols: int = -1
    power_of_2: bool = False

    @property
    def scaled_along_k(self) -> bool:
        """Whether the scale changes along the columns, so that it cannot be applied after the sum."""
        return self.scale.dim() == 2 and self.cols != -1

    def t(self) -> Operand:
        """The transposed matrix, as a view."""
        scale = self.scale.t() if self.scale.dim() == 2 else self.scale
        return Operand(self.data.t(), scale, self.cols, self.rows, self.power_of_2)


def operand(data: torch.Tensor, scale: torch.Tensor, cast: Cast) -> Operand:
    """What a cast has made, as an Operand."""
    return Operand(data, scale, cast.rows, cast.cols, cast.power_of_2)


class Slot(NamedTuple):
    """Where a cast reads its predicted scale and writes its counters: column `index` of a model's tables.

    live_2S: FP32; row 0 largest amax of this step (-1: none yet), row 1 the factor s (0: none yet).
    counts_CS: INT64, a row for each of COUNTERS; its columns lie as many elements apart as live_2S's.
    record: whether this call's amax enters the history.  count: whether it enters the counters; neither, for a tensor
    that is cast a second time under the same scale.
    host: both tables as NumPy arrays, where the caller has them at hand.
    group: name of the process group over which the tensor is divided: one scale for all of it takes the amax of all
    ranks (ops/joined.py).
    """

    live_2S: torch.Tensor
    counts_CS: torch.Tensor
    index: int
    record: bool = True
    count: bool = True
    host: tuple | None = None
    group: str = ""

    @property
    def place(self) -> int:
        """How many elements its column lies behind the first one, in both tables."""
        return self.index * self.live_2S.stride(1)

    @property
    def on_host(self) -> tuple:
        """NumPy's views of both tables (CPU only): an element costs a tenth of what indexing a tensor does."""
        return self.host or (self.live_2S.numpy(), self.counts_CS.numpy())


def as_groups(x_MK: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """x as [groups down, rows, groups across, cols], padded with zeros where the last group is short; -1 = all."""
    m, k = x_MK.shape
    rows, cols = (m if rows == -1 else rows), (k if cols == -1 else cols)
    pad = (-k % cols, -m % rows)
    if any(pad):
        x_MK = torch.nn.functional.pad(x_MK, (0, pad[0], 0, pad[1]))
    return x_MK.reshape(-(-m // rows), rows, -(-k // cols), cols)


def from_groups(x: torch.Tensor, m: int, k: int) -> torch.Tensor:
    """The m x k matrix of which `as_groups` made x."""
    down, rows, across, cols = x.shape
    x_MK = x.reshape(down * rows, across * cols)
    return x_MK if x_MK.shape == (m, k) else x_MK[:m, :k].contiguous()
