"""What fused layers and TransformerLayer keep for backward, measured with saved-tensor hooks, byte for byte."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from fused import MEMORIES, NORMS, Model, like
from support import FP8_RECIPES, saved
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.autograd import Memory
from fp8engine.ops.reference.activations import ACTIVATIONS

M, K, F = 256, 384, 256
RMS, LAYER = NORMS[0], NORMS[2]
BF16 = torch.bfloat16
every_memory = pytest.mark.parametrize("memory", MEMORIES, ids=str)


def bytes_of(model: nn.Module, x: torch.Tensor) -> int:
    """What a forward keeps, each memory once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in saved(model, x)}
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)


def size(model: nn.Module, dtype=BF16, needs=True) -> int:
    return bytes_of(model, torch.randn(M, K, dtype=dtype, requires_grad=needs))


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


class Sizes(NamedTuple):
    """Of a layer, and of its input: batch sequences of t tokens."""

    h: int
    f: int
    heads: int
    kv_heads: int
    batch: int
    t: int

    @property
    def kv(self) -> int:
        return self.h // self.heads * self.kv_heads


SMALL = Sizes(256, 896, 8, 2, 3, 128)
OTHER = Sizes(128, 320, 2, 1, 2, 64)
# Options, and what is kept less than without them: bytes a token, and scales of tensors.
OPTIONS: list[tuple[dict[str, Any], Callable[[Sizes], int], int]] = [
    ({}, lambda size: 0, 0),
    ({"recompute": "norm"}, lambda size: 2 * size.h, 2),
    ({"recompute": "activation"}, lambda size: size.f, 1),
    ({"recompute": True}, lambda size: 2 * size.h + size.f, 3),
    # x, y, gate and up in FP8, with a scale a row
    ({"recompute": True, "store": "fp8"}, lambda size: 4 * size.h + 3 * size.f - 4 * 4, 3),
]


def ours(size: Sizes) -> int:
    """A token keeps x, q, k, v, o, y, gate, up; in FP8 norm, o, norm, product; numbers of the softmax and of norms.

    A tensor has a scale: two norms, o and the product.  The rotation's cosines and sines are in FP32.
    """
    h, f, kv = size.h, size.f, size.kv
    token = 2 * (4 * h + 2 * kv + 2 * f) + 3 * h + f + 4 * size.heads + 8
    return size.batch * size.t * token + 4 * 4 + 4 * size.t * h // size.heads


def kept_by(size: Sizes, checkpointed: bool = False, **options: Any) -> int:
    """Bytes that a layer of those options keeps."""
    heads = fe.Heads(size.heads, size.kv_heads, theta=1e4, causal=True)
    common = {"bias": False, "recipe": "current", "norm": "rms", "dtype": BF16}
    layer: Any = fe.TransformerLayer(size.h, size.f, heads, "swiglu", **{**common, **options})
    network = nn.Module()
    network.layer = layer
    network.forward = lambda x: checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
    return bytes_of(network, torch.randn(size.batch, size.t, size.h, dtype=BF16, requires_grad=True))


@pytest.mark.parametrize(("options", "less", "scales"), OPTIONS)
@pytest.mark.parametrize("size", [SMALL, OTHER], ids=str)
def test_every_byte_of_a_transformer_layer(size: Sizes, options: dict, less: Callable[[Sizes], int], scales: int):
    assert kept_by(size, **options) == ours(size) - size.batch * size.t * less(size) - 4 * scales


def test_post_norm_keeps_the_inputs_of_its_norms_in_fp8_too():
    kept, in_fp8 = (kept_by(SMALL, placement="post", recompute=True, store=store) for store in ("16 bits", "fp8"))
    rows, h, f = SMALL.batch * SMALL.t, SMALL.h, SMALL.f
    assert kept - in_fp8 == 2 * rows * (h - 4) + rows * (2 * f - 8)


def test_under_a_checkpoint_the_input_alone_is_kept():
    assert kept_by(OTHER, checkpointed=True) <= 2 * OTHER.batch * OTHER.t * OTHER.h
