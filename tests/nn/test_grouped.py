"""fe.GroupedLinear: each expert's rows times its own weight, whichever way the rows are counted and stored."""

from typing import Any

import pytest
import torch
from experts import SIZES, run, uneven
from support import FP8_RECIPES, UNIT, same, sqnr, tables
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fp8engine as fe
from fp8engine.nn.grouped import GroupedLinear
from fp8engine.numerics.recipe import resolve


def layer_of(recipe: str, k: int = 32, n: int = 48, **options) -> Any:
    """Four experts.  Any: their bias is there."""
    return GroupedLinear(len(SIZES), k, n, recipe=recipe, **options)


@pytest.mark.parametrize(
    ("ratio", "loss", "within"), [(0, 0, 0.05), (-8, 0, 0.05), (-10, 0.02, 0.05), (-12, 0.7, 0.3), (-14, 8.4, 1.0)]
)
def test_what_a_shared_scale_costs_a_smaller_expert(ratio: int, loss: float, within: float):
    """The table of nn/grouped.py: nothing, until the smaller expert's values are near E4M3's smallest normal."""
    layers = {recipe: GroupedLinear(2, 512, 256, bias=False, recipe=recipe) for recipe in ("current", "rowwise")}
    x, w = torch.randn(256, 512), torch.randn(2, 256, 512)
    w[1] *= 2.0**ratio
    found = {}
    for recipe, layer in layers.items():
        with torch.no_grad():
            layer.weight.copy_(w)
        found[recipe] = sqnr(x[128:].double() @ w[1].double().T, layer(x, [128, 128])[128:])
    # Of its own: 28.5 dB, that of two E4M3 operands (tests/nn/test_linear.py).
    assert abs(found["rowwise"] - 28.5) < 0.2
    assert abs(28.5 - found["current"] - loss) < within + 0.1


@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "bf16", "fp16", "fp32"])
def test_sizes_are_ints_or_a_tensor(recipe: str):
    layer, x = layer_of(recipe), torch.randn(144, 32)
    want = layer(x, SIZES)
    for given in (tuple(SIZES), torch.tensor(SIZES), torch.tensor(SIZES, dtype=torch.int32)):
        assert torch.equal(layer(x, given), want)


@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "bf16"])
def test_a_single_row_of_any_stride(recipe: str):
    """`contiguous` leaves it its stride, which torch's grouped matmul wants in multiples of 16 bytes."""
    layer = layer_of(recipe, dtype=torch.bfloat16)
    wide, dy = torch.randn(1, 37).bfloat16(), torch.randn(1, 53).bfloat16()
    found = []
    for x, d in ((wide[:, :32], dy[:, :48]), (wide[:, :32].clone(memory_format=torch.contiguous_format), dy[:, :48])):
        layer.zero_grad()
        y = layer(x.requires_grad_(), [0, 1, 0, 0])
        y.backward(d)
        found.append((y, x.grad, layer.weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("shape", [(1, 1), (33, 50), (0, 8), (16, 16)], ids=str)
@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "bf16", "fp32"])
def test_any_number_of_rows_and_columns(recipe: str, shape):
    k, n = shape
    for sizes in ([0, 0, 0, 0], [0, 0, 3, 0], [1, 1, 1, 1]):
        ran = run(layer_of(recipe, k, n), sizes)
        assert (ran.y.shape, ran.x.grad.shape) == ((sum(sizes), n), (sum(sizes), k))
        assert torch.isfinite(ran.y).all()
        for e, size in enumerate(sizes):
            assert ran.dw[e].any() == bool(size and k)
            assert ran.db[e].any() == bool(size)


@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "bf16", "fp16"])
def test_a_weight_stored_the_other_way_round(recipe: str):
    layer = layer_of(recipe)
    other = GroupedLinear.of(
        nn.Parameter(layer.weight.detach().mT.contiguous()), layer.bias, recipe=recipe, turned=True
    )
    assert other.shape == layer.shape == (4, 48, 32)
    x = torch.randn(144, 32)
    torch.manual_seed(1)
    one = run(layer, SIZES, x=x.clone())
    layer.bias.grad = None
    torch.manual_seed(1)
    two = run(other, SIZES, x=x.clone())
    # In 16 bits the same products are summed in another order, and each side rounded once: two units of the largest.
    units = 0 if resolve(recipe).is_fp8 else 2 * UNIT[resolve(recipe).input.format.dtype]
    for found, want in ((two.y, one.y), (two.x.grad, one.x.grad), (two.dw.mT, one.dw)):
        assert (found - want).abs().max() <= units * want.abs().max()
    report = fe.inspect(other).layers[0]
    assert (report["kind"], report["shape"]) == ("GroupedLinear", [4, 48, 32])


# F.linear rounds sums and bias once (u |y|), the grouped matmul before the bias too (u |y - b|); sums of 32 products.
def test_bf16_by_the_grouped_matmul_and_without_it():
    layer, x = layer_of("bf16"), torch.randn(144, 32)
    y, u = layer(x, SIZES), UNIT[torch.bfloat16]
    for e, (x_e, y_e) in enumerate(zip(x.bfloat16().double().split(SIZES), y.split(SIZES), strict=True)):
        w, b = layer.weight[e].bfloat16().double(), layer.bias[e].bfloat16().double()
        product = x_e @ w.T
        slack = 1.01 * (u * product.abs() + u * (product + b).abs() + 2.0**-19 * x_e.abs() @ w.abs().T)
        assert ((y_e - product - b).abs() <= slack).all()


def test_16_bit_gradients_of_a_sum_of_many_rows_and_of_a_gradient():
    # A sum's gradient is one number, expanded: torch's grouped matmul refuses its strides.
    layer, x = layer_of("bf16", bias=False, dtype=torch.bfloat16), torch.ones(144, 32, dtype=torch.bfloat16)
    (dw,) = torch.autograd.grad(layer(x, SIZES).sum(), layer.weight)
    assert torch.equal(dw, torch.tensor(SIZES)[:, None, None].expand(4, 48, 32).bfloat16())
    # Ones summed in BF16 stop at 2^8; 600 is a number of BF16.
    layer = layer_of("bf16")
    (db,) = torch.autograd.grad(layer(torch.randn(600, 32), [0, 600, 0, 0]).sum(), layer.bias)
    assert db[:, 0].tolist() == [0, 600, 0, 0]
    x = torch.randn(144, 32, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x, SIZES).square().sum(), x, create_graph=True)
    assert torch.autograd.grad(dx.square().sum(), x)[0].any()


@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "bf16"])
def test_autocast_decides_the_dtype(recipe: str):
    layer, x = layer_of(recipe), torch.randn(144, 32)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            y = layer(x, SIZES)
        assert y.dtype == dtype
        # Two recipes' roundings of the same sums, to BF16 (2^-8) and to `dtype`, on either side.
        assert torch.allclose(y.float(), layer(x, SIZES), rtol=2.0**-6, atol=2.0**-6)


ROWS, SHAPE, DTYPE = torch.ones(144, 32), fe.errors.ShapeError, fe.errors.UnsupportedDtype
BAD = [
    (ROWS, [5, 0, 130], r"sizes has shape \[3\]; want one number of rows for each of 4 experts", SHAPE),
    (ROWS, [5, 0, 130, 8], r"sum to 143, and the input has 144 rows", SHAPE),
    (ROWS, [5, -1, 131, 9], r"at least 0", SHAPE),
    (ROWS, [5.0, 0, 130, 9], r"numbers of rows are ints", DTYPE),
    (ROWS, torch.tensor([SIZES]), r"sizes has shape \[1, 4\]", SHAPE),
    (ROWS, torch.tensor([5, 0, 130, 8]), r"sum to 143", SHAPE),
    (ROWS, torch.tensor([5, -1, 131, 9]), r"at least 0", SHAPE),
    (ROWS, torch.tensor([5.0, 0, 130, 9]), r"sizes is torch.float32", DTYPE),
    (ROWS, torch.empty(4, dtype=torch.int64, device="meta"), r"on cpu and sizes on meta", fe.errors.BackendError),
    (torch.ones(4, 36, 32), SIZES, r"\[4, 36, 32\]; want \[T, 32\]", SHAPE),
    (torch.ones(144, 31), SIZES, r"144x31 and 32x48", SHAPE),
    (ROWS.double(), SIZES, "float64", DTYPE),
    (ROWS.bfloat16(), SIZES, "bfloat16 and weight is torch.float32", DTYPE),
    (ROWS.to("meta"), SIZES, "weight on cpu", fe.errors.BackendError),
]


@pytest.mark.parametrize(("x", "sizes", "message", "error"), BAD, ids=[message[:24] for _, _, message, _ in BAD])
@pytest.mark.parametrize("recipe", ["current", "bf16"])
def test_what_does_not_fit_is_named(recipe: str, x: torch.Tensor, sizes, message: str, error):
    layer = layer_of(recipe)
    layer.numerics.name = "layers.3.experts.up"
    with pytest.raises(error, match=rf"^layers\.3\.experts\.up: .*{message}"):
        layer(x, sizes)


def test_parameters_are_held_or_refused():
    weight, bias = nn.Parameter(torch.randn(2, 4, 8)), nn.Parameter(torch.randn(2, 4))
    layer = GroupedLinear.of(weight, bias, recipe="current")
    assert (layer.weight is weight, layer.bias is bias) == (True, True)
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert list(GroupedLinear.of(weight, recipe="current").state_dict()) == ["weight"]
    with pytest.raises(fe.errors.ShapeError, match=r"weight is \[0, 4, 8\]"):
        GroupedLinear(0, 8, 4, recipe="current")
    with pytest.raises(fe.errors.ShapeError, match=r"weight is \[4, 8\]"):
        GroupedLinear.of(nn.Parameter(torch.ones(4, 8)), recipe="current")
    with pytest.raises(fe.errors.ShapeError, match=r"bias is \[2, 8\]; want \[E, N\] = \[2, 4\]"):
        GroupedLinear.of(weight, nn.Parameter(torch.ones(2, 8)), recipe="current")
    with pytest.raises(fe.errors.UnknownName, match="rowwise"):
        GroupedLinear(2, 8, 4, recipe="rowise")


def test_experts_begin_as_linears_do():
    layer = GroupedLinear(8, 256, 64, recipe="current")
    assert 0.95 / 16 < layer.weight.detach().abs().max() <= 1 / 16
    # The mean square of a uniform number within 1 / sqrt(K) is 1 / 3 K.
    assert layer.weight.detach().square().mean().item() == pytest.approx(1 / (3 * 256), rel=0.02)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_the_report_counts_rows_once(recipe: str):
    """A row meets one of the four experts: T x N x K products, and not four times as many."""
    experts, plain = layer_of(recipe), nn.Linear(32, 48)
    model = nn.ModuleDict({"experts": experts, "plain": plain})
    run(experts, SIZES)
    plain(torch.randn(144, 32))
    report, slots = fe.inspect(model), fe.scaling_state(model)
    (row,) = (row for row in report.layers if row["name"] == "experts")
    assert (row["kind"], row["shape"], row["rows"], row["recipe"]) == ("GroupedLinear", [4, 48, 32], 144, recipe)
    assert (row["backend"], row["emulated"], row["ran"]) == ("reference", True, True)
    assert report.totals["fp8_flops_share"] == pytest.approx(resolve(recipe).fp8_share / 2)
    elements = {role: int(slots[f"experts.{role}"].elements) for role in ("weight", "grad_output")}
    assert elements == {"weight": 4 * 48 * 32, "grad_output": 144 * 48}
    assert slots["experts.weight"].amax == experts.weight.detach().abs().max()


@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "bf16"])
def test_shapes_propagate_on_meta(recipe: str):
    with torch.device("meta"):
        for sizes in (SIZES, torch.tensor(SIZES)):
            assert layer_of(recipe)(torch.empty(144, 32), sizes).shape == (144, 48)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "bf16"])
def test_one_graph_for_any_division_of_the_rows(recipe: str, fresh):
    eager, compiled = (uneven(layer_of(recipe)) for _ in range(2))
    compiled.load_state_dict(eager.state_dict())
    graphs = CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda x, sizes: compiled(x * 2, sizes).square(), backend=graphs, fullgraph=True)
    for sizes in (SIZES, [50, 50, 44, 0], [0, 0, 0, 144]):
        x, results = torch.randn(144, 32, requires_grad=True), []
        for layer, function in ((eager, lambda x, s: eager(x * 2, s).square()), (compiled, call)):
            y = function(x, torch.tensor(sizes))
            results.append([y.detach(), *torch.autograd.grad(y.sum(), [x, *layer.parameters()])])
            results[-1] += tables(layer) if recipe != "bf16" else []
            with torch.no_grad():
                layer.weight.mul_(1.25)  # a weight that stands still is cast once in eager code, and counted once
        assert same(*results)
    assert graphs.frame_count == 1
    for wrong in ([5, 0, 130, 8], [5, -1, 131, 9]):
        with pytest.raises(RuntimeError, match="are negative, or do not sum to the number of rows"):
            call(torch.randn(144, 32), torch.tensor(wrong))


# torch 2.13's Dynamo looks at .grad of what comes back from the break, which is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_rows_in_16_bits_that_torch_does_not_group_break_the_graph(fresh):
    layer, x = layer_of("bf16", k=36), torch.randn(144, 36)
    call = torch.compile(lambda x, sizes: layer(x * 2, sizes), backend="aot_eager")
    assert torch.equal(call(x, torch.tensor(SIZES)), layer(x * 2, SIZES))
