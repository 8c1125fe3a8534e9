"""Recipes, which hold the casts of a layer's three operands and the rules of its three matmuls.

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

import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from fp8engine.errors import InvalidRecipe, UnknownName
from fp8engine.numerics.cast import Cast, PerBlock, serves_both
from fp8engine.numerics.fields import decoded, encoded
from fp8engine.numerics.formats import BF16, E4M3, E5M2, FP32, Format

MATMULS = ("forward", "dgrad", "wgrad")
ROLES: Final = ("input", "weight", "grad_output")  # operands of a layer with a scale
OUTPUT: Final = "output"  # its result
OBJECTIVES = ("accuracy", "speed")
# SQNR in dB that auto asks of a cast, by kind of consumer.  Values within the normal range have 31.6 dB in E4M3 and
# 25.6 dB in E5M2.  Below 22 dB the shared scale costs more than the three mantissa bits do.
NEEDS = {"matmul": 22.0, "activation": 22.0}
CONSUMERS = (*NEEDS, "norm", "softmax", "residual", "loss", "output", "unknown")  # kinds (report/flow/graph.py)
MOST_DB = 31.6
OTHER_CASTS = ("weight_for_dgrad", "input_for_wgrad", "grad_output_for_wgrad")


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
    cache_weights: whether the weight's FP8 copies, one byte an element and orientation, outlive their call.
        "auto": until backward, and across calls where one version is read again (frozen, inference, accumulation);
        True: until the weight changes; False: never.  A compiled graph keeps nothing across calls.
    stored: FP8 cast under which the layer's result goes to memory, for FP8 matmuls that read it: per tensor, delayed
        (the scale is predicted over `history`); None: 16 or 32 bits.  stored_margin: its headroom in powers of two.

    What follows from them, for the path of a step: forward, dgrad, wgrad: the casts of a matmul's two operands, equal
    ones being one object.  is_fp8: whether any is FP8.  input_serves_both, weight_serves_both, grad_serves_both: the
    operand is cast once, transpose included, for the two matmuls that read it.  by_block: a scale covers a block.
    precision: "fast", "promoted" or "exact", by matmul.  predicts_weight: the weight's scale is predicted.
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
    stored: Cast | None = None
    stored_margin: int = 0
    name: str = "custom"

    forward: tuple[Cast, Cast] = field(init=False, repr=False, compare=False)
    dgrad: tuple[Cast, Cast] = field(init=False, repr=False, compare=False)
    wgrad: tuple[Cast, Cast] = field(init=False, repr=False, compare=False)
    is_fp8: bool = field(init=False, repr=False, compare=False)
    input_serves_both: bool = field(init=False, repr=False, compare=False)
    weight_serves_both: bool = field(init=False, repr=False, compare=False)
    grad_serves_both: bool = field(init=False, repr=False, compare=False)
    by_block: bool = field(init=False, repr=False, compare=False)
    precision: Mapping[str, str] = field(init=False, repr=False, compare=False)
    predicts_weight: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        for key in (*ROLES, *OTHER_CASTS):
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
        self._derive()
        for matmul in MATMULS:
            a, b = self.operands(matmul)
            if a.is_fp8 != b.is_fp8:
                raise InvalidRecipe(f"{matmul} would multiply {a} by {b}: both operands in FP8 or neither")
            if a.format == b.format == E5M2:
                raise InvalidRecipe(f"{matmul} would multiply E5M2 by E5M2, which Hopper's Tensor Cores refuse")
        for role, other, first, second in self._pairs():
            if second.delayed and second != first.along(0):
                raise InvalidRecipe(
                    f"{other}={second} beside {role}={first}: a scale is predicted for an operand's first cast alone; "
                    f"give {other} scaling='current', or make the two casts equal"
                )
        predicted = isinstance(self.stored, Cast) and self.stored.delayed and 0 <= self.stored_margin <= 32
        if self.stored is not None and not (predicted and self.input.is_fp8):
            raise InvalidRecipe(
                f"stored={self.stored!r}: a result is in FP8 before its amax is known, so want a delayed fe.Cast, "
                "stored_margin 0 to 32, and an FP8 forward"
            )

    def _derive(self) -> None:
        dy, w, x = self.grad_output, self.weight, self.input
        other_w, other_x, other_dy = self.weight_for_dgrad, self.input_for_wgrad, self.grad_output_for_wgrad
        one: dict[Cast, Cast] = {}
        x, w, dy, w_t, dy_t, x_t = (
            one.setdefault(cast, cast)
            for cast in (x, w, dy, other_w or w.along(0), other_dy or dy.along(0), other_x or x.along(0))
        )
        vars(self).update(
            forward=(x, w),
            dgrad=(dy, w_t),
            wgrad=(dy_t, x_t),
            is_fp8=any(cast.is_fp8 for cast in one),
            input_serves_both=serves_both(x, x_t),
            weight_serves_both=serves_both(w, w_t),
            grad_serves_both=serves_both(dy, dy_t),
            by_block=any(isinstance(cast.granularity, PerBlock) for cast in one),
            precision={
                name: "exact" if self.output is FP32 else "fast" if name in self.fast_accumulation else "promoted"
                for name in MATMULS
            },
            predicts_weight=w.delayed or w_t.delayed,
        )  # past the frozen attributes

    def _pairs(self) -> tuple[tuple[str, str, Cast, Cast], ...]:
        """(role, name of its other cast, cast for its first matmul, cast for its second)."""
        (x, w), (dy, w_t), (dy_t, x_t) = self.forward, self.dgrad, self.wgrad
        return (
            ("weight", "weight_for_dgrad", w, w_t),
            ("input", "input_for_wgrad", x, x_t),
            ("grad_output", "grad_output_for_wgrad", dy, dy_t),
        )

    def operands(self, matmul: str) -> tuple[Cast, Cast]:
        """The casts of the two operands of "forward" (x, w), "dgrad" (dy, w) or "wgrad" (dy, x)."""
        return getattr(self, matmul)

    @functools.cached_property
    def casts(self) -> tuple[Cast, ...]:
        """All six casts, forward's two, dgrad's two, wgrad's two."""
        return self.forward + self.dgrad + self.wgrad

    @functools.cached_property
    def fp8_share(self) -> float:
        """Share of the three matmuls' FLOPs done in FP8: 0, 1/3, 2/3 or 1."""
        return sum(self.operands(matmul)[0].is_fp8 for matmul in MATMULS) / len(MATMULS)

    @functools.cached_property
    def delayed(self) -> bool:
        """Whether any scale, an operand's or a stored result's, is predicted from earlier steps."""
        return self.stored is not None or any(cast.delayed for cast in self.casts)

    @property
    def window(self) -> int:
        """Steps of amax history that decide a predicted scale: all of `history`, or one for "most_recent"."""
        return self.history if self.algo == "max" else 1

    def __str__(self) -> str:
        parts = [f"input {self.input}", f"weight {self.weight}", f"grad_output {self.grad_output}"]
        parts += [f"{key} {getattr(self, key)}" for key in (*OTHER_CASTS, "stored") if getattr(self, key) is not None]
        if not self.is_fp8:
            return f"{self.name}: {', '.join(parts)}; no FP8."
        if any(cast.delayed for cast in self.casts):
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
        return json.dumps({f.name: encoded(getattr(self, f.name)) for f in fields(self) if f.init})

    @staticmethod
    def from_json(text: str) -> Recipe:
        """The recipe that `to_json` wrote.  Raises InvalidRecipe on a missing or unknown field."""
        try:
            parts: dict[str, Any] = {key: decoded(value) for key, value in json.loads(text).items()}
            return (Auto if "interval" in parts else Recipe)(**parts)
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise InvalidRecipe(f"not a recipe's JSON: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Auto(Recipe):
    """The recipe of `fe.auto`: every layer starts with these casts, and the statistics of its tensors may change them.

    min_sqnr_db: SQNR that a kind of consumer needs, as (kind, dB) pairs; consumers of other kinds get 16 bits.
    budget: what all forward casts together may cost the loss, relative to it; None: no limit.
    interval: training steps in which one is sampled.  freeze_after: the last step at which a decision may change.
    objective: "accuracy" takes the cheapest cast within 1 dB of the best, "speed" the cheapest that is good enough.
    plan: path of decisions to repeat, made by `Report.save_plan`; nothing is measured then.
    """

    min_sqnr_db: tuple[tuple[str, float], ...] = ()
    budget: float | None = None
    interval: int = 16
    freeze_after: int | None = None
    objective: str = "accuracy"
    plan: str | None = None

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "min_sqnr_db", tuple((str(kind), float(need)) for kind, need in self.min_sqnr_db))
        for kind, need in self.min_sqnr_db:
            if kind not in CONSUMERS:
                raise UnknownName("kind of consumer in min_sqnr_db", kind, CONSUMERS)
            if not 0 <= need <= MOST_DB:
                raise InvalidRecipe(
                    f"auto(min_sqnr_db={need:g}) for {kind}: between 0 and {MOST_DB:g} dB, the error of the best FP8 "
                    "cast there is; a layer that needs more belongs in 16 bits: overrides={name: 'bf16'}"
                )
        if self.budget is not None and not (isinstance(self.budget, (int, float)) and 0 < self.budget <= 1):
            raise InvalidRecipe(f"auto(budget={self.budget!r}): a share of the loss, above 0 and up to 1, or None")
        if not isinstance(self.interval, int) or self.interval < 1:
            raise InvalidRecipe(f"auto(interval={self.interval!r}): training steps in which one is sampled, at least 1")
        if self.freeze_after is not None and not (isinstance(self.freeze_after, int) and self.freeze_after >= 0):
            raise InvalidRecipe(f"auto(freeze_after={self.freeze_after!r}): a training step, or None for never")
        if self.objective not in OBJECTIVES:
            raise UnknownName("objective", self.objective, OBJECTIVES)
        if not isinstance(self.plan, str | None):
            raise InvalidRecipe(f"auto(plan={self.plan!r}): the path of a file of decisions, or None")


# A row is a recipe: the casts of input, weight and grad_output; then those of weight_for_dgrad, input_for_wgrad and
# grad_output_for_wgrad, "=" for the same along the other dimension; then the matmuls of fast accumulation.
TABLE = """
current        e4m3           e4m3             e5m2           =        =     =     forward dgrad
delayed        e4m3 delayed   e4m3 delayed     e5m2 delayed   =        =     =     forward dgrad
rowwise        e4m3 1x-1 p2   e4m3 1x-1 p2     e4m3 1x-1 p2   =        =     =     forward dgrad
rowwise_gw_hp  e4m3 1x-1 p2   e4m3 1x-1 p2     e4m3 1x-1 p2   e4m3 p2  bf16  bf16  forward dgrad
blockwise      e4m3 1x128 p2  e4m3 128x128 p2  e4m3 1x128 p2  =        =     =     -
mxfp8          e4m3 1x32 p2   e4m3 1x32 p2     e4m3 1x32 p2   =        =     =     -
bf16           bf16           bf16             bf16           =        =     =     -
fp16           fp16           fp16             fp16           =        =     =     -
fp32           fp32           fp32             fp32           =        =     =     -
"""


def _row(line: str) -> Recipe:
    name, *casts, fast = re.split("  +", line)
    made: dict[str, Any] = dict(
        zip((*ROLES, *OTHER_CASTS), (None if text == "=" else Cast.parse(text) for text in casts), strict=True)
    )
    matmuls = () if fast == "-" else tuple(fast.split())
    output = BF16 if made["input"].is_fp8 else made["input"].format
    return Recipe(name=name, fast_accumulation=matmuls, output=output, **made)


ROWS = {recipe.name: recipe for recipe in map(_row, TABLE.strip().splitlines())}


def current() -> Recipe:
    """Scale of every tensor from its own amax: hybrid formats, no history. The default; = torchao "tensorwise"."""
    return ROWS["current"]


def delayed(history: int = 16, margin: int = 0, algo: str = "max") -> Recipe:
    """Scale predicted from a window of amaxes, so the cast needs no pass of its own (NVIDIA's FP8 training recipe)."""
    return replace(ROWS["delayed"], history=history, margin=margin, algo=algo)


def rowwise(*, power_of_2: bool = True) -> Recipe:
    """One scale per row of every operand, all E4M3, a power of two; = torchao "rowwise".

    power_of_2: False for exact FP32 scales, under the name "rowwise_exact".

    >>> print(rowwise(power_of_2=False).name, rowwise(power_of_2=False).input)
    rowwise_exact E4M3 per row
    """
    return ROWS["rowwise"] if power_of_2 else _exact(ROWS["rowwise"])


def rowwise_gw_hp() -> Recipe:
    """As rowwise, the weight per tensor in dgrad and the weight gradient in 16 bits; = torchao "rowwise_with_gw_hp"."""
    return ROWS["rowwise_gw_hp"]


def blockwise(size: int = 128, *, power_of_2: bool = True) -> Recipe:
    """1 x size blocks of activations and gradients, size x size of weights, promoted sums (DeepSeek-V3).

    power_of_2: False for exact FP32 scales, under the name "blockwise_exact".

    >>> print(blockwise(power_of_2=False).name, blockwise(64).weight)
    blockwise_exact E4M3 per 64x64 block (power of 2)
    """
    line, square = Cast(E4M3, PerBlock(1, size), power_of_2=True), Cast(E4M3, PerBlock(size, size), power_of_2=True)
    recipe = replace(ROWS["blockwise"], input=line, weight=square, grad_output=line)
    return recipe if power_of_2 else _exact(recipe)


def mxfp8() -> Recipe:
    """1x32 blocks of every operand along what is summed, promoted sums; = NVIDIA's MXFP8, OCP Microscaling (MX) 1.0.

    A scale is the least power of two under which its block does not saturate (RCEIL), 2^-127 at least and so E8M0.

    >>> print(mxfp8().weight, "|", mxfp8().dgrad[1])
    E4M3 per 1x32 block (power of 2) | E4M3 per 32x1 block (power of 2)
    """
    return ROWS["mxfp8"]


def _exact(recipe: Recipe) -> Recipe:
    casts = {role: replace(getattr(recipe, role), power_of_2=False) for role in ROLES}
    return replace(recipe, name=f"{recipe.name}_exact", **casts)


def high_precision(format: Format = BF16) -> Recipe:
    """No FP8 in this layer: its matmuls take operands in BF16, FP16 or FP32."""
    if Cast(format).is_fp8:
        raise InvalidRecipe(f"high_precision({format}): want BF16, FP16 or FP32")
    return ROWS[format.name.lower()]


def auto(
    *,
    min_sqnr_db: float | Mapping[str, float] = 22.0,
    budget: float | None = None,
    interval: int = 16,
    freeze_after: int | None = None,
    plan: str | os.PathLike | None = None,
    objective: str = "accuracy",
) -> Auto:
    """Format and granularity of each tensor from its own statistics; starts as `current`, reports every change.

    min_sqnr_db: SQNR that matmuls need of their operands, or {kind of consumer: SQNR}; FP8 gives at most 31.6 dB.
    budget: share of the loss that all casts may cost, 0.005: 0.5 %; the loss is the model's `.loss`, or what is given
    to `fe.scaling_state(model).see_loss`.  Costs are predicted, for a mean over tokens; of a mean over sequences (a
    classifier's loss) they are too high by the tokens of a sequence, until `fe.keep_budget` measures them.
    interval: training steps in which one is sampled.  freeze_after: the last step that may change anything.
    plan: decisions to repeat instead (`fe.inspect(model).save_plan`).
    objective: "accuracy", or "speed" (predicted scales, and the cheapest cast that is good enough).
    Raises InvalidRecipe for numbers out of range, UnknownName for an objective.

    >>> print(auto(objective="speed").input.scaling, auto().interval, auto().is_fp8)
    delayed 16 True
    """
    needs = {**NEEDS, **(min_sqnr_db if isinstance(min_sqnr_db, Mapping) else {"matmul": min_sqnr_db})}
    start = ROWS["delayed" if objective == "speed" else "current"]
    return Auto(
        name="auto",
        **{role: getattr(start, role) for role in ROLES},
        min_sqnr_db=tuple(sorted(needs.items())),
        budget=budget,
        interval=interval,
        freeze_after=freeze_after,
        objective=objective,
        plan=os.fspath(plan) if isinstance(plan, os.PathLike) else plan,
    )


RECIPES = ("auto", *ROWS)


def resolve(recipe: str | Recipe) -> Recipe:
    """A Recipe from its name, or the Recipe itself.  Raises UnknownName, with the nearest name.

    >>> resolve("rowwise") == rowwise()
    True
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise UnknownName("recipe", recipe, RECIPES)
    return auto() if recipe == "auto" else ROWS[recipe]
