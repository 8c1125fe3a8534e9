"""What a Linear takes and refuses: shapes, strides, dtypes, autocast, devices; nn.Linear's own rules and words."""

import re

import pytest
import torch
from support import DTYPES, FP8_RECIPES, tables
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8engine as fe

ALL_RECIPES = [*FP8_RECIPES, "bf16"]


def layer_of(k: int, n: int, recipe: str = "current", **options) -> fe.Linear:
    return fe.Linear(k, n, recipe=recipe, **options)


def plain_of(layer: nn.Linear) -> nn.Linear:
    """nn.Linear with the same parameters."""
    plain = nn.Linear(layer.in_features, layer.out_features, dtype=layer.weight.dtype)
    plain.load_state_dict(layer.state_dict())
    return plain


def gradients(layer: nn.Linear, x: torch.Tensor, dy: torch.Tensor):
    """(y, dx, dw, db), dx in x's shape."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    return y.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()


# Each makes a tensor whose last dimension is 24, in a layout that a matmul does not take as it is.
LAYOUTS = {
    "1-D": lambda: torch.randn(24),
    "3-D": lambda: torch.randn(2, 5, 24),
    "5-D": lambda: torch.randn(2, 1, 3, 2, 24),
    "every second column": lambda: torch.randn(6, 48)[:, ::2],
    "every second row": lambda: torch.randn(12, 24)[::2],
    "reversed by flip of a view": lambda: torch.randn(6, 24).t().flip(0).t(),
    "transposed": lambda: torch.randn(24, 6).t(),
    "expanded row": lambda: torch.randn(1, 24).expand(6, 24),
    "expanded column": lambda: torch.randn(6, 1).expand(6, 24),
    "3-D with permuted leading dimensions": lambda: torch.randn(5, 2, 24).transpose(0, 1),
    "4-D of channels last": lambda: torch.randn(2, 24, 3, 4).permute(0, 2, 3, 1),
    "a storage offset": lambda: torch.randn(200)[7 : 7 + 144].view(6, 24),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_any_layout_gives_what_its_contiguous_matrix_gives(recipe: str, layout: str):
    layer, x = layer_of(24, 10, recipe), LAYOUTS[layout]()
    dy = torch.randn(*x.shape[:-1], 10)
    y, dx, dw, db = gradients(layer, x, dy)
    y_MN, dx_MK, dw_matrix, db_matrix = gradients(layer, x.reshape(-1, 24).clone(), dy.reshape(-1, 10))
    assert y.shape == dy.shape
    assert dx.shape == x.shape
    assert torch.equal(y.reshape(-1, 10), y_MN)
    assert torch.equal(dx.reshape(-1, 24), dx_MK)
    assert torch.equal(dw, dw_matrix)
    assert torch.equal(db, db_matrix)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a_gradient_in_any_layout(recipe: str):
    layer, x = layer_of(24, 10, recipe), torch.randn(6, 24)
    for dy in (torch.randn(10, 6).t(), torch.randn(1, 10).expand(6, 10), torch.ones(()).expand(6, 10)):
        for found, want in zip(gradients(layer, x, dy), gradients(layer, x, dy.contiguous()), strict=True):
            assert torch.equal(found, want)


@pytest.mark.parametrize("shape", [(0, 24), (2, 0, 24), (0, 3, 24)], ids=str)
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_no_rows_give_what_nn_linear_gives(recipe: str, shape):
    layer, dy = layer_of(24, 10, recipe), torch.randn(*shape[:-1], 10)
    x = torch.randn(shape)
    before = tables(layer)[1]
    for found, want in zip(gradients(layer, x, dy), gradients(plain_of(layer), x, dy), strict=True):
        assert found.shape == want.shape
        assert torch.equal(found, want), "gradients of weight and bias are zeros, not NaN"
    assert torch.equal(tables(layer)[1][:, [0, 2]], before[:, [0, 2]]), "no elements, no amax: the slots did not run"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize(("k", "n"), [(0, 10), (24, 0), (0, 0)])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_no_features_give_what_nn_linear_gives(recipe: str, k: int, n: int):
    layer, x, dy = layer_of(k, n, recipe), torch.randn(6, k), torch.randn(6, n)
    for found, want in zip(gradients(layer, x, dy), gradients(plain_of(layer), x, dy), strict=True):
        assert found.shape == want.shape
        assert torch.allclose(found, want)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_last_microbatch_smaller_than_the_others(recipe: str):
    layer = layer_of(24, 10, recipe)
    for rows in (64, 64, 7):
        x, dy = torch.randn(rows, 24), torch.randn(rows, 10)
        found, want = gradients(layer, x, dy), gradients(plain_of(layer), x, dy)
        for a, b in zip(found, want, strict=True):
            assert a.shape == b.shape
            assert (a - b).norm() < 0.1 * b.norm()  # E5M2 gradients: 24.5 dB is 6 %


AUTOCAST = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("dtype", "cast"), AUTOCAST, ids=str)
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_autocast_gives_the_dtypes_of_nn_linear(recipe: str, dtype, cast):
    layer = layer_of(32, 16, recipe, dtype=dtype)
    results = []
    for module in (layer, plain_of(layer)):
        torch.manual_seed(1)
        x = torch.randn(8, 32, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", dtype=cast):
            y = module(x)
        y.sum().backward()
        results.append([t.dtype for t in (y, x.grad, module.weight.grad, module.bias.grad) if t is not None])
    assert results[0] == results[1] == [cast, dtype, dtype, dtype]


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(8, 32, 16), (160, 128, 192)], ids=str)  # held for emulation in FP32, in BF16
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_autocast_changes_the_dtype_of_the_output_and_no_more(recipe: str, shape, cast):
    # Codes reach 448: a matmul inside that followed autocast to FP16 would overflow.
    m, k, n = shape
    layer, x = layer_of(k, n, recipe), torch.randn(m, k, requires_grad=True)
    want = layer(x)
    (dx,) = torch.autograd.grad(want.sum(), x)
    with torch.autocast("cpu", dtype=cast):
        found = layer(x)
        assert torch.equal(found, want.to(cast))
        (dx_found,) = torch.autograd.grad(found.sum(), x)  # backward under autocast: not advised, often done
    assert torch.equal(dx_found, dx)


def test_autocast_takes_an_input_of_another_dtype_than_the_weight():
    layer, x = layer_of(32, 16), torch.randn(8, 32).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        assert torch.equal(y, layer(x.float())), "the same values, quantised from either dtype"
    assert y.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert layer(x.float()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_mixed_dtypes_without_autocast_are_refused_by_both_names(recipe: str, dtype):
    with pytest.raises(TypeError, match=rf"Linear: input is {dtype} and weight is torch.float32.*autocast"):
        layer_of(32, 16, recipe)(torch.randn(8, 32, dtype=dtype))


@pytest.mark.parametrize("recipe", ALL_RECIPES)
@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 32, dtype=torch.float64),
        torch.ones(2, 32, dtype=torch.int64),
        torch.ones(2, 32, dtype=torch.int8),
        torch.ones(2, 32, dtype=torch.bool),
        torch.ones(2, 32, dtype=torch.complex64),
        torch.ones(2, 32).to(torch.float8_e4m3fn),
        torch.ones(2, 32).to_sparse(),
    ],
    ids=lambda x: f"{x.dtype}{'' if x.layout == torch.strided else ' sparse'}",
)
def test_unsupported_inputs_name_the_layer(recipe: str, x: torch.Tensor):
    layer = layer_of(32, 16, recipe)
    layer.numerics.name = "blocks.3.up"
    with pytest.raises(fe.errors.UnsupportedDtype, match=r"^blocks\.3\.up: input is torch\.\w+"):
        layer(x)
    assert tables(layer)[2].sum() == 0, "refused before anything was counted"


@pytest.mark.parametrize("autocast", [False, True])
def test_a_float64_weight_is_refused(autocast: bool):
    layer = layer_of(32, 16).double()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        pytest.raises(fe.errors.UnsupportedDtype, match=r"weight is torch\.float64"),
    ):
        layer(torch.randn(2, 32))


@pytest.mark.parametrize("shape", [(4, 31), (2, 2, 33), (31,), (4, 0)], ids=str)
def test_in_features_mismatch_has_nn_linears_words_and_the_layers_name(shape):
    layer = layer_of(32, 16)
    layer.numerics.name = "blocks.3.up"
    with pytest.raises(RuntimeError) as ours:
        layer(torch.randn(shape))
    rows = max(torch.Size(shape[:-1]).numel(), 1) if shape[-1] else 0
    words = f"mat1 and mat2 shapes cannot be multiplied ({rows}x{shape[-1]} and 32x16)"
    assert str(ours.value) == f"blocks.3.up: {words}: in_features is 32"
    if len(shape) == 2 and shape[-1]:
        with pytest.raises(RuntimeError, match=re.escape(words)):
            plain_of(layer)(torch.randn(shape))


def test_a_scalar_input_is_refused():
    with pytest.raises(fe.errors.ShapeError, match="Linear: mat1 and mat2"):
        layer_of(32, 16)(torch.tensor(1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_meta_tensors_give_shapes_forward_and_backward(recipe: str, dtype):
    layer = layer_of(32, 16, recipe, device="meta", dtype=dtype)
    x = torch.empty(2, 4, 32, device="meta", dtype=dtype, requires_grad=True)
    y = layer(x)
    assert (y.shape, y.dtype, y.device.type) == ((2, 4, 16), dtype, "meta")
    y.sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert (x.grad.shape, x.grad.dtype) == (x.shape, dtype)
    assert layer.weight.grad.shape == (16, 32)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_fake_tensors_give_shapes(recipe: str):
    with FakeTensorMode():
        layer = layer_of(32, 16, recipe)
        x = torch.empty(4, 32, requires_grad=True)
        y = layer(x)
        y.sum().backward()
    assert y.shape == (4, 16)
    assert x.grad is not None
    assert x.grad.shape == (4, 32)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_inference_mode(recipe: str):
    layer, x = layer_of(32, 16, recipe), torch.randn(4, 32)
    with torch.no_grad():
        want = layer(x)
    with torch.inference_mode():
        assert torch.equal(layer(x), want)
        assert torch.equal(layer(x.clone()), want), "a tensor made in inference mode has no version counter"


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize(("size", "weight"), [(2.0**120, 1.0), (2.0**75, 2.0**75)])
def test_values_near_the_end_of_fp32(recipe: str, size: float, weight: float):
    """Finite wherever nn.Linear is, forward and backward; not finite wherever nn.Linear is not."""
    layer = layer_of(32, 16, recipe)
    with torch.no_grad():
        layer.weight.mul_(weight)
    x, dy = torch.rand(8, 32) * size, torch.rand(8, 16)
    x[3] = 0.0
    for ours, its in zip(gradients(layer, x, dy), gradients(plain_of(layer), x, dy), strict=True):
        assert torch.equal(ours.isfinite(), its.isfinite())
        if ours.isfinite().all():
            assert (ours - its).abs().max() <= 0.1 * its.abs().max()  # two casts, each to 2^-4 or, in E5M2, 2^-3
