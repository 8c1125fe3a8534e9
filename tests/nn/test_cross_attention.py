"""Cross attention of fe.Attention and fe.TransformerLayer: torch's, Hugging Face's BART, gradients, masks, one cast."""

import pytest
import torch
from support import FP8_RECIPES, spy_on, sqnr
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.autograd.attention import Cache
from fp8engine.errors import ShapeError, UnknownName

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# Two matmuls deep, as in test_attention.py: 25 dB forward (E4M3), 21 dB backward (E5M2); 3 dB for few numbers.
OUTPUT_DB, GRADIENT_DB = 22.0, 17.0


def torchs(layer: fe.Attention, context_size: int) -> nn.MultiheadAttention:
    """torch's attention with the same parameters."""
    hidden = layer.q_proj.in_features
    own = nn.MultiheadAttention(
        hidden, layer.heads.count, kdim=context_size, vdim=context_size, batch_first=True, dtype=torch.float64
    )
    with torch.no_grad():
        parts = [getattr(layer, name) for name in PROJECTIONS]
        if own.in_proj_weight is None:
            for name, part in zip(PROJECTIONS, parts, strict=True):
                getattr(own, f"{name}_weight").copy_(part.weight)
        else:
            own.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        own.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        own.out_proj.weight.copy_(layer.o_proj.weight)
        own.out_proj.bias.copy_(layer.o_proj.bias)
    return own


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("context_size", "t", "s"), [(32, 9, 5), (48, 1, 7), (40, 6, 6)])
@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "fp32"])
def test_it_is_torchs_multihead_attention(recipe: str, context_size: int, t: int, s: int, masked: bool):
    torch.manual_seed(t)
    layer = fe.Attention(32, fe.Heads(4, context_size=context_size), recipe=recipe)
    own = torchs(layer, context_size)
    x, context = (torch.randn(3, n, width).requires_grad_() for n, width in ((t, 32), (s, context_size)))
    dy = torch.randn(3, t, 32)
    seen = torch.arange(s) < torch.tensor([[s], [s - 1], [1]]) if masked else None
    y = layer(x, seen, context=context)
    y.backward(dy)
    x64, context64 = (each.detach().double().requires_grad_() for each in (x, context))
    padding = None if seen is None else ~seen
    wanted, _ = own(x64, context64, context64, key_padding_mask=padding, need_weights=False)
    wanted.backward(dy.double())
    bounds = (100.0, 90.0) if recipe == "fp32" else (OUTPUT_DB, GRADIENT_DB)
    assert sqnr(wanted.detach(), y.detach()) > bounds[0]
    pairs = [(x64.grad, x.grad), (context64.grad, context.grad), (own.out_proj.weight.grad, layer.o_proj.weight.grad)]
    if own.in_proj_weight is None:
        pairs += [
            (own.v_proj_weight.grad, layer.v_proj.weight.grad),
            (own.k_proj_weight.grad, layer.k_proj.weight.grad),
        ]
    for want, got in pairs:
        assert want is not None
        assert sqnr(want, got) > bounds[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_grouped_keys_and_a_norm_of_heads(dtype: torch.dtype):
    heads = fe.Heads(4, of_keys=2, width=16, qk_norm=1e-6, context_size=48)
    layer = fe.Attention(32, heads, recipe="rowwise", dtype=dtype)
    plain = fe.Attention(32, heads, recipe="fp32")
    plain.load_state_dict(layer.state_dict())
    x, context = torch.randn(2, 5, 32, dtype=dtype), torch.randn(2, 7, 48, dtype=dtype)
    y = layer(x, context=context)
    assert y.dtype == dtype
    assert sqnr(plain(x.float(), context=context.float()), y) > OUTPUT_DB


def test_keys_and_values_share_one_cast_of_the_context(monkeypatch):
    layer = fe.Attention(32, fe.Heads(4, context_size=40), recipe="current")
    seen = []

    def spy(real, x, *rest, **more):
        seen.append(tuple(x.shape))
        return real(x, *rest, **more)

    spy_on(monkeypatch, "cast_transpose", spy)
    spy_on(monkeypatch, "quantize", spy)
    layer(torch.randn(2, 5, 32), context=torch.randn(2, 7, 40))
    assert seen.count((14, 40)) == 1


def test_a_cache_holds_the_projected_context():
    layer, cache = fe.Attention(32, fe.Heads(4, context_size=48), recipe="rowwise").eval(), Cache()
    x, context = torch.randn(2, 6, 32), torch.randn(2, 7, 48)
    with torch.no_grad():
        whole = layer(x, context=context)
        parts = [layer(x[:, :4], cache=cache, context=context)]
        parts += [layer(x[:, t : t + 1], cache=cache, context=context * float("nan")) for t in (4, 5)]
    assert len(cache) == 0, "the cache of self-attention is another's"
    assert sqnr(whole, torch.cat(parts, 1)) > 35  # rows are cast by themselves; BF16 products round sums otherwise
    with torch.no_grad(), pytest.raises(ShapeError, match="context of 2 rows, and the input has 1"):
        layer(x[:1], cache=cache, context=context[:1])


@pytest.mark.parametrize("order", [{"causal": True}, {"theta": 1e4}, {"causal": True, "window": 2}], ids=str)
def test_heads_with_an_order_are_refused(order: dict):
    layer = fe.Attention(32, fe.Heads(4, **order), recipe="current")
    with pytest.raises(ShapeError, match="Heads without causal, window and theta"):
        layer(torch.randn(2, 5, 32), context=torch.randn(2, 7, 32))


def test_contexts_that_do_not_fit_are_refused():
    layer = fe.Attention(32, fe.Heads(4, context_size=48), recipe="current")
    x = torch.randn(2, 5, 32)
    for wrong in (torch.randn(3, 7, 48), torch.randn(7, 48)):
        with pytest.raises(ShapeError, match=r"context is .*want \[2, S, context_size\]"):
            layer(x, context=wrong)
    with pytest.raises(ShapeError, match=r"k_proj: .* in_features is 48"):
        layer(x, context=torch.randn(2, 7, 32))
    with pytest.raises(ShapeError, match="k_proj"):
        layer(x)
    with pytest.raises(ShapeError, match="context or its mask is given, and the layer has no cross attention"):
        fe.TransformerLayer(32, 48, 4, recipe="current")(x, context=x)
    with pytest.raises(ShapeError, match="context or its mask is given, and the layer has no cross attention"):
        fe.TransformerLayer(32, 48, 4, recipe="current")(x, context_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ShapeError, match="context is missing"):
        fe.TransformerLayer(32, 48, 4, recipe="current", context_size=32)(x)
    with pytest.raises(UnknownName, match="placement of a layer with cross attention 'parallel'"):
        fe.TransformerLayer(32, 48, 4, recipe="current", context_size=32, placement="parallel")


def barts(activation: str = "gelu"):
    modeling = pytest.importorskip("transformers.models.bart.modeling_bart")
    from transformers import BartConfig

    config = BartConfig(
        d_model=32, decoder_ffn_dim=48, decoder_attention_heads=4, activation_function=activation, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, attn_implementation="eager",  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return modeling.BartDecoderLayer(config).double()


NAMES = {
    "self_attn": "self_attn",
    "encoder_attn": "cross_attn",
    "self_attn_layer_norm": "post_attention_layernorm",
    "encoder_attn_layer_norm": "cross_attn_layernorm",
    "final_layer_norm": "post_feedforward_layernorm",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("recipe", ["fp32", "rowwise", "current"])
def test_a_decoders_layer_is_barts(recipe: str, checkpointed: bool):
    torch.manual_seed(0)
    theirs = barts()
    layer = fe.TransformerLayer(
        32, 48, fe.Heads(4, causal=True), recipe=recipe, placement="post", context_size=32, eps=1e-5
    )
    renamed = {}
    for name, value in theirs.state_dict().items():
        first, rest = name.split(".", 1)
        renamed[f"{NAMES[first]}.{rest.replace('out_proj', 'o_proj')}"] = value.float()
    layer.load_state_dict(renamed)
    x, context = (torch.randn(2, n, 32).requires_grad_() for n in (6, 9))
    x64, context64 = (each.detach().double().requires_grad_() for each in (x, context))
    seen = torch.arange(9) < torch.tensor([[9], [4]])
    if checkpointed:
        y = checkpoint(lambda x, context: layer(x, context=context, context_mask=seen), x, context, use_reentrant=False)
    else:
        y = layer(x, context=context, context_mask=seen)
    causal = torch.full((6, 6), float("-inf")).triu(1)[None, None].double()
    hidden = torch.zeros(2, 1, 1, 9).double().masked_fill(~seen[:, None, None], float("-inf"))
    wanted = theirs(x64, attention_mask=causal, encoder_hidden_states=context64, encoder_attention_mask=hidden)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    dy = torch.randn(2, 6, 32)
    y.backward(dy)
    wanted.backward(dy.double())
    # fp32 of six matmuls and three norms; FP8: noise of three parts one after another, each as test_attention.py has it
    bounds = (100.0, 90.0) if recipe == "fp32" else (18.0, 13.0)
    assert sqnr(wanted.detach(), y.detach()) > bounds[0]
    for want, got in ((x64.grad, x.grad), (context64.grad, context.grad)):
        assert want is not None
        assert sqnr(want, got) > bounds[1]
    for name, parameter in theirs.named_parameters():
        first, rest = name.split(".", 1)
        if rest != "k_proj.bias":  # its gradient is what cancelling leaves
            got = layer.get_parameter(f"{NAMES[first]}.{rest.replace('out_proj', 'o_proj')}").grad
            assert sqnr(parameter.grad, got) > bounds[1] - 3, name


def test_pre_norm_writes_the_norm_once_and_decodes_with_one_cache():
    torch.manual_seed(0)
    layer = fe.TransformerLayer(
        32, 48, fe.Heads(4, theta=1e4, causal=True), "swiglu", recipe="rowwise", norm="rms", context_size=40
    ).eval()
    x, context, cache = torch.randn(2, 6, 32), torch.randn(2, 9, 40), Cache()
    with torch.no_grad():
        whole = layer(x, context=context)
        steps = [layer(part, cache=cache, context=context) for part in x.split([4, 1, 1], dim=1)]
    assert sqnr(whole, torch.cat(steps, 1)) > 30
    assert [row["name"] for row in fe.inspect(layer).layers][-4:] == [f"cross_attn.{n}_proj" for n in "qkvo"]


@pytest.mark.slow
def test_torch_compile_traces_it_whole():
    layer = fe.TransformerLayer(32, 48, 4, recipe="rowwise", context_size=40)
    x, context = torch.randn(2, 5, 32), torch.randn(2, 7, 40)
    wanted = layer(x, context=context)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, context=context)
    assert sqnr(wanted, found) > 35
    found.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
