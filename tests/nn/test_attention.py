"""fe.Attention and cross attention of fe.TransformerLayer: torch's, Hugging Face's BART, masks, caches, refusals."""

from typing import Any

import pytest
import torch
from support import FP8_RECIPES, sqnr
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.autograd.attention import Cache
from fp8engine.errors import ShapeError, UnknownName

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# Three projections and the fourth behind a softmax: two matmuls deep at 28 dB each (E4M3), 24 dB in E5M2's gradients,
# so 25 and 21 dB; 3 dB for a draw of few numbers.
OUTPUT_DB, GRADIENT_DB = 22.0, 17.0


def torchs(layer: fe.Attention, context_size: int) -> nn.MultiheadAttention:
    size = {"kdim": context_size, "vdim": context_size, "batch_first": True, "dtype": torch.float64}
    own = nn.MultiheadAttention(layer.q_proj.in_features, layer.heads.count, **size)
    parts = [getattr(layer, name) for name in PROJECTIONS]
    with torch.no_grad():
        if own.in_proj_weight is None:
            for name, part in zip(PROJECTIONS, parts, strict=True):
                getattr(own, f"{name}_weight").copy_(part.weight)
        else:
            own.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        own.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        own.out_proj.load_state_dict(layer.o_proj.state_dict())
    return own


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("context_size", "t", "s"), [(None, 7, 7), (32, 9, 5), (48, 1, 7), (40, 6, 6)])
@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "fp32"])
def test_it_is_torchs_multihead_attention(recipe: str, context_size: int | None, t: int, s: int, masked: bool):
    torch.manual_seed(t)
    layer: Any = fe.Attention(32, fe.Heads(4, context_size=context_size), True, recipe=recipe)
    own: Any = torchs(layer, context_size or 32)
    given = [torch.randn(3, n, width).requires_grad_() for n, width in ((t, 32), (s, context_size or 32))]
    given = given if context_size else given[:1]
    dy = torch.randn(3, t, 32)
    seen = torch.arange(s) < torch.tensor([[s], [s - 1], [1]]) if masked else None
    y = layer(given[0], seen, **({"context": given[1]} if context_size else {}))
    y.backward(dy)
    x64 = [each.detach().double().requires_grad_() for each in given]
    wanted, _ = own(x64[0], x64[-1], x64[-1], key_padding_mask=None if seen is None else ~seen, need_weights=False)
    wanted.backward(dy.double())
    output, gradient = (100.0, 90.0) if recipe == "fp32" else (OUTPUT_DB, GRADIENT_DB)
    assert sqnr(wanted, y) > output
    of_keys, of_values = (
        own.in_proj_weight.grad.chunk(3)[1:]
        if own.k_proj_weight is None
        else (own.k_proj_weight.grad, own.v_proj_weight.grad)
    )
    grads = [*(each.grad for each in x64), own.out_proj.weight.grad, of_keys, of_values]
    ours = [*given, layer.o_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
    assert all(sqnr(want, got.grad) > gradient for want, got in zip(grads, ours, strict=True))


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


def test_what_several_projections_read_is_cast_once(casts):
    fe.Attention(32, 4, recipe="current")(torch.randn(2, 5, 32))
    assert sum(shape == (10, 32) for _, shape in casts) == 2, "the input, and what o_proj reads"
    fe.Attention(32, fe.Heads(4, context_size=40), recipe="current")(
        torch.randn(2, 5, 32), context=torch.randn(2, 7, 40)
    )
    assert sum(shape == (14, 40) for _, shape in casts) == 1


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


DIVIDE, WINDOW = "heads divide the columns", "a query sees the last so many keys"


@pytest.mark.parametrize(
    ("hidden", "heads", "words"),
    [
        (30, fe.Heads(4), DIVIDE),
        (32, fe.Heads(4, of_keys=3), DIVIDE),
        (32, fe.Heads(0), DIVIDE),
        (32, fe.Heads(4, of_keys=0), DIVIDE),
        (32, fe.Heads(4, width=0), DIVIDE),
        (32, fe.Heads(4, causal=True, window=0), WINDOW),
        (32, fe.Heads(4, window=3), WINDOW),
    ],
)
def test_heads_that_do_not_fit_are_refused(hidden: int, heads: fe.Heads, words: str):
    with pytest.raises(ShapeError, match=words):
        fe.Attention(hidden, heads, recipe="current")


def test_positions_are_of_this_calls_tokens():
    heads = fe.Heads(4, of_keys=2, theta=1e4, causal=True)
    layer, x = fe.Attention(32, heads, recipe="fp32"), torch.randn(2, 3, 32)
    whole, compiled = layer(x), torch.compile(layer, fullgraph=True, backend="eager")
    for positions in (torch.arange(3), torch.arange(3)[None], torch.arange(3).repeat(2, 1)):
        for run in (layer, compiled):
            assert torch.equal(run(x, positions=positions), whole)
    for rows, tokens, shape in ((1, 3, (2, 3)), (1, 1, (4,)), (2, 3, (1,)), (2, 3, (2, 1))):
        with pytest.raises(ShapeError, match=rf"want \[{tokens}\] or \[{rows}, {tokens}\]"):
            layer(x[:rows, :tokens], positions=torch.zeros(shape, dtype=torch.int64))


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
    for order in (fe.Heads(4, causal=True), fe.Heads(4, theta=1e4), fe.Heads(4, causal=True, window=2)):
        with pytest.raises(ShapeError, match="Heads without causal, window and theta"):
            fe.Attention(32, order, recipe="current")(x, context=torch.randn(2, 7, 32))
    for context in ({"context": x}, {"context_mask": torch.ones(2, 5, dtype=torch.bool)}):
        with pytest.raises(ShapeError, match="context or its mask is given, and the layer has no cross attention"):
            fe.TransformerLayer(32, 48, 4, recipe="current")(x, **context)
    with pytest.raises(ShapeError, match="context is missing"):
        fe.TransformerLayer(32, 48, 4, recipe="current", context_size=32)(x)
    with pytest.raises(UnknownName, match="placement of a layer with cross attention 'parallel'"):
        fe.TransformerLayer(32, 48, 4, recipe="current", context_size=32, placement="parallel")


def barts() -> Any:
    modeling = pytest.importorskip("transformers.models.bart.modeling_bart")
    from transformers import BartConfig

    config = BartConfig(
        d_model=32, decoder_ffn_dim=48, decoder_attention_heads=4, activation_function="gelu", dropout=0.0,
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


def renamed(name: str) -> str:
    """Of a parameter of BART's, ours."""
    first, rest = name.split(".", 1)
    return f"{NAMES[first]}.{rest.replace('out_proj', 'o_proj')}"


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("recipe", ["fp32", "rowwise", "current"])
def test_a_decoders_layer_is_barts(recipe: str, checkpointed: bool):
    torch.manual_seed(0)
    theirs, options = barts(), {"placement": "post", "context_size": 32, "eps": 1e-5}
    layer: Any = fe.TransformerLayer(32, 48, fe.Heads(4, causal=True), recipe=recipe, **options)
    layer.load_state_dict({renamed(name): value.float() for name, value in theirs.state_dict().items()})
    given: list[Any] = [torch.randn(2, n, 32).requires_grad_() for n in (6, 9)]
    x64, context64 = (each.detach().double().requires_grad_() for each in given)
    seen = torch.arange(9) < torch.tensor([[9], [4]])

    def run(x, context):
        return layer(x, context=context, context_mask=seen)

    y: Any = checkpoint(run, *given, use_reentrant=False) if checkpointed else run(*given)
    causal = torch.full((6, 6), float("-inf")).triu(1)[None, None].double()
    hidden = torch.zeros(2, 1, 1, 9).double().masked_fill(~seen[:, None, None], float("-inf"))
    wanted = theirs(x64, attention_mask=causal, encoder_hidden_states=context64, encoder_attention_mask=hidden)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    dy = torch.randn(2, 6, 32)
    y.backward(dy)
    wanted.backward(dy.double())
    # fp32 of six matmuls and three norms; FP8: noise of three parts one after another, each as OUTPUT_DB has it
    output, gradient = (100.0, 90.0) if recipe == "fp32" else (18.0, 13.0)
    assert sqnr(wanted, y) > output
    for want, got in zip((x64, context64), given, strict=True):
        assert sqnr(want.grad, got.grad) > gradient
    for name, parameter in theirs.named_parameters():
        if not name.endswith("k_proj.bias"):  # its gradient is what cancelling leaves
            assert sqnr(parameter.grad, layer.get_parameter(renamed(name)).grad) > gradient - 3, name


def test_pre_norm_writes_the_norm_once_and_decodes_with_one_cache():
    torch.manual_seed(0)
    heads = fe.Heads(4, theta=1e4, causal=True)
    layer = fe.TransformerLayer(32, 48, heads, "swiglu", recipe="rowwise", norm="rms", context_size=40).eval()
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
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, context=context)
    assert sqnr(layer(x, context=context), found) > 35
    found.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
