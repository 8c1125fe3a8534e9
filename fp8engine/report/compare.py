"""Comparison of a model under recipes with the model as it is, on real tokens.

The model runs in the precision it is in, then a copy of it under each recipe, on the same batches:

    loss      mean cross-entropy of the tokens to predict (language models)
    top-1     share of these predictions, or of a classifier's answers, that stay the same
    cosine    of each text's embedding, the mean of its tokens' last hidden states, to the model's own (encoders)
    SQNR      10 log10( sum y^2 / sum (y' - y)^2 ) dB in FP64, padding left out; y the model's own, y' under the recipe

SQNR is taken of the model's output and of each linear layer, there twice: `sqnr_db` inside the model, where errors of
earlier layers arrive with the input, and `own_sqnr_db` of the layer alone, called with the input that it has in the
model's own precision.  The layer to look at is the one of the lowest own SQNR: errors add up on the way, so a layer's
place lowers the first, and nothing but the layer's own casts the second.

fe.amp.compare asks another question: two dtypes of one model without FP8, every module.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fp8engine._torch import tree_leaves
from fp8engine.convert.select import Decision
from fp8engine.convert.swap import convert, plan
from fp8engine.errors import ConversionError, EmulationWarning
from fp8engine.numerics.recipe import Auto, Recipe, resolve
from fp8engine.report.collect import inspect
from fp8engine.report.compare_auto import fill_history, show
from fp8engine.report.compare_text import NOTHING, Batch, pooled, real_rows

ROWS = 128  # taken into FP64 at once: logits of a large vocabulary in FP64 would be the largest tensor of all


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


@dataclass(frozen=True)
class RecipeResult:
    """A model under one recipe, against itself.  None: the model has no such number.

    loss: nats a token.  top1: share of equal answers.  cosine, least_cosine: over the texts.
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

    def worst(self) -> LayerResult | None:
        """The converted layer of the lowest own SQNR, one that is not finite first; None where none was called."""
        called = [layer for layer in self.layers if layer.recipe != "none" and layer.own_sqnr_db is not None]
        return min(called, key=lambda layer: _rank(layer.own_sqnr_db), default=None)


@dataclass(frozen=True)
class Comparison:
    """A model, and what each recipe makes of it.  loss: its own.  texts, tokens: what it was run on."""

    model: str
    dtype: str
    loss: float | None
    texts: int
    tokens: int
    results: list[RecipeResult]


def compare_recipes(model: nn.Module, batches: Sequence[Batch], recipes: Sequence[str | Recipe]) -> Comparison:
    """Run `model` as it is and a converted copy under each recipe, one copy at a time, on the same batches.

    batches: from `fp8engine.report.compare_text.batches`.  Forwards only, in eval mode; the model is left as it was.
    "auto" runs a few training steps first, without an optimizer; "delayed" a forward over each of the first batches,
    which fills its history.  A 16- or 32-bit recipe that every layer computes in already gives the model itself.
    Memory: the model, one copy, and what its linear layers give for one batch.

    Raises UnknownName (a recipe), ConversionError (no batch, no linear layer that can be converted to FP8, a model
    that cannot be copied or does not run on the batches).

    >>> from fp8engine.report.compare_text import BYTES, batches
    >>> model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    >>> found = compare_recipes(model, batches(model, [list(b"some text")], BYTES), ["current", "bf16"])
    >>> [(result.recipe, result.worst().name in "13") for result in found.results]
    [('current', True), ('bf16', True)]
    >>> 0.99 < found.results[0].cosine < found.results[1].cosine < 1
    True
    """
    asked = [resolve(recipe) for recipe in recipes]
    if not batches:
        raise ConversionError("compare_recipes: no batches: give text that is not empty")
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        pairs = [_compare(model, batches, recipe) for recipe in asked]
    finally:
        for module, mode in modes:
            module.training = mode
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()})
    return Comparison(
        type(model).__name__,
        "+".join(dtypes),
        pairs[0][0] if pairs else None,
        sum(len(batch.real) for batch in batches),
        sum(int(batch.real.sum()) for batch in batches),
        [result for _, result in pairs],
    )


def _compare(model: nn.Module, batches: Sequence[Batch], recipe: Recipe) -> tuple[float | None, RecipeResult]:
    """(the model's own loss, the result)."""
    decisions = plan(model, recipe)
    if not decisions:
        raise ConversionError(f"{type(model).__name__} has no linear layers")
    twin = _converted(model, recipe, decisions)
    if isinstance(recipe, Auto):
        run_steps(twin, batches)
    elif recipe.delayed:
        fill_history(batches[: recipe.window], lambda batch: _run(twin, batch))
    layers, scores = _Layers(model, twin, decisions), _Scores()
    with torch.no_grad():
        for batch in batches:
            with layers.reference(batch):
                high = _run(model, batch)
            with layers.twin(batch):
                low = _call(twin, batch)
            layers.settle()
            scores.add(low, high, batch)
    report = inspect(twin)
    result = RecipeResult(
        recipe.name,
        scores.mean(scores.loss_low),
        scores.same / scores.answers if scores.answers else None,
        sum(scores.cosines) / len(scores.cosines) if scores.cosines else None,
        min(scores.cosines, default=None),
        scores.output.decibels(),
        report.totals["fp8_flops_share"],
        any(layer["emulated"] for layer in report.layers),
        layers.results(),
    )
    return scores.mean(scores.loss_high), result


def run_steps(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Let a model's `auto` layers decide from a few training steps without an optimizer.  Raises ConversionError."""
    show(model, batches, lambda batch: _run(model, batch))


def _converted(model: nn.Module, recipe: Recipe, decisions: list[Decision]) -> nn.Module:
    """A copy under the recipe; the copy as it is, where every layer computes in a 16- or 32-bit recipe already."""
    try:
        twin = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:  # what copy and torch raise for what cannot be copied
        raise ConversionError(f"{type(model).__name__} cannot be copied to convert the copy: {error}") from error
    if not recipe.is_fp8 and all(decision.recipe is None for decision in decisions):
        return twin
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationWarning)  # the result says it
        return convert(twin, recipe)


def _call(model: nn.Module, batch: Batch) -> Any:
    return model(**batch.inputs) if isinstance(batch.inputs, dict) else model(*batch.inputs)


def _run(model: nn.Module, batch: Batch) -> Any:
    try:
        return _call(model, batch)
    except Exception as error:  # the user's model: anything
        raise ConversionError(
            f"{type(model).__name__} cannot be run on token ids: {type(error).__name__}: {error}"
        ) from error


@dataclass
class _Noise:
    """Sums of squares of a signal and of what is added to it; `odd`: shapes did not agree."""

    signal: float = 0.0
    noise: float = 0.0
    calls: int = 0
    odd: bool = False

    def add(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.calls += 1
        if low.shape != high.shape:
            self.odd = True
            return
        for ours, theirs in zip(low.split(ROWS), high.split(ROWS), strict=True):
            want = theirs.double()
            self.signal += want.square().sum().item()
            self.noise += (ours.double() - want).square().sum().item()

    def decibels(self) -> float:
        if not math.isfinite(self.signal + self.noise):
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    def of_a_layer(self) -> float | None:
        return self.decibels() if self.calls and not self.odd else None


@dataclass
class _Scores:
    """What the outputs of all batches add up to."""

    loss_low: float = 0.0
    loss_high: float = 0.0
    predicted: int = 0
    same: int = 0
    answers: int = 0
    cosines: list[float] = field(default_factory=list)
    output: _Noise = field(default_factory=_Noise)

    def mean(self, loss: float) -> float | None:
        return loss / self.predicted if self.predicted else None

    def add(self, low: Any, high: Any, batch: Batch) -> None:
        ours, theirs = _answer(low), _answer(high)
        if batch.targets is not None:
            asked = batch.targets != NOTHING
            targets, ours, theirs = batch.targets[asked], ours[asked].float(), theirs[asked].float()
            self.loss_low += F.cross_entropy(ours, targets, reduction="sum").item()
            self.loss_high += F.cross_entropy(theirs, targets, reduction="sum").item()
            self.predicted += len(targets)
            self._agree(ours, theirs)
        elif hasattr(high, "logits"):
            self._agree(ours, theirs)
        else:
            pairs = pooled(ours.double(), batch.real), pooled(theirs.double(), batch.real)
            self.cosines += F.cosine_similarity(*pairs, dim=-1).tolist()
            ours, theirs = real_rows(ours, batch.real), real_rows(theirs, batch.real)
        self.output.add(ours, theirs)

    def _agree(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        same = ours.argmax(-1) == theirs.argmax(-1)
        self.same += int(same.sum())
        self.answers += same.numel()


class _Layers:
    """Hooks on the linear layers of both models, and the sums of each layer's noise."""

    def __init__(self, model: nn.Module, twin: nn.Module, decisions: list[Decision]):
        paths = {id(module): name for name, module in model.named_modules()}
        copies = dict(twin.named_modules())
        # Experts of one module come as several decisions; the module is what can be called.
        by_module = {id(decision.module): decision for decision in reversed(decisions)}
        self.decisions = {paths[key]: decision for key, decision in reversed(by_module.items())}
        self.modules = {name: (decision.module, copies[name]) for name, decision in self.decisions.items()}
        self.own, self.inside = defaultdict(_Noise), defaultdict(_Noise)
        self.kept: dict[str, list[torch.Tensor]] = defaultdict(list)

    def reference(self, batch: Batch) -> _Hooks:
        """Around the model's own run: keep each output, and call the converted layer with the same input."""

        def hook(name: str, twin: nn.Module):
            def keep(module, args, kwargs, output) -> None:
                high = real_rows(_tensor(output), batch.real).clone()  # a clone: a later function may work in place
                self.kept[name].append(high)
                if self.decisions[name].recipe is not None:
                    self.own[name].add(real_rows(_tensor(twin(*args, **kwargs)), batch.real), high)

            return keep

        return _Hooks([(module, hook(name, twin)) for name, (module, twin) in self.modules.items()])

    def twin(self, batch: Batch) -> _Hooks:
        """Around the copy's run: hold each output against the one kept."""

        def hook(name: str):
            def match(module, args, kwargs, output) -> None:
                low = real_rows(_tensor(output), batch.real)
                kept = self.kept[name]
                self.inside[name].add(low, kept.pop(0) if kept else low.new_empty(0))

            return match

        return _Hooks([(twin, hook(name)) for name, (_, twin) in self.modules.items()])

    def settle(self) -> None:
        """After both: a layer that the copy called less often (an expert that no token was sent to) has no SQNR."""
        for name, kept in self.kept.items():
            self.inside[name].odd |= bool(kept)
        self.kept.clear()

    def results(self) -> list[LayerResult]:
        found = []
        for name, decision in self.decisions.items():
            recipe = "none" if decision.recipe is None else decision.recipe.name
            own, inside = self.own[name].of_a_layer(), self.inside[name].of_a_layer()
            found.append(LayerResult(name, decision.shape, recipe, decision.reason, own, inside))
        return found


class _Hooks:
    """Forward hooks for the time of a `with`."""

    def __init__(self, wanted: list[tuple[nn.Module, Any]]):
        self.wanted = wanted

    def __enter__(self) -> None:
        self.handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in self.wanted]

    def __exit__(self, *error) -> None:
        for handle in self.handles:
            handle.remove()


def _tensor(output: Any) -> torch.Tensor:
    return next(value for value in tree_leaves(output) if isinstance(value, torch.Tensor)).detach()


def _answer(output: Any) -> torch.Tensor:
    for name in ("logits", "last_hidden_state"):
        if isinstance(value := getattr(output, name, None), torch.Tensor):
            return value
    return _tensor(output)


def _rank(decibels: float | None) -> float:
    return -math.inf if decibels is None or math.isnan(decibels) else decibels
