"""Layers that work together on the triton backend, in the interpreter.

Fused ones: the expected few kernels, and the reference's results.  A result that the matmul stores in FP8: codes,
statistics, one launch.  A whole transformer layer, against float64.
"""

import pytest
import torch
from casts import bits
from chains import chain, storing
from fused import NORMS, Model, batches, like, step
from layer64 import exact_step, lively
from layer64 import step as step_of_layer
from support import sqnr, state_of

import fp8engine as fe
from fp8engine.autograd import Memory
from fp8engine.ops.tensor import Float8Tensor

K = 140
# In order: the norm, with X and X^T or before them; each weight with its transpose, and y; dy of each with its
# transpose, dx, dw.
WEIGHT, LAYER = ["cast_transpose", "matmul_fp8"], ["cast_transpose", "matmul_fp8", "matmul_fp8"]
KERNELS = {
    "current": ["norm_quantize", *WEIGHT * 2, *LAYER * 2, "norm_quantize_backward"],
    "delayed": ["norm_quantize", "cast_transpose", *WEIGHT * 2, *LAYER * 2, "norm_quantize_backward"],
    "rowwise": ["norm_quantize", "cast_transpose", *WEIGHT * 2, *LAYER * 2, "norm_quantize_backward"],
}
# Of an MLP dy of the first layer comes from the activation's backward, with its transpose and db: no cast.
MIDDLE = ["act_quantize", *WEIGHT]
BACKWARD = [*LAYER, "act_quantize_backward", "matmul_fp8", "matmul_fp8", "norm_quantize_backward"]
OF_MLP = {
    "current": ["norm_quantize", *WEIGHT, *MIDDLE, *BACKWARD],
    "delayed": ["norm_quantize", "cast_transpose", *WEIGHT, *MIDDLE, *BACKWARD],
    # Row scales of both orientations are a cast's, behind what is 16 bits.
    "rowwise": [
        "norm_quantize", "cast_transpose", *WEIGHT, "act_quantize", "cast_transpose", *WEIGHT,
        *LAYER, "act_quantize_backward", "cast_transpose", "matmul_fp8", "matmul_fp8", "norm_quantize_backward",
    ],
}  # fmt: skip


def compare(model: Model, dtype: torch.dtype, widths, launched: list[str], kernels: list[str]) -> None:
    other = like(model, model.call, model.memory)
    for i, (x, dys) in enumerate(batches((37, 37, 37), K, widths, dtype)):
        launched.clear()
        with fe.backend("triton"):
            found = step(model, x, dys)
        if i:  # the first backward tells the activation who reads the gradient that it gives back
            # But the update of the scales, which delayed scaling launches once a step.
            assert [name for name in launched if name != "scale_update"] == kernels
        with fe.backend("reference"):
            wanted = step(other, x, dys)
        assert found.keys() == wanted.keys()
        for name, want in wanted.items():
            # Up to four roundings to BF16 lie between the two, 2^-8 each.  In an MLP those of y and of da move what is
            # cast after them by d = 2^-8: a share d / step of the values to the next code, a mean square of d step:
            # 2^-8 2^-3 for X2 in E4M3, 2^-8 2^-2 for dy in E5M2.
            error = (found[name].double() - want.double()).norm() / want.double().norm()
            assert error <= ((4 * 2**-8) ** 2 + (2**-11 + 2**-10 if model.kind else 0)) ** 0.5, f"{name}: {error:.4f}"
        model.zero_grad()
        with torch.no_grad():
            for mine, its in zip(model.parameters(), other.parameters(), strict=True):
                mine.mul_(1.01)
                its.mul_(1.01)
    backends = [row["backend"] for row in fe.inspect(model).layers]
    assert backends == ["triton"] * len(backends)


@pytest.mark.parametrize("recipe", KERNELS)
def test_a_norm_and_two_layers(recipe, launched):
    model = Model(recipe, NORMS[2], [(K, 67), (K, 48)], torch.bfloat16)
    compare(model, torch.bfloat16, (67, 48), launched, KERNELS[recipe])


@pytest.mark.parametrize("recipe", OF_MLP)
def test_an_mlp(recipe, launched):
    model = Model(recipe, NORMS[0], [(K, 2 * 128), (128, 67)], torch.bfloat16, kind="swiglu")
    compare(model, torch.bfloat16, (67,), launched, OF_MLP[recipe])


def test_what_is_recomputed_is_made_in_16_bits_and_cast_again(launched):
    model = Model("delayed", NORMS[0], [(K, 2 * 128), (128, 67)], torch.bfloat16, kind="swiglu")
    model.memory = Memory(True, True)
    forward = OF_MLP["delayed"][: -len(BACKWARD)]
    again = ["act_quantize", "cast_transpose"], ["norm_quantize", "cast_transpose"]
    kernels = [*forward, *again[0], *BACKWARD[:4], *again[1], *BACKWARD[4:]]
    compare(model, torch.bfloat16, (67,), launched, kernels)


@pytest.mark.parametrize("format", [fe.E4M3, fe.E5M2], ids=str)
def test_the_kernel_stores_what_the_reference_stores(format, launched):
    x, found = torch.randn(2, 19, 40), {}
    for name in ("triton", "reference"):
        torch.manual_seed(11)
        with fe.backend("reference"):
            model = chain(up=storing(format=format), warm=2)
        with fe.backend(name), torch.no_grad():
            launched.clear()
            h = model.up(4 * x)
            assert isinstance(h, Float8Tensor)
            if name == "triton":
                assert [kernel for kernel in launched if "matmul" in kernel] == ["matmul_fp8"]
        slot = fe.scaling_state(model)["up.output"]
        found[name] = h, int(slot.saturated), int(slot.nonfinite)
    (ours, over, bad), (theirs, wanted, _) = found["triton"], found["reference"]
    assert torch.equal(ours.scale, theirs.scale)
    # The reference rounds products to BF16 first (2^-8), half a step of E4M3 is 2^-4: few codes differ, by one.
    codes = [torch.from_numpy(bits(each.data)).int() for each in (ours, theirs)]
    assert (codes[0] - codes[1]).abs().max() <= 1
    assert (codes[0] != codes[1]).float().mean() < 0.1
    assert bad == 0
    assert abs(over - wanted) <= 0.2 * wanted
    assert wanted > 10


def test_amax_and_the_first_step_on_our_kernels():
    with fe.backend("triton"):
        model = chain(warm=0)
        x = torch.randn(17, 40)
        first = model.up(x)
        model.down(first).sum().backward()
        assert type(first) is torch.Tensor
        amax = fe.scaling_state(model)["up.output"].amax
        assert amax == pytest.approx(first.abs().max().item(), rel=1e-6)
        state_of(model).begin_step()
        h = model.up(x)
        assert isinstance(h, Float8Tensor)
        model.down(h).sum().backward()
        assert h.scale.item() == pytest.approx(amax.item() / 448, rel=2.0**-22)
        assert fe.inspect(model).layers[1]["input"]["ready"] == 1
    assert model.up.weight.grad is not None
    assert model.up.weight.grad.isfinite().all()


def test_gradients_of_a_chain_on_our_kernels():
    grads, x, dy = [], torch.randn(19, 40), torch.randn(19, 30)
    for name in ("triton", "reference"):
        torch.manual_seed(11)
        with fe.backend("reference"):
            model = chain()
        with fe.backend(name):
            model(x).backward(dy)
        assert fe.inspect(model).layers[1]["input"]["ready"] == 2
        grads.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        # Sums in another order and products not rounded to BF16 first move a few codes of up's gradient by a step.
        assert sqnr(theirs, ours) > 25


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("current", {}), ("rowwise", {"placement": "post", "store": "fp8", "recompute": True})],
    ids=["pre", "post"],
)
def test_a_layer_on_our_kernels(recipe: str, options: dict):
    heads = fe.Heads(4, 2, theta=1e4, causal=True)
    common = {"recipe": recipe, "norm": "rms", "dtype": torch.bfloat16}
    layer = lively(fe.TransformerLayer(32, 48, heads, "swiglu", False, **common, **options))
    x, dy = torch.randn(2, 2, 8, 32).bfloat16()
    with fe.backend("triton"):
        found = step_of_layer(layer, x, dy)
    assert {row["backend"] for row in fe.inspect(layer).layers} == {"triton"}
    wanted = exact_step(layer, x, dy)
    # As in test_transformer.py: four matmuls in E4M3 in what is added; a gradient passes four casts of dy beside.
    low = {n: sqnr(wanted[n], found[n]) for n in wanted if not sqnr(wanted[n], found[n]) > (19.5 if n == "y" else 13.5)}
    assert not low
