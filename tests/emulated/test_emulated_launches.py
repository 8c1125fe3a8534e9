"""What a layer asks of the driver: launches of a forward and a backward under each recipe, and tensor maps encoded.

Counted at the emulated card's driver, by Triton's own launcher, and held against ops/launches.py, from which time is
predicted; of torch's small operators those that it names are counted, where they are called.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulator.card import Card
from emulator.launch import Done, Launch

import fp8engine as fe
from benchmarks.checks.operands import differs, exact, integers
from fp8engine.kernels import encoded, quantize_groups
from fp8engine.kernels.matmul import matmul_fp8
from fp8engine.kernels.tuning import Config
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import E4M3, E5M2
from fp8engine.numerics.recipe import RECIPES, resolve
from fp8engine.ops import cost, launches, triton_backend
from fp8engine.ops.reference import Epilogue

CPU = torch.device("cpu")
SMALL = Config(64, 128, 128, warps=4, flatten=True)
# Launches of a step with two microbatches, by recipe and its cache_weights: forward and backward of the first, forward
# and backward of the second, which finds the weight's FP8 copies.  A cast under one scale takes two, because the
# largest value has to be known before the first is cast, and one of rows in both orientations as well, which also add
# dbias; after the cast of blocks, which takes one, its partial sums are added by another.  Under "delayed" each forward
# predicts the scales again: only a copy that was asked for stays.
LAUNCHES = {
    ("auto", "auto"): (5, 4, 3, 4),
    ("current", "auto"): (5, 4, 3, 4),
    ("current", False): (5, 6, 5, 6),
    ("delayed", "auto"): (5, 4, 5, 4),
    ("delayed", True): (5, 4, 3, 4),
    ("rowwise", "auto"): (5, 4, 3, 4),
    ("rowwise_gw_hp", "auto"): (3, 5, 2, 3),
    ("blockwise", "auto"): (3, 4, 2, 4),
    ("mxfp8", "auto"): (3, 4, 2, 4),
    ("bf16", "auto"): (1, 2, 1, 2),
    ("fp16", "auto"): (1, 2, 1, 2),
}
PARTS = (launches.forward, launches.backward)
OF_THE_MODEL = "_scale_update_kernel"  # one launch a forward of the model, whatever its layers
MIXED = replace(  # x and w are cast for each of their two matmuls
    resolve("current"),
    input_for_wgrad=Cast.parse("e4m3 128x1"),
    weight_for_dgrad=Cast.parse("e4m3 128x128"),
    grad_output_for_wgrad=Cast.parse("e4m3 128x1"),
    grad_output=Cast.parse("e4m3 1x128"),
)


class Counted:
    """What a layer's step asks a card for, by name: Triton's kernels, and of torch's what launches.py names."""

    def __init__(self, there: Card, monkeypatch: pytest.MonkeyPatch):
        self.there, self.monkeypatch = there, monkeypatch
        monkeypatch.setattr(Launch, "run", lambda self, seed: Done(self.program.name, 0, self.ctas, 0))
        self.note(torch, "zeros", "torch fill", lambda *given, **options: True)
        self.note(torch.Tensor, "sum", "torch sum", lambda x, dim=None, **more: dim == 0 and "dtype" in more)
        self.note(triton_backend, "_along_k", "torch copy", lambda codes: codes.stride(1) != 1)

    def note(self, holder: Any, name: str, word: str, when: Any) -> None:
        """Count calls of a function of which `when` says that they are launches."""
        function = getattr(holder, name)

        def noted(*given: Any, **options: Any) -> Any:
            if when(*given, **options):
                self.there.done.append(Done(word, 0, 0, 0))
            return function(*given, **options)

        self.monkeypatch.setattr(holder, name, noted)

    def taken(self) -> list[str]:
        """Since it was last asked."""
        names = [done.kernel for done in self.there.done if done.kernel != OF_THE_MODEL]
        self.there.done.clear()
        return names


def step_of(layer: fe.Linear, tokens: int, counted: Counted) -> list[list[str]]:
    """Launches of a forward and of a backward."""
    x = torch.zeros(tokens, layer.in_features, dtype=layer.weight.dtype, requires_grad=True)
    counted.taken()
    y = layer(x)
    found = [counted.taken()]
    y.backward(torch.zeros_like(y))
    return [*found, counted.taken()]


def agree(found: list[list[str]], wanted: list[list[launches.Launch]]) -> bool:
    """Whether the launches are those of launches.py, in any order."""
    names = [[name.removeprefix("_").removesuffix("_kernel") for name in each] for each in found]
    matmuls = [[name.split("_")[0] if name.startswith("matmul") else name for name in each] for each in names]
    words = [
        [one.kernel if one.kernel.startswith("torch") else one.kernel.split()[0] for one in each] for each in wanted
    ]
    return list(map(sorted, matmuls)) == list(map(sorted, words))


@pytest.mark.few(4)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("recipe", "cache"), LAUNCHES)
def test_launches_of_a_layer(recipe: str, cache: bool | str, bias: bool, card, monkeypatch: pytest.MonkeyPatch):
    made = replace(resolve(recipe), cache_weights=cache)
    layer = fe.Linear(64, 32, bias=bias, recipe=made, dtype=made.output.dtype)
    counted, seen = Counted(card(), monkeypatch), []
    with fe.backend("triton"):
        for _ in range(3):  # what is kept of a weight follows from the steps before
            seen = step_of(layer, 48, counted) + step_of(layer, 48, counted)
            with torch.no_grad():
                layer.weight.zero_()  # an optimizer's step
    step = launches.Step(made, 48, 32, 64, bias)
    wanted = [part(step, copies) for copies in (False, launches.kept(made)) for part in PARTS]
    assert agree(seen, wanted), f"ops/launches.py and the kernels differ:\n{seen}\n{wanted}"
    counts = [sum(name.startswith("_") for name in names) for names in seen]
    sums = made.by_block and not bias
    assert tuple(counts) == tuple(count - (sums and place % 2) for place, count in enumerate(LAUNCHES[recipe, cache]))
    found_a_copy = (recipe, cache) not in (("delayed", "auto"), ("current", False))
    assert counts[2] <= (3 if found_a_copy else 5)  # DESIGN, section 9
    assert counts[3] <= (6 if made.cache_weights is False else 4)


def test_every_recipe_on_the_card_is_counted():
    assert set(RECIPES) - {recipe for recipe, _ in LAUNCHES} == {"fp32"}  # torch's own


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [resolve("rowwise_gw_hp"), MIXED], ids=["wide rows", "casts of their own"])
def test_launches_of_other_casts(recipe, card, monkeypatch: pytest.MonkeyPatch):
    assert launches.WIDEST == quantize_groups.WIDEST
    wide = launches.WIDEST + 16
    layer = fe.Linear(wide, 32, recipe=recipe, dtype=torch.bfloat16)
    with fe.backend("triton"):
        found = step_of(layer, 16, Counted(card(), monkeypatch))
    step = launches.Step(recipe, 16, 32, wide, bias=True)
    found[0].remove("_add_parts_kernel")  # of a sum over so many columns, which is cut into parts
    assert agree(found, [part(step) for part in PARTS]), found


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2048, 1536, 1536), (2048, 1536, 1544), (256, 1536, 1536)])
def test_the_kernel_that_is_predicted_is_the_one_that_runs(shape, card, monkeypatch: pytest.MonkeyPatch):
    """Of scales in blocks, whose matmuls are ours where nothing has been measured."""
    monkeypatch.setattr(triton_backend, "measured", lambda *given: 0.0)
    dispatched = cost.dispatched.__wrapped__  # without what it found in the committed table
    (m, n, k), recipe = shape, resolve("blockwise")
    layer = fe.Linear(k, n, bias=False, recipe=recipe, dtype=torch.bfloat16)
    with fe.backend("triton"):
        forward, backward = step_of(layer, m, Counted(card(), monkeypatch))
    ran = [name for name in forward + backward if name.startswith("_matmul")]
    shapes = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
    for name, (which, of) in zip(ran, shapes.items(), strict=True):
        found = dispatched(recipe, which, of)
        assert found is not None
        assert ("gluon" in name) == (found[1].kernel == "gluon"), which


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
