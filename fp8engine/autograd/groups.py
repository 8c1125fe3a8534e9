"""Division of rows among experts, and torch's grouped matmuls, which take it as offsets on the device.

    scaled_grouped    y[t]  = a[t] @ b[e(t)]^T           FP8; sm_90 and sm_100; E4M3 by E4M3, a scale per row
    grouped_wgrad     dw[e] = sum of dy[t]^T x[t]        BF16; a CPU, and cards from sm_80 on

Source: torch 2.13, aten/src/ATen/native/cuda/GroupedBlas.cpp and torch/_meta_registrations.py, which refuse the rest.
FP8 codes must lie along what is summed, which in wgrad is the rows of x: each group would have to begin at a multiple
of 16 bytes.  Such rows are not what a router gives, so that wgrad of FP8 codes is not here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch

from fp8engine import _torch
from fp8engine.errors import ShapeError, UnsupportedDtype
from fp8engine.ops import device
from fp8engine.ops.reference import Operand

ALIGNED = 16  # bytes between rows that torch's grouped matmuls want multiples of
SCALED_GROUPED = ((9, 0), (10, 0))  # capabilities on which torch has a grouped matmul of FP8
CAPABILITY_16_BITS = (8, 0)
COUNTS = (torch.int32, torch.int64)


class Groups:
    """Division of the rows of x: the first sizes[0] are the first expert's, the next sizes[1] the second's, ...

    sizes: E numbers of rows, 0 allowed, that sum to T: ints, or a tensor of ints on the host or beside x.
    Raises ShapeError, UnsupportedDtype and BackendError (another card), naming the layer.  What lies on a card is
    checked there, without waiting: a wrong sum is then a device-side assertion.

    >>> Groups([2, 0, 1], torch.ones(3, 8), 3, "experts").ends
    tensor([2, 2, 3], dtype=torch.int32)
    """

    def __init__(self, sizes: Sequence[int] | torch.Tensor, x_TK: torch.Tensor, experts: int, name: str):
        self.rows, self.experts, self.where, self.name = len(x_TK), experts, x_TK.device, name
        self.counts: torch.Tensor | None = None
        if isinstance(sizes, torch.Tensor):
            if sizes.dtype not in COUNTS:
                raise UnsupportedDtype(f"{name}: sizes is {sizes.dtype}; numbers of rows are int32 or int64")
            shape = list(sizes.shape)
            if sizes.device.type != "cpu":
                device.check_one(name, x_TK, sizes=sizes)
                self.counts = sizes
            given = [] if self.counts is not None else sizes.flatten().tolist()
        else:
            shape, given = [len(sizes)], list(sizes)
        if shape != [experts]:
            raise ShapeError(f"{name}: sizes has shape {shape}; want one number of rows for each of {experts} experts")
        if self.counts is None:
            try:
                self.sizes = self._check([operator.index(count) for count in given])
            except TypeError as error:
                raise UnsupportedDtype(f"{name}: sizes {given}: numbers of rows are ints") from error

    @functools.cached_property
    def sizes(self) -> list[int]:
        """On the host; waits for the card where they lie on one."""
        if self.counts is None or self.counts.is_meta:  # shapes only: any division gives the same
            return [self.rows, *[0] * (self.experts - 1)]
        return self._check(self.counts.tolist())

    @functools.cached_property
    def ends(self) -> torch.Tensor:
        """Where each group ends, int32 [E] beside x: what torch's grouped matmuls take."""
        if "sizes" in vars(self) or self.counts is None:
            return torch.tensor(self.sizes, device=self.where).cumsum(0, dtype=torch.int32)
        right = (self.counts >= 0).all() & (self.counts.sum() == self.rows)
        _torch.assert_async(right, f"{self.name}: sizes of experts are negative, or do not sum to {self.rows} rows")
        return self.counts.cumsum(0, dtype=torch.int32)

    def _check(self, sizes: list[int]) -> list[int]:
        if any(count < 0 for count in sizes):
            raise ShapeError(f"{self.name}: sizes {sizes}: a number of rows is at least 0")
        if sum(sizes) != self.rows:
            raise ShapeError(
                f"{self.name}: sizes {sizes} sum to {sum(sizes)}, and the input has {self.rows} rows: "
                "each row belongs to one expert, and rows of one expert lie together"
            )
        return sizes


def of_rows(table_EN: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The row for each row's expert (its bias) of a table [E, N]: [T, N], without waiting for a card.

    >>> of_rows(torch.tensor([[1.0], [2.0], [3.0]]), Groups([2, 0, 1], torch.ones(3, 8), 3, "experts")).tolist()
    [[1.0], [1.0], [3.0]]
    """
    rows = torch.arange(groups.rows, device=groups.where, dtype=torch.int32)
    return table_EN[torch.searchsorted(groups.ends, rows, right=True)]


def has_scaled_grouped(where: torch.device) -> bool:
    """Whether torch multiplies groups of FP8 rows there in one launch.

    >>> has_scaled_grouped(torch.device("cpu"))
    False
    """
    return where.type == "cuda" and hasattr(torch, "_scaled_grouped_mm") and device.capability(where) in SCALED_GROUPED


def ungroupable(a: Operand, b: Operand, experts: int) -> str | None:
    """Why torch's scaled grouped matmul refuses rows a and a stack b of E matrices, or None when it takes them.

    >>> codes = torch.ones(32, 16).to(torch.float8_e5m2)
    >>> ungroupable(Operand(codes, torch.tensor(1.0)), Operand(codes, torch.tensor(1.0)), experts=2)
    'it multiplies E4M3 by E4M3 only'
    """
    if not a.data.dtype == b.data.dtype == torch.float8_e4m3fn:
        return "it multiplies E4M3 by E4M3 only"
    if a.scaled_along_k or b.scaled_along_k or any(x.scale.dim() == 2 and x.rows != 1 for x in (a, b)):
        return "it takes a scale per row only"
    if b.data.shape[1] % ALIGNED or (len(b.data) // experts) % ALIGNED:
        return f"it wants N and K in multiples of {ALIGNED}"
    return "there are no rows" if len(a.data) == 0 else None


def scaled_grouped(a: Operand, b: Operand, transposed: bool, groups: Groups, fast: bool) -> torch.Tensor:
    """Each row of a times its expert's matrix of the stack b [E * R, C], in one launch; BF16, no bias: torch's rules.

    transposed: times the transposes, whose codes are copied (both operands lie along what is summed); per tensor only.
    """
    experts = groups.experts
    data = b.data.unflatten(0, (experts, -1))
    data = data.mT.contiguous() if transposed else data
    # A scale per tensor becomes a constant per row.
    scale_a = a.scale.reshape(-1).expand(len(a.data)).contiguous()
    scale_b = b.scale.reshape(-1, 1) if b.scale.dim() == 0 else b.scale.view(experts, -1)
    scale_b = scale_b.expand(data.shape[:2]).contiguous()
    rows = a.data.contiguous()
    return _torch.scaled_grouped_mm(
        rows, data.mT, scale_a, scale_b, offs=groups.ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def grouped_wgrad(dy_TN: torch.Tensor, x_TK: torch.Tensor, groups: Groups) -> torch.Tensor:
    """dy^T x of each group, [E, N, K]: torch's grouped matmul of tensors that `groupable` knows, 0 for no rows.

    >>> ones = torch.ones(3, 8, dtype=torch.bfloat16)
    >>> grouped_wgrad(ones, ones, Groups([2, 0, 1], ones, 3, "experts"))[:, 0, 0].tolist()
    [2.0, 0.0, 1.0]
    """
    dw_ENK = torch.nn.functional.grouped_mm(dy_TN.t(), x_TK, offs=groups.ends)
    empty_E = torch.diff(groups.ends, prepend=groups.ends.new_zeros(1)) == 0
    # Over no rows a card's kernel need not write its tile.
    return dw_ENK.masked_fill_(empty_E[:, None, None], 0)


def groupable(*tensors: torch.Tensor) -> bool:
    """Whether torch's grouped matmul takes these BF16 tensors: rows of 16 bytes, and at least one.

    >>> [groupable(torch.ones(3, columns, dtype=torch.bfloat16)) for columns in (16, 20)]
    [True, False]
    """
    where = tensors[0].device
    if where.type != "cpu" and not (where.type == "cuda" and device.capability(where) >= CAPABILITY_16_BITS):
        return False
    if not hasattr(torch.nn.functional, "grouped_mm") or any(x.dtype != torch.bfloat16 for x in tensors):
        return False
    return all(x.numel() and not size * x.itemsize % ALIGNED for x in tensors for size in x.shape[1:])
