"""Operands that do not fit: two devices, scales of another shape.  The error names the tensor."""

import pytest
import torch

import fp8engine as fe
from fp8engine.errors import BackendError, ShapeError
from fp8engine.numerics.cast import Cast
from fp8engine.ops import casts

CURRENT = fe.Cast(fe.E4M3)


def elsewhere(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_a_matmul_or_a_cast_over_two_devices_names_the_tensor():
    plain, q, other = (
        torch.randn(4, 32),
        fe.quantize(torch.randn(4, 32), CURRENT),
        fe.quantize(torch.randn(8, 32), CURRENT),
    )
    for a, b, bias, what in (
        (q, other.to("meta"), None, "b"),
        (q, other, elsewhere(8), "bias"),
        (plain, elsewhere(8, 32), None, "b"),
        (plain, torch.randn(8, 32), elsewhere(8), "bias"),
    ):
        with pytest.raises(BackendError, match=rf"^matmul: its first tensor is on cpu and {what} on meta; .*move one"):
            fe.matmul(a, b, bias_N=bias)
    with pytest.raises(BackendError, match=r"^quantize: .* on cpu and scale on meta"):
        fe.quantize(plain, CURRENT, scale=elsewhere())


@pytest.mark.parametrize("what", ["input", "weight"])
@pytest.mark.parametrize("recipe", ["current", "bf16"])
def test_a_layer_and_its_input_on_two_devices_name_the_layer(recipe: str, what: str):
    layer = fe.Linear(32, 8, recipe=recipe)
    layer.numerics.name = "blocks.3.up"
    x = torch.randn(4, 32)
    if what == "input":
        x = x.to("meta")
    else:
        layer = layer.to("meta")
    with pytest.raises(BackendError, match=r"^blocks\.3\.up: .* on (cpu|meta) and weight on (meta|cpu)"):
        layer(x)


@pytest.mark.parametrize("text", ["e4m3", "e4m3 1x-1"])
def test_a_scale_of_another_shape_is_refused_with_the_shape_it_should_have(text: str):
    x, how, want = torch.randn(4, 32), Cast.parse(text), r"\[\]" if text == "e4m3" else r"\[4, 1\]"
    for shape in ((3,), (4, 2), (1, 4), (5, 1)):
        with pytest.raises(ShapeError, match=rf"^quantize: scale is .*has {want}"):
            casts.quantize_given(x, how, torch.ones(shape))
    one, wanted = (casts.quantize_given(x, each, torch.tensor(0.25)) for each in (how, Cast.parse("e4m3")))
    assert torch.equal(one.data.float(), wanted.data.float()), "one number serves every group"
