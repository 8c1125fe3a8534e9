"""Operands that do not fit: two devices, scales of another shape.  The error names the tensor."""

import pytest
import torch

import fp8engine as fe
from fp8engine.errors import BackendError, ShapeError
from fp8engine.numerics.cast import Cast
from fp8engine.ops import casts
from tests.helpers.casts import cast_of

CURRENT = fe.Cast(fe.E4M3)
HOWS = {"tensor": cast_of(torch.float8_e4m3fn, -1, -1), "row": cast_of(torch.float8_e4m3fn, 1, -1)}


def elsewhere(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize("case", ["b", "bias", "plain b", "plain bias"])
def test_a_matmul_over_two_devices_names_the_tensor(case: str):
    x = torch.randn(4, 32)
    a = x if "plain" in case else fe.quantize(x, CURRENT)
    b = elsewhere(8, 32) if case == "plain b" else torch.randn(8, 32)
    if "plain" not in case:
        b = fe.quantize(b, CURRENT)
        b = b.to("meta") if case == "b" else b
    bias = elsewhere(8) if "bias" in case else None
    what = "bias" if "bias" in case else "b"
    with pytest.raises(BackendError, match=rf"^matmul: its first tensor is on cpu and {what} on meta; .*move one"):
        fe.matmul(a, b, bias_N=bias)


def test_a_scale_on_another_device_is_refused_and_not_fetched():
    with pytest.raises(BackendError, match=r"^quantize: .* on cpu and scale on meta"):
        fe.quantize(torch.randn(4, 32), CURRENT, scale=elsewhere())


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


@pytest.mark.parametrize("shape", [(3,), (4, 2), (1, 4), (5, 1)], ids=str)
@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_a_scale_of_another_shape_is_refused_with_the_shape_it_should_have(how: Cast, shape: tuple[int, ...]):
    want = r"\[\]" if how.per_tensor else r"\[4, 1\]"
    with pytest.raises(ShapeError, match=rf"^quantize: scale is .*has {want}"):
        casts.quantize_given(torch.randn(4, 32), how, torch.ones(shape))


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_one_number_serves_every_group(how: Cast):
    x = torch.randn(4, 32)
    one = casts.quantize_given(x, how, torch.tensor(0.25))
    assert torch.equal(one.data.float(), casts.quantize_given(x, HOWS["tensor"], torch.tensor(0.25)).data.float())
