"""The triton backend as a user meets it, in the interpreter: layers, fe.matmul, gradients, the report."""

import itertools

import pytest
import torch
from casts import E4M3, cast_of
from support import EVERY_FP8_RECIPE, FP8_RECIPES, converted
from torch import nn

import fp8engine as fe
from fp8engine.errors import BackendError, UnknownName
from fp8engine.ops import casts, grouped, matmul, reference, triton_backend
from fp8engine.ops.reference import Epilogue
from fp8engine.ops.reference.grouped import bounds_of

OTHERS = ("cublas", "reference")


def operand(m: int, k: int, rows: int = -1, cols: int = -1):
    # All rows times some columns: a group that matmuls take and no cast makes; here it is as high as the matrix.
    down = m if rows == -1 and cols > 1 else rows
    return casts.quantize(torch.randn(m, k), cast_of(E4M3, down, cols))._replace(rows=rows)


# In order: x with its transpose for wgrad, the weight with its for dgrad, y; dy with its transpose, dx, dw.
ONCE = ["cast_transpose", "cast_transpose", "matmul_fp8", "cast_transpose", "matmul_fp8", "matmul_fp8"]
KERNELS = {
    "current": ONCE,
    "delayed": ONCE,
    "rowwise": ONCE,
    "rowwise_gw_hp": ["quantize", "quantize", "matmul_fp8", "quantize", "quantize", "matmul_fp8", "matmul_fp16"],
    "blockwise": ONCE,
    "mxfp8": ONCE,
    "bf16": ["matmul_fp16"] * 3,
    fe.rowwise(power_of_2=False): ONCE,
    fe.blockwise(power_of_2=False): ONCE,
}


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", KERNELS, ids=lambda recipe: getattr(recipe, "name", recipe))
def test_a_layer_trains_on_our_kernels_and_the_report_says_so(
    recipe: str | fe.Recipe, dtype: torch.dtype, launched: list[str]
):
    torch.manual_seed(0)
    layer = fe.Linear(130, 67, recipe=recipe, dtype=dtype)
    x, dy = torch.randn(2, 17, 130, dtype=dtype), torch.randn(2, 17, 67, dtype=dtype)
    results = []
    for name in ("triton", "reference"):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with fe.backend(name):
            y = layer(leaf)
            y.backward(dy)
        results.append([y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad])
        if name == "triton":
            assert launched == KERNELS[recipe]
            row = fe.inspect(layer).layers[0]
            assert row["backend"] == ("torch" if recipe == "bf16" else "triton")
            assert row["emulated"] is (recipe != "bf16")  # a CPU's interpreter is no Tensor Core, and says so
    # The same FP8 values; up to three roundings to BF16 between the two, 2^-8 each of the result, and FP32 sums of up
    # to 130 products.  The norm over all elements, because where products cancel a single one may be far off.
    for ours, twin in zip(*results, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - twin.double()).norm() <= 3 * 2**-8 * twin.double().norm()


def test_forward_and_dgrad_sum_fast_and_wgrad_promotes(monkeypatch: pytest.MonkeyPatch):
    promoted, real = [], triton_backend._launch

    def spy(first: torch.Tensor, kernel: tuple[str, ...], *given):
        if kernel[-1] == "matmul_fp8":
            promoted.append(given[3])
        return real(first, kernel, *given)

    monkeypatch.setattr(triton_backend, "_launch", spy)
    layer, x = fe.Linear(32, 16, recipe="current"), torch.randn(8, 32, requires_grad=True)
    with fe.backend("triton"):
        layer(x).sum().backward()
        a = operand(4, 32)
        for precision in ("fast", "promoted", "exact"):
            matmul.matmul(a, a, precision=precision)
            matmul.matmul_epilogue(a, a, Epilogue(), precision)
    assert promoted == [False, False, True] + [False] * 2 + [True] * 4


def test_every_recipe_is_covered():
    assert set(EVERY_FP8_RECIPE) <= set(KERNELS)


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("first", "second"),
    [*itertools.product([(-1, -1), (1, -1), (1, 128), (1, 64), (128, 128), (-1, 128)], repeat=2)],
    ids=str,
)
def test_fe_matmul_of_any_two_granularities(first, second):
    a, b = operand(37, 200, *first), operand(141, 200, *second)
    sizes = {group[1] for group in (first, second) if group[1] != -1}
    with fe.backend("triton"):
        if len(sizes) == 2:
            with pytest.raises(BackendError, match=r"scales along K for every \[64, 128\] values"):
                matmul.matmul(a, b, None, torch.float32)
            return
        found = matmul.matmul(a, b, None, torch.float32)
    wanted = reference.matmul_fp8(a, b, None, torch.float32, exact=True)
    sums = reference.matmul_fp8(
        *(each._replace(data=each.data.float().abs().to(E4M3)) for each in (a, b)), None, torch.float32, exact=True
    )
    # 200 additions and 4 factors in FP32, on both sides.
    assert ((found - wanted).abs() <= 2 * 204 * 2.0**-24 * sums).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [*itertools.product([False, True], repeat=2)], ids=str)
def test_16_bit_gradients_in_every_layout(layout, dtype):
    a, b = (torch.randn(size, dtype=dtype) for size in ((33, 20), (27, 20)))
    a, b = (x.t().contiguous().t() if turn else x for x, turn in zip((a, b), layout, strict=True))
    bias, dy = torch.randn(27, dtype=dtype), torch.randn(33, 27, dtype=dtype)
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in (a, b, bias)]
    with fe.backend("triton"):
        y = matmul.matmul_fp16(*leaves)
        y.backward(dy)
    exact = [x.detach().double().requires_grad_() for x in (a, b, bias)]
    wanted = torch.nn.functional.linear(*exact)
    wanted.backward(dy.double())
    unit = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for found, true in zip([y, *(x.grad for x in leaves)], [wanted, *(x.grad for x in exact)], strict=True):
        assert found.dtype == dtype
        # One rounding of each element; FP32 sums of at most 33 terms of size up to 10 are far below it.
        assert ((found.double() - true).abs() <= unit * true.abs() + 33 * 10 * 2.0**-24 * 4).all()


def test_gradients_of_the_16_bit_operator_have_gradients():
    a, b = (torch.randn(5, 8, dtype=torch.bfloat16).requires_grad_() for _ in "ab")
    with fe.backend("triton"):
        (da,) = torch.autograd.grad(matmul.matmul_fp16(a, b).float().square().sum(), a, create_graph=True)
        (db,) = torch.autograd.grad(da.float().sum(), b)
    assert torch.isfinite(db).all()
    assert db.abs().sum() > 0


@pytest.mark.parametrize("kind", ["none", "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "dispatcher"])
def test_an_epilogue_on_every_backend(kind: str, direct: bool):
    a, b, bias_N = operand(40, 96), operand(56, 96), torch.randn(56)
    found = {}
    for name in ("triton", *OTHERS):
        end = Epilogue(
            bias_N, E4M3, kind, torch.tensor(0.03), torch.full((1,), -1.0), torch.zeros(2, dtype=torch.int64)
        )
        with fe.backend(name), torch.set_grad_enabled(not direct):
            found[name] = matmul.matmul_epilogue(a, b, end), end
    q, end = found["triton"]
    assert end.counts[0] > 0
    for name in OTHERS:
        other, its = found[name]
        # FP32 results a few ulp apart round to neighbouring codes where they straddle a boundary, and nowhere else.
        assert (q.float() - other.float()).abs().max() <= 32
        assert ((q.view(torch.uint8) != other.view(torch.uint8)) & (q.float() != other.float())).float().mean() < 0.005
        assert torch.allclose(end.amax, its.amax, rtol=1e-5)
        assert (end.counts - its.counts).abs().max() <= 2


def test_an_epilogue_of_no_known_kind():
    a = operand(4, 32)
    for name in ("triton", *OTHERS):
        with fe.backend(name), pytest.raises(UnknownName, match="activation of a matmul 'swiglu'"):
            matmul.matmul_epilogue(a, a, Epilogue(activation="swiglu"))


def test_a_compiled_layer_runs_our_kernels(launched: list[str]):
    layer, x = fe.Linear(32, 48, recipe="rowwise"), torch.randn(8, 32)
    with fe.backend("triton"):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        y = compiled(x)
        y.sum().backward()
        # x for forward and, a graph not knowing the backend when it is traced, for wgrad apart; the weight.
        assert launched[:4] == ["quantize", "quantize", "quantize", "matmul_fp8"]
        assert torch.equal(y, layer(x))


class OnTwoBackends(nn.Module):
    """q is emulated, and leaves values of x on it; k reads the same x on our kernels, which take codes."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with fe.backend("reference"):
            y = self.q(x)
        with fe.backend("triton"):
            return y + self.k(x)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_what_an_emulated_call_has_kept_serves_our_kernels(recipe: str):
    """Of a weight, by an evaluation before; of an input, by a sibling: the numbers are those of kernels alone."""
    found = []
    for evaluated, share in ((False, False), (True, False), (False, True), (True, True)):
        torch.manual_seed(0)
        model, x = converted(nn.Sequential(OnTwoBackends()), recipe), torch.randn(8, 32)
        if not share:
            model[0].k.register_forward_pre_hook(lambda layer, given: (given[0].clone(),))
        if evaluated:
            with torch.no_grad(), fe.backend("reference"):
                model[0].k(x)
        x.requires_grad_()
        y = model(x)
        y.sin().sum().backward()  # each layer where its forward ran
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


STRIDES = {
    "every second": lambda x: torch.stack([x, x + 5], -1)[..., 0],
    "one number": lambda x: x[..., :1].expand(x.shape),
    "columns first": lambda x: x.t().contiguous().t(),
}


@pytest.mark.parametrize("lie", STRIDES.values(), ids=STRIDES)
def test_a_bias_and_scales_of_rows_of_any_strides(lie):
    """Of one matrix, of 16 bits, and of experts: kernels take no stride for these."""
    bias = lie(torch.randn(2, 40).bfloat16())
    bounds = bounds_of(torch.tensor([17, 16]))
    a, b = operand(33, 64, 1), operand(80, 64, 1)
    a = a._replace(scale=STRIDES["every second"](a.scale[:, 0])[:, None])
    half = torch.randn(33, 64).bfloat16()
    for call in (
        lambda: matmul.matmul(a, b._replace(data=b.data[:40], scale=b.scale[:40]), bias[1], torch.float32),
        lambda: matmul.matmul_fp16(half, half[:20].repeat(2, 1), bias[1]),
        lambda: grouped.rows(a, b, bounds, bias, torch.float32),
    ):
        with fe.backend("reference"):
            wanted = call()
        with fe.backend("triton"):
            assert torch.allclose(call(), wanted, rtol=2.0**-7, atol=1e-4)
