"""Results of a comparison: one value a model, a recipe and a layer, and all of them as plain values for JSON.

JSON has no Inf and no NaN: an SQNR that is no number is null there, and `note` says why ("equal", "not finite", "not
comparable").
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


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
class RecipeResult:
    """A model under one recipe, against itself.  None: the model has no such number.

    loss: nats a token.  top1: share of equal answers.  cosine, least_cosine: over the texts.
    chosen: what `auto` decided, as `chosen` counts it; None of a fixed recipe.
    """

    recipe: str
    loss: float | None
    top1: float | None
    cosine: float | None
    least_cosine: float | None
    sqnr_db: float
    fp8_flops_share: float
    emulated: bool
    layers: list[LayerResult]
    chosen: dict | None = None

    def worst_first(self) -> list[LayerResult]:
        """The converted layers that were called, by their own SQNR; those that are not finite first."""
        pairs = [(layer.own_sqnr_db, layer) for layer in self.layers if layer.recipe != "none"]
        called = [(-math.inf if math.isnan(sqnr) else sqnr, layer) for sqnr, layer in pairs if sqnr is not None]
        return [layer for _, layer in sorted(called, key=lambda pair: pair[0])]

    def worst(self) -> LayerResult | None:
        """The converted layer of the lowest own SQNR; None where none was called."""
        return next(iter(self.worst_first()), None)


@dataclass(frozen=True)
class Comparison:
    """A model, and what each recipe makes of it.  loss: its own.  texts, tokens: what it was run on."""

    model: str
    dtype: str
    loss: float | None
    texts: int
    tokens: int
    results: list[RecipeResult]

    def loss_change_percent(self, result: RecipeResult) -> float | None:
        """By how much a recipe raises the loss, in percent of the model's own; None where a loss is missing or NaN."""
        if result.loss is None or not self.loss:
            return None
        change = 100 * (result.loss / self.loss - 1)
        return change if math.isfinite(change) else None

    def to_dict(self) -> dict:
        """Everything, in types that JSON knows.

        >>> Comparison("Model", "float32", math.nan, 1, 2, []).to_dict()["loss"] is None
        True
        """
        results = []
        for result in self.results:
            worst, change = result.worst(), self.loss_change_percent(result)
            plain = {key: value for key, value in vars(result).items() if key != "layers"}
            plain |= {"loss_change_percent": change, "worst_layer": None if worst is None else worst.name}
            results.append(_finite(plain) | {"layers": [layer.to_dict() for layer in result.layers]})
        return _finite(vars(self)) | {"results": results}


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
