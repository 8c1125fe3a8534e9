"""fp8engine/scaling/choice.py: every choice is a recipe, and a layer under it multiplies what the choice says.

Which matmuls are in FP8: all eight sets; granularities: three; formats: E4M3, and E5M2 where it may be.  Values against
float64 by test_linear's bounds; in fused layers against the same layers one by one.
"""

import itertools

import pytest
import torch
from fused import Model, apart, fused, like, step, with_root
from nn.test_linear import check
from support import DTYPES, numerics_of, sqnr

import fp8engine as fe
from fp8engine.numerics.formats import E4M3, E5M2
from fp8engine.numerics.recipe import MATMULS, auto
from fp8engine.ops.reference import Norm
from fp8engine.scaling.choice import GRANULARITIES, OPERANDS, Casts, Choice, recipe_of

SETS = [set(some) for n in range(1, 4) for some in itertools.combinations(MATMULS, n)]
AUTO = auto()


def choice(matmuls: set[str], granularity: str = "tensor", wide: str = "") -> Choice:
    """Layer 0 with these matmuls in FP8; wide: the role in E5M2."""
    formats = {matmul: [E5M2 if role == wide else E4M3 for role in OPERANDS[matmul]] for matmul in matmuls}
    return Choice((0,), {(0, matmul): Casts(granularity, *formats[matmul]) for matmul in matmuls})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("matmuls", SETS, ids=lambda each: "-".join(sorted(each)))
def test_a_layer_multiplies_what_was_chosen(matmuls: set[str], granularity: str, dtype):
    recipe = recipe_of(AUTO, choice(matmuls, granularity), 0)
    assert recipe.fp8_share == pytest.approx(len(matmuls) / 3)
    assert {matmul for matmul in MATMULS if recipe.operands(matmul)[0].is_fp8} == matmuls
    check(recipe, (40, 150, 33), dtype)


@pytest.mark.parametrize("wide", ["input", "grad_output"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_layer_with_one_slot_in_e5m2(granularity: str, wide: str):
    recipe = recipe_of(AUTO, choice(set(MATMULS), granularity, wide), 0)
    assert getattr(recipe, wide).format == E5M2
    check(recipe, (40, 150, 33), torch.bfloat16)


@pytest.mark.parametrize("mixed", [("tensor", "row", "block"), ("block", "tensor", "row"), ("row", "block", "tensor")])
def test_each_matmul_has_casts_of_its_own(mixed: tuple[str, str, str]):
    used = {(0, matmul): Casts(granularity, E4M3, E4M3) for matmul, granularity in zip(MATMULS, mixed, strict=True)}
    recipe = recipe_of(AUTO, Choice((0,), used), 0)
    assert recipe.fp8_share == 1
    check(recipe, (40, 150, 33), torch.bfloat16)


def test_nothing_in_fp8_is_a_recipe_without_fp8():
    recipe = recipe_of(AUTO, choice(set()), 0)
    assert not recipe.is_fp8
    assert recipe.input == recipe.weight_for_dgrad or recipe.weight_for_dgrad is None


@pytest.mark.parametrize("kind", ["", "swiglu"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("matmuls", SETS, ids=lambda each: "-".join(sorted(each)))
def test_fused_layers_compute_what_their_pieces_do(matmuls: set[str], granularity: str, kind: str):
    """FP32 throughout: 2^-8 of one BF16 rounding of a product, 48 dB, and an FP8 value that falls the other way."""
    model = Model("current", Norm("rms", 1e-5), [(64, 96), (48 if kind else 64, 64)], kind=kind)
    for layer in model.layers:
        numerics_of(layer).adopt(recipe_of(AUTO, choice(matmuls, granularity), 0))
    x = torch.randn(24, 64).requires_grad_()
    dys = [torch.randn(24, 64)] if kind else [torch.randn(24, 96), torch.randn(24, 64)]
    one, other = (step(with_root(like(model, call)), x, dys) for call in (fused, apart))
    assert one.keys() == other.keys()
    for name, want in other.items():
        assert sqnr(want, one[name]) > 38, name


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_predicted_scales_are_for_whole_tensors_alone(granularity: str):
    speed = auto(objective="speed")
    recipe = recipe_of(speed, choice(set(MATMULS), granularity), 0)
    assert recipe.delayed == (granularity == "tensor")
    assert recipe.fast_accumulation == (() if granularity == "block" else ("forward", "dgrad"))


def test_a_deeper_history_makes_the_table_deeper():
    """A plan of predicted scales begins in a model that was converted without."""
    layer = fe.Linear(16, 16, recipe="current")
    state = numerics_of(layer).state
    numerics_of(layer).adopt(fe.delayed(history=4))
    for size in (4.0, 1.0, 1.0):
        layer(torch.full((2, 16), size)).sum().backward()
    assert state.history_HS.shape == (4, 4)
    state.begin_step()
    assert state.history_HS[:, 0].tolist() == [1.0, 1.0, 4.0, 0.0]
    assert float(fe.scaling_state(layer)["input"].scale) == pytest.approx(4 / 448)
