"""Norms and activations as producers, and the layers that read them, against the same in pieces, bit for bit.

In FP32 nothing is rounded between the pieces, so that fused and apart are one computation: results, gradients, scales
and counters agree in every bit.  In BF16 too: both round to 16 bits first.  The pieces are the reference's norms and
activations (tests/ops/reference, against float64) and fe.Linear (tests/nn/test_linear.py).
"""

import math
from dataclasses import replace

import pytest
import torch
from fused import (
    EXACT,
    MEMORIES,
    NORMS,
    Model,
    apart,
    assert_as_apart,
    assert_equal,
    assert_same_tables,
    batches,
    in_float64,
    like,
    step,
    train,
)
from support import FP8_RECIPES, sqnr

import fp8engine as fe
from fp8engine.autograd import Memory, linear
from fp8engine.autograd.produce import keep, kept
from fp8engine.errors import ShapeError, UnknownName
from fp8engine.numerics.recipe import resolve
from fp8engine.ops.reference.activations import ACTIVATIONS

LAYER = NORMS[2]
ROWS = (24, 24, 40, 24)
K, F = 48, 40


def shapes(kind: str, two: bool = False) -> list[tuple[int, int]]:
    """(in, out) of the layers of an MLP; two: gate and up are a layer each."""
    return [(K, F), (K, F), (F, K)] if two else [(K, F * (1 + ACTIVATIONS[kind].gated)), (F, K)]


# Norm, layers, activation, and whether with a root: outside of its forward, layers would each cast the input that they
# share.  Two layers behind a norm: FP32 sums of two gradients do not depend on their order.
FORMS = {
    **{str(norm): (norm, [(K, F), (K, 16)], "", True) for norm in NORMS},
    **{kind: (LAYER, shapes(kind), kind, False) for kind in ACTIVATIONS},
    "gate and up": (None, shapes("geglu", two=True), "geglu", True),
    "norm, gate and up": (NORMS[0], shapes("geglu", two=True), "geglu", True),
}


@pytest.mark.few(100)
@pytest.mark.parametrize("memory", EXACT, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_in_fp32_it_is_its_pieces_bit_for_bit(recipe: str, form: str, memory: Memory):
    norm, sizes, kind, root = FORMS[form]
    assert_as_apart(Model(recipe, norm, sizes, kind=kind), ROWS, memory, root)


@pytest.mark.parametrize("form", ["norm", "gated", "gate and up"])
@pytest.mark.parametrize("recipe", [name for name in FP8_RECIPES if name != "rowwise_gw_hp"])
def test_in_bf16_results_and_gradients_between_are_rounded_once(recipe: str, form: str):
    """To 16 bits: from there FP8 in both orientations, and db its sums."""
    if form == "norm":
        with torch.autocast("cpu", dtype=torch.bfloat16):  # an FP32 norm beside BF16 weights, for the layers apart
            for memory in EXACT:
                assert_as_apart(Model(recipe, LAYER, [(160, 24)], torch.bfloat16), ROWS, memory)
    else:
        two = form == "gate and up"
        assert_as_apart(Model(recipe, None, shapes("swiglu", two), torch.bfloat16, kind="swiglu"), ROWS, root=two)


def test_layers_whose_casts_differ_read_16_bits():
    """Each casts for itself, as apart; and so does a layer that keeps a scaling state of its own."""
    model, strangers = Model("current", LAYER, [(48, 16)] * 2), Model("delayed", LAYER, [(48, 16)] * 2)
    model.layers[1].numerics = replace(model.layers[1].numerics, recipe=resolve("rowwise"))
    strangers.layers[1] = fe.Linear(48, 16, recipe="delayed")
    for each in (model, strangers):
        other = like(each, apart)
        for x, dys in batches(ROWS, 48, (16, 16)):
            assert_equal(train(each, x, dys), train(other, x, dys))
            for one, layer in zip(each.layers, other.layers, strict=True):
                assert_same_tables(one, layer)


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_recipes_without_fp8_read_torchs_norm(name):
    model, x = Model(name, LAYER, [(48, 16)]), torch.randn(6, 48)
    (y,) = model(x)
    n = torch.nn.functional.layer_norm(x, (48,), model.gamma, model.beta, LAYER.eps)
    assert torch.equal(y, model.layers[0](n))


def test_a_predicted_scale_that_is_too_small_is_recast():
    model = Model("delayed", LAYER, [(48, 16)])
    ((x, dys),) = batches((24,), 48, (16,))
    step(model, x, dys)
    with torch.no_grad():
        model.gamma.mul_(64)
    (y,) = model(x)
    slot = fe.scaling_state(model)["layers.0.input"]
    assert int(slot.recasts) == 1
    assert int(slot.saturated) > 0
    assert sqnr(in_float64(like(model, in_float64).double(), x.double())[0], y) > 27


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_one_of_two_layers_is_frozen(recipe, frozen):
    """The store is the one that the other's wgrad reads."""
    model = Model(recipe, LAYER, [(48, 16)] * 2)
    model.layers[frozen].weight.requires_grad_(False)
    with torch.no_grad():  # columns so unequal that scales per row, not along what wgrad sums, would flush some to zero
        model.gamma.mul_(torch.exp2(-torch.arange(48.0) / 2))
        model.beta.zero_()
    one, other = like(model, model.call), like(model, apart)
    for x, dys in batches((24, 40), 48, (16, 16)):
        assert_equal(train(one, x, dys), train(other, x, dys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_kept_in_fp8_is_its_codes_times_its_scale(dtype):
    """A row of 1e4 has codes up to 448 under 2^5; one of 1e-6 scales that FP16 does not have."""
    x = (torch.randn(3, 48) * torch.tensor([[1e4], [1.0], [1e-6]])).to(dtype)
    data, scale = keep(x, Memory(store="fp8"))
    assert data is not None
    assert scale is not None
    wanted = (data.double() * scale.double()).to(dtype)
    assert torch.equal(kept(data, scale, dtype), wanted)
    assert (wanted - x).double().norm() < 10 ** (-31 / 20) * x.double().norm()


def test_an_rms_norm_with_a_beta():
    """Its gradient is the sum of what the layer, by itself, gives."""
    model = Model("current", NORMS[0], [(48, 16)])
    model.beta = torch.nn.Parameter(torch.randn(48))
    ((x, dys),) = batches((6,), 48, (16,))
    (n,) = model.layers
    rms = torch.nn.functional.rms_norm(x.detach(), (48,), model.gamma, model.which.eps) + model.beta
    y = linear(rms, n.weight, n.bias, n.numerics)
    assert torch.equal(step(model, x, dys)["beta"], torch.autograd.grad(y, rms, dys[0])[0].sum(0))


# gate and up in E4M3 are 31.5 dB each, and so is a norm's input; what differs a little rounds anew, so that either
# carries E5M2's (6 dB more) and E4M3's noise of its own: 2 E5M2 + 6 E4M3.
STORING_DB = -10 * math.log10(2 * 10**-2.55 + 6 * 10**-3.15)


@pytest.mark.parametrize("kind", ["", "gelu", "swiglu"])
@pytest.mark.parametrize("memory", [MEMORIES[2], MEMORIES[3]], ids=str)
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_storing_in_fp8_costs_backward_what_e4m3_costs_and_forward_nothing(recipe, memory, kind):
    model = Model(recipe, NORMS[0], shapes(kind) if kind else [(K, F)], kind=kind)
    ((x, dys),) = batches((24,), K, (K if kind else F,))
    before, stored = step(model, x, dys), step(like(model, model.call, memory), x, dys)
    same = {"y0", f"layers.{len(model.layers) - 1}.bias"}
    if not (memory.recompute_activation if kind else memory.recompute_norm):
        same.add(f"layers.{len(model.layers) - 1}.weight")
    assert all(torch.equal(before[name], stored[name]) for name in same)
    for name in before.keys() - same:
        assert STORING_DB < sqnr(before[name], stored[name]) < 60, name


@pytest.mark.parametrize(
    "pair", [("current", "bf16"), ("bf16", "current"), ("bf16", "bf16"), ("rowwise_gw_hp", "fp32")]
)
@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("norm", [None, NORMS[2]], ids=str)
def test_a_layer_without_fp8_runs_as_apart(pair, two, norm):
    """The pieces are the same functions, but for the norm's and the activation's, torch's own here."""
    model = Model("current", norm, shapes("swiglu", two), kind="swiglu")
    for i, layer in enumerate(model.layers):
        layer.numerics.recipe = resolve(pair[i == len(model.layers) - 1])
        layer.numerics.__post_init__()
    ((x, dys),) = batches((24,), K, (K,))
    found = step(model, x, dys)
    wanted = step(like(model, in_float64).double(), x.double(), [dy.double() for dy in dys])
    for name in wanted:
        assert sqnr(wanted[name], found[name]) > 20, name


@pytest.mark.parametrize("recipe", ["bf16", "fp32"])
def test_recipes_without_fp8_have_second_gradients(recipe):
    model, x = Model(recipe, NORMS[0], shapes("gelu"), kind="gelu"), torch.randn(6, K, requires_grad=True)
    (dx,) = torch.autograd.grad(model(x)[0].square().sum(), x, create_graph=True)
    assert torch.autograd.grad(dx.square().sum(), x)[0].any()


FROZEN = {
    "x": ["x"],
    "gamma": ["gamma"],
    "norm": ["gamma", "beta"],
    "first weight": [0],
    "first layer": [0, 1],
    "second weight": [2],
    "weights": [0, 2],
    "x and norm": ["x", "gamma", "beta"],
    "all but the second layer": ["x", "gamma", "beta", 0, 1],
    "all but the first bias": ["x", "gamma", "beta", 0, 2, 3],
    "all but the first weight": ["x", "gamma", "beta", 1, 2, 3],
    "all but x": ["gamma", "beta", 0, 1, 2, 3],
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("memory", EXACT, ids=str)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_what_takes_no_gradient_gets_none_and_changes_no_other(recipe, memory, frozen):
    model = Model(recipe, NORMS[2], shapes("silu"), kind="silu")
    ((x, dys),) = batches((24,), K, (K,))
    parameters = list(model.layers.parameters())
    named = {"x": x, "gamma": model.gamma, "beta": model.beta, **dict(enumerate(parameters))}
    for which in FROZEN[frozen]:
        named[which].requires_grad_(False)
    one, other = like(model, model.call, memory), like(model, apart)
    assert_equal(step(one, x, dys), step(other, x, dys))
    assert_same_tables(one, other)


UNEQUAL = r"^layers\.1: mat1 and mat2 shapes cannot be multiplied "
REFUSED = [
    (UnknownName, "did you mean 'swiglu'", [(K, F), (F, K)], "swigluu"),
    (ShapeError, r"swiglu takes \[gate \| up\], an even number of columns; .*\[4, 41\]", [(K, 41), (F, K)], "swiglu"),
    (ShapeError, "relu has no gate", [(K, F), (K, F), (F, K)], "relu"),
    (ShapeError, r"up is \[4, 24\]; want \[4, 40\], the gate's", [(K, F), (K, 24), (F, K)], "swiglu"),
    (ShapeError, UNEQUAL + r"\(4x40 and 24x48\)", [(K, F), (24, K)], "relu"),
    (ShapeError, UNEQUAL + r"\(4x20 and 40x48\)", [(K, F), (F, K)], "swiglu"),
    (ShapeError, r"^layers\.0: .*\(4x48 and 32x40\)", [(32, F), (F, K)], "relu"),
]


@pytest.mark.parametrize(("error", "words", "sizes", "kind"), REFUSED)
def test_what_does_not_fit_is_refused(error, words: str, sizes: list[tuple[int, int]], kind: str):
    model = Model("current", None, sizes, kind="relu")
    model.kind = kind
    with pytest.raises(error, match=words):
        model(torch.randn(4, K))
