"""What a layer asks of the driver: launches of a forward and a backward under each recipe, and tensor maps encoded.

Counted at the emulated card's driver, by Triton's own launcher; small operators of torch (copies of a tensor in another
dtype) are not in it.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulator.card import Card
from emulator.launch import Done, Launch

import fp8engine as fe
from benchmarks.checks.operands import differs, exact, integers
from fp8engine.kernels import encoded
from fp8engine.kernels.matmul_fp8 import matmul_fp8
from fp8engine.kernels.tuning import Config
from fp8engine.numerics.formats import E4M3, E5M2
from fp8engine.numerics.recipe import RECIPES, resolve
from fp8engine.ops.reference import Epilogue

CPU = torch.device("cpu")
SMALL = Config(64, 128, 128, warps=4, flatten=True)
# Launches of a step with two microbatches, by recipe and its cache_weights: forward and backward of the first, forward
# and backward of the second, which finds the weight's FP8 copies.  A cast under one scale takes two, because the
# largest value has to be known before the first is cast, and one of rows in both orientations as well; partial sums of
# dbias are added by one.  Under "delayed" each forward predicts the scales again: only a copy that was asked for stays.
LAUNCHES = {
    ("current", "auto"): (5, 5, 3, 5),
    ("delayed", "auto"): (5, 5, 5, 5),
    ("delayed", True): (5, 5, 3, 5),
    ("rowwise", "auto"): (5, 5, 3, 5),
    ("rowwise_gw_hp", "auto"): (3, 5, 2, 3),
    ("blockwise", "auto"): (3, 4, 2, 4),
    ("bf16", "auto"): (1, 2, 1, 2),
}
OF_THE_MODEL = "_scale_update_kernel"  # one launch a forward of the model, whatever its layers


@pytest.mark.parametrize(("recipe", "cache"), LAUNCHES)
def test_launches_of_a_layer(recipe: str, cache: bool | str, card, monkeypatch: pytest.MonkeyPatch):
    layer = fe.Linear(64, 32, recipe=replace(resolve(recipe), cache_weights=cache), dtype=torch.bfloat16)
    there, seen = card(), []
    monkeypatch.setattr(Launch, "run", lambda self, seed: Done(self.program.name, 0, self.ctas, 0))  # counted, not run
    with fe.backend("triton"):
        for _ in range(3):  # what is kept of a weight follows from the steps before
            seen.clear()
            for _ in range(2):
                x = torch.zeros(48, 64, dtype=torch.bfloat16, requires_grad=True)
                there.done.clear()
                y = layer(x)
                seen.append(of_the_layer(there))
                y.backward(torch.zeros_like(y))
                seen.append(of_the_layer(there) - seen[-1])
            with torch.no_grad():
                layer.weight.zero_()  # an optimizer's step
    assert tuple(seen) == LAUNCHES[recipe, cache]
    found_a_copy = (recipe, cache) != ("delayed", "auto")
    assert seen[2] <= (3 if found_a_copy else 5)  # DESIGN, section 9


def of_the_layer(there: Card) -> int:
    return sum(done.kernel != OF_THE_MODEL for done in there.done)


def test_every_recipe_on_the_card_is_counted():
    assert set(RECIPES) - {recipe for recipe, _ in LAUNCHES} == {
        "auto",
        "fp16",
        "fp32",
    }  # current until it decides; bf16 in another dtype; torch's own


def test_a_tensor_map_is_encoded_once(card):
    there = card()
    a, b = integers(CPU, 13, 256, E5M2, by_row=True), integers(CPU, 48, 256, E4M3, by_row=False)
    kept, maps = [], []
    for _ in range(4):
        kept.append(matmul_fp8(a, b, Epilogue(), False, SMALL))
        maps.append(there.encoded)
        assert differs(kept[-1], exact(a, b, None).bfloat16()) is None
    # Of a, b and y: Triton encodes the first launch's itself; then only y, a new tensor each time.
    assert maps == [3, 6, 7, 8]


def test_another_shape_dtype_or_box_at_an_address_has_a_map_of_its_own(card):
    there = card()
    wide = integers(CPU, 64, 256, E4M3, by_row=False)
    b = integers(CPU, 48, 256, E4M3, by_row=False)
    views = [wide, wide._replace(data=wide.data[:13]), wide._replace(data=wide.data[::2])]
    views += [wide._replace(data=(wide.data.view(torch.uint8) & 0x80).view(E5M2.dtype)), wide]
    for config in (SMALL, SMALL._replace(block_k=64)):
        for a in views:
            assert differs(matmul_fp8(a, b, Epilogue(None, torch.float32), False, config), exact(a, b, None)) is None
    assert len(there.done) == 2 * len(views)
    assert there.encoded < 3 * len(there.done)


def test_a_launcher_that_is_built_in_another_way_is_left_as_it_is():
    """Triton of another version: it goes on encoding at each launch, and nothing breaks."""

    def other(launcher: Any, *arguments: Any) -> None:
        launcher(*arguments)

    for launch in (other, print, None, encoded.EncodedOnce(print, set(), [], None, None)):
        kernel = SimpleNamespace(_run=SimpleNamespace(launch=launch))
        encoded.encode_once(kernel)
        assert kernel._run.launch is launch
    for nothing in (None, SimpleNamespace(), SimpleNamespace(_run=None), SimpleNamespace(_run=SimpleNamespace())):
        encoded.encode_once(nothing)
