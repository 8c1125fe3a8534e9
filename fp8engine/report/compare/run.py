"""Runs of a model and of a converted copy on the same batches, and the numbers that their outputs add up to.

`auto` decides in training steps, and `delayed` predicts its scales from the amaxes of earlier steps.  Forwards without
gradients are neither, so a copy under these recipes runs a few steps on the first batches before it is compared.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fp8engine._torch import tree_leaves
from fp8engine.amp.difference import Call, Difference, on_calls
from fp8engine.convert.select import Decision
from fp8engine.convert.swap import convert, plan
from fp8engine.errors import ConversionError, EmulationWarning
from fp8engine.numerics.formats import word
from fp8engine.numerics.recipe import Auto, Recipe, resolve
from fp8engine.report.collect import inspect
from fp8engine.report.compare.batches import NOTHING, Batch, pooled, real_rows
from fp8engine.report.compare.chosen import chosen
from fp8engine.report.compare.result import Comparison, LayerResult, RecipeResult

ROWS = 128  # taken into FP64 at once: logits of a large vocabulary in FP64 would be the largest tensor of all
STEPS = 4  # of auto: samples, whose noise fades and whose costs are averaged, and the decisions that follow


def compare_recipes(model: nn.Module, batches: Sequence[Batch], recipes: Sequence[str | Recipe]) -> Comparison:
    """Run `model` as it is and a converted copy under each recipe, one copy at a time, on the same batches.

    batches: from `batches`.  Forwards only, in eval mode; the model is left as it was.
    "auto" runs a few training steps first, without an optimizer; "delayed" a forward over each of the first batches,
    which fills its history.  A 16- or 32-bit recipe that every layer computes in already gives the model itself.
    Memory: the model, one copy, and what its linear layers give for one batch.

    Raises UnknownName (a recipe), ConversionError (no batch, no linear layer that can be converted to FP8, a model
    that cannot be copied or does not run on the batches).

    >>> from fp8engine.report.compare import BYTES, batches
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
    dtypes = sorted({word(p.dtype) for p in model.parameters() if p.is_floating_point()})
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
        run_training_steps(twin, batches)
    elif recipe.delayed:
        _fill_history(twin, batches[: recipe.window])
    layers, scores = _Layers(model, twin, decisions), _Scores()
    with torch.no_grad():
        for batch in batches:
            low, high = layers.run(batch)
            scores.add(low, high, batch)
    report = inspect(twin)
    result = RecipeResult(
        recipe.name,
        scores.mean(scores.loss_low),
        scores.same / scores.answers if scores.answers else None,
        sum(scores.cosines) / len(scores.cosines) if scores.cosines else None,
        min(scores.cosines, default=None),
        scores.output.found.sqnr_db,
        report.totals["fp8_flops_share"],
        any(layer["emulated"] for layer in report.layers),
        layers.results(),
        chosen(report.controllers),
    )
    return scores.mean(scores.loss_high), result


def run_training_steps(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Let a model's `auto` layers decide from a few forwards and backwards without an optimizer.

    The loss is the cross-entropy where there are targets, else the mean square of the output.  Weights do not change;
    a parameter that takes no gradient gets one meanwhile, so that gradients are sampled too, and all are thrown away.
    Raises ConversionError for a model that does not run on the batches.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            for step in range(STEPS):
                batch = batches[step % len(batches)]
                _loss(_run(model, batch), batch).backward()
                model.zero_grad(set_to_none=True)
            _run(model, batches[0])  # a step begins: what the last one showed is decided on
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _fill_history(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Enter each batch's amaxes into the windows of a model under delayed scaling."""
    with torch.enable_grad():  # without gradients nothing is recorded
        for batch in [*batches, batches[0]]:  # a step's amaxes are entered when the next step begins
            _run(model, batch)


def _loss(output: Any, batch: Batch) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    values = logits if isinstance(logits, torch.Tensor) else _first(output, with_grad=True)
    if batch.targets is not None and values.dim() == 3:
        return F.cross_entropy(values.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=NOTHING)
    return values.float().square().mean()


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
    """The difference of one tensor between the two runs, over all batches.  comparable: shapes agreed so far."""

    found: Difference = field(default_factory=Difference)
    calls: int = 0
    comparable: bool = True

    def add(self, low: torch.Tensor, high: torch.Tensor | None) -> None:
        self.calls += 1
        if high is None or low.shape != high.shape:
            self.comparable = False
            return
        self.found.add(low, high, ROWS)

    def sqnr_db(self) -> float | None:
        return self.found.sqnr_db if self.calls and self.comparable else None


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
    """The linear layers of a model and of its copy, and the noise of each.

    own: of the copy's layer called with the input of the model's; inside: of the copy's layer within the copy.
    """

    def __init__(self, model: nn.Module, twin: nn.Module, decisions: list[Decision]):
        paths = {id(module): name for name, module in model.named_modules()}
        twins = dict(twin.named_modules())
        self.model, self.twin = model, twin
        self.decisions: dict[str, Decision] = {}
        for decision in decisions:  # experts of one module have a decision each, and are called as one
            self.decisions.setdefault(paths[id(decision.module)], decision)
        self.modules = {name: decision.module for name, decision in self.decisions.items()}
        self.twins = {name: twins[name] for name in self.decisions}
        self.own = {name: _Noise() for name in self.decisions}
        self.inside = {name: _Noise() for name in self.decisions}

    def run(self, batch: Batch) -> tuple[Any, Any]:
        """(output of the copy, output of the model); the noise of every layer on the way is added."""
        reference: dict[tuple[str, int], torch.Tensor] = {}

        def rows(call: Call) -> torch.Tensor:
            return real_rows(call.tensors()[0], batch.real)

        def keep(call: Call) -> None:
            name, _ = call.key
            high = reference[call.key] = rows(call).clone()  # a clone: a later function may work in place
            if self.decisions[name].recipe is not None:
                alone = call._replace(output=self.twins[name](*call.args, **call.kwargs))
                self.own[name].add(rows(alone), high)

        def match(call: Call) -> None:
            self.inside[call.key[0]].add(rows(call), reference.pop(call.key, None))

        with on_calls(self.modules, keep):
            high = _run(self.model, batch)
        with on_calls(self.twins, match):
            low = _call(self.twin, batch)
        for name, _ in reference:  # the copy called it less often: an expert that no token was sent to
            self.inside[name].comparable = False
        return low, high

    def results(self) -> list[LayerResult]:
        found = []
        for name, decision in self.decisions.items():
            recipe = "none" if decision.recipe is None else decision.recipe.name
            own, inside = self.own[name].sqnr_db(), self.inside[name].sqnr_db()
            found.append(LayerResult(name, decision.shape, recipe, decision.reason, own, inside))
        return found


def _first(output: Any, *, with_grad: bool = False) -> torch.Tensor:
    tensors = (value for value in tree_leaves(output) if isinstance(value, torch.Tensor))
    found = next((tensor for tensor in tensors if tensor.requires_grad or not with_grad), None)
    if found is None:
        wanted = "tensor that has a gradient" if with_grad else "tensor"
        raise ConversionError(f"the model returns no {wanted}: the comparison needs one in its output")
    return found


def _answer(output: Any) -> torch.Tensor:
    for name in ("logits", "last_hidden_state"):
        if isinstance(value := getattr(output, name, None), torch.Tensor):
            return value
    return _first(output)
