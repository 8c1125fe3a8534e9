"""Runs of a model in FP32 and of a converted copy on the same batches.

`auto` decides in training steps, and `delayed` predicts its scales from the amaxes of earlier steps.  Forwards without
gradients are neither, so a copy under these recipes runs a few steps on the first batches before it is compared.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fp8engine.amp.difference import Call, Difference, call, run_both
from fp8engine.amp.tensors import NARROW, cast_all
from fp8engine.auto import Controller
from fp8engine.auto.untouched import untouched
from fp8engine.convert.blocks import repeated_blocks
from fp8engine.convert.select import Decision
from fp8engine.convert.swap import convert, plan
from fp8engine.errors import ConversionError, EmulationWarning
from fp8engine.numerics.formats import BF16, word
from fp8engine.numerics.names import RecipeName
from fp8engine.numerics.recipe import MATMULS, Auto, Recipe, resolve
from fp8engine.report.collect import inspect
from fp8engine.report.compare.batches import NOTHING, Batch, real_rows
from fp8engine.report.compare.result import BlockResult, Comparison, LayerResult, RecipeResult, least
from fp8engine.report.compare.scores import ROWS, Scores, first, ratio
from fp8engine.report.flow.graph import FIRST_NUMBER
from fp8engine.report.flow.repeats import grouped
from fp8engine.report.state import controllers_of
from fp8engine.scaling.choice import Casts

STEPS = 4  # of auto: samples, whose noise fades and whose costs are averaged, and the decisions that follow


def compare_recipes(model: nn.Module, batches: Sequence[Batch], recipes: Sequence[RecipeName | Recipe]) -> Comparison:
    """Run `model` in FP32 and a converted copy of it under each recipe, one copy at a time, on the same batches.

    batches: from `batches`.  Forwards only, in eval mode; the model is left as it was.  A model in 16 bits is the one
    that is converted, and its FP32 copy what it is compared with: "bf16" is then the model itself.
    "auto" runs a few training steps first, without an optimizer; "delayed" a forward over each of the first batches,
    which fills its history.  A 16- or 32-bit recipe that every layer computes in already gives the model itself.
    Memory: the model, in 16 bits also its FP32 copy, one converted copy, and what linear layers give for one batch.

    Raises UnknownName (a recipe), ConversionError (no batch, no linear layer that can be converted to FP8, a model
    that cannot be copied or does not run on the batches).

    >>> from fp8engine.report.compare import BYTES, batches
    >>> model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    >>> found = compare_recipes(model, batches(model, [list(b"some text")], BYTES), ["current", "bf16"])
    >>> [(result.recipe, result.worst().name in "13") for result in found.results]
    [('current', True), ('bf16', True)]
    >>> 0.99 < found.results[0].least_cosine < found.results[1].least_cosine < 1
    True
    """
    asked = [resolve(recipe) for recipe in recipes]
    if not batches:
        raise ConversionError("compare_recipes: no batches: give text that is not empty")
    dtypes = sorted({word(p.dtype) for p in model.parameters() if p.is_floating_point()})
    with untouched(model):
        exact = model if dtypes == ["float32"] else _copy(model).float()
        pairs = [_compare(model, exact, batches, recipe) for recipe in asked]
    return Comparison(
        type(model).__name__,
        "+".join(dtypes),
        pairs[0][0] if pairs else None,
        sum(len(batch.real) for batch in batches),
        sum(int(batch.real.sum()) for batch in batches),
        [result for _, result in pairs],
    )


def _compare(
    model: nn.Module, exact: nn.Module, batches: Sequence[Batch], recipe: Recipe
) -> tuple[float | None, RecipeResult]:
    """(the loss in FP32, the result).  exact: the model in FP32."""
    decisions = plan(model, recipe)
    if not decisions:
        raise ConversionError(f"{type(model).__name__} has no linear layers")
    twin = _converted(model, recipe, decisions)
    if isinstance(recipe, Auto):
        run_training_steps(twin, batches)
    elif recipe.delayed:
        _fill_history(twin, batches[: recipe.window])
    layers, scores = _Layers(model, exact, twin, decisions), Scores()
    for batch in batches:
        low, high = layers.run(batch)
        scores.add(low, high, batch)
    report = inspect(twin)
    own, change = ratio(scores.high, scores.predicted), ratio(scores.change, scores.predicted)
    loss = None if own is None or change is None else own.value + change.value
    result = RecipeResult(
        recipe.name,
        loss,
        change,
        ratio(scores.same, scores.answers),
        ratio(scores.cosines, [1] * len(scores.cosines)),
        min(scores.cosines, default=None),
        scores.output.sqnr_db,
        report.totals["fp8_flops_share"],
        any(layer["emulated"] for layer in report.layers),
        *layers.results(),
        chosen(controllers_of(twin)),
    )
    return None if own is None else own.value, result


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
    values = logits if isinstance(logits, torch.Tensor) else first(output, with_grad=True)
    if batch.targets is not None and values.dim() == 3:
        return F.cross_entropy(values.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=NOTHING)
    return values.float().square().mean()


def _converted(model: nn.Module, recipe: Recipe, decisions: list[Decision]) -> nn.Module:
    """A copy under the recipe; the copy as it is, where every layer computes in a 16- or 32-bit recipe already.

    Without producers: norms and activations are the model's own in both, so that only layers differ.
    """
    twin = _copy(model)
    if not recipe.is_fp8 and all(decision.recipe is None for decision in decisions):
        return twin
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationWarning)  # the result says it
        return convert(twin, recipe, fuse=False)


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:  # what copy and torch raise for what cannot be copied
        raise ConversionError(f"{type(model).__name__} cannot be copied to convert the copy: {error}") from error


def _run(model: nn.Module, batch: Batch) -> Any:
    try:
        return call(model, batch.inputs)
    except Exception as error:  # the user's model: anything
        raise ConversionError(
            f"{type(model).__name__} cannot be run on token ids: {type(error).__name__}: {error}"
        ) from error


def chosen(controllers: Iterable[Controller]) -> dict | None:
    """Counts of the casts that `auto` chose; None where it chose nothing: a fixed recipe, a plan that is repeated.

    matmuls: for forward, dgrad and wgrad, how many layers multiply with which casts, the most frequent first.
    not_sampled: layers that have run in no training step.
    """
    matmuls: dict[str, Counter[str]] = {matmul: Counter() for matmul in MATMULS}
    layers = sampled = 0
    for controller in controllers:
        layers += len(controller.layers)
        sampled += len(controller.choices)
        for i, choice in controller.choices.items():
            for matmul, count in matmuls.items():
                casts: Casts | None = choice.used.get((i, matmul))
                # Formats of both operands, and what a scale covers.
                name = BF16 if casts is None else f"{'·'.join(dict.fromkeys(map(str, casts[1:])))}/{casts.granularity}"
                count[str(name)] += 1
    if not sampled:
        return None
    return {
        "matmuls": {key: dict(count.most_common()) for key, count in matmuls.items()},
        "not_sampled": layers - sampled,
    }


def _block_of(layer: str, blocks: Sequence[str]) -> str:
    """The name of the block that a layer is in: of a repeated one, else up to its first number, else its own.

    >>> _block_of("h.3.experts.0.up", ["h.3"]), _block_of("tower.7.up", ["h.3"]), _block_of("lm_head", ["h.3"])
    ('h.3', 'tower.7', 'lm_head')
    """
    numbered = FIRST_NUMBER.match(layer)
    return next((block for block in blocks if f"{layer}.".startswith(f"{block}.")), numbered[0] if numbered else layer)


class _Layers:
    """The linear layers of a model and of its copy, the blocks that they are in, and the noise of each.

    own: of the copy's layer called with the input that it has in FP32; inside: of layers and blocks within the copy.
    """

    def __init__(self, model: nn.Module, exact: nn.Module, twin: nn.Module, decisions: list[Decision]):
        paths = {id(module): name for name, module in model.named_modules()}
        self.exact, self.twin, self.same_dtype = exact, twin, exact is model
        self.decisions: dict[str, Decision] = {}
        for decision in decisions:  # experts of one module have a decision each, and are called as one
            self.decisions.setdefault(paths[id(decision.module)], decision)
        blocks = [paths[id(block)] for block in repeated_blocks(model)]
        self.inner = grouped((_block_of(name, blocks), name) for name in self.decisions)
        watched = dict.fromkeys([*self.decisions, *self.inner])
        self.modules, self.twins = ({name: each.get_submodule(name) for name in watched} for each in (exact, twin))
        self.own = {name: Difference() for name in self.decisions}
        self.inside = {name: Difference() for name in watched}

    def run(self, batch: Batch) -> tuple[Any, Any]:
        """(output of the copy, output of the model); the noise of every layer on the way is added."""

        def rows(call: Call) -> torch.Tensor:
            return real_rows(call.tensors()[0], batch.real)

        def keep(call: Call) -> torch.Tensor:
            name, _ = call.key
            high, decision = rows(call).clone(), self.decisions.get(name)
            if decision is not None and not (decision.recipe is None and self.same_dtype):
                self.own[name].add(rows(call._replace(output=self._alone(call))), high, ROWS)
            return high

        def match(call: Call, kept: torch.Tensor | None) -> None:
            self.inside[call.key[0]].add(rows(call), kept, ROWS)

        exact = (self.modules, lambda: _run(self.exact, batch))
        twin = (self.twins, lambda: call(self.twin, batch.inputs))
        high, low, only_high = run_both(exact, twin, keep, match)
        for name, _ in only_high:  # the copy called it less often: an expert that no token was sent to
            self.inside[name].comparable = False
        return low, high

    def _alone(self, call: Call) -> Any:
        """What the copy's layer gives for the FP32 input of a call, rounded to the copy's dtype."""
        twin = self.twins[call.key[0]]
        dtype = next((p.dtype for p in twin.parameters() if p.is_floating_point()), torch.float32)
        args, kwargs = cast_all((call.args, call.kwargs), NARROW, dtype)
        return twin(*args, **kwargs)

    def results(self) -> tuple[list[LayerResult], list[BlockResult]]:
        """The layers, and the blocks in the model's order, each with its worst layer's own SQNR."""
        own = {name: noise.sqnr_db_or_none for name, noise in self.own.items()}
        inside = {name: noise.sqnr_db_or_none for name, noise in self.inside.items()}
        layers = []
        for name, decision in self.decisions.items():
            recipe = "none" if decision.recipe is None else decision.recipe.name
            layers.append(LayerResult(name, decision.shape, recipe, decision.reason, own[name], inside[name]))
        inner = self.inner.items()
        return layers, [BlockResult(name, least(own[layer] for layer in those), inside[name]) for name, those in inner]
