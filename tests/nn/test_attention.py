"""fe.Attention: against plain torch with the same weights; gradients; shared input; cached decoding."""

import pytest
import torch
from support import FP8_RECIPES, sqnr
from torch import nn
from torch.nn import functional as F

import fp8engine as fe
from fp8engine.autograd.attention import Cache
from fp8engine.errors import ShapeError

HEADS = fe.Heads(4, of_keys=2, theta=1e4, causal=True)
# Three projections and the fourth behind a softmax: two matmuls deep at 28 dB each (E4M3), 24 dB in E5M2's gradients,
# so 25 and 21 dB; 3 dB for a draw of few numbers.
OUTPUT_DB, GRADIENT_DB = 22.0, 17.0


class Plain(nn.Module):
    """The same in FP32 torch, rotation by complex numbers."""

    def __init__(self, source: fe.Attention):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            layer = getattr(source, name)
            copy = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            copy.load_state_dict(layer.state_dict())
            setattr(self, name, copy)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[2])[:, None] * 1e4 ** (-torch.arange(0, 8, 2) / 8)
        pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones(()), angle)
        return torch.cat([pairs.real, pairs.imag], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [getattr(self, f"{one}_proj")(x).unflatten(-1, (-1, 8)).transpose(1, 2) for one in "qkv"]
        q, k, v = self.turned(parts[0]), self.turned(parts[1]).repeat_interleave(2, 1), parts[2].repeat_interleave(2, 1)
        return self.get_submodule("o_proj")(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "fp32"])
def test_against_plain_torch(recipe: str, bias: bool):
    torch.manual_seed(0)
    layer = fe.Attention(32, HEADS, bias, recipe=recipe)
    plain = Plain(layer)
    x, dy = torch.randn(4, 9, 32), torch.randn(4, 9, 32)
    found, wanted = [], []
    for module, results in ((layer, found), (plain, wanted)):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(dy)
        # A key's bias moves every score of a query alike, but for its rotation: its gradient is what cancelling leaves.
        grads = [p.grad for name, p in sorted(module.named_parameters()) if name != "k_proj.bias"]
        results += [y.detach(), leaf.grad, *grads]
    bounds = (100.0, 90.0) if recipe == "fp32" else (OUTPUT_DB, GRADIENT_DB)
    assert sqnr(wanted[0], found[0]) > bounds[0]
    for want, got in zip(wanted[1:], found[1:], strict=True):
        assert sqnr(want, got) > bounds[1]


def test_the_three_that_read_the_input_share_one_quantised_copy():
    layer = fe.Attention(32, HEADS, recipe="current")
    x = torch.randn(2, 5, 32)
    layer(x)
    slots = [fe.scaling_state(layer)[f"{name}_proj.input"] for name in "qkv"]
    assert {slot.amax.item() for slot in slots} == {x.abs().max().item()}
    assert len({id(getattr(layer, f"{name}_proj").numerics.state) for name in "qkvo"}) == 1


@pytest.mark.parametrize("recipe", ["rowwise", "fp32"])
def test_decoding_with_a_cache_gives_the_whole_sequence(recipe: str):
    torch.manual_seed(0)
    layer, x, cache = fe.Attention(32, HEADS, recipe=recipe).eval(), torch.randn(2, 6, 32), Cache()
    with torch.no_grad():
        whole = layer(x)
        steps = torch.cat([layer(x[:, :4], cache=cache), *(layer(x[:, t : t + 1], cache=cache) for t in (4, 5))], 1)
    # Rows are cast by themselves, so FP8 gives the same codes; BF16 products may round sums the other way.
    assert sqnr(whole, steps) > (100 if recipe == "fp32" else 35)
    assert len(cache) == 6


def test_padding_is_not_seen():
    layer, x = fe.Attention(32, 4, recipe="rowwise").eval(), torch.randn(1, 6, 32)
    mask = torch.tensor([[True] * 4 + [False] * 2])
    other = x.clone()
    other[:, 4:] = 7.0
    with torch.no_grad():
        assert torch.equal(layer(x, mask)[:, :4], layer(other, mask)[:, :4])


@pytest.mark.parametrize(
    ("hidden", "heads"),
    [(30, 4), (32, fe.Heads(4, of_keys=3)), (32, 0), (32, fe.Heads(4, of_keys=0)), (32, fe.Heads(4, width=0))],
    ids=str,
)
def test_heads_that_do_not_divide_are_refused(hidden: int, heads):
    with pytest.raises(ShapeError, match="heads divide the columns"):
        fe.Attention(hidden, heads, recipe="current")


def test_positions_are_of_this_calls_tokens():
    layer, x = fe.Attention(32, HEADS, recipe="fp32"), torch.randn(2, 3, 32)
    whole = layer(x)
    for positions in (torch.arange(3), torch.arange(3)[None], torch.arange(3).repeat(2, 1)):
        assert torch.equal(layer(x, positions=positions), whole)
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x, positions=positions), whole)
    for rows, tokens, shape in ((1, 3, (2, 3)), (1, 1, (4,)), (2, 3, (1,)), (2, 3, (2, 1))):
        with pytest.raises(ShapeError, match=rf"want \[{tokens}\] or \[{rows}, {tokens}\]"):
            layer(x[:rows, :tokens], positions=torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("heads", [fe.Heads(4, causal=True, window=0), fe.Heads(4, window=3)], ids=str)
def test_a_window_that_shows_nothing_or_is_not_causal_is_refused(heads):
    with pytest.raises(ShapeError, match="a query sees the last so many keys"):
        fe.Attention(32, heads, recipe="current")
    with pytest.raises(ShapeError, match="a query sees the last so many keys"):
        fe.TransformerLayer(32, 64, heads, recipe="current")
