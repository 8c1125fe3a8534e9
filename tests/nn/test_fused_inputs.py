"""What fused layers take and refuse: shapes, strides, dtypes, autocast, devices; as a Linear does."""

import math
import re

import pytest
import torch
from fused import NORMS, Model, apart, assert_equal, batches, like, step
from nn.test_linear_inputs import LAYOUTS
from support import DTYPES, FP8_RECIPES, tables
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8engine as fe
from fp8engine.autograd import Memory
from fp8engine.autograd.produce import KEEP

K, F = 24, 16
FORMS = {"norm_linear": "", "norm_mlp": "swiglu"}
ALL = [*FP8_RECIPES, "bf16"]


def model_of(recipe: str, kind: str, dtype=torch.float32, memory=KEEP) -> Model:
    model = Model(recipe, NORMS[2], [(K, 2 * F), (F, 10)] if kind else [(K, 10)], dtype, kind=kind)
    model.memory = memory
    return model


@pytest.fixture(params=FORMS.values(), ids=list(FORMS))
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_any_layout_gives_what_its_contiguous_matrix_gives(recipe, kind, layout):
    model, x = model_of(recipe, kind), LAYOUTS[layout]().requires_grad_()
    dy = torch.randn(*x.shape[:-1], 10)
    found = step(like(model, model.call), x, [dy])
    wanted = step(model, x.detach().reshape(-1, K).clone().requires_grad_(), [dy.reshape(-1, 10)])
    assert found["dx"].shape == x.shape
    assert found["y0"].shape == dy.shape
    assert_equal({name: value.reshape(wanted[name].shape) for name, value in found.items()}, wanted)


@pytest.mark.parametrize("memory", [Memory(), Memory(True, True, "fp8")], ids=str)
@pytest.mark.parametrize("shape", [(0, K), (2, 0, K)], ids=str)
@pytest.mark.parametrize("recipe", ALL)
def test_no_rows(recipe, kind, shape, memory):
    model = model_of(recipe, kind, memory=memory)
    before = tables(model)[1]
    found = step(model, torch.randn(shape, requires_grad=True), [torch.randn(*shape[:-1], 10)])
    assert found["y0"].shape == (*shape[:-1], 10)
    assert found["dx"].shape == shape
    for name, p in model.named_parameters():
        assert torch.equal(found[name], torch.zeros_like(p)), name
    inputs = [i for i in range(before.shape[1]) if i % 3 != 1]
    assert torch.equal(tables(model)[1][:, inputs], before[:, inputs]), "no elements, no amax"


@pytest.mark.parametrize(("dtype", "cast"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)])
@pytest.mark.parametrize("recipe", ALL)
def test_autocast_gives_the_dtypes_of_nn_linear(recipe, kind, dtype, cast):
    model = model_of(recipe, kind, dtype)
    x = torch.randn(8, K, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=cast):
        (y,) = model(x)
    y.sum().backward()
    assert y.dtype == cast
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "blockwise"])  # the other stores 16 bits between
def test_under_autocast_it_is_its_pieces(recipe, kind):
    """`ActAlone` gives its own dtype and autocast decides each layer's output, as fused."""
    model = model_of(recipe, kind)
    ((x, _),) = batches((12,), K, (10,))
    found = {}
    for name, call in (("fused", model.call), ("apart", apart)):
        other = like(model, call)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found[name] = other(x)[0]
    assert torch.equal(found["fused"], found["apart"])


def test_a_norm_in_fp32_beside_layers_in_bf16(kind):
    model = model_of("current", kind, torch.bfloat16)
    model.gamma, model.beta = (torch.nn.Parameter(p.detach().float()) for p in (model.gamma, model.beta))
    ((x, dys),) = batches((12,), K, (10,), torch.bfloat16)
    found = step(model, x, dys)
    assert found["gamma"].dtype == found["beta"].dtype == torch.float32
    assert found["dx"].dtype == torch.bfloat16
    for recipe in ("bf16", "current"):  # and where torch's own norm runs
        y = model_of(recipe, kind, torch.bfloat16)(x)[0]
        assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", ALL)
def test_what_a_linear_refuses_is_refused_by_the_layers_name(recipe, kind):
    model = model_of(recipe, kind)
    for x in (torch.ones(2, K).double(), torch.ones(2, K).int(), torch.ones(2, K).to_sparse()):
        with pytest.raises(fe.errors.UnsupportedDtype, match=r"^layers\.0: input is torch\.\w+"):
            model(x)
    with pytest.raises(TypeError, match=r"^layers\.0: input is torch\.bfloat16 and weight is .*autocast"):
        model(torch.ones(2, K).bfloat16())
    words = f"mat1 and mat2 shapes cannot be multiplied (2x{K + 1} and {K}x"
    with pytest.raises(fe.errors.ShapeError, match=r"^layers\.0: " + re.escape(words)):
        model(torch.ones(2, K + 1))
    with pytest.raises(fe.errors.ShapeError, match=r"^layers\.0: mat1"):
        model(torch.tensor(1.0))
    assert tables(model)[2].sum() == 0, "refused before anything was counted"


def test_gammas_that_do_not_fit_are_refused(kind):
    model, x = model_of("current", kind), torch.ones(2, K)
    for gamma, error in ((torch.ones(K + 1), fe.errors.ShapeError), (torch.ones(K).double(), TypeError)):
        model.gamma = torch.nn.Parameter(gamma)
        with pytest.raises(error, match="weight is"):
            model(x)
    for recipe in ("current", "bf16"):
        model = model_of(recipe, kind)
        model.which = model.which._replace(kind="batch")
        with pytest.raises(fe.errors.UnknownName, match="unknown norm 'batch'"):
            model(x)


@pytest.mark.parametrize("store", ["fp4", "", None])
def test_a_store_that_there_is_not(kind, store):
    """Modules of ours refuse it when they are made, under any recipe."""
    with pytest.raises(fe.errors.UnknownName, match=r"unknown store .*16 bits, fp8"):
        model_of("current", kind, memory=Memory(store=store))(torch.ones(2, K))


@pytest.mark.parametrize("memory", [Memory(), Memory(True, True, "fp8")], ids=str)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_gradient_of_the_gradient_is_refused(recipe, kind, memory):
    model, x = model_of(recipe, kind, memory=memory), torch.randn(4, K, requires_grad=True)
    last = "layers.1" if kind else "layers.0"
    remedy = re.escape(f"overrides={{{last!r}: 'bf16'}}")
    with pytest.raises(fe.errors.GradientError, match=rf"{re.escape(last)}: .*create_graph=True.*{remedy}"):
        torch.autograd.grad(model(x)[0].square().sum(), x, create_graph=True)


@pytest.mark.few(40)
@pytest.mark.parametrize("memory", [Memory(), Memory(True, True, "fp8")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", ALL)
def test_meta_and_fake_tensors_give_shapes(recipe, kind, dtype, memory):
    def check(model: Model, x: torch.Tensor) -> None:
        (y,) = model(x)
        assert (y.shape, y.dtype) == ((2, 4, 10), dtype)
        y.sum().backward()
        assert x.grad is not None
        assert (x.grad.shape, x.grad.dtype) == (x.shape, dtype)
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())

    model = model_of(recipe, kind, dtype, memory).to("meta")
    for layer in model.layers:
        assert layer.numerics.state.device.type == "meta"
    check(model, torch.empty(2, 4, K, device="meta", dtype=dtype, requires_grad=True))
    with FakeTensorMode():
        check(model_of(recipe, kind, dtype, memory), torch.empty(2, 4, K, dtype=dtype, requires_grad=True))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_backward_twice_through_a_retained_graph(recipe, kind):
    model, x = model_of(recipe, kind, memory=Memory(True, True)), torch.randn(4, K, requires_grad=True)
    (y,) = model(x)
    leaves = [x, *model.parameters()]
    first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(y.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_one_bad_input_reaches_its_row_and_is_counted(recipe, kind, bad):
    model, x = model_of(recipe, kind), torch.randn(6, K)
    x[2, 5] = bad
    (y,) = model(x)
    assert torch.isfinite(y).all(1).tolist() == [True, True, False, True, True, True]
    assert int(fe.scaling_state(model)["layers.0.input"].nonfinite) == K  # the norm spreads it over its row
