"""What precision a layer computes in: a Recipe is three operands' Casts and the rules of its three matmuls.

    forward   y[M, N]  = x[M, K]    @ w[N, K]^T        reduces K: x along -1, w along -1
    dgrad     dx[M, K] = dy[M, N]   @ w[N, K]          reduces N: dy along -1, w along 0
    wgrad     dw[N, K] = dy[M, N]^T @ x[M, K]          reduces M: dy along 0, x along 0

A cast per row or per block must put its scales along the dimension that is reduced, so each operand is cast
once for each of its two matmuls; a cast per tensor serves both.  Recipes are frozen, comparable and hashable.

>>> print(current())
current: input E4M3 per tensor, weight E4M3 per tensor, grad_output E5M2 per tensor;
scales from each tensor itself; fast accumulation in forward and dgrad, promoted in wgrad.
>>> Recipe.from_json(delayed(history=4).to_json()) == delayed(history=4)
True
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fp8engine.errors import InvalidRecipe, UnknownName
from fp8engine.formats import BF16, E4M3, E5M2, FP16, FP32, Format

MATMULS = ("forward", "dgrad", "wgrad")
OTHER_CASTS = ("weight_for_dgrad", "input_for_wgrad", "grad_output_for_wgrad")


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole tensor."""

    def along(self, dim: int) -> PerTensor:
        """The same: one scale fits a reduction along any dimension."""
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
    """How one operand is brought into a format: format, granularity, where the scale comes from.

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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The precision of one Linear.

    name: what reports print.
    input, weight, grad_output: casts for forward (x, w) and dgrad (dy); x and dy are cast again along dim 0 for wgrad.
    weight_for_dgrad, input_for_wgrad, grad_output_for_wgrad: another cast for that matmul; None: the same, along 0.
    history, margin, algo: delayed scaling's window in steps, headroom in powers of two, and "max" or "most_recent".
    fast_accumulation: the matmuls that may keep Hopper's ~13-bit partial sums; the others promote to FP32.
    output: format in which a matmul's result leaves the Tensor Core when the layer itself is FP32; BF16 as on
        hardware under autocast (one rounding, relative error up to 2^-8), FP32 for none.  A 16-bit layer uses its own.
    cache_weights: whether the weight's FP8 copies, one byte an element and orientation, outlive what reads them.
        "auto": until backward, and across calls where one version is read again (frozen, inference, accumulation);
        True: as long as the weight stands; False: never.  A compiled graph keeps nothing across calls.
    """

    input: Cast
    weight: Cast
    grad_output: Cast
    weight_for_dgrad: Cast | None = None
    input_for_wgrad: Cast | None = None
    grad_output_for_wgrad: Cast | None = None
    history: int = 16
    margin: int = 0
    algo: str = "max"
    fast_accumulation: tuple[str, ...] = ("forward", "dgrad")
    output: Format = BF16
    cache_weights: bool | str = "auto"
    name: str = "custom"

    def __post_init__(self):
        for key in ("input", "weight", "grad_output", *OTHER_CASTS):
            value = getattr(self, key)
            if not isinstance(value, Cast) and not (value is None and key in OTHER_CASTS):
                raise InvalidRecipe(f"Recipe({key}={value!r}): want a fe.Cast")
        if not isinstance(self.history, int) or self.history < 1:
            raise InvalidRecipe(f"history={self.history!r}: the window holds at least one step")
        if not isinstance(self.margin, int) or not -32 <= self.margin <= 32:
            raise InvalidRecipe(f"margin={self.margin!r}: powers of two between -32 and 32")
        if self.algo not in ("max", "most_recent"):
            raise UnknownName("amax algorithm", self.algo, ["max", "most_recent"])
        object.__setattr__(self, "fast_accumulation", tuple(self.fast_accumulation))
        for matmul in self.fast_accumulation:
            if matmul not in MATMULS:
                raise UnknownName("matmul", matmul, MATMULS)
        if not isinstance(self.output, Format) or self.output.is_fp8:
            raise InvalidRecipe(f"output={self.output!r}: FP8 needs a consumer that reads it; want BF16, FP16 or FP32")
        if self.cache_weights not in ("auto", True, False):
            raise UnknownName("cache_weights", self.cache_weights, ["auto", "True", "False"])
        for matmul in MATMULS:
            a, b = self.operands(matmul)
            if a.is_fp8 != b.is_fp8:
                raise InvalidRecipe(f"{matmul} would multiply {a} by {b}: both operands in FP8 or neither")
            if a.format == b.format == E5M2:
                raise InvalidRecipe(f"{matmul} would multiply E5M2 by E5M2, which Hopper's Tensor Cores refuse")

    def operands(self, matmul: str) -> tuple[Cast, Cast]:
        """The casts of the two operands of "forward" (x, w), "dgrad" (dy, w) or "wgrad" (dy, x)."""
        if matmul == "forward":
            return self.input, self.weight
        if matmul == "dgrad":
            return self.grad_output, self.weight_for_dgrad or self.weight.along(0)
        return (
            self.grad_output_for_wgrad or self.grad_output.along(0),
            self.input_for_wgrad or self.input.along(0),
        )

    @property
    def casts(self) -> tuple[Cast, ...]:
        """All six casts, forward's two, dgrad's two, wgrad's two."""
        return tuple(cast for matmul in MATMULS for cast in self.operands(matmul))

    @property
    def fp8_share(self) -> float:
        """Share of the three matmuls' FLOPs done in FP8: 0, 1/3, 2/3 or 1."""
        return sum(self.operands(matmul)[0].is_fp8 for matmul in MATMULS) / len(MATMULS)

    @property
    def is_fp8(self) -> bool:
        """Whether any matmul is in FP8."""
        return self.fp8_share > 0

    @property
    def delayed(self) -> bool:
        """Whether any operand's scale is predicted from earlier steps."""
        return any(cast.delayed for cast in self.casts)

    @property
    def window(self) -> int:
        """Steps of amax history that decide a predicted scale: "most_recent" looks at one."""
        return self.history if self.algo == "max" else 1

    def __str__(self) -> str:
        parts = [f"input {self.input}", f"weight {self.weight}", f"grad_output {self.grad_output}"]
        parts += [f"{key} {getattr(self, key)}" for key in OTHER_CASTS if getattr(self, key) is not None]
        if not self.is_fp8:
            return f"{self.name}: {', '.join(parts)}; no FP8."
        if self.delayed:
            window = f"the largest of {self.history} steps" if self.algo == "max" else "the last step"
            scales = f"scales predicted from {window}, margin 2^{self.margin}"
        else:
            scales = "scales from each tensor itself"
        fast = " and ".join(self.fast_accumulation)
        slow = " and ".join(matmul for matmul in MATMULS if matmul not in self.fast_accumulation)
        accumulation = [f"fast accumulation in {fast}"] * bool(fast) + [f"promoted in {slow}"] * bool(slow)
        return f"{self.name}: {', '.join(parts)}; {scales}; {', '.join(accumulation)}."

    def to_json(self) -> str:
        """One JSON object; `Recipe.from_json` gives back an equal recipe."""
        return json.dumps({f.name: _encode(getattr(self, f.name)) for f in fields(self)})

    @staticmethod
    def from_json(text: str) -> Recipe:
        """The recipe that `to_json` wrote.  Raises InvalidRecipe on a missing or unknown field."""
        try:
            parts: dict[str, Any] = {key: _decode(value) for key, value in json.loads(text).items()}
            return Recipe(**parts)
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise InvalidRecipe(f"not a recipe's JSON: {error}") from error


def _encode(value):
    if isinstance(value, Format):
        return {"format": value.name}
    if isinstance(value, Cast):
        kind = {"kind": type(value.granularity).__name__, **vars(value.granularity)}
        return {
            "cast": value.format.name,
            "granularity": kind,
            "scaling": value.scaling,
            "power_of_2": value.power_of_2,
        }
    return list(value) if isinstance(value, tuple) else value


def _decode(value):
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict):
        return value
    if "format" in value:
        return Format.named(value["format"])
    kind = dict(value["granularity"])
    granularity = {"PerTensor": PerTensor, "PerRow": PerRow, "PerBlock": PerBlock}[kind.pop("kind")](**kind)
    return Cast(Format.named(value["cast"]), granularity, value["scaling"], power_of_2=value["power_of_2"])


def current() -> Recipe:
    """Scale of every tensor from its own amax: hybrid formats, no history. The default; = torchao "tensorwise"."""
    return Recipe(name="current", input=Cast(E4M3), weight=Cast(E4M3), grad_output=Cast(E5M2))


def delayed(history: int = 16, margin: int = 0, algo: str = "max") -> Recipe:
    """Scale predicted from a window of amaxes, so the cast needs no pass of its own (NVIDIA's FP8 training recipe)."""
    cast, grad = Cast(E4M3, PerTensor(), "delayed"), Cast(E5M2, PerTensor(), "delayed")
    return Recipe(name="delayed", input=cast, weight=cast, grad_output=grad, history=history, margin=margin, algo=algo)


def rowwise() -> Recipe:
    """One power-of-two scale per row of every operand, all E4M3; = torchao "rowwise"."""
    cast = Cast(E4M3, PerRow(), power_of_2=True)
    return Recipe(name="rowwise", input=cast, weight=cast, grad_output=cast)


def rowwise_gw_hp() -> Recipe:
    """As rowwise, the weight per tensor in dgrad and the weight gradient in 16 bits; = torchao "rowwise_with_gw_hp"."""
    cast = Cast(E4M3, PerRow(), power_of_2=True)
    return Recipe(
        name="rowwise_gw_hp",
        input=cast,
        weight=cast,
        grad_output=cast,
        weight_for_dgrad=Cast(E4M3, power_of_2=True),
        input_for_wgrad=Cast(BF16),
        grad_output_for_wgrad=Cast(BF16),
    )


def blockwise(size: int = 128) -> Recipe:
    """1 x size blocks of activations and gradients, size x size of weights, promoted sums (DeepSeek-V3)."""
    line = Cast(E4M3, PerBlock(1, size), power_of_2=True)
    square = Cast(E4M3, PerBlock(size, size), power_of_2=True)
    return Recipe(name="blockwise", input=line, weight=square, grad_output=line, fast_accumulation=())


def high_precision(format: Format = BF16) -> Recipe:
    """No FP8 in this layer: its matmuls take operands in BF16, FP16 or FP32."""
    cast = Cast(format)
    if cast.is_fp8:
        raise InvalidRecipe(f"high_precision({format}): want BF16, FP16 or FP32")
    return Recipe(
        name=format.name.lower(), input=cast, weight=cast, grad_output=cast, fast_accumulation=(), output=format
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "current": current,
    "delayed": delayed,
    "rowwise": rowwise,
    "rowwise_gw_hp": rowwise_gw_hp,
    "blockwise": blockwise,
    "bf16": lambda: high_precision(BF16),
    "fp16": lambda: high_precision(FP16),
    "fp32": lambda: high_precision(FP32),
}


def resolve(recipe: str | Recipe) -> Recipe:
    """A Recipe from its name, or the Recipe itself.  Raises UnknownName, with the nearest name.

    >>> resolve("rowwise") == rowwise()
    True
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise UnknownName("recipe", recipe, RECIPES)
    return RECIPES[recipe]()
