"""Around a Linear's backward: what is not finite is seen, a byte an element is saved, what cannot be is said."""

import math

import pytest
import torch
from support import EVERY_FP8_RECIPE, FP8_RECIPES, converted, same, saved, spy_on
from torch import nn

import fp8engine as fe
from fp8engine.numerics.recipe import resolve

BAD = [math.inf, -math.inf, math.nan]
every_recipe = pytest.mark.parametrize("recipe", EVERY_FP8_RECIPE)
PER_TENSOR = [name for name in EVERY_FP8_RECIPE if isinstance(resolve(name).input.granularity, fe.PerTensor)]


def finite_rows(x: torch.Tensor) -> list[int]:
    """The rows without NaN or Inf."""
    return [row for row in range(len(x)) if bool(torch.isfinite(x[row]).all())]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_recipe
def test_one_bad_input_reaches_its_row_of_the_output_and_the_weight_gradient(recipe: str, dtype, bad: float):
    layer, x = fe.Linear(48, 16, recipe=recipe, dtype=dtype), torch.randn(6, 48, dtype=dtype)
    x[2, 5] = bad
    y = layer(x.requires_grad_())
    assert finite_rows(y) == [0, 1, 3, 4, 5]
    assert not torch.isfinite(y[2]).any()
    (dw,) = torch.autograd.grad(y, layer.weight, torch.ones_like(y))
    assert finite_rows(dw.t()) == [k for k in range(48) if k != 5]
    slot = fe.scaling_state(layer)["input"]
    assert (int(slot.nonfinite), int(fe.scaling_state(layer)["grad_output"].nonfinite)) == (1, 0)
    want = layer.weight.detach().abs().max().float()
    assert torch.equal(fe.scaling_state(layer)["weight"].amax, want), "the other slots see nothing of it"


@pytest.mark.parametrize("bad", BAD, ids=str)
@every_recipe
def test_one_bad_gradient_reaches_both_gradients(recipe: str, bad: float):
    layer = fe.Linear(48, 16, recipe=recipe)
    x, dy = torch.randn(6, 48, requires_grad=True), torch.randn(6, 16)
    dy[4, 3] = bad
    dx, dw, db = torch.autograd.grad(layer(x), [x, layer.weight, layer.bias], dy)
    assert finite_rows(dx) == [0, 1, 2, 3, 5]
    assert finite_rows(dw) == finite_rows(db[:, None]) == [n for n in range(16) if n != 3]
    assert int(fe.scaling_state(layer)["grad_output"].nonfinite) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_recipe
def test_what_is_saved_for_backward(recipe: str, dtype):
    m, k = 256, 128
    layer = fe.Linear(k, 64, recipe=recipe, dtype=dtype)
    kept = saved(layer, torch.randn(m, k, dtype=dtype, requires_grad=True))
    size = sum(t.nbytes for t in kept)
    scales = {"current": 1, "delayed": 1, "rowwise": k, "blockwise": m // 128 * k, "mxfp8": m // 32 * k}  # along M
    if recipe == "rowwise_gw_hp":
        assert size == 2 * m * k, "wgrad in 16 bits keeps x in 16 bits"
    else:
        assert size == m * k + 4 * scales[recipe]
        assert sum(t.numel() for t in kept if t.dtype == torch.float8_e4m3fn) == m * k
    with torch.no_grad():
        assert saved(layer, torch.randn(m, k, dtype=dtype)) == []
    layer.requires_grad_(False)
    assert saved(layer, torch.randn(m, k, dtype=dtype, requires_grad=True)) == [], "a frozen weight's"


@pytest.mark.parametrize("recipe", PER_TENSOR)
def test_no_dgrad_where_the_input_needs_none(recipe: str, monkeypatch: pytest.MonkeyPatch):
    ran = []
    spy_on(monkeypatch, "matmul", lambda real, *args: ran.append(args[0].data.shape) or real(*args))
    layer = fe.Linear(48, 16, recipe=recipe)
    forward, dgrad, wgrad = (6, 48), (6, 16), (16, 6)  # the shapes of x, dy, dy^T
    cases = ((False, True, [forward, wgrad]), (True, True, [forward, dgrad, wgrad]), (True, False, [forward, dgrad]))
    for of_x, of_weight, matmuls in cases:
        ran.clear()
        layer.weight.requires_grad_(of_weight)
        layer(torch.randn(6, 48, requires_grad=of_x)).sum().backward()
        assert ran == matmuls


@every_recipe
def test_a_weight_changed_between_forward_and_backward_is_refused_as_torch_does(recipe: str):
    layer, x = fe.Linear(32, 16, recipe=recipe), torch.randn(4, 32, requires_grad=True)
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@every_recipe
def test_a_weight_that_no_dgrad_reads_may_change_before_the_backward_and_be_an_inference_tensor(recipe: str):
    layer, x = fe.Linear(32, 16, recipe=recipe), torch.randn(4, 32)
    (want,) = torch.autograd.grad(layer(x).sum(), layer.weight)
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)  # as nn.Linear, whose backward reads x alone here
    assert torch.equal(torch.autograd.grad(y.sum(), layer.weight)[0], want)
    want = layer(x)
    with torch.inference_mode():
        layer.weight = torch.nn.Parameter(layer.weight.clone())
    assert torch.equal(layer(x), want)


def test_an_input_changed_after_the_forward_does_not_matter():
    # Its FP8 copy is what is saved.
    layer, x = fe.Linear(32, 16, recipe="current"), torch.randn(4, 32)
    (want,) = torch.autograd.grad(layer(x).sum(), layer.weight)
    y = layer(x)
    x.zero_()
    assert torch.equal(torch.autograd.grad(y.sum(), layer.weight)[0], want)


def test_data_parallel_is_refused_and_ddp_named():
    model = converted(nn.Sequential(nn.Linear(16, 16)))
    with pytest.raises(fe.errors.ParallelError, match=r"^0: nn.DataParallel .*DistributedDataParallel"):
        model[0]._replicate_for_data_parallel()


class Siblings(nn.Module):
    """q, whose weight takes no gradient, reads x as values on a CPU; k keeps codes of it for its weight's gradient."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(160, 48), nn.Linear(160, 48)

    def forward(self, x):
        return self.q(x) + self.k(x)


def siblings_step(recipe: str, x: torch.Tensor, share: bool) -> tuple[list[torch.Tensor], list[torch.dtype]]:
    """(x's and k's gradients, the dtypes of what is saved of x's size)."""
    torch.manual_seed(0)
    model = converted(nn.Sequential(Siblings()), recipe)
    q, k = model[0].q, model[0].k
    q.weight.requires_grad_(False)
    if not share:
        k.register_forward_pre_hook(lambda layer, given: (given[0].clone(),))
    grads = torch.autograd.grad(model(x).sin().sum(), [x, k.weight])
    return list(grads), [t.dtype for t in saved(model, x) if t.numel() == x.numel()]


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_what_is_kept_until_backward_is_codes_whoever_has_cast_before(recipe: str):
    x = torch.randn(70, 160, requires_grad=True)
    (shared, kept), (apart, wanted) = (siblings_step(recipe, x, share) for share in (True, False))
    assert same(shared, apart)
    assert kept == wanted
    assert recipe == "rowwise_gw_hp" or kept == [torch.float8_e4m3fn], "whose wgrad is in 16 bits"
