"""Results of a comparison: one value a model, a recipe, a block and a layer, and all of them as plain values for JSON.

JSON has no Inf and no NaN: an SQNR that is no number is null there, and `note` says why ("equal", "not finite", "not
comparable").
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from fp8engine.report.compare.scores import Estimate


@dataclass(frozen=True)
class LayerResult:
    """One linear layer under a recipe.  recipe "none": left alone, for `reason`.

    own_sqnr_db, sqnr_db: inf where nothing differs, NaN where a value is not finite, None where it was never called
    or the two runs called it with different numbers of rows.
    """

    name: str
    shape: tuple[int, ...]
    recipe: str
    reason: str
    own_sqnr_db: float | None
    sqnr_db: float | None

    def to_dict(self) -> dict:
        """The fields, and a note on each SQNR that is no number."""
        notes = {
            "own_sqnr_db": note(self.own_sqnr_db) if self.recipe != "none" else "",
            "sqnr_db": note(self.sqnr_db),
        }
        told = "; ".join(f"{key}: {why}" for key, why in notes.items() if why)
        return _finite(asdict(self)) | {"shape": list(self.shape), "note": told}


@dataclass(frozen=True)
class BlockResult:
    """A transformer block under a recipe: the lowest own SQNR of its layers, and the SQNR of its output in the model.

    inf, NaN and None as in LayerResult; own_sqnr_db is None also where every layer is left alone.
    """

    name: str
    own_sqnr_db: float | None
    sqnr_db: float | None


@dataclass(frozen=True)
class RecipeResult:
    """A model under one recipe, against itself in FP32.  None: the model has no such number.

    loss: nats a token; change: of it, paired text by text.  top1: share of equal answers.  cosine: over the texts, the
    lowest is least_cosine.  chosen: what `auto` decided, as `chosen` counts it; None of a fixed recipe.
    """

    recipe: str
    loss: float | None
    change: Estimate | None
    top1: Estimate | None
    cosine: Estimate | None
    least_cosine: float | None
    sqnr_db: float
    fp8_flops_share: float
    emulated: bool
    layers: list[LayerResult]
    blocks: list[BlockResult]
    chosen: dict | None = None

    def worst_first(self) -> list[LayerResult]:
        """The converted layers that were called, the lowest own SQNR first, and NaN before all."""
        called = [layer for layer in self.layers if layer.recipe != "none" and layer.own_sqnr_db is not None]
        return sorted(called, key=lambda layer: order(layer.own_sqnr_db))

    def worst(self) -> LayerResult | None:
        """The converted layer of the lowest own SQNR; None where none was called."""
        return next(iter(self.worst_first()), None)


@dataclass(frozen=True)
class Comparison:
    """A model, and what each recipe makes of it.  loss: its own in FP32.  texts, tokens: what it was run on."""

    model: str
    dtype: str
    loss: float | None
    texts: int
    tokens: int
    results: list[RecipeResult]

    def change_percent(self, result: RecipeResult) -> Estimate | None:
        """By how much a recipe raises the loss, in percent of the loss in FP32; None where there is no loss."""
        return None if result.change is None or not self.loss else result.change.times(100 / self.loss)

    def to_dict(self) -> dict:
        """Everything, in types that JSON knows; an estimate `x` is `x` and `x_error`.

        >>> Comparison("Model", "float32", math.nan, 1, 2, []).to_dict()["loss"] is None
        True
        """
        results = []
        for result in self.results:
            worst = result.worst()
            plain = vars(result) | {"change_percent": self.change_percent(result)}
            for key in ("change", "change_percent", "top1", "cosine"):
                plain[key], plain[f"{key}_error"] = plain[key] or (None, None)
            plain |= {"worst_layer": None if worst is None else worst.name}
            plain |= {"blocks": [_finite(asdict(block)) for block in result.blocks]}
            results.append(_finite(plain) | {"layers": [layer.to_dict() for layer in result.layers]})
        return _finite(vars(self)) | {"results": results}


def least(sqnrs: Iterable[float | None]) -> float | None:
    """The worst SQNR, NaN before all numbers; None where there is none.

    >>> least([31.0, None, 29.0]), least([31.0, math.nan]), least([None])
    (29.0, nan, None)
    """
    return min((sqnr for sqnr in sqnrs if sqnr is not None), key=order, default=None)


def order(sqnr: float | None) -> float:
    """What SQNRs are sorted by: NaN and None come before every number."""
    return -math.inf if sqnr is None or math.isnan(sqnr) else sqnr


def note(sqnr_db: float | None) -> str:
    """Why an SQNR is no number; "" for one that is.

    >>> note(31.4), note(math.inf), note(math.nan), note(None)
    ('', 'equal', 'not finite', 'not comparable')
    """
    if sqnr_db is None:
        return "not comparable"
    if math.isnan(sqnr_db):
        return "not finite"
    return "" if math.isfinite(sqnr_db) else "equal" if sqnr_db > 0 else "noise without a signal"


def _finite(values: dict) -> dict:
    """The values, with None for a float that JSON cannot write."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
