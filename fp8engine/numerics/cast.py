"""Casts of one operand: its format, its granularity (the elements that share a scale), and where its scale comes from.

A cast is also one word, `text`: the key by which operands are kept and found, and what an operator's schema carries.

>>> print(Cast(E4M3, PerBlock(1, 128), power_of_2=True))
E4M3 per 1x128 block (power of 2)
>>> Cast(E4M3, PerBlock(1, 128), power_of_2=True).text
'e4m3 1x128 p2'
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import torch

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
        if not all(isinstance(size, int) and size >= 1 for size in (self.rows, self.cols)):
            raise InvalidRecipe(f"{self!r}: rows and columns of a block are whole numbers of 1 or more")

    def along(self, dim: int) -> PerBlock:
        """This granularity for a matmul that reduces `dim`: 1x128 along -1 becomes 128x1 along 0."""
        return self if dim == -1 else PerBlock(self.cols, self.rows)

    def __str__(self) -> str:
        return f"per {self.rows}x{self.cols} block"


Granularity = PerTensor | PerRow | PerBlock


def granularity(rows: int, cols: int) -> Granularity:
    """The granularity of groups of rows x cols elements; -1: all of that dimension.

    >>> print(granularity(-1, -1), granularity(1, -1), granularity(-1, 1), granularity(1, 128), sep=", ")
    per tensor, per row, per column, per 1x128 block
    """
    if rows == cols == -1:
        return PerTensor()
    return PerRow(-1 if cols == -1 else 0) if (rows, cols) in ((1, -1), (-1, 1)) else PerBlock(rows, cols)


@dataclass(frozen=True)
class Cast:
    """The cast of one operand: format, granularity, source of the scale.

    format: E4M3 or E5M2; BF16, FP16 or FP32 mean "no scale, only the dtype".
    scaling: "current" takes the scale from the tensor's own amax; "delayed" predicts it from earlier steps.
    power_of_2: round the scale factor down to a power of two, so that scaling itself never rounds.
    Raises InvalidRecipe for a contradiction: delayed rows, a scale for a 16-bit format.

    What follows from them: dtype, torch's.  is_fp8: whether the result has a scale.  delayed: whether that is
    predicted.  rows, cols: of a group of elements that share one; -1: all.  per_tensor: whether there is but one scale.
    text: the cast as one word.  text_of_transpose: the same for codes that lie transposed, of a matrix [K, M].
    """

    format: Format
    granularity: Granularity = field(default_factory=PerTensor)
    scaling: str = "current"
    power_of_2: bool = field(default=False, kw_only=True)

    dtype: torch.dtype = field(init=False, repr=False, compare=False)
    is_fp8: bool = field(init=False, repr=False, compare=False)
    delayed: bool = field(init=False, repr=False, compare=False)
    rows: int = field(init=False, repr=False, compare=False)
    cols: int = field(init=False, repr=False, compare=False)
    per_tensor: bool = field(init=False, repr=False, compare=False)
    text: str = field(init=False, repr=False, compare=False)
    text_of_transpose: str = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        if not isinstance(self.format, Format):
            raise InvalidRecipe(f"Cast(format={self.format!r}): want fe.E4M3, fe.E5M2, fe.BF16, fe.FP16 or fe.FP32")
        if not isinstance(self.granularity, Granularity):
            raise InvalidRecipe(f"Cast(granularity={self.granularity!r}): want fe.PerTensor(), PerRow() or PerBlock()")
        if self.scaling not in ("current", "delayed"):
            raise UnknownName("scaling", self.scaling, ["current", "delayed"])
        delayed, per_tensor = self.scaling == "delayed", isinstance(self.granularity, PerTensor)
        if delayed and not per_tensor:
            raise InvalidRecipe(
                f"delayed scaling keeps one amax per tensor; {self.granularity} needs scaling='current'"
            )
        if not self.format.is_fp8 and (delayed or self.power_of_2 or not per_tensor):
            raise InvalidRecipe(f"{self.format} is not scaled: leave granularity, scaling and power_of_2 alone")
        rows, cols = _groups(self.granularity)
        words = [self.format.name.lower()] + [f"{rows}x{cols}"] * (not per_tensor)
        text = " ".join(words + ["p2"] * self.power_of_2 + ["delayed"] * delayed)
        vars(self).update(
            dtype=self.format.dtype,
            is_fp8=self.format.is_fp8,
            delayed=delayed,
            rows=rows,
            cols=cols,
            per_tensor=per_tensor and self.format.is_fp8,
            text=text,
            text_of_transpose=f"{text} transposed",
        )  # past the frozen attributes

    def __reduce__(self):
        return Cast.parse, (self.text,)

    @staticmethod
    @functools.cache
    def parse(text: str) -> Cast:
        """The cast of which that is the `text`: format, rows x cols of a group, "p2" for powers of two, "delayed".

        Raises UnknownName for another format, InvalidRecipe for another word, and as `Cast` does.

        >>> print(Cast.parse("e4m3 1x-1 p2"), "|", Cast.parse("e5m2 delayed").scaling, "|", Cast.parse("bf16"))
        E4M3 per row (power of 2) | delayed | BF16
        """
        groups = PerTensor()
        try:
            format, *words = text.split()
            if words and words[0] not in ("p2", "delayed"):
                groups = granularity(*map(int, words.pop(0).split("x")))
            if left := [word for word in words if word not in ("p2", "delayed")]:
                raise ValueError(left[0])
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidRecipe(f"Cast.parse({text!r}): {error}; want for example 'e4m3 1x128 p2'") from error
        scaling = "delayed" if "delayed" in words else "current"
        return Cast(Format.named(format), groups, scaling, power_of_2="p2" in words)

    def scale_shape(self, m: int, k: int) -> tuple[int, ...]:
        """Shape of the scales of an m x k matrix: (), (m, 1), (1, k) or one per block.

        >>> Cast.parse("e4m3 1x128").scale_shape(3, 300)
        (3, 3)
        """
        if self.per_tensor:
            return ()
        return tuple(1 if step == -1 else -(-size // step) for size, step in ((m, self.rows), (k, self.cols)))

    def along(self, dim: int) -> Cast:
        """This cast for a matmul that reduces `dim` of the operand (-1 or 0)."""
        granularity = self.granularity.along(dim)
        return self if granularity == self.granularity else replace(self, granularity=granularity)

    def t(self) -> Cast:
        """The cast of the transposed matrix that has the same groups.

        >>> print(Cast.parse("e4m3 1x128").t())
        E4M3 per 128x1 block
        """
        return self if self.rows == self.cols else replace(self, granularity=granularity(self.cols, self.rows))

    def __str__(self) -> str:
        if not self.is_fp8:
            return f"{self.format}"
        return f"{self.format} {self.granularity}" + (" (power of 2)" if self.power_of_2 else "")


def serves_both(first: Cast, second: Cast) -> bool:
    """Whether `first`, and the same cast of the transpose, are an operand's casts for the two matmuls that read it.

    Per tensor one scale serves both; groups of rows x cols for one are groups of cols x rows for the other.

    >>> serves_both(Cast(E4M3, PerBlock(1, 128)), Cast(E4M3, PerBlock(128, 1)))
    True
    """
    return first.is_fp8 and second == first.t()


def _groups(granularity: Granularity) -> tuple[int, int]:
    if isinstance(granularity, PerBlock):
        return granularity.rows, granularity.cols
    if isinstance(granularity, PerRow):
        return (1, -1) if granularity.dim == -1 else (-1, 1)
    return -1, -1
