"""The served layer by itself: its products against float64, its memory, its refusals, what torch may do with it."""

import copy
import pickle
from typing import Any

import pytest
import torch
from support import DTYPES, EXACT_SCALES, spy_on, sqnr
from torch import nn

import fp8engine as fe
from fp8engine.errors import GradientError, ShapeError, UnsupportedDtype
from fp8engine.nn.serving import ServedLinear, make_served, serving
from fp8engine.numerics.recipe import resolve

RECIPES = ("current", "delayed", "rowwise", "rowwise_gw_hp", "blockwise", *EXACT_SCALES)


def made(recipe: str | fe.Recipe = "current", bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    return ServedLinear.of(nn.Linear(144, 40, bias, dtype=dtype), resolve(recipe))


def dequantised(codes: torch.Tensor, scale: torch.Tensor, cast: fe.Cast) -> torch.Tensor:
    scale = scale.reshape(()) if scale.numel() == 1 else scale
    return fe.Float8Tensor(codes, scale, cast.granularity, torch.float32).dequantize().double()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_is_that_of_the_codes(recipe, dtype):
    layer, x = made(recipe, dtype=dtype), torch.randn(3, 5, 144).to(dtype)
    cast = serving(resolve(recipe)).input
    x_q = fe.quantize(x.reshape(15, 144), cast)
    a = dequantised(x_q.data, x_q.scale, cast)
    w = dequantised(layer.weight.data, layer.scale, resolve(recipe).weight)
    want = a @ w.T + layer.bias.double()
    with torch.no_grad():
        got = layer(x)
    assert got.dtype == dtype
    assert got.shape == (3, 5, 40)
    # K = 144 products summed in FP32, 2^-24 each and as much for each dequantised operand; then rounded: to BF16 for a
    # 32-bit layer too (the recipe's output, 2^-9), to BF16 or FP16 (2^-9, 2^-12) and once more where the bias is added.
    unit = 2.0**-12 if dtype == torch.float16 else 2.0**-9
    bound = (150 * 2.0**-24) * (a.abs() @ w.abs().T) + 2 * unit * (want.abs() + layer.bias.double().abs())
    assert bool(((got.reshape(15, 40).double() - want).abs() <= bound).all())


def test_it_is_an_nn_linear_at_one_byte_a_weight():
    layer = made("blockwise", dtype=torch.bfloat16)
    assert issubclass(type(layer), nn.Linear)
    held = {name: tensor.nbytes for name, tensor in layer.state_dict().items()}
    assert held == {"weight": 144 * 40, "weight_scale_inv": 2 * 4, "bias": 40 * 2}
    with torch.no_grad():
        layer(torch.randn(4, 144, dtype=torch.bfloat16))
    assert not layer.numerics.weight.kept, "a copy of the weight stays in memory"
    assert "weight in FP8" in repr(layer)


def test_scales_are_frozen_at_fp32_whatever_the_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        plain = nn.Linear(32, 16, device="meta").requires_grad_(False)
        layer: Any = make_served(plain, ServedLinear, resolve("rowwise"), static=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (layer.scale.dtype, layer.input_scale.dtype, layer.bias.dtype) == (*2 * (torch.float32,), torch.bfloat16)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradients_are_those_of_the_codes(recipe, dtype):
    layer, x = made(recipe, dtype=dtype), torch.randn(3, 5, 144).to(dtype).requires_grad_()
    layer.bias.requires_grad_()
    dy = torch.randn(3, 5, 40).to(dtype)
    layer(x).backward(dy)
    weight = layer.numerics.recipe.weight
    w = dequantised(layer.weight.data, layer.scale, weight)
    by_row = isinstance(weight.granularity, fe.PerRow)
    rows = layer.scale.double().reshape(1, -1) if by_row else torch.ones(1, 1).double()
    given = (dy.reshape(15, 40).double() * rows).float()  # what is cast: scales per row are folded into dy
    q = fe.quantize(given, serving(resolve(recipe)).grad_output)
    a = dequantised(q.data, q.scale, serving(resolve(recipe)).grad_output) / rows
    want = a @ w
    # 40 products summed in FP32; rounded to BF16 (the recipe's output, also of a 32-bit layer) and to dtype.
    bound = (60 * 2.0**-24) * (a.abs() @ w.abs()) + 2 * 2.0**-9 * want.abs()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert bool(((x.grad.reshape(15, 144).double() - want).abs() <= bound).all())
    summed = dy.reshape(15, 40).double().sum(0)  # 15 FP32 additions, one rounding to dtype (BF16: 2^-9)
    assert bool(((layer.bias.grad.double() - summed).abs() <= 2.0**-8 * summed.abs() + 15 * 2.0**-20).all())


def test_blocks_of_one_row_are_cast_again_for_the_input_gradient(monkeypatch: pytest.MonkeyPatch):
    """Their scales would change with every value that is summed, which no kernel takes.  Noise is that of dy's
    cast, 31.5 dB (tests/nn/test_linear.py), and 0.5 for this draw; the weight's second cast rounds next to nothing."""
    layer, x, seen = made("mxfp8"), torch.randn(15, 144).requires_grad_(), []

    def spy(real, a, b, *rest):
        seen.append((a.cols, b.cols))
        return real(a, b, *rest)

    spy_on(monkeypatch, "matmul", spy)
    dy = torch.randn(15, 40)
    layer(x).backward(dy)
    assert seen == [(32, 32)] * 2
    assert x.grad is not None
    assert sqnr(dy.double() @ layer.dequantize().double(), x.grad) > 31.0


def test_what_has_no_gradient():
    layer, x = made(), torch.randn(4, 144, requires_grad=True)
    y = layer(x)
    with pytest.raises(GradientError, match=r"Linear: .* create_graph=True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    y = layer(x)
    layer.weight.data.view(torch.uint8).zero_()
    with torch.no_grad():
        layer.scale.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    layer = made()
    y = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    assert not layer(x.detach()).requires_grad
    layer.weight.requires_grad_()
    with pytest.raises(GradientError, match="which no optimizer can update"):
        layer(x.detach())
    with torch.inference_mode():
        assert torch.equal(layer(x), y)


def test_inputs_that_do_not_fit():
    layer = made()
    with pytest.raises(ShapeError, match=r"input is \[4, 100\]; a weight of \[40, 144\] wants \[..., 144\]"):
        layer(torch.randn(4, 100))
    with pytest.raises(UnsupportedDtype, match="float64"):
        layer(torch.randn(4, 144, dtype=torch.float64))
    with pytest.raises(UnsupportedDtype, match="casts to its weight's dtype: leave it in 16 bits"):
        layer(torch.randn(4, 144).to(layer.weight.dtype))
    with torch.no_grad():
        assert layer(torch.randn(0, 144)).shape == (0, 40)
        assert layer(torch.randn(144)).shape == (40,)


CHANGES = [
    lambda m: m.to(torch.bfloat16),
    lambda m: m.half(),
    lambda m: m.double().float(),
    lambda m: m.to("meta").to_empty(device="cpu"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_dtype_leaves_codes_and_scales(change):
    layer = made("rowwise")
    before = copy.deepcopy(layer.state_dict())
    change(layer)
    for name in ("weight", "weight_scale"):
        assert layer.state_dict()[name].dtype == before[name].dtype
        assert change is CHANGES[-1] or torch.equal(layer.state_dict()[name].float(), before[name].float())
    assert isinstance(layer.weight, nn.Parameter)


def loaded(layer: nn.Module) -> nn.Module:
    other = made("blockwise")
    other.load_state_dict(layer.state_dict())
    return other


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), loaded])
def test_copies_pickles_and_loaded_states_compute_the_same(copied):
    layer, x = made("blockwise"), torch.randn(4, 144)
    other = copied(layer)
    with torch.no_grad():
        assert torch.equal(other(x), layer(x))
    assert other.weight.dtype == torch.float8_e4m3fn


def test_loaded_scales_that_are_no_powers_of_two_are_not_taken_for_such():
    layer, given, x = made("blockwise"), made(fe.blockwise(power_of_2=False)), torch.randn(64, 144)
    assert layer.scale.shape == given.scale.shape
    assert layer.numerics.recipe.weight.power_of_2
    layer.load_state_dict(given.state_dict())
    assert not layer.numerics.recipe.weight.power_of_2
    assert fe.inspect(layer).layers[0]["weight"]["scale"] == float(given.scale.max())
    x_q = fe.quantize(x, layer.numerics.recipe.input).dequantize().double()
    scale = given.scale.repeat_interleave(128, 0)[:40].repeat_interleave(128, 1)[:, :144]
    want = x_q @ (given.weight.double() * scale).T + given.bias.double()
    with torch.no_grad():
        assert sqnr(want, layer(x)) > 100.0  # FP32; folded into BF16, scales lose 2^-9: 50 dB


@pytest.mark.parametrize("strict", [True, False])
def test_a_16_bit_weight_is_not_copied_into_codes(strict: bool):
    layer, plain = made("rowwise"), nn.Linear(144, 40)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(
        RuntimeError, match=r"weight is stored as FP8 codes, and weight is torch\.float32: call fe\.rev"
    ):
        layer.load_state_dict(plain.state_dict(), strict=strict)
    assert torch.equal(layer.weight.float(), before["weight"].float())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_autocast_decides_the_outputs_dtype_and_a_layer_may_have_no_rows():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert made()(torch.randn(4, 144)).dtype == torch.bfloat16
    with torch.no_grad():
        assert ServedLinear.of(nn.Linear(8, 0, bias=False), resolve("current"))(torch.randn(2, 8)).shape == (2, 0)


@pytest.mark.slow
def test_compiled_blocks_of_one_row_have_a_gradient():
    layer, x = made("mxfp8"), torch.randn(4, 144).requires_grad_()
    found, want = (torch.autograd.grad(run(x).sum(), x)[0] for run in (torch.compile(layer, fullgraph=True), layer))
    assert torch.equal(found, want)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_compiled_it_is_one_graph(recipe):
    layer, x = made(recipe), torch.randn(4, 144)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (4, 7):
            x = torch.randn(rows, 144)
            want = layer(x)
            # FP32 sums in another order, rounded to BF16 (the recipe's output): at most one step of 2^-8 apart.
            assert bool(((compiled(x) - want).abs() <= 2.0**-8 * want.abs() + 1e-6).all())


def test_the_report_tells_the_truth():
    net: Any = nn.Sequential(made("rowwise"))
    assert fe.inspect(net).layers[0]["reason"].startswith("never ran")
    with torch.no_grad():
        net(x := torch.randn(6, 144))
    (row,) = fe.inspect(net).layers
    assert (row["kind"], row["recipe"], row["rows"], row["kept_bytes"]) == ("ServedLinear", "rowwise", 6, 0)
    assert (row["backend"], row["emulated"], row["fp8_share"]) == ("reference", True, 1.0)
    assert row["input"]["amax"] == float(x.abs().max())
    assert row["weight"]["scale"] == float(net[0].scale.max())
    assert fe.inspect(net).totals["fp8_flops_share"] == 1.0
    with pytest.raises(fe.errors.ConversionError, match="stores FP8 codes"):
        fe.convert(net)
