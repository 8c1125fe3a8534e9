"""A result stored in FP8 by its own matmul, and the layer that reads it: values, gradients, codes, memory."""

from dataclasses import replace

import pytest
import torch
from casts import assert_same, bits
from chains import Chain, chain, storing
from support import DTYPES, converted, saved, spy_on, sqnr, state_of

import fp8engine as fe
from fp8engine.ops import casts, matmul, reference
from fp8engine.ops.reference import Epilogue
from fp8engine.ops.tensor import Float8Tensor


def gradients(model: Chain, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(33,), (3, 7), (2, 3, 5)], ids=str)
def test_values_and_gradients_of_a_chain_are_those_of_float64(rows, bias: bool, dtype):
    model = chain(bias=bias, dtype=dtype)
    x, dy = torch.randn(*rows, 40).to(dtype), torch.randn(*rows, 30).to(dtype)
    assert isinstance(model.up(x), Float8Tensor)
    plain = Chain(bias=bias).double()
    plain.load_state_dict(model.state_dict())
    # Two E4M3 operands leave 28.5 dB, an E5M2 gradient 24.5 (test_linear.py); y has two casts of activations and two
    # of weights between it and x: 31.5 - 6 = 25.5; dx two gradients and two weights: 22.  2 dB for small matrices.
    wanted = gradients(plain, x.double(), dy.double())
    for i, (want, found) in enumerate(zip(wanted, gradients(model, x, dy), strict=True)):
        assert (found.dtype, found.shape) == (dtype, want.shape)
        assert sqnr(want, found) > (20.0 if i else 23.5), f"result {i}: {sqnr(want, found):.1f} dB"


@pytest.mark.parametrize("format", [fe.E4M3, fe.E5M2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_are_those_of_the_fp32_product_under_the_predicted_scale(dtype, format):
    model = chain(up=storing(format=format), dtype=dtype, sizes=(33, 17, 5))
    x = torch.randn(19, 33).to(dtype)
    with torch.no_grad():
        y = model.up(x)
        a, b = (casts.quantize(t, fe.Cast(fe.E4M3)) for t in (x, model.up.weight))
        product = matmul.matmul(a, b, None, torch.float32, "fast")
    assert isinstance(y, Float8Tensor)
    assert (y.format, y.dtype, y.granularity) == (format, dtype, fe.PerTensor())
    end = Epilogue(model.up.bias, format.dtype, "none", y.scale)
    assert_same(bits(y.operand().data), bits(reference.finish(product, end)))
    assert y.scale.item() == pytest.approx(fe.scaling_state(model)["up.output"].scale.item(), rel=1e-6)


def test_the_first_step_is_in_16_bits_and_the_second_under_its_amax():
    model = chain(warm=0)
    x = torch.randn(8, 40)
    first = model.up(x)
    assert type(first) is torch.Tensor
    model.down(first).sum().backward()
    state_of(model).begin_step()
    second = model.up(x)
    assert isinstance(second, Float8Tensor)
    assert second.scale.item() == pytest.approx(
        first.abs().max().item() / 448, rel=2.0**-7
    )  # the matmul rounds to BF16
    slot = fe.scaling_state(model)["up.output"]
    assert (int(slot.calls), int(slot.elements), int(slot.saturated)) == (2, 2 * 8 * 50, 0)


def test_the_reader_saves_the_codes_that_the_producer_wrote_and_nothing_else():
    model = chain(bias=False)
    h = model.up(torch.randn(64, 40))
    assert isinstance(h, Float8Tensor)
    (middle,) = (t for t in saved(model.down, h) if t.dim())
    assert middle.nbytes == 64 * 50  # one byte an element
    assert middle.untyped_storage().data_ptr() == h.operand().data.untyped_storage().data_ptr()


def test_the_readers_slot_takes_amax_and_scale_over_without_a_pass_over_memory(monkeypatch: pytest.MonkeyPatch):
    model = chain()
    h = model.up(torch.randn(64, 40))
    spy_on(monkeypatch, "cast_transpose", None)
    quantised: list[torch.Size] = []
    spy_on(monkeypatch, "quantize", lambda real, x, *rest: quantised.append(x.shape) or real(x, *rest))
    before = fe.scaling_state(model)["down.input"]
    model.down(h)
    assert set(quantised) <= {model.down.weight.shape}
    slots = fe.scaling_state(model)
    assert slots["down.input"].amax == slots["up.output"].amax > 0
    assert slots["down.input"].elements - before.elements == 64 * 50
    assert slots["down.input"].calls - before.calls == 1
    assert slots["down.input"].scale == pytest.approx(slots["up.output"].scale.item(), rel=1e-6)


def test_two_readers_and_a_residual_add_their_gradients():
    model = chain()
    other = fe.Linear(50, 30, recipe="current")
    x = torch.randn(9, 40)
    h = model.up(x)
    h.retain_grad()
    (model.down(h).sum() + other(h).sum() + h.sum()).backward()
    want = model.down.weight.double().sum(0) + other.weight.double().sum(0) + 1
    assert type(h.grad) is torch.Tensor
    assert sqnr(want.expand(9, 50), h.grad) > 27


def test_autocast_names_the_dtype_of_what_is_stored():
    model = chain()
    with torch.autocast("cpu", torch.bfloat16):
        h = model.up(torch.randn(4, 40))
        y = model.down(h)
    assert isinstance(h, Float8Tensor)
    assert h.dtype == y.dtype == torch.bfloat16
    y.sum().backward()
    assert model.up.weight.grad is not None
    assert model.up.weight.grad.dtype == torch.float32


def test_what_was_stored_keeps_its_scale_when_the_next_step_begins():
    model = chain()
    x = torch.randn(8, 40)
    h = model.up(x)
    want = h.dequantize().detach()
    (first,) = torch.autograd.grad(model.down(h).sum(), model.down.weight, retain_graph=True)
    model(100 * x).sum().backward()
    state_of(model).begin_step()
    assert model.up(x).scale > 50 * h.scale
    assert torch.equal(h.dequantize(), want)
    assert sqnr(first, torch.autograd.grad(model.down(h).sum(), model.down.weight)[0]) > 40


PLANS = [
    ("rowwise", fe.E4M3, "it casts per row, not per tensor"),
    ("blockwise", fe.E4M3, "it casts per 1x128 block, not per tensor"),
    ("bf16", fe.E4M3, "its forward is in 16 bits"),
    ("current", fe.E5M2, "Tensor Cores do not multiply E5M2 by E5M2"),  # of a gradient
]


@pytest.mark.parametrize(("recipe", "format", "told"), PLANS, ids=lambda value: str(value)[:12])
def test_other_plans_dequantise_and_say_so(recipe: str, format, told: str):
    model, x = chain(recipe, up=storing(format=format)), torch.randn(32, 40)
    want = model.up(x).dequantize().double() @ model.down.weight.double().t() + model.down.bias.double()
    assert sqnr(want, model(x)) > 27
    layer = fe.inspect(model).layers[1]
    assert layer["input"]["dequantised"] == {told: 2}  # the second of the two warm steps, and this
    assert f"2 inputs in FP8 were dequantised: {told}" in layer["reason"]


def test_a_recipe_cannot_store_what_it_cannot_scale():
    for wrong in (
        {"stored": fe.Cast(fe.E4M3)},
        {"stored": fe.Cast(fe.BF16)},
        {"stored": fe.Cast(fe.E4M3, scaling="delayed"), "stored_margin": -1},
    ):
        with pytest.raises(fe.errors.InvalidRecipe, match="delayed"):
            replace(fe.current(), **wrong)
    with pytest.raises(fe.errors.InvalidRecipe, match="an FP8 forward"):
        storing(fe.high_precision())
    recipe = storing(stored_margin=2)
    assert fe.Recipe.from_json(recipe.to_json()) == recipe


def test_fixed_recipes_show_no_slot_for_their_outputs():
    model = converted(Chain())
    model(torch.randn(4, 40)).sum().backward()
    assert "up.output" not in list(fe.scaling_state(model))
    assert fe.inspect(model).layers[0]["output"]["format"] == "float32"


def test_a_compiled_model_stores_16_bits_and_says_so(fresh):
    model = converted(Chain(), overrides={"up": storing()})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(16, 40)
    for _ in range(3):
        y = compiled(x)
        y.sum().backward()
    want = x.double() @ model.up.weight.double().t() + model.up.bias.double()
    want = want @ model.down.weight.double().t() + model.down.bias.double()
    assert sqnr(want, y) > 23.5  # two casts of activations and two of weights: 31.5 - 6 dB, less 2 for small matrices
    output = fe.inspect(model).layers[0]["output"]
    assert (output["format"], output["reason"]) == ("float32", "torch.compile: a graph stores 16 bits")


# torch 2.13's Dynamo looks at .grad of a graph's input, which is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_layer_reads_what_eager_code_stored(fresh):
    model, x = chain(), torch.randn(16, 40)
    h = model.up(x)
    assert isinstance(h, Float8Tensor)
    want = model.down(h.dequantize().detach())
    (wanted,) = torch.autograd.grad(model.down(h).square().sum(), model.up.weight)
    model.down.compile(backend="aot_eager")
    y = model.down(model.up(x))
    assert sqnr(want, y) > 35  # the same casts but for a scale 2^-8 apart
    (grad,) = torch.autograd.grad(y.square().sum(), model.up.weight)
    assert sqnr(wanted, grad) > 20
