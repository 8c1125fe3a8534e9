"""A norm as a producer and the layers that read it, against the same in pieces, bit for bit, and against float64.

In FP32 nothing is rounded between the pieces, so that fused and apart are one computation: results, gradients, scales
and counters agree in every bit.  In BF16 too: both round the norm to 16 bits first.
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
from fp8engine.numerics.recipe import resolve

LAYER = NORMS[2]
ROWS = (24, 24, 40, 24)


@pytest.mark.parametrize("memory", EXACT, ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_in_fp32_it_is_norm_and_layers_apart_bit_for_bit(recipe, norm, memory):
    """Two layers: FP32 sums of two gradients do not depend on their order."""
    assert_as_apart(Model(recipe, norm, [(48, 40), (48, 16)]), ROWS, memory, root=True)


@pytest.mark.parametrize("memory", EXACT, ids=str)
@pytest.mark.parametrize("recipe", [name for name in FP8_RECIPES if name != "rowwise_gw_hp"])
def test_in_bf16_the_norm_is_rounded_once(recipe, memory):
    with torch.autocast("cpu", dtype=torch.bfloat16):  # an FP32 norm beside BF16 weights, for the layers apart
        assert_as_apart(Model(recipe, LAYER, [(160, 24)], torch.bfloat16), ROWS, memory)


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_layers_behind_torchs_own_norm_in_bf16_read_the_same_codes(recipe):
    """But where torch's FP32 norm is another one an ulp away from a tie: a value in 2^15, moved by 2^-8."""
    model = Model(recipe, LAYER, [(160, 24)], torch.bfloat16)
    ((x, _),) = batches((64,), 160, (24,), torch.bfloat16)
    norm = torch.nn.functional.layer_norm(x, (160,), model.gamma, model.beta, LAYER.eps)
    (layer,) = model.layers
    (y,) = model(x)
    assert sqnr(y, layer(norm)) > 60


# As derived in test_linear.py: an operand in E4M3 carries noise of 31.5 dB, in E5M2 6 dB less, and noises add.  The
# norm's backward is linear in dn and takes the same part of signal and noise.  x kept in FP8 is E4M3's 31.5 dB more
# wherever x is read: in dgamma, and in dw where the norm is computed again from it; in dx x is a small part.
E4M3, E5M2 = 10**-3.15, 10**-2.55


def expected(recipe: str, memory: Memory) -> dict[str, float]:
    """The noise, relative to the signal, in power."""
    grad = E5M2 if resolve(recipe).grad_output.format == fe.E5M2 else E4M3
    x = E4M3 if memory.store == "fp8" else 0.0
    dw = grad + E4M3 + (x if memory.recompute_norm else 0.0)
    if recipe == "rowwise_gw_hp":
        dw = x if memory.recompute_norm else 0.0
    dn = grad + E4M3
    return {"y0": 2 * E4M3, "dx": dn, "gamma": dn + x, "beta": dn, "layers.0.weight": dw}


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_gradients_against_float64(recipe, norm, memory):
    model = like(Model(recipe, norm, [(256, 192)]), Model(recipe, norm, [(256, 192)]).call, memory)
    ((x, dys),) = batches((128,), 256, (192,))
    found = step(model, x, dys)
    wanted = step(like(model, in_float64).double(), x.double(), [dy.double() for dy in dys])
    assert found.keys() == wanted.keys()
    for name, noise in expected(recipe, memory).items():
        if name in wanted:
            measured = sqnr(wanted[name], found[name])
            # 1.2 dB: the sums of a column have few elements.  Without noise, 16 bits.
            near = abs(measured + 10 * math.log10(noise)) < 1.2 if noise else measured > 48
            assert near, f"{name}: {measured:.2f} dB"
    assert sqnr(wanted["layers.0.bias"], found["layers.0.bias"]) > 100


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
    model = Model(name, LAYER, [(48, 16)])
    x = torch.randn(6, 48, requires_grad=True)
    (y,) = model(x)
    n = torch.nn.functional.layer_norm(x, (48,), model.gamma, model.beta, LAYER.eps)
    assert torch.equal(y, model.layers[0](n))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert torch.autograd.grad(dx.square().sum(), x)[0].any()


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
