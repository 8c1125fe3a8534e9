"""Norm, layer, activation, layer, through producers, against the same in pieces, bit for bit, and against float64.

In FP32 nothing is rounded between the pieces, so that fused and apart are one computation, as in test_norm_linear.py.
"""

import math

import pytest
import torch
from activations import SQUARED
from casts import plain
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
)
from support import FP8_RECIPES, sqnr

import fp8engine as fe
from fp8engine.autograd import Memory
from fp8engine.errors import ShapeError, UnknownName
from fp8engine.numerics.recipe import resolve
from fp8engine.ops import casts, matmul, reference
from fp8engine.ops.reference.activations import ACTIVATIONS

K, F = 48, 40
ROWS = (24, 24, 40)
PLAIN_RECIPES = ["current", "delayed", "rowwise", "blockwise"]


def shapes(kind: str, two: bool = False, k: int = K, f: int = F) -> list[tuple[int, int]]:
    """(in, out) of the layers; two: gate and up are a layer each."""
    if two:
        return [(k, f), (k, f), (f, k)]
    return [(k, f * (1 + ACTIVATIONS[kind].gated)), (f, k)]


@pytest.mark.few(60)
@pytest.mark.parametrize("memory", EXACT, ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_in_fp32_it_is_its_pieces_bit_for_bit(recipe, kind, memory):
    assert_as_apart(Model(recipe, NORMS[2], shapes(kind), kind=kind), ROWS, memory)


@pytest.mark.parametrize("norm", [None, NORMS[0]], ids=str)
@pytest.mark.parametrize("memory", EXACT, ids=str)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_gate_and_up_as_two_layers(recipe, memory, norm):
    # With a root: outside of its forward, gate and up would each cast the input that they share.
    assert_as_apart(Model(recipe, norm, shapes("geglu", two=True), kind="geglu"), ROWS, memory, root=True)


@pytest.mark.parametrize("recipe", PLAIN_RECIPES)
def test_in_bf16_gradients_of_the_first_layer_are_rounded_once_by_hand(recipe):
    """From y and da in BF16: dy in BF16, from it FP8 in both orientations, and db its sums."""
    model = Model(recipe, None, shapes("swiglu"), torch.bfloat16, kind="swiglu")
    up, down = model.layers
    ((x, (dz,)),) = batches((24,), K, (K,), torch.bfloat16)
    found = step(model, x, [dz])
    ready, out = resolve(recipe), torch.bfloat16

    (x_q, x_t), (w1, w1_t) = (
        casts.cast_transpose(v.detach(), c) for v, c in zip((x, up.weight), ready.forward, strict=True)
    )
    w2, w2_t = casts.cast_transpose(down.weight.detach(), ready.forward[1])
    forward, dgrad, wgrad = (ready.precision[name] for name in ("forward", "dgrad", "wgrad"))
    y = matmul.matmul(x_q, w1, up.bias.detach(), out, forward)
    a_q, a_t = casts.cast_transpose(plain(reference.act_quantize(y, "swiglu")[0]), ready.forward[0])
    assert torch.equal(found["y0"], matmul.matmul(a_q, w2, down.bias.detach(), out, forward))
    dz_q, dz_t = casts.cast_transpose(dz, ready.dgrad[0])
    assert torch.equal(found["layers.1.weight"], matmul.matmul(dz_t, a_t, None, out, wgrad))
    da = matmul.matmul(dz_q, w2_t, None, out, dgrad)
    dy = plain(reference.act_quantize_backward(da, y, "swiglu").dx_MK)
    dy_q, dy_t = casts.cast_transpose(dy, ready.dgrad[0])
    assert torch.equal(found["layers.0.weight"], matmul.matmul(dy_t, x_t, None, out, wgrad))
    assert torch.equal(found["dx"], matmul.matmul(dy_q, w1_t, None, out, dgrad))
    assert torch.equal(found["layers.0.bias"], dy.sum(0, dtype=torch.float32).to(out))


# As in test_norm_linear.py: E4M3 carries noise of 31.5 dB, E5M2 6 dB more.  y has that of two operands.  An activation
# passes y's noise on: the ratio of noise to signal grows by the mean square of f'(y) over that of f(y) / rms(y), which
# for values of size 1 lies between 1 (relu) and 2 (gelu, silu near 0); a gate adds the other factor's.  So bounds:
# what each result reads, with the activation's noise as if doubled for each of its inputs.
E4M3, E5M2 = 10**-3.15, 10**-2.55


def worst(recipe: str, kind: str, memory: Memory) -> dict[str, float]:
    """The most noise, relative to the signal, in power."""
    grad = E5M2 if resolve(recipe).grad_output.format == fe.E5M2 else E4M3
    kept = E4M3 if memory.store == "fp8" else 0.0
    inputs = 2 * (1 + ACTIVATIONS[kind].gated)
    act = inputs * 2 * E4M3  # noise of f(y), of y with two operands' noise
    dy = (grad + E4M3) + inputs * (2 * E4M3 + kept)  # noise of dz @ w, then of f'(y)
    if kind in ("relu", "reglu"):  # y's sign flips in sqrt(noise) / pi of the elements; half of them pass a gradient
        dy += 2 / math.pi * math.sqrt(2 * E4M3)
    again = inputs * kept if memory.recompute_activation else 0.0
    x_again = kept if memory.recompute_norm else 0.0
    first = dy + grad + E4M3
    return {
        "y0": act + 2 * E4M3,
        "layers.1.weight": act + again + E4M3 + grad,
        "layers.0.weight": first + x_again,
        "layers.0.bias": dy,
        "dx": first,
        "gamma": first + kept,
        "beta": first,
    }


@pytest.mark.few(100)
@pytest.mark.parametrize("memory", MEMORIES, ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_gradients_against_float64(recipe, kind, memory):
    model = Model(recipe, NORMS[3], shapes(kind, k=192, f=128), kind=kind)
    ((x, dys),) = batches((96,), 192, (192,))
    with torch.no_grad():  # y of size 1, as in a trained model
        for layer in model.layers:
            layer.weight.mul_(math.sqrt(3))
    found = step(like(model, model.call, memory), x, dys)
    wanted = step(like(model, in_float64).double(), x.double(), [dy.double() for dy in dys])
    assert found.keys() == wanted.keys()
    for name, noise in worst(recipe, kind, memory).items():
        # 0.5 dB for the spread of sums over few elements; of squares, a few large ones outweigh the others
        spread = 1.0 if kind in SQUARED else 0.5
        assert sqnr(wanted[name], found[name]) > -10 * math.log10(noise) - spread, name
    assert sqnr(wanted["layers.1.bias"], found["layers.1.bias"]) > 100


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
    model = Model(recipe, NORMS[0], shapes("gelu"), kind="gelu")
    x = torch.randn(6, K, requires_grad=True)
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
