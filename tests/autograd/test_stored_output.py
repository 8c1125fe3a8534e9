"""A result stored in FP8 by its own matmul, and the layer that reads it: values, gradients, codes, memory."""

from dataclasses import replace

import pytest
import torch
from casts import assert_same, bits
from chains import Chain, chain, storing
from support import DTYPES, converted, same, spy_on, sqnr, state_of
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.ops import casts, matmul, reference
from fp8engine.ops.reference import Epilogue
from fp8engine.ops.tensor import Float8Tensor


def gradients(model: Chain, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """y, dx and the gradients of all parameters."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(dy)
    assert x.grad is not None
    found = [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert len(found) == 2 + len(list(model.parameters()))
    return found


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
    least = {0: 23.5, 1: 20.0}
    for i, (want, found) in enumerate(
        zip(gradients(plain, x.double(), dy.double()), gradients(model, x, dy), strict=True)
    ):
        assert found.dtype == dtype
        assert found.shape == want.shape
        assert sqnr(want, found) > least.get(i, 20.0), f"result {i}: {sqnr(want, found):.1f} dB"


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
    x = torch.randn(64, 40)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        h = model.up(x)
        before = len(saved)
        model.down(h)
    assert isinstance(h, Float8Tensor)
    middle = [t for t in saved[before:] if t.dim() and t is not model.down.weight]
    assert [t.numel() * t.element_size() for t in middle] == [64 * 50]  # one byte an element
    assert middle[0].untyped_storage().data_ptr() == h.operand().data.untyped_storage().data_ptr()


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


def test_a_checkpoint_between_producer_and_reader():
    model, x, dy = chain(), torch.randn(16, 40), torch.randn(16, 30)
    want = gradients(model, x, dy)
    model.forward = lambda x: checkpoint(model.down, model.up(x), use_reentrant=False)
    assert same(gradients(model, x, dy)[1:], want[1:])


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


def test_evaluation_uses_the_last_scale_and_records_nothing():
    model = chain()
    before = fe.scaling_state(model)["up.output"]
    with torch.no_grad():
        h = model.up(torch.full((4, 40), 100.0))
    after = fe.scaling_state(model)["up.output"]
    assert isinstance(h, Float8Tensor)
    assert (after.amax, after.scale) == (before.amax, before.scale)
    assert after.saturated > before.saturated


def test_what_was_stored_keeps_its_scale_when_the_next_step_begins():
    model = chain()
    x = torch.randn(8, 40)
    h = model.up(x)
    want = h.dequantize().detach()
    model.down(h).sum().backward(retain_graph=True)
    assert model.down.weight.grad is not None
    first = model.down.weight.grad.clone()
    model(100 * x).sum().backward()
    state_of(model).begin_step()
    assert model.up(x).scale > 50 * h.scale
    assert torch.equal(h.dequantize(), want)
    model.zero_grad()
    model.down.zero_grad()
    y = model.down(h)
    y.sum().backward()
    assert sqnr(first, model.down.weight.grad) > 40


def test_other_plans_dequantise_and_say_so():
    x = torch.randn(32, 40)
    for recipe, told in [
        ("rowwise", "it casts per row, not per tensor"),
        ("blockwise", "it casts per 1x128 block, not per tensor"),
        ("bf16", "its forward is in 16 bits"),
    ]:
        model = chain(recipe)
        want = model.up(x).dequantize().double() @ model.down.weight.double().t() + model.down.bias.double()
        assert sqnr(want, model(x)) > 27
        layer = fe.inspect(model).layers[1]
        assert layer["input"]["dequantised"] == {told: 2}  # the second of the two warm steps, and this
        assert f"2 inputs in FP8 were dequantised: {told}" in layer["reason"]


def test_e5m2_by_an_e5m2_gradient_is_dequantised():
    model = chain(up=storing(format=fe.E5M2))
    model(torch.randn(8, 40)).sum().backward()
    (why,) = fe.inspect(model).layers[1]["input"]["dequantised"]
    assert why == "Tensor Cores do not multiply E5M2 by E5M2"


def test_codes_along_rows_are_read_by_a_plan_of_rows():
    layer = fe.Linear(64, 32, recipe="rowwise")
    cast = fe.Cast(fe.E4M3, fe.PerRow(), power_of_2=True)
    x = torch.randn(4, 8, 64)
    y = layer(fe.quantize(x, cast))
    assert torch.equal(y, layer(x))
    y.sum().backward()
    assert layer.weight.grad is not None
    found = layer.weight.grad.clone()
    layer.zero_grad()
    layer(x).sum().backward()
    assert sqnr(layer.weight.grad, found) > 27  # cast twice, along rows and then along columns
    assert fe.inspect(layer).layers[0]["input"]["ready"] == 1


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


def test_fixed_recipes_have_no_slot_for_their_outputs():
    model = converted(Chain())
    model(torch.randn(4, 40)).sum().backward()
    assert state_of(model).live_2S.shape[1] == 6
    assert "up.output" not in list(fe.scaling_state(model))
    assert fe.inspect(model).layers[0]["output"]["format"] == "float32"
