"""What linear and fused layers take and refuse: shapes, strides, dtypes, autocast, devices; nn.Linear's own words."""

import re

import pytest
import torch
from fused import NORMS, Model, apart, assert_equal, batches, in_float64, like, step
from support import DTYPES, FP8_RECIPES, same, tables
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8engine as fe
from fp8engine.autograd import Memory

K, F, N = 24, 16, 10
ALL_RECIPES = [*FP8_RECIPES, "bf16"]
FORMS = {"linear": (None, ""), "norm and linear": (NORMS[2], ""), "norm and MLP": (NORMS[2], "swiglu")}
every_form = pytest.mark.parametrize("form", FORMS)
every_fused_form = pytest.mark.parametrize("form", [form for form in FORMS if form != "linear"])
most_and_least = pytest.mark.parametrize("memory", [Memory(), Memory(True, True, "fp8")], ids=str)


def model_of(recipe: str, form: str, dtype=torch.float32, memory: Memory = Memory()) -> Model:  # noqa: B008 - a tuple
    norm, kind = FORMS[form]
    model = Model(recipe, norm, [(K, 2 * F), (F, N)] if kind else [(K, N)], dtype, kind=kind)
    model.memory = memory
    return model


def as_plain(model: Model) -> Model:
    return like(model, in_float64)


# Each makes a tensor whose last dimension is K, in a layout that a matmul does not take as it is.
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
@pytest.mark.parametrize("recipe", ["current", "rowwise", "blockwise"])
@every_form
def test_any_layout_gives_what_its_contiguous_matrix_gives(form: str, recipe: str, layout: str):
    model, x = model_of(recipe, form), LAYOUTS[layout]()
    dy = torch.randn(*x.shape[:-1], N)
    found = step(like(model, model.call), x.requires_grad_(), [dy])
    wanted = step(model, x.detach().reshape(-1, K).clone().requires_grad_(), [dy.reshape(-1, N)])
    assert (found["dx"].shape, found["y0"].shape) == (x.shape, dy.shape)
    assert_equal({name: value.reshape(wanted[name].shape) for name, value in found.items()}, wanted)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
@every_form
def test_a_gradient_in_any_layout(form: str, recipe: str):
    model, x = model_of(recipe, form), torch.randn(6, K, requires_grad=True)
    for dy in (torch.randn(N, 6).t(), torch.randn(1, N).expand(6, N), torch.ones(()).expand(6, N)):
        found, wanted = (step(like(model, model.call), x, [each]) for each in (dy, dy.contiguous()))
        assert_equal(found, wanted)


@most_and_least
@pytest.mark.parametrize("shape", [(0, K), (2, 0, K), (0, 3, K)], ids=str)
@pytest.mark.parametrize("recipe", ALL_RECIPES)
@every_form
def test_no_rows_give_nothing_and_gradients_of_zeros(form: str, recipe: str, shape: tuple, memory: Memory):
    model = model_of(recipe, form, memory=memory)
    before = tables(model)[1]
    found = step(model, torch.randn(shape, requires_grad=True), [torch.randn(*shape[:-1], N)])
    assert (found["y0"].shape, found["dx"].shape) == ((*shape[:-1], N), shape)
    for name, p in model.named_parameters():
        assert torch.equal(found[name], torch.zeros_like(p)), name
    inputs = [i for i in range(before.shape[1]) if i % 4 != 1]
    assert torch.equal(tables(model)[1][:, inputs], before[:, inputs]), "no elements, no amax: the slots did not run"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize(("k", "n"), [(0, 10), (24, 0), (0, 0)])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_no_features_give_what_nn_linear_gives(recipe: str, k: int, n: int):
    model, x, dy = Model(recipe, None, [(k, n)]), torch.randn(6, k, requires_grad=True), torch.randn(6, n)
    wanted = step(as_plain(model), x, [dy])
    for name, found in step(model, x, [dy]).items():
        torch.testing.assert_close(found, wanted[name], msg=name)


AUTOCAST = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("dtype", "cast"), AUTOCAST, ids=str)
@pytest.mark.parametrize("recipe", ALL_RECIPES)
@every_form
def test_autocast_gives_the_dtypes_of_nn_linear(form: str, recipe: str, dtype, cast):
    model, x = model_of(recipe, form, dtype), torch.randn(8, K, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=cast):
        (y,) = model(x)
    assert y.dtype == cast
    assert {grad.dtype for grad in torch.autograd.grad(y.sum(), [x, *model.parameters()])} == {dtype}


@pytest.mark.parametrize(("dtype", "cast"), AUTOCAST, ids=str)
def test_autocast_gives_its_dtype_where_only_the_backward_is_in_fp8(dtype, cast):
    plain, fp8 = fe.Cast(fe.BF16), fe.Cast(fe.E4M3)
    mine = fe.Recipe(input=plain, weight=plain, grad_output=fp8, weight_for_dgrad=fp8, input_for_wgrad=fp8)
    layer = fe.Linear(32, 16, recipe=mine, dtype=dtype)
    with torch.autocast("cpu", dtype=cast):
        assert layer(torch.randn(4, 32, dtype=dtype)).dtype == cast


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(8, 32, 16), (160, 128, 192)], ids=str)  # held for emulation in FP32, in BF16
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_autocast_changes_the_dtype_of_the_output_and_no_more(recipe: str, shape, cast):
    # Codes reach 448: a matmul inside that followed autocast to FP16 would overflow.
    m, k, n = shape
    layer, x = fe.Linear(k, n, recipe=recipe), torch.randn(m, k, requires_grad=True)
    want = layer(x)
    (dx,) = torch.autograd.grad(want.sum(), x)
    with torch.autocast("cpu", dtype=cast):
        found = layer(x)
        assert torch.equal(found, want.to(cast))
        (dx_found,) = torch.autograd.grad(found.sum(), x)  # backward under autocast: not advised, often done
    assert torch.equal(dx_found, dx)


def test_autocast_takes_an_input_of_another_dtype_than_the_weight():
    layer, x = fe.Linear(32, 16, recipe="current"), torch.randn(8, 32).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        assert torch.equal(y, layer(x.float())), "the same values, quantised from either dtype"
    assert y.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert layer(x.float()).dtype == torch.float32


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "blockwise"])  # the other stores 16 bits between
@every_fused_form
def test_under_autocast_it_is_its_pieces(form: str, recipe: str):
    """`ActAlone` gives its own dtype and autocast decides each layer's output, as fused."""
    model = model_of(recipe, form)
    ((x, _),) = batches((12,), K, (N,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(*(like(model, call)(x)[0] for call in (model.call, apart)))


@every_fused_form
def test_a_norm_in_fp32_beside_layers_in_bf16(form: str):
    model = model_of("current", form, torch.bfloat16)
    model.gamma, model.beta = (nn.Parameter(p.detach().float()) for p in (model.gamma, model.beta))
    ((x, dys),) = batches((12,), K, (N,), torch.bfloat16)
    found = step(model, x, dys)
    assert found["gamma"].dtype == found["beta"].dtype == torch.float32
    assert found["dx"].dtype == torch.bfloat16
    for recipe in ("bf16", "current"):  # and where torch's own norm runs
        assert model_of(recipe, form, torch.bfloat16)(x)[0].dtype == torch.bfloat16


ONES = torch.ones(2, K)
NO_INPUTS = [ONES.to(dtype) for dtype in (torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64)]
NO_INPUTS += [ONES.to(torch.float8_e4m3fn), ONES.to_sparse()]


@pytest.mark.parametrize("recipe", ALL_RECIPES)
@every_form
def test_what_is_refused_names_the_layer_and_counts_nothing(form: str, recipe: str):
    model = model_of(recipe, form)
    for x in NO_INPUTS:
        with pytest.raises(fe.errors.UnsupportedDtype, match=r"^layers\.0: input is torch\.\w+"):
            model(x)
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(TypeError, match=rf"^layers\.0: input is {dtype} and weight is torch.float32.*autocast"):
            model(ONES.to(dtype))
    for shape in ((4, K - 1), (2, 2, K + 1), (K - 1,), (4, 0), ()):
        words = (
            "mat1 and mat2 shapes cannot be multiplied" if shape else "both arguments to linear need to be at least 1D"
        )
        with pytest.raises(fe.errors.ShapeError, match=rf"^layers\.0: {words}"):
            model(torch.randn(shape))
    assert tables(model)[2].sum() == 0


@pytest.mark.parametrize("autocast", [False, True])
def test_a_float64_weight_is_refused(autocast: bool):
    layer = fe.Linear(32, 16, recipe="current").double()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        pytest.raises(fe.errors.UnsupportedDtype, match=r"weight is torch\.float64"),
    ):
        layer(torch.randn(2, 32))


@every_fused_form
def test_gammas_norms_and_stores_that_do_not_fit_are_refused(form: str):
    model = model_of("current", form)
    for gamma, error in ((torch.ones(K + 1), fe.errors.ShapeError), (torch.ones(K).double(), TypeError)):
        model.gamma = nn.Parameter(gamma)
        with pytest.raises(error, match="weight is"):
            model(ONES)
    for recipe in ("current", "bf16"):
        model = model_of(recipe, form)
        model.which = model.which._replace(kind="batch")
        with pytest.raises(fe.errors.UnknownName, match="unknown norm 'batch'"):
            model(ONES)
    for store in ("fp4", "", None):
        with pytest.raises(fe.errors.UnknownName, match=r"unknown store .*16 bits, fp8"):
            model_of("current", form, memory=Memory(store=store))(ONES)  # pyright: ignore[reportArgumentType]


@most_and_least
@pytest.mark.parametrize("recipe", FP8_RECIPES)
@every_form
def test_a_gradient_of_the_gradient_is_refused(form: str, recipe: str, memory: Memory):
    model, x = model_of(recipe, form, memory=memory), torch.randn(4, K, requires_grad=True)
    last = f"layers.{len(model.layers) - 1}"
    remedy = re.escape(f"overrides={{{last!r}: 'bf16'}}")
    with pytest.raises(fe.errors.GradientError, match=rf"{re.escape(last)}: .*create_graph=True.*{remedy}"):
        torch.autograd.grad(model(x)[0].square().sum(), x, create_graph=True)


@pytest.mark.few(40)
@most_and_least
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", ALL_RECIPES)
@every_form
def test_meta_and_fake_tensors_give_shapes(form: str, recipe: str, dtype: torch.dtype, memory: Memory):
    def check(model: Model, x: torch.Tensor) -> None:
        (y,) = model(x)
        assert (y.shape, y.dtype, y.device) == ((2, 4, N), dtype, x.device)
        leaves = [x, *model.parameters()]
        for grad, leaf in zip(torch.autograd.grad(y.sum(), leaves), leaves, strict=True):
            assert (grad.shape, grad.dtype) == (leaf.shape, dtype)

    model = model_of(recipe, form, dtype, memory).to("meta")
    assert all(layer.numerics.state.device.type == "meta" for layer in model.layers)
    check(model, torch.empty(2, 4, K, device="meta", dtype=dtype, requires_grad=True))
    with FakeTensorMode():
        check(model_of(recipe, form, dtype, memory), torch.empty(2, 4, K, dtype=dtype, requires_grad=True))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@every_form
def test_in_inference_mode_it_is_what_it_is_without_gradients(form: str, recipe: str):
    model, x = model_of(recipe, form), torch.randn(4, K)
    with torch.no_grad():
        (want,) = model(x)
    with torch.inference_mode():
        assert torch.equal(model(x)[0], want)
        assert torch.equal(model(x.clone())[0], want), "a tensor made in inference mode has no version counter"


@pytest.mark.parametrize("memory", [Memory(), Memory(True, True)], ids=str)
@every_form
def test_an_input_that_was_made_in_inference_mode_is_trained_on(form: str, memory: Memory):
    model, found = model_of("current", form, memory=memory), []
    with torch.inference_mode():
        frozen = torch.randn(4, K)
    for x in (frozen, frozen.clone()):
        model(x)[0].sum().backward()
        found.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert same(*found)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@every_form
def test_backward_twice_through_a_retained_graph(form: str, recipe: str):
    model, x = model_of(recipe, form, memory=Memory(True, True)), torch.randn(4, K, requires_grad=True)
    (y,) = model(x)
    leaves = [x, *model.parameters()]
    first, second = (torch.autograd.grad(y.sum(), leaves, retain_graph=again) for again in (True, False))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize(("size", "weight"), [(2.0**120, 1.0), (2.0**75, 2.0**75)])
def test_values_near_the_end_of_fp32(recipe: str, size: float, weight: float):
    """Finite wherever nn.Linear is, forward and backward; not finite wherever nn.Linear is not."""
    model = Model(recipe, None, [(32, 16)])
    with torch.no_grad():
        model.layers[0].weight.mul_(weight)
    x, dy = torch.rand(8, 32) * size, torch.rand(8, 16)
    x[3] = 0.0
    wanted = step(as_plain(model), x.requires_grad_(), [dy])
    for name, ours in step(model, x, [dy]).items():
        its = wanted[name]
        assert torch.equal(ours.isfinite(), its.isfinite()), name
        error = (ours - its).abs().where(its.isfinite(), 0.0)  # two casts, each to 2^-4 or, in E5M2, 2^-3
        assert error.max() <= 0.1 * its.abs().max()
