"""fe.fuse_wgrad_accumulation: the weight's gradient in its main_grad, FP32, and what autograd is told instead.

With FP32 weights main_grad holds, bit for bit, what .grad would: the same matmul, added by the same FP32 addition.
With BF16 weights .grad is rounded to BF16 (2^-8) once a microbatch and once a sum, and main_grad is not.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from support import FP8_RECIPES, sqnr
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.errors import ConversionError, GradientError, ShapeError, UnsupportedDtype
from fp8engine.ops import matmul, reference
from fp8engine.ops.reference import Epilogue, Operand

RECIPES = [*FP8_RECIPES, "bf16", "fp32"]
LAYERS = {
    "linear": lambda **common: fe.Linear(48, 33, **common),
    "norm linear": lambda **common: fe.LayerNormLinear(48, 33, **common),
    "mlp": lambda **common: fe.LayerNormMLP(48, 40, "clamped_swiglu", **common),
    "block": lambda **common: fe.TransformerLayer(48, 40, 4, "swiglu", **common),
}


def make(layer: str, recipe: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(a module, its copy whose weights have a main_grad)."""
    plain: Any = LAYERS[layer](recipe=recipe, dtype=dtype)
    fused = copy.deepcopy(plain)
    fe.fuse_wgrad_accumulation(fused)
    give(fused)
    return plain, fused


def weights(model: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.dim() == 2}


def give(model: nn.Module, **attributes) -> None:
    for weight in weights(model).values():
        weight.main_grad = torch.zeros(weight.shape)
        for name, value in attributes.items():
            setattr(weight, name, value)


def run(model: Any, x: torch.Tensor) -> torch.Tensor:
    """dx of one microbatch."""
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(torch.sin(torch.arange(y.numel()).view(y.shape)).bfloat16().to(y.dtype))
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_in_fp32_main_grad_is_what_grad_would_be(recipe: str, layer: str):
    plain, fused = make(layer, recipe)
    for scale in (1.0, 3.0, 0.5):  # microbatches
        x = torch.randn(2, 7, 48) * scale
        assert torch.equal(run(plain, x), run(fused, x))
    for name, weight in weights(fused).items():
        assert weight.grad is None
        wanted = plain.get_parameter(name).grad
        if recipe == "rowwise_gw_hp":  # .grad had three gradients rounded to BF16 by their matmuls, main_grad has not
            assert (weight.main_grad - wanted).abs().max() <= 3 * 2.0**-8 * wanted.abs().max(), name
        else:
            assert torch.equal(weight.main_grad, wanted), name
    for name, p in fused.named_parameters():
        if p.dim() == 1:
            wanted = plain.get_parameter(name).grad
            assert p.grad is not None
            assert torch.equal(p.grad, wanted), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_in_16_bits_the_sum_is_not_rounded(recipe: str, dtype: torch.dtype):
    plain, fused = make("linear", recipe, dtype)
    for _ in range(4):
        x = torch.randn(31, 48, dtype=dtype)
        run(plain, x)
        run(fused, x)
    found, rounded = fused.weight.main_grad, plain.weight.grad
    unit = torch.finfo(dtype).eps / 2
    # 4 gradients and 3 sums are rounded, each by at most `unit` of the largest there is.
    assert (found - rounded.float()).abs().max() <= 7 * unit * found.abs().max()
    assert not torch.equal(found, found.to(dtype).float())


def test_main_grad_is_nearer_to_float64_than_bf16_sums_are():
    plain, fused = make("linear", "current", torch.bfloat16)
    exact = torch.zeros(33, 48).double()
    for _ in range(8):
        x = torch.randn(31, 48, dtype=torch.bfloat16)
        run(plain, x)
        run(fused, x)
        one = copy.deepcopy(fused).float()
        give(one)
        run(one, x.float())
        exact += one.weight.main_grad
    assert sqnr(exact, fused.weight.main_grad) > sqnr(exact, plain.weight.grad) + 6


def test_what_autograd_is_given_is_megatrons():
    """As Megatron's hook on the gradient's accumulator reads it: never added a second time, and never missing."""
    layer: Any = fe.Linear(48, 33, recipe="current")
    fe.fuse_wgrad_accumulation(layer)
    give(layer, grad_added_to_main_grad=False)
    accumulator = layer.weight.view_as(layer.weight).grad_fn.next_functions[0][0]
    seen = []

    def hook(*unused):
        assert layer.weight.grad is not None, "Megatron's DDP asserts that, where it overlaps its reductions"
        seen.append((layer.weight.grad.shape, layer.weight.grad_added_to_main_grad))
        if not layer.weight.grad_added_to_main_grad:
            layer.weight.main_grad.add_(layer.weight.grad)
        layer.weight.grad = None

    accumulator.register_hook(hook)
    x = torch.randn(5, 48)
    run(layer, x)
    once = layer.weight.main_grad.clone()
    run(layer, x)
    assert seen == [((33, 48), True)] * 2
    assert torch.equal(layer.weight.main_grad, 2 * once)


def test_attributes_of_the_weight_are_followed():
    _, layer = make("linear", "current")
    layer.weight.grad_added_to_main_grad, layer.weight.zero_out_wgrad = False, True
    run(layer, torch.randn(5, 48))
    assert layer.weight.grad.count_nonzero() == 0
    layer.weight.overwrite_main_grad = True
    before = layer.weight.main_grad.clone()
    x = torch.randn(5, 48)
    run(layer, x)
    again = layer.weight.main_grad.clone()
    run(layer, x)
    assert torch.equal(layer.weight.main_grad, again)
    assert not torch.equal(before, again)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layer", ["linear", "block"])
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "bf16"])
def test_a_checkpoint_changes_nothing(recipe: str, layer: str, reentrant: bool):
    _, straight = make(layer, recipe)
    _, again = make(layer, recipe)
    again.load_state_dict(straight.state_dict())
    x = torch.randn(2, 7, 48)
    run(straight, x)
    run(lambda x: checkpoint(again, x, use_reentrant=reentrant), x)
    for one, other in zip(weights(straight).values(), weights(again).values(), strict=True):
        assert other.grad is None
        assert torch.equal(one.main_grad, other.main_grad)


def test_torch_compile_runs_these_layers_between_graphs_and_says_so():
    plain, layer = make("mlp", "current")
    model = nn.Sequential(layer, nn.Tanh())
    x = torch.randn(2, 7, 48)
    compiled = torch.compile(model, backend="aot_eager")
    run(compiled, x)
    run(nn.Sequential(plain, nn.Tanh()), x)
    for name, weight in weights(layer).items():
        assert torch.equal(weight.main_grad, plain.get_parameter(name).grad), name
    with pytest.raises(Exception, match=r"fuse_wgrad_accumulation adds to weight\.main_grad"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)


def test_a_weight_without_main_grad_is_an_error_in_forward():
    layer: Any = fe.Linear(48, 33, recipe="current")
    fe.fuse_wgrad_accumulation(layer)
    x = torch.randn(5, 48)
    with pytest.raises(GradientError, match=r"^Linear: .*has none: give every weight an FP32 tensor"):
        layer(x)
    for wrong in (torch.zeros(48, 33), torch.zeros(33, 48).bfloat16(), torch.zeros(33, 48, device="meta")):
        layer.weight.main_grad = wrong
        with pytest.raises(GradientError, match=r"^Linear: weight.main_grad is \[.*make it that"):
            layer(x)
    with torch.no_grad():
        layer(x)  # no gradient, no rule
    layer.weight.requires_grad_(False)
    run(layer, x)
    layer.weight.requires_grad_()
    fe.fuse_wgrad_accumulation(layer, False)
    run(layer, x)
    assert layer.weight.grad is not None


def test_the_same_error_without_fp8():
    layer = fe.Linear(48, 33, recipe="bf16")
    fe.fuse_wgrad_accumulation(layer)
    with pytest.raises(GradientError, match="has none"):
        layer(torch.randn(5, 48))


def test_what_it_does_not_take_is_refused_by_name():
    with pytest.raises(ConversionError, match="no converted layers"):
        fe.fuse_wgrad_accumulation(nn.Linear(4, 4))
    model: Any = nn.Sequential(fe.Linear(32, 32, recipe="current"), fe.GroupedLinear(2, 32, 32, recipe="current"))
    with pytest.raises(ConversionError, match="is a GroupedLinear"):
        fe.fuse_wgrad_accumulation(model)
    assert not model[0].numerics.fused_wgrad, "all or nothing"
    _, layer = make("linear", "current")
    with pytest.raises(GradientError, match=r"torch.func's transforms where fe.fuse_wgrad_accumulation is on"):
        torch.func.grad(lambda x: layer(x).sum())(torch.randn(5, 48))


def test_the_report_says_how():
    _, layer = make("linear", "current")
    run(layer, torch.randn(5, 48))
    assert "wgrad is added to main_grad after its matmul" in fe.inspect(layer).layers[0]["reason"]


def test_copies_and_pickles_keep_it_and_old_ones_have_it_off():
    _, layer = make("linear", "current")
    assert copy.deepcopy(layer).numerics.fused_wgrad
    assert pickle.loads(pickle.dumps(layer)).numerics.fused_wgrad
    state: Any = layer.numerics.__getstate__()
    del state["fused_wgrad"]
    old: Any = object.__new__(type(layer.numerics))
    old.__setstate__(state)
    assert old.fused_wgrad is False


def test_a_weight_read_twice_adds_both():
    plain, fused = make("linear", "rowwise")
    x, z = torch.randn(5, 48), torch.randn(9, 48)
    for model in (plain, fused):
        (model(x).sum() + model(z).square().sum()).backward()
    torch.testing.assert_close(fused.weight.main_grad, plain.weight.grad, rtol=1e-6, atol=1e-6)


def test_accumulate_by_itself():
    a = Operand(torch.randn(7, 9).to(torch.float8_e4m3fn), torch.tensor(0.5))
    b = Operand(torch.randn(5, 9).to(torch.float8_e4m3fn), torch.tensor(2.0))
    before = torch.randn(7, 5)
    total, twin = before.clone(), before.clone()
    with torch.no_grad():
        matmul.accumulate(a, b, total)
    assert torch.equal(total, before + matmul.matmul(a, b, None, torch.float32))
    end = Epilogue(None, torch.float32, into=twin)
    assert reference.finish(reference.matmul_fp8(a, b, None, torch.float32), end) is twin
    assert torch.equal(twin, total)
    under_grad = before.clone()
    matmul.accumulate(a, b, under_grad)  # by the operator
    assert torch.equal(under_grad, total)
    with pytest.raises(ShapeError, match="into is"):
        matmul.accumulate(a, b, torch.zeros(5, 7))
    with pytest.raises(UnsupportedDtype, match="kept in float32"):
        matmul.accumulate(a, b, torch.zeros(7, 5).half())
