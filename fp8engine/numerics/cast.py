"""Casts of one operand: its format, its granularity (the elements that share a scale), and where its scale comes from.

>>> print(Cast(E4M3, PerBlock(1, 128), power_of_2=True))
E4M3 per 1x128 block (power of 2)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fp8engine.errors import InvalidRecipe, UnknownName
from fp8engine.numerics.formats import E4M3, Format  # noqa: F401 - E4M3: for the example above


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole tensor."""

    def along(self, dim: int) -> PerTensor:
        """Itself: one scale for the tensor fits a reduction along any dimension."""
        return self

    def __str__(self) -> str:
        return "per tensor"


@dataclass(frozen=True)
class PerRow:
    """One scale per row of a 2-D operand (dim=-1), or per column (dim=0): `dim` is the dimension reduced."""

    dim: int = -1

    def __post_init__(self):
        if self.dim not in (-1, 0):
            raise InvalidRecipe(f"PerRow(dim={self.dim}): dim is the reduced dimension of a 2-D operand, -1 or 0")

    def along(self, dim: int) -> PerRow:
        """This granularity for a matmul that reduces `dim` (-1 or 0)."""
        return PerRow(dim)

    def __str__(self) -> str:
        return "per row" if self.dim == -1 else "per column"


@dataclass(frozen=True)
class PerBlock:
    """One scale per block of rows x cols; DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) uses 1x128 and 128x128."""

    rows: int
    cols: int

    def __post_init__(self):
        if min(self.rows, self.cols) < 1:
            raise InvalidRecipe(f"{self!r}: a block has at least one row and one column")

    def along(self, dim: int) -> PerBlock:
        """This granularity for a matmul that reduces `dim`: 1x128 along -1 becomes 128x1 along 0."""
        return self if dim == -1 else PerBlock(self.cols, self.rows)

    def __str__(self) -> str:
        return f"per {self.rows}x{self.cols} block"


Granularity = PerTensor | PerRow | PerBlock


@dataclass(frozen=True)
class Cast:
    """The cast of one operand: format, granularity, source of the scale.

    format: E4M3 or E5M2; BF16, FP16 or FP32 mean "no scale, only the dtype".
    scaling: "current" takes the scale from the tensor's own amax; "delayed" predicts it from earlier steps.
    power_of_2: round the scale factor down to a power of two, so that scaling itself never rounds.
    Raises InvalidRecipe for a contradiction: delayed rows, a scale for a 16-bit format.
    """

    format: Format
    granularity: Granularity = field(default_factory=PerTensor)
    scaling: str = "current"
    power_of_2: bool = field(default=False, kw_only=True)

    def __post_init__(self):
        if not isinstance(self.format, Format):
            raise InvalidRecipe(f"Cast(format={self.format!r}): want fe.E4M3, fe.E5M2, fe.BF16, fe.FP16 or fe.FP32")
        if not isinstance(self.granularity, Granularity):
            raise InvalidRecipe(f"Cast(granularity={self.granularity!r}): want fe.PerTensor(), PerRow() or PerBlock()")
        if self.scaling not in ("current", "delayed"):
            raise UnknownName("scaling", self.scaling, ["current", "delayed"])
        if self.delayed and not isinstance(self.granularity, PerTensor):
            raise InvalidRecipe(
                f"delayed scaling keeps one amax per tensor; {self.granularity} needs scaling='current'"
            )
        if not self.is_fp8 and (self.delayed or self.power_of_2 or not isinstance(self.granularity, PerTensor)):
            raise InvalidRecipe(f"{self.format} is not scaled: leave granularity, scaling and power_of_2 alone")

    @property
    def is_fp8(self) -> bool:
        """Whether the cast produces FP8 data with a scale."""
        return self.format.is_fp8

    @property
    def delayed(self) -> bool:
        """Whether the scale is predicted from earlier steps."""
        return self.scaling == "delayed"

    def along(self, dim: int) -> Cast:
        """This cast for a matmul that reduces `dim` of the operand (-1 or 0)."""
        granularity = self.granularity.along(dim)
        return self if granularity == self.granularity else replace(self, granularity=granularity)

    def __str__(self) -> str:
        if not self.is_fp8:
            return f"{self.format}"
        return f"{self.format} {self.granularity}" + (" (power of 2)" if self.power_of_2 else "")
