"""Float8Tensor: what keeps the FP8 form, that all else sees the values, that it travels as a tensor does."""

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from support import UNIT, dequantised
from torch import nn

import fp8engine as fe

TENSOR, ROW, COLUMN = fe.PerTensor(), fe.PerRow(), fe.PerRow(0)
LINE, SQUARE = fe.PerBlock(1, 16), fe.PerBlock(16, 16)
GRANULARITIES = [TENSOR, ROW, COLUMN, LINE, SQUARE, fe.PerBlock(16, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def cast_of(granularity, format=fe.E4M3, **options) -> fe.Cast:
    return fe.Cast(format, granularity, **options)


def quantized(granularity: Any = TENSOR, *shape: int, dtype=torch.float32) -> fe.Float8Tensor:
    return fe.quantize(torch.randn(shape or (20, 40)).to(dtype), cast_of(granularity))


def assert_same_tensor(a: Any, b: Any) -> None:
    assert isinstance(a, fe.Float8Tensor)
    assert isinstance(b, fe.Float8Tensor)
    assert (a.shape, a.dtype, a.granularity, a.format) == (b.shape, b.dtype, b.granularity, b.format)
    assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    assert torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("format", [fe.E4M3, fe.E5M2], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_is_the_cast_of_numpy(dtype, granularity, format, power_of_2: bool):
    x = torch.randn(20, 40).to(dtype)
    cast = cast_of(granularity, format, power_of_2=power_of_2)
    q = fe.quantize(x, cast)
    want = dequantised(x, cast)
    # q * scale in FP32 and one rounding to the dtype; dequantised() keeps float64
    assert np.allclose(q.dequantize().double().numpy(), want, rtol=2 * UNIT[dtype] + 2.0**-22, atol=0)
    found = (q.shape, q.dtype, q.data.dtype, q.format, q.granularity, q.scale.dtype, q.requires_grad)
    assert found == (x.shape, dtype, format.dtype, format, granularity, torch.float32, False)


SCALE_SHAPES = {
    (24,): {TENSOR: (), ROW: (1, 1), COLUMN: (1, 24), LINE: (1, 2), SQUARE: (1, 2)},
    (20, 24): {TENSOR: (), ROW: (20, 1), COLUMN: (1, 24), LINE: (20, 2), SQUARE: (2, 2)},
    (2, 10, 24): {TENSOR: (), ROW: (2, 10, 1), COLUMN: (1, 24), LINE: (2, 10, 2), SQUARE: (2, 2)},
    (2, 1, 5, 2, 24): {TENSOR: (), ROW: (2, 1, 5, 2, 1), COLUMN: (1, 24), LINE: (2, 1, 5, 2, 2), SQUARE: (2, 2)},
}


@pytest.mark.parametrize("granularity", [TENSOR, ROW, COLUMN, LINE, SQUARE], ids=str)
@pytest.mark.parametrize("shape", SCALE_SHAPES, ids=str)
def test_leading_dimensions_count_as_rows(shape, granularity):
    x = torch.randn(shape)
    q, flat = fe.quantize(x, cast_of(granularity)), fe.quantize(x.view(-1, 24), cast_of(granularity))
    assert tuple(q.scale.shape) == SCALE_SHAPES[shape][granularity]
    assert torch.equal(q.scale.flatten(), flat.scale.flatten())
    assert torch.equal(q.dequantize(), flat.dequantize().view(shape))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_a_given_scale_is_used_and_what_does_not_fit_saturates(granularity):
    x = torch.randn(20, 40)
    measured = fe.quantize(x, cast_of(granularity))
    assert_same_tensor(fe.quantize(x, cast_of(granularity), measured.scale), measured)
    halved = fe.quantize(x * 4, cast_of(granularity), measured.scale)
    assert halved.data.float().abs().max() == 448
    assert torch.isfinite(halved.dequantize()).all()
    assert torch.equal(halved.scale, measured.scale)
    if granularity == TENSOR:
        assert_same_tensor(fe.quantize(x, cast_of(TENSOR), measured.scale.view(1)), measured)


@pytest.mark.parametrize(
    ("x", "cast", "error", "why"),
    [
        (torch.ones(2, 2).double(), cast_of(TENSOR), fe.errors.UnsupportedDtype, "x is torch.float64"),
        (torch.ones(2, 2).int(), cast_of(TENSOR), fe.errors.UnsupportedDtype, "x is torch.int32"),
        (torch.ones(2, 2).to_sparse(), cast_of(TENSOR), fe.errors.UnsupportedDtype, "torch.sparse_coo"),
        (torch.ones(2, 2), fe.Cast(fe.BF16), fe.errors.UnsupportedDtype, "BF16 has no scale"),
        (torch.tensor(1.0), cast_of(TENSOR), fe.errors.ShapeError, "no dimensions"),
        ([1, 2], cast_of(TENSOR), fe.errors.UnsupportedDtype, "quantize takes a tensor, not list"),
        (torch.ones(2, 2), "e4m3", fe.errors.InvalidRecipe, "quantize takes an fe.Cast, not str"),
        (torch.ones(2, 2), fe.current(), fe.errors.InvalidRecipe, "quantize takes an fe.Cast, not Recipe"),
    ],
)
def test_what_quantize_refuses(x, cast, error, why: str):
    with pytest.raises(error, match=why):
        fe.quantize(x, cast)
    with pytest.raises(fe.errors.UnsupportedDtype, match="a tensor as scale, not float"):
        fe.quantize(torch.ones(2, 2), cast_of(TENSOR), 0.5)  # pyright: ignore[reportArgumentType]


KEEPING = {
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "to the same": lambda x: x.to(x.device),
    "alias": lambda x: torch.ops.aten.alias(x),
    "view as itself": lambda x: x.view(x.shape),
    "contiguous": lambda x: x.contiguous(),
    "cpu": lambda x: x.cpu(),
}


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("granularity", [TENSOR, ROW, LINE], ids=str)
def test_operations_that_keep_fp8(granularity, name: str):
    q = quantized(granularity)
    assert_same_tensor(KEEPING[name](q), q)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_transposing_a_matrix_keeps_fp8_as_a_view(granularity):
    q = quantized(granularity)
    for t in (q.t(), q.T, q.mT, q.transpose(0, 1), q.transpose(-1, -2)):
        assert isinstance(t, fe.Float8Tensor)
        assert t.shape == (40, 20)
        assert t.data.data_ptr() == q.data.data_ptr()
        assert torch.equal(t.dequantize(), q.dequantize().t())
        assert_same_tensor(t.t(), q)
    for same in (q.transpose(0, 0), q.permute(0, 1), q.permute(-2, -1)):
        assert torch.equal(same, q.dequantize())


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("shape", [(2, 10, 40), (-1, 40), (20, 1, 40), (2, 2, 5, 40), (40, 20), (800,)], ids=str)
def test_views_that_cut_no_group_keep_fp8(granularity, shape):
    q = quantized(granularity)
    kept = granularity == TENSOR or (granularity in (ROW, LINE) and shape[-1] == 40)
    for v in (q.view(shape), q.reshape(shape)):
        assert isinstance(v, fe.Float8Tensor) == kept
        assert torch.equal(v.dequantize() if isinstance(v, fe.Float8Tensor) else v, q.dequantize().view(shape))
        if isinstance(v, fe.Float8Tensor):
            assert v.data.data_ptr() == q.data.data_ptr()
            assert granularity == TENSOR or v.scale.shape[:-1] == v.shape[:-1]
            assert_same_tensor(v.view(20, 40), q)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_to_meta_keeps_the_form(granularity):
    q = quantized(granularity).to("meta")
    assert isinstance(q, fe.Float8Tensor)
    assert (q.device.type, q.data.device.type, q.scale.device.type) == ("meta", "meta", "meta")
    assert (q.shape, q.format) == ((20, 40), fe.E4M3)
    assert quantized(granularity).to("meta", torch.bfloat16).dtype == torch.bfloat16


def by_pickle(q):
    return pickle.loads(pickle.dumps(q))


def by_torch_save(q):
    file = io.BytesIO()
    torch.save({"q": q}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["q"]


def by_flattening(q):
    names, context = q.__tensor_flatten__()
    inner = {name: getattr(q, name).clone() for name in names}
    return fe.Float8Tensor.__tensor_unflatten__(inner, context, q.shape, q.stride())


COPIES = [copy.deepcopy, copy.copy, by_pickle, by_torch_save, by_flattening]


@pytest.mark.parametrize("copied", COPIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_copies(transposed: bool, granularity, copied):
    q = quantized(granularity, dtype=torch.bfloat16)
    q = q.t() if transposed else q
    other = copied(q)
    assert_same_tensor(other, q)
    if copied is not copy.copy:
        before = q.dequantize()
        other.data.view(torch.uint8).zero_()
        assert torch.equal(q.dequantize(), before), "a copy of the codes, not a view of them"


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("power_of_2", [False, True])
def test_a_matmul_hears_that_scales_are_powers_of_two(power_of_2: bool, granularity):
    """Folding such a scale into 16-bit values is exact; any other is folded in FP32."""
    x, cast = torch.randn(20, 40), cast_of(granularity, power_of_2=power_of_2)
    q, other = fe.quantize(x, cast), quantized(granularity)
    same = [q, q.detach(), q.clone(), q.t(), q.t().t(), q.to("meta"), other.copy_(q), *(made(q) for made in COPIES)]
    assert [each.operand().power_of_2 for each in same] == [power_of_2] * len(same)
    q.copy_(x)
    assert torch.equal(q.scale, fe.quantize(x, cast).scale)
    given = fe.quantize(x, cast_of(granularity, power_of_2=True), scale=q.scale * 3)
    assert not given.operand().power_of_2


def test_copy_into():
    q, x = quantized(ROW), torch.randn(20, 40)
    assert q.copy_(x) is q
    assert_same_tensor(q, fe.quantize(x, cast_of(ROW)))
    other = quantized(ROW)
    q.copy_(other)
    assert_same_tensor(q, other)
    plain = torch.empty(20, 40)
    plain.copy_(q)
    assert torch.equal(plain, q.dequantize())


@pytest.mark.parametrize("format", [fe.E4M3, fe.E5M2], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_copy_into_codes_of_another_cast_casts_anew(granularity, format):
    q = quantized(SQUARE)
    for other in (fe.quantize(torch.randn(20, 40), cast_of(granularity, format)), quantized(granularity).t().t()):
        q.copy_(other)
        assert_same_tensor(q, fe.quantize(other.dequantize(), cast_of(SQUARE)))


def test_a_result_is_never_written_into_codes_that_cannot_hold_it():
    q = quantized()
    with pytest.raises(fe.errors.UnsupportedDtype, match="writes into a Float8Tensor"):
        torch.add(torch.ones(20, 40), 5.0, out=q)


def test_as_strided_with_another_offset_is_not_the_same_memory():
    q = quantized()[:2]
    assert_same_tensor(q.as_strided((2, 40), (40, 1)), q)
    with pytest.raises(RuntimeError, match="out of bounds"):  # of the dequantised copy
        q.as_strided((2, 40), (40, 1), 40)


@pytest.mark.parametrize("granularity", [TENSOR, ROW, LINE], ids=str)
@pytest.mark.parametrize("x", [torch.randn(2, 3, 40), torch.randn(2, 3, 40) * 1e-38], ids=["ordinary", "tiny"])
def test_a_result_s_own_scale_gives_it_again(x, granularity):
    """Of tiny values, whose factor is FP32's largest number and its inverse's inverse Inf, zeros too."""
    x[0, 0] = 0.0
    q = fe.quantize(x, cast_of(granularity))
    assert torch.equal(fe.quantize(x, cast_of(granularity), scale=q.scale).dequantize(), q.dequantize())


def test_as_a_parameter():
    q = quantized(ROW)
    layer = nn.Linear(40, 20, bias=False)
    layer.weight = nn.Parameter(q, requires_grad=False)
    x = torch.randn(3, 40)
    assert torch.equal(layer(x), x @ q.dequantize().t())
    assert isinstance(layer.state_dict()["weight"], fe.Float8Tensor)
    other = copy.deepcopy(layer)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    layer.to("cpu")
    assert isinstance(layer.weight, fe.Float8Tensor)


def test_compile_takes_one_in_and_gives_one_out():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def double(q, x):
        return q.t(), q + x, q.detach()

    q, x = quantized(ROW), torch.randn(20, 40)
    transposed, plain, kept = double(q, x)
    assert_same_tensor(transposed, q.t())
    assert_same_tensor(kept, q)
    assert torch.equal(plain, q.dequantize() + x)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_a_graph_dequantises_as_eager_code_does(granularity):
    """Of more elements than a table of codes is used for, in any order of dimensions."""
    torch._dynamo.reset()

    def both(x):
        q = fe.quantize(x, cast_of(granularity))
        return q.t().dequantize(), q.view(10, 8, 40).permute(2, 1, 0).dequantize()

    x = torch.randn(80, 40)
    for mine, its in zip(torch.compile(both, fullgraph=True, backend="aot_eager")(x), both(x), strict=True):
        assert torch.equal(mine, its)
        assert mine.stride() == its.stride()


def test_print_says_what_it_is():
    shown = repr(quantized(LINE, 2, 10, 32, dtype=torch.bfloat16))
    assert shown == "Float8Tensor(2x10x32, E4M3 per 1x16 block, dequantises to torch.bfloat16, on cpu)"
    assert repr(nn.Parameter(quantized(TENSOR), requires_grad=False)).count("Float8Tensor") >= 1
