"""What a TransformerLayer keeps for backward, byte for byte, and how much less than the same layer in BF16.

A token of a SwiGLU layer with h columns, f between, and kv columns of keys keeps, beside 4 bytes a head (the softmax's)
and 4 for each norm:

    BF16      2 (6 h + 2 kv + 4 f)   x, norm, q, k, v, o; y, norm, gate, up, silu(gate), product (o is o_proj's input)
    current   2 (4 h + 2 kv + 2 f) + 3 h + f    x, q, k, v, o, y, gate, up; in FP8 norm, o, norm, product
    recompute                      less 2 h + f                    norms and product
    store="fp8"                    less 2 h + 2 f, and 16 more     x, y, gate and up with a scale a row
"""

from typing import Any, NamedTuple

import pytest
import torch
from support import saved as tensors_saved
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from benchmarks.networks import Block, Size


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
DESIGN = Sizes(4096, 14336, 32, 8, 4, 2048)  # section 9: 8192 tokens, sequences of 2048
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"recompute": "norm"},
    "activation": {"recompute": "activation"},
    "both": {"recompute": True},
    "both, fp8": {"recompute": True, "store": "fp8"},
}


def saved(network: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the storages that a forward keeps for its backward, each once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors_saved(network, x)}
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)


def turns(size: Sizes) -> int:
    """Bytes of the rotation's cosines and sines, FP32."""
    return 4 * size.t * size.h // size.heads


def in_bf16(size: Sizes) -> int:
    h, f, kv = size.h, size.f, size.kv
    return size.batch * size.t * (2 * (6 * h + 2 * kv + 4 * f) + 4 * size.heads + 8) + turns(size)


def ours(size: Sizes, option: str) -> int:
    h, f, kv = size.h, size.f, size.kv
    token = 2 * (4 * h + 2 * kv + 2 * f) + 3 * h + f + 4 * size.heads + 8
    scales = 4  # of tensors, FP32: two norms, o, product
    if option in ("norm", "both", "both, fp8"):
        token, scales = token - 2 * h, scales - 2
    if option in ("activation", "both", "both, fp8"):
        token, scales = token - f, scales - 1
    if option == "both, fp8":
        token -= 2 * h + 2 * f - 4 * 4
    return size.batch * size.t * token + 4 * scales + turns(size)


def layer(size: Sizes, recipe: str = "current", **options: Any) -> fe.TransformerLayer:
    heads = fe.Heads(size.heads, size.kv_heads, theta=1e4, causal=True)
    common = {"bias": False, "recipe": recipe, "norm": "rms", "dtype": torch.bfloat16}
    return fe.TransformerLayer(size.h, size.f, heads, "swiglu", **{**common, **options})


def data(size: Sizes) -> torch.Tensor:
    return torch.randn(size.batch, size.t, size.h, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("size", [SMALL, OTHER], ids=str)
def test_every_byte_is_accounted_for(size: Sizes, option: str):
    assert saved(layer(size, **OPTIONS[option]), data(size)) == ours(size, option)


@pytest.mark.parametrize("size", [SMALL, OTHER], ids=str)
def test_so_is_every_byte_of_the_same_layer_in_bf16(size: Sizes):
    """With a norm that keeps its input alone, as a card's RMSNorm does; torch composes RMSNorm on a CPU, of more."""
    plain = Block(Size(size.h, size.f, size.heads, size.kv_heads))
    of_rms = saved(plain.bfloat16(), data(size))
    for name in ("input_layernorm", "post_attention_layernorm"):
        setattr(plain, name, nn.LayerNorm(size.h, bias=False, dtype=torch.bfloat16))
    # networks.Attention turns q and k each with cosines of its own, and a CPU's softmax lays heads before tokens, so
    # that o_proj reads a copy of o; LayerNorm keeps two BF16 numbers a row.
    assert saved(plain, data(size)) == in_bf16(size) + turns(size) + size.batch * size.t * 2 * size.h < of_rms


def test_against_bf16_the_design_block_keeps():
    """Counted by shape, by the formulas that hold to the byte at the other sizes."""
    assert [round(in_bf16(DESIGN) / ours(DESIGN, option), 2) for option in OPTIONS] == [1.39, 1.49, 1.58, 1.71, 2.73]


def test_post_norm_keeps_the_inputs_of_its_norms_in_fp8_too():
    kept = saved(layer(SMALL, placement="post", recompute=True), data(SMALL))
    in_fp8 = saved(layer(SMALL, placement="post", recompute=True, store="fp8"), data(SMALL))
    rows, h, f = SMALL.batch * SMALL.t, SMALL.h, SMALL.f
    assert kept - in_fp8 == 2 * rows * (h - 4) + rows * (2 * f - 8)


def test_under_a_checkpoint_the_input_alone_is_kept():
    inner, x = layer(OTHER), data(OTHER)
    network = nn.Module()
    network.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
    assert saved(network, x) <= x.nbytes
