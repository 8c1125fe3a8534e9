"""fe.GroupedLinear against experts in NumPy (helpers/experts.py), what it keeps, torch's grouped matmul, FP8 inputs.

Inputs that are FP8 codes are read without a cast where the recipe casts so, else dequantised with a reason.
"""

import dataclasses
import math
from typing import Any
from unittest import mock

import pytest
import torch
from experts import SIZES, linears, run, uneven, wanted
from support import DTYPES, FP8_RECIPES, assert_products, numerics_of, same, saved, spy_on, sqnr, tables
from torch import nn

import fp8engine as fe
from fp8engine.autograd import grouped, groups
from fp8engine.nn.grouped import GroupedLinear
from fp8engine.numerics.recipe import Recipe, resolve
from fp8engine.ops import casts, scaled_grouped, scaled_mm
from fp8engine.ops import grouped as operations
from fp8engine.ops.reference import Operand
from fp8engine.ops.reference import grouped as twin

E4M3 = fe.Cast(fe.E4M3)
SQUARE = fe.Cast(fe.E4M3, fe.PerBlock(32, 32), power_of_2=True)
CUSTOM = {
    "tensor_e4m3": fe.Recipe(name="tensor_e4m3", input=E4M3, weight=E4M3, grad_output=E4M3),
    "rowwise_exact": fe.rowwise(power_of_2=False),
    "blockwise_exact": fe.blockwise(power_of_2=False),
    # Blocks that span rows of activations too: they begin anew at each expert in all three matmuls.
    "squares": fe.Recipe(name="squares", input=SQUARE, weight=SQUARE, grad_output=SQUARE),
}
RECIPES = [*FP8_RECIPES, *CUSTOM]


def recipe_of(name: str) -> Recipe:
    return CUSTOM.get(name) or resolve(name)


def layer_of(name: str, k: int = 32, n: int = 48, **options) -> GroupedLinear:
    return uneven(GroupedLinear(len(SIZES), k, n, recipe=recipe_of(name), **options))


def check(recipe: Recipe, layer: Any, dtype=torch.float32, sizes=SIZES) -> None:
    ran = run(layer, sizes, dtype)
    _, n, k = layer.shape
    found = (ran.y.split(sizes), ran.x.grad.split(sizes), ran.dw, ran.db)
    experts = wanted(recipe, layer, ran.x, ran.dy, sizes)
    for each, want, rows in zip(zip(*found, strict=True), experts, sizes, strict=True):
        assert_products(each, want, (rows, k, n), dtype, recipe.output != fe.FP32)


CASES = [(name, dtype, (50, 33), SIZES) for name in RECIPES for dtype in DTYPES]
CASES += [(name, torch.float32, (130, 257), SIZES) for name in RECIPES]
CASES += [
    (name, torch.float32, (128, 256), sizes)  # groups of whole blocks and of nothing
    for name in ("blockwise", "squares", "rowwise", "rowwise_gw_hp", "current")
    for sizes in ([128, 0, 256, 128], [144, 0, 0, 0], [0, 0, 0, 1])
]


@pytest.mark.parametrize(("name", "dtype", "shape", "sizes"), CASES)
def test_forward_and_gradients_are_the_products_of_the_cast_operands(name: str, dtype, shape, sizes):
    check(recipe_of(name), layer_of(name, *shape, dtype=dtype), dtype, sizes)


@pytest.mark.parametrize("name", RECIPES)
def test_output_in_fp32_rounds_nothing_but_the_operands(name: str):
    asked = dataclasses.replace(recipe_of(name), output=fe.FP32)
    if asked.fp8_share < 1:  # a 16-bit matmul keeps its 16-bit result
        asked = dataclasses.replace(asked, input_for_wgrad=None, grad_output_for_wgrad=None)
    check(asked, uneven(GroupedLinear(4, 32, 48, recipe=asked)))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "current"])
def test_what_is_not_finite_stays_with_its_expert(recipe: str, bad: float):
    x = torch.randn(144, 32)
    x[2, 5] = bad
    ran = run(layer_of(recipe), SIZES, x=x)
    assert not torch.isfinite(ran.y[2]).any()
    assert torch.isfinite(ran.y[[row for row in range(144) if row != 2]]).all()
    assert not torch.isfinite(ran.dw[0, :, 5]).any()
    assert torch.isfinite(ran.dw[1:]).all()
    assert int(fe.scaling_state(ran.layer)["input"].nonfinite) == 1


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_byte_an_element_is_saved(recipe: str, turned: bool):
    weight = nn.Parameter(torch.randn(4, 128, 64) if turned else torch.randn(4, 64, 128))
    layer, sizes, k = GroupedLinear.of(weight, recipe=recipe, turned=turned), [130, 0, 100, 26], 128
    size = sum(t.nbytes for t in saved(layer, torch.randn(256, k, requires_grad=True), sizes))
    # Of x reduced along its rows: per column of each expert; per 128 rows, as many as four experts can have.
    scales = {"current": 1, "delayed": 1, "rowwise": 4 * k, "blockwise": (256 + 4 * 127) // 128 * k}
    assert size == (2 * 256 * k if recipe == "rowwise_gw_hp" else 256 * k + 4 * scales[recipe])
    layer.requires_grad_(False)
    assert saved(layer, torch.randn(256, k, requires_grad=True), sizes) == []


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_backward_needs_only_what_is_asked(recipe: str):
    full = layer_of(recipe)
    ran = run(full, SIZES)
    for needs, want in (("x", ran.x.grad), ("weight", ran.dw)):
        layer: Any = layer_of(recipe)
        layer.load_state_dict(full.state_dict())
        layer.requires_grad_(needs == "weight")
        x = ran.x.detach().clone().requires_grad_(needs == "x")
        layer(x, SIZES).backward(ran.dy)
        found = {"x": x.grad, "weight": layer.weight.grad}
        assert torch.equal(found.pop(needs), want)
        assert [*found.values()] == [None]


def test_delayed_scaling_predicts_and_casts_again_what_saturates():
    """Of inputs that grow from step to step, while rows move about."""
    layer = layer_of("delayed")
    for step in range(5):
        layer(torch.randn(144, 32) * 1.5**step, torch.tensor(SIZES).roll(step)).square().mean().backward()
        with torch.no_grad():
            layer.weight.mul_(0.99)
    slots = fe.scaling_state(layer)
    assert (slots["input"].history[:4] > 0).all()
    assert int(slots["input"].recasts) == 4, "each step's input was larger than any before"
    assert int(slots["weight"].calls) == 5, "one cast a step for all the experts"


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_forward_without_gradients_is_counted_and_not_recorded(recipe: str):
    layer = layer_of(recipe)
    with torch.no_grad():
        layer(torch.randn(144, 32), SIZES)
    history, live, counts = tables(layer)
    assert not history.any()
    assert (live[0] == -1).all()
    assert counts[1].tolist() == [144 * 32, 4 * 48 * 32, 0, 0]
    run(layer, SIZES)
    _, live, counts = tables(layer)
    assert (live[0, :3] > 0).all()
    # The weight's copy for an inference is not a step's: cast again, or its amax would be missing.
    assert counts[1].tolist() == [2 * 144 * 32, 2 * 4 * 48 * 32, 144 * 48, 0]


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_weight_that_stands_still_is_cast_once(recipe: str, monkeypatch: pytest.MonkeyPatch):
    layer, x, seen = layer_of(recipe), torch.randn(144, 32), []
    spy_on(monkeypatch, "quantize", lambda real, x, *rest: seen.append(x.shape) or real(x, *rest))
    with torch.no_grad():
        layer(x, SIZES)
        before = len(seen)
        want = layer(x.clone(), SIZES)
        assert seen[before:] == [(144, 32)]
        layer.weight.mul_(2)
        assert not torch.equal(layer(x.clone(), SIZES), want)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_gradient_of_the_gradient_and_a_changed_weight_are_refused(recipe: str):
    layer, x = layer_of(recipe), torch.randn(144, 32, requires_grad=True)
    layer.numerics.name = "experts.up"
    with pytest.raises(fe.errors.GradientError, match=r"^experts\.up: .*create_graph=True"):
        torch.autograd.grad(layer(x, SIZES).square().sum(), x, create_graph=True)
    y = layer(x, SIZES)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of rows lie on a card, and nobody may wait for them."""

    def waited(bounds_2E1):
        raise AssertionError("waited for the card")

    monkeypatch.setattr(groups, "on_host", lambda sizes: False)
    for module in (twin, grouped):
        monkeypatch.setattr(module, "parts_of", waited)


def scaled_grouped_mm(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum):
    """torch's on a card, in plain torch: its own checks of layout, then each group."""
    on_meta = [t.to("meta") for t in (a, b, scale_a, scale_b)]
    shape = torch.ops.aten._scaled_grouped_mm(
        *on_meta, offs=offs.to("meta"), out_dtype=out_dtype, use_fast_accum=use_fast_accum
    ).shape
    assert offs.dtype == torch.int32
    y, start = torch.full(shape, math.nan), 0
    for e, end in enumerate(offs.tolist()):
        y[start:end] = a[start:end].float() @ b[e].float() * scale_a[start:end, None] * scale_b[e]
        start = end
    return y.to(out_dtype)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list:
    """torch's grouped matmul of FP8 as a card has it; the calls of it."""
    calls = []
    monkeypatch.setattr(scaled_grouped, "has_scaled_grouped", lambda where: True)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", lambda *a, **k: calls.append(k) or scaled_grouped_mm(*a, **k))
    return calls


def as_on_a_card(layer: GroupedLinear, sizes, x: torch.Tensor):
    with fe.backend("cublas"):
        return run(layer, sizes, x=x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["tensor_e4m3", "rowwise_exact", "rowwise", "rowwise_gw_hp"])
def test_forward_and_dgrad_by_torchs_grouped_matmul(name: str, bias: bool, card: list):
    layer = layer_of(name, bias=bias)
    ran = as_on_a_card(layer, SIZES, torch.randn(144, 32))
    assert [call["use_fast_accum"] for call in card] == [True, True], "forward and dgrad"
    experts = wanted(recipe_of(name), layer, ran.x, ran.dy, SIZES)
    for y, dx, want, rows in zip(ran.y.split(SIZES), ran.x.grad.split(SIZES), experts, SIZES, strict=True):
        assert_products((y, dx, None, None), want, (rows, 32, 48), torch.float32, True)
    assert fe.inspect(layer).layers[0]["backend"] == "cublas"


@pytest.mark.parametrize("name", ["current", "blockwise", "squares"])
def test_what_torchs_grouped_matmul_does_not_take_goes_expert_by_expert(name: str, card: list):
    with fe.backend("cublas" if name == "current" else "reference"):
        check(recipe_of(name), layer_of(name))
    assert len(card) == (name == "current"), "E5M2 gradients, scales along K: its forward only"


@pytest.mark.parametrize("shape", [(24, 48), (32, 40)], ids=str)
def test_unaligned_experts_go_one_by_one(shape, card: list):
    layer = layer_of("rowwise", *shape)
    ran = as_on_a_card(layer, SIZES, torch.randn(144, shape[0]))
    assert card == []
    with fe.backend("cublas"):
        assert torch.equal(ran.y, linears(layer, ran, SIZES)["y"])


@pytest.mark.parametrize("name", ["rowwise_gw_hp", "bf16"])
def test_a_step_does_not_wait_for_the_card(name: str, card: list, request: pytest.FixtureRequest):
    layer, x, found = layer_of(name, bias=name == "bf16"), torch.randn(144, 32), []
    for fixture in ("card", "on_card"):
        request.getfixturevalue(fixture)
        layer.zero_grad()
        torch.manual_seed(1)
        ran = as_on_a_card(layer, torch.tensor(SIZES), x.clone())
        found.append([ran.y, ran.x.grad, ran.dw])
    assert same(*found)
    for wrong in ([5, 0, 130, 8], [5, -1, 131, 9]):
        with fe.backend("cublas"), pytest.raises(RuntimeError, match="are negative, or do not sum to the number"):
            layer(x, torch.tensor(wrong))


def test_a_backward_runs_where_its_forward_was_asked_to(monkeypatch: pytest.MonkeyPatch):
    ran = mock.Mock(side_effect=scaled_mm.matmul)
    monkeypatch.setattr(scaled_mm, "matmul", ran)
    with fe.backend("cublas"):
        y = layer_of("rowwise")(torch.randn(144, 32, requires_grad=True), SIZES)
    assert ran.call_count == 3, "one of the four experts has no rows"
    y.sum().backward()
    assert ran.call_count == 9


@pytest.mark.usefixtures("on_card")
def test_inference_per_tensor_does_not_wait_for_the_card(card: list):
    for recipe in ("current", "delayed", "rowwise"):
        with torch.no_grad(), fe.backend("cublas"):
            layer_of(recipe)(torch.randn(144, 32), torch.tensor(SIZES))
    assert len(card) == 3


def test_a_card_without_it_says_why():
    codes = torch.zeros(32, 32).to(torch.float8_e4m3fn)
    plain = Operand(codes, torch.ones(()), -1, -1)
    assert not scaled_grouped.has_scaled_grouped(torch.device("cpu"))
    for one, experts, why in (
        (plain, 2, "None"),
        (plain._replace(data=codes.view(torch.float8_e5m2)), 2, "E4M3"),
        (plain._replace(scale=torch.ones(1, 1), rows=32), 2, "per row"),
        (plain, 4, "multiples of 16"),
        (plain._replace(data=codes[:0]), 2, "no rows"),
    ):
        assert why in str(scaled_grouped.ungroupable(one, plain, experts))


BLOCKS = fe.Cast(fe.E4M3, fe.PerBlock(1, 128))
K, N = 200, 48  # one group of 128, and one of 72


def layer_for(recipe: str, linear: bool = False):
    torch.manual_seed(0)
    return fe.Linear(K, N, recipe=recipe) if linear else fe.GroupedLinear(len(SIZES), K, N, recipe=recipe)


def results_of(layer, x: torch.Tensor) -> list[torch.Tensor]:
    """y, dx, dw and db."""
    x = x.detach().requires_grad_()
    y = layer(x) if isinstance(layer, fe.Linear) else layer(x, SIZES)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("recipe", [recipe for recipe in FP8_RECIPES if recipe != "delayed"])
def test_codes_under_the_layers_own_cast_are_read(recipe: str, linear: bool):
    x = torch.randn(sum(SIZES), K) * torch.exp2(torch.randn(sum(SIZES), 1) * 3)
    layer = layer_for(recipe, linear)
    found = results_of(layer, fe.quantize(x, resolve(recipe).input))
    assert numerics_of(layer).ready == {"": 1}
    wanted = results_of(layer_for(recipe, linear), x)
    for name, a, b in zip(("y", "dx", "dw", "db"), found, wanted, strict=True):
        if name != "dw" or recipe == "current":
            assert torch.equal(a, b), name
        else:
            # wgrad casts x along its rows, of values that were cast before.  By powers of two that changes what lies
            # below the smallest normal alone; where wgrad is in 16 bits, it is the cast: 31.6 dB.
            assert sqnr(b, a) > (31 if recipe == "rowwise_gw_hp" else 50)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "current"])
def test_no_cast_of_x_in_a_forward(recipe: str, monkeypatch: pytest.MonkeyPatch):
    layer, seen = layer_for(recipe), []
    q = fe.quantize(torch.randn(sum(SIZES), K), resolve(recipe).input)
    for module in (casts, operations):
        real = module.quantize
        spy = lambda x, *rest, real=real, **more: seen.append(len(x)) or real(x, *rest, **more)  # noqa: E731
        monkeypatch.setattr(module, "quantize", spy)
    with torch.no_grad():
        layer(q, SIZES)
    assert sum(seen) == len(SIZES) * N, "the weights alone, together"


@pytest.mark.parametrize(
    ("recipe", "cast", "why"),
    [
        ("rowwise", fe.Cast(fe.E4M3), "it casts per row, not per tensor"),
        ("current", fe.Cast(fe.E4M3, fe.PerRow(), power_of_2=True), "it casts per tensor, not per row"),
        ("blockwise", fe.Cast(fe.E4M3, fe.PerRow(), power_of_2=True), "it casts per 1x128 block, not per row"),
        ("blockwise", BLOCKS, "its scales within a row are not known to be powers of two"),
        ("bf16", fe.Cast(fe.E4M3), "its forward is in 16 bits"),
    ],
)
def test_other_codes_are_dequantised_and_counted_with_the_reason(recipe: str, cast: fe.Cast, why: str):
    layer, q = layer_for(recipe), fe.quantize(torch.randn(sum(SIZES), K), cast)
    y = layer(q, SIZES)
    assert numerics_of(layer).ready == {why: 1}
    assert torch.equal(y, layer_for(recipe)(q.dequantize(), SIZES))
