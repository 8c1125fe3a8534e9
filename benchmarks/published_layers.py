"""Published speed-ups of whole linear layers and of models beside ops/cost.py's; published.py prints them.

    layer    nn.Linear's forward and backward in BF16 over the same in FP8, predicted / measured - 1.  A benchmark of
             y.sum() that never clears its gradients, as torchao's, has the bytes of that beside it, in both
    model    the rest of a step is what the measured BF16 step takes beyond its predicted linear layers, and FP8 leaves
             it as it is: measured BF16 step / (rest + linear layers in FP8), predicted / measured - 1

Matmuls are predicted as ours; casts move the bytes that ours move, at the share of the bandwidth that is published of
other people's kernels and not at that of ours.  No parameter was fitted to any of these rows.  published_layers.json
has them, each with its source.  Left out are rows whose card or sizes are not said, runs with tensor parallelism (FP8
changes what they send), and matmuls of zeros.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from fp8engine.numerics.cards import CARDS, Card
from fp8engine.numerics.cast import PerBlock
from fp8engine.numerics.matmul_time import START, library
from fp8engine.numerics.recipe import MATMULS, Recipe, resolve
from fp8engine.ops.cost import OTHERS, layer_time
from fp8engine.ops.launches import Step, backward, forward

TABLES = Path(__file__).with_name("published_layers.json")
KINDS = {"layer": "a linear layer, forward and backward", "model": "a block, a model"}
MODELS = {"llama-3-8b": [(64, 4096, 4096), (64, 1024, 4096), (64, 14336, 4096), (32, 4096, 14336)]}  # count, N, K


class Layers(NamedTuple):
    """Linear layers that were timed together.  measured, predicted: how much faster than in BF16."""

    table: str
    kind: str
    shapes: tuple[tuple[int, int, int], ...]
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def card_of(table: dict) -> Card:
    """The card of a published table, with the limits that the table names."""
    card = CARDS[table["card"]]
    return dataclasses.replace(card, watts=table["watts"], memory=table.get("memory", card.memory))


def rows() -> list[Layers]:
    """Every row of published_layers.json, predicted."""
    return [_predicted(table, row) for table in json.loads(TABLES.read_text()) for row in table["rows"]]


def _predicted(table: dict, row: dict) -> Layers:
    if "model" in table:
        counted = [(count, (table["tokens"], n, k)) for count, n, k in MODELS[table["model"]]]
        measured = row["tps"] / row["bf16_tps"]
        step = table["tokens"] / row["bf16_tps"]
    else:
        counted = [(1, tuple(shape)) for shape in row["layers"]]
        measured = row["bf16_us"] / row["us"]
        step = 1e-6 * row["bf16_us"]
    bf16, fp8 = _seconds(table, counted)
    predicted = step / (step - bf16 + fp8) if table["kind"] == "model" else bf16 / fp8
    return Layers(table["id"], KINDS[table["kind"]], tuple(shape for _, shape in counted), measured, predicted)


def _seconds(table: dict, counted: list[tuple[int, tuple[int, int, int]]]) -> tuple[float, float]:
    """Of all linear layers, in BF16 and under the recipe."""
    card, recipe, again = card_of(table), resolve(table["recipe"]), table.get("again", 0.0)
    bf16 = fp8 = 0.0
    for count, (m, n, k) in counted:
        found = layer_time(recipe, m, n, k, card)
        beside = _of_sum(m, n, k, card) if table.get("sum") else 0.0
        bf16 += count * (found.bf16 + beside + again * library(card, "fast", 16, (m, n, k)).seconds)
        matmuls = sum(one.seconds for one in found.matmuls.values())
        fp8 += count * (_casts(recipe, m, n, k, card) + matmuls + beside + again * found.matmuls["forward"].seconds)
    return bf16, fp8


def _casts(recipe: Recipe, m: int, n: int, k: int, card: Card) -> float:
    """Seconds of all launches but matmuls."""
    by_block = isinstance(recipe.forward[0].granularity, PerBlock)
    step = Step(recipe, m, n, k, ours=MATMULS if by_block else ())
    others = (launch for launch in forward(step) + backward(step) if not launch.kernel.startswith("matmul"))
    return sum(START + launch.bytes / (OTHERS * card.memory) for launch in others)


def _of_sum(m: int, n: int, k: int, card: Card) -> float:
    """Seconds of what y.sum().backward() adds: y read, dy written, and dx and dw added to the last call's, in BF16."""
    return (4 * m * n + 6 * (m * k + n * k)) / (OTHERS * card.memory)
