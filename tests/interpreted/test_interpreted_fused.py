"""Fused layers on the triton backend, in the interpreter: the expected few kernels, and the reference's results."""

import pytest
import torch
from fused import NORMS, Model, batches, like, step
from interpreted.test_interpreted_ops import launched  # noqa: F401  a fixture

import fp8engine as fe
from fp8engine.autograd import Memory

# NumPy remarks on exp(-x) that is Inf, and the like, which a GPU computes in silence.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
K, F = 140, 96
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


def compare(model: Model, dtype: torch.dtype, widths, launched: list[str], kernels: list[str]) -> None:  # noqa: F811
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
def test_a_norm_and_two_layers(recipe, launched):  # noqa: F811
    model = Model(recipe, NORMS[2], [(K, 67), (K, 48)], torch.bfloat16)
    compare(model, torch.bfloat16, (67, 48), launched, KERNELS[recipe])


@pytest.mark.parametrize("recipe", OF_MLP)
def test_an_mlp(recipe, launched):  # noqa: F811
    model = Model(recipe, NORMS[0], [(K, 2 * 128), (128, 67)], torch.bfloat16, kind="swiglu")
    compare(model, torch.bfloat16, (67,), launched, OF_MLP[recipe])


def test_what_is_recomputed_is_made_in_16_bits_and_cast_again(launched):  # noqa: F811
    model = Model("delayed", NORMS[0], [(K, 2 * 128), (128, 67)], torch.bfloat16, kind="swiglu")
    model.memory = Memory(True, True)
    forward = OF_MLP["delayed"][: -len(BACKWARD)]
    again = ["act_quantize", "cast_transpose"], ["norm_quantize", "cast_transpose"]
    kernels = [*forward, *again[0], *BACKWARD[:4], *again[1], *BACKWARD[4:]]
    compare(model, torch.bfloat16, (67,), launched, kernels)
