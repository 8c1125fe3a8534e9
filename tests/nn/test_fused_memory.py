"""What fused layers keep for backward, measured with saved-tensor hooks, is what their docstrings say; and where."""

import gc

import pytest
import torch
from fused import MEMORIES, NORMS, Model, like
from support import FP8_RECIPES, saved
from torch import nn

from fp8engine.autograd import Memory
from fp8engine.ops.reference.activations import ACTIVATIONS

M, K, F = 256, 384, 256
RMS, LAYER = NORMS[0], NORMS[2]
BF16 = torch.bfloat16
every_memory = pytest.mark.parametrize("memory", MEMORIES, ids=str)


def size(model: nn.Module, dtype=BF16, needs=True, k: int = K) -> int:
    """Bytes of what a forward keeps; what several layers keep is the same memory."""
    kept = saved(model, torch.randn(M, k, dtype=dtype, requires_grad=needs))
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in kept}.values())


def operand(recipe: str, features: int) -> int:
    """Bytes of [M, features] as wgrad reads it, scales along M."""
    scales = {"current": 1, "delayed": 1, "rowwise": features, "blockwise": M // 128 * features}
    if recipe == "rowwise_gw_hp":
        return 2 * M * features
    return M * features + 4 * scales[recipe]


def elementwise(features: int, dtype, memory: Memory) -> int:
    """Bytes of the input of a norm or an activation."""
    return M * features + 4 * M if memory.store == "fp8" else M * features * dtype.itemsize


def rows(norm) -> int:
    return 4 * M * (2 if norm.kind == "layer" else 1)


@every_memory
@pytest.mark.parametrize("norm", [RMS, LAYER], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_norm_and_three_layers(recipe, dtype, norm, memory):
    model = Model(recipe, norm, [(K, 64), (K, 64), (K, 32)], dtype)
    want = elementwise(K, dtype, memory) + rows(norm)
    copies = 3 if recipe == "rowwise_gw_hp" and dtype == torch.float32 else 1  # in BF16, by each layer for itself
    want += 0 if memory.recompute_norm else copies * operand(recipe, K)
    assert size(like(model, model.call, memory), dtype) == want


@pytest.mark.parametrize("memory", [*MEMORIES, Memory(True), Memory(recompute_activation=True)], ids=str)
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_norm_and_an_mlp(recipe, kind, memory):
    wide = F * (1 + ACTIVATIONS[kind].gated)
    model = Model(recipe, RMS, [(K, wide), (F, K)], BF16, kind=kind)
    frozen = elementwise(K, BF16, memory) + rows(RMS) + elementwise(wide, BF16, memory)
    want = frozen + (0 if memory.recompute_norm else operand(recipe, K))
    want += 0 if memory.recompute_activation else operand(recipe, F)
    assert size(like(model, model.call, memory)) == want
    for layer in model.layers:
        layer.requires_grad_(False)
    assert size(like(model, model.call, memory)) == frozen, "frozen weights keep no operand"


@every_memory
def test_where_nothing_before_takes_a_gradient_the_operand_alone_is_kept(memory):
    """x would be kept for nothing but the recompute, at twice the bytes."""
    model = Model("current", RMS, [(K, 64)], BF16)
    mlp = Model("current", RMS, [(K, F), (F, K)], BF16, kind="gelu")
    for p in (model.gamma, mlp.gamma, *mlp.layers[0].parameters()):
        p.requires_grad_(False)
    assert size(like(model, model.call, memory), needs=False) == M * K + 4
    assert size(like(mlp, mlp.call, memory), needs=False) == M * F + 4
    with torch.no_grad():
        assert size(like(mlp, mlp.call, memory), needs=False) == 0


def test_a_graph_that_is_held_after_backward_holds_no_operand():
    """A user keeps losses in a list: what forward made must go with backward."""

    def codes() -> set[int]:
        gc.collect()
        return {id(t) for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == torch.float8_e4m3fn}

    model = Model("current", RMS, [(K, F), (F, K)], BF16, kind="gelu")
    before = codes()  # another test's
    (y,) = model(torch.randn(M, K, dtype=BF16, requires_grad=True))
    y.sum().backward()
    assert y.grad_fn is not None
    assert codes() <= before


@pytest.mark.parametrize(
    ("memory", "least"), [(Memory(), 1.55), (Memory(True, True), 1.95), (Memory(True, True, "fp8"), 3.9)]
)
def test_the_share_of_bf16(memory: Memory, least: float):
    """Of a SwiGLU MLP of Llama's sizes, F = 3.5 K: plain PyTorch keeps x, the norm's result, gate and up, silu(gate)
    and the product, 2 (2 K + 4 F) bytes a row; here 3 K + 5 F, 2 K + 4 F recomputed, K + 2 F from inputs in FP8."""
    k, f = 128, 448
    model = Model("current", RMS, [(k, 2 * f), (f, k)], BF16, kind="swiglu", bias=False)
    assert 2 * M * (2 * k + 4 * f) / size(like(model, model.call, memory), k=k) > least
