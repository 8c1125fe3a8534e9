"""fe.TransformerLayer as a module: dropout, checkpoints of both kinds, copies, autocast, decoding, the report."""

from typing import Any

import pytest
import torch
from layer64 import exact_step, lively, step
from support import converted, sqnr
from torch import nn

import fp8engine as fe
from fp8engine.autograd.attention import Cache, Rotary

H, F = 32, 48
LLAMA: dict[str, Any] = {"activation": "swiglu", "bias": False, "norm": "rms"}
ROTARY = fe.Heads(4, of_keys=2, theta=1e4, causal=True)
LINEAR = [*(f"self_attn.{n}_proj" for n in "qkvo"), *(f"mlp.{n}_proj" for n in ("gate", "up", "down"))]


def llama(recipe: Any = "current", **more: Any) -> fe.TransformerLayer:
    return lively(fe.TransformerLayer(H, F, **{"heads": ROTARY, "recipe": recipe, **LLAMA, **more}))


def test_names_are_those_of_a_llama_block():
    names = [f"{name}.weight" for name in (*LINEAR, "input_layernorm", "post_attention_layernorm")]
    assert list(llama().state_dict()) == names
    post = fe.TransformerLayer(H, F, 4, recipe="current", placement="post")
    assert [n for n in post.state_dict() if "norm" in n] == [
        f"post_{part}_layernorm.{key}" for part in ("attention", "feedforward") for key in ("weight", "bias")
    ]
    shared = fe.TransformerLayer(H, F, 4, recipe="current", placement="parallel shared")
    assert [n for n in shared.state_dict() if "norm" in n] == ["input_layernorm.weight", "input_layernorm.bias"]


def test_dropout_is_that_of_the_seed_and_only_in_training():
    layer, x = llama("fp32", dropout=0.5, heads=fe.Heads(4, 2, dropout=0.5)), torch.randn(2, 6, H)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(layer(x))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    plain = llama("fp32", heads=fe.Heads(4, 2))
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), plain(x))
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("placement", ["pre", "post", "parallel"])
def test_dropout_is_before_the_residual_and_apart_for_both(placement: str):
    """All of it dropped leaves the residual; of one, the other."""
    x, post = torch.randn(2, 6, H), placement == "post"
    layer = fe.TransformerLayer(H, F, 4, recipe="fp32", placement=placement, dropout=1.0)
    first, second = (layer.get_submodule(name) for name in layer.norms())
    after_first = first(x) if post else x
    mlp_alone = after_first + layer.mlp(after_first if post else second(x))
    attention_alone = x + layer.self_attn(x if post else first(x))
    wanted = {
        (1.0, 1.0): second(first(x)) if post else x,
        (1.0, 0.0): second(mlp_alone) if post else mlp_alone,
        (0.0, 1.0): second(first(attention_alone)) if post else attention_alone,
    }
    for dropout, want in wanted.items():
        layer.dropout = dropout
        assert torch.allclose(layer(x), want, rtol=0, atol=1e-6), dropout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_matmuls_are_in_its_dtype_and_the_residual_in_fp32(dtype: torch.dtype):
    layer, x, dy = llama(), torch.randn(4, 8, H), torch.randn(4, 8, H)
    seen = []
    layer.self_attn.o_proj.register_forward_hook(lambda m, args, y: seen.append((args[0].dtype, y.dtype)))
    with torch.autocast("cpu", dtype):
        found = step(layer, x, dy)
    assert seen == [(dtype, dtype)]
    assert found["y"].dtype == torch.float32
    wanted = exact_step(layer, x, dy)
    assert min(sqnr(wanted[name], found[name]) for name in wanted) > 13.5  # as in test_transformer.py


def test_meta():
    layer = llama(device="meta", dtype=torch.bfloat16)
    assert layer(torch.empty(2, 6, H, device="meta", dtype=torch.bfloat16)).shape == (2, 6, H)


@pytest.mark.parametrize("recipe", ["rowwise", "fp32"])
@pytest.mark.parametrize(
    "heads",
    [ROTARY, fe.Heads(4, 1, theta=Rotary(1e4, width=4), causal=True, window=3, qk_norm=1e-5)],
    ids=["llama", "window"],
)
@pytest.mark.parametrize("placement", ["pre", "post", "parallel"])
def test_decoding_with_a_cache_gives_the_whole_sequence(placement: str, heads: Any, recipe: str):
    layer, x, cache = llama(recipe, heads=heads, placement=placement).eval(), torch.randn(2, 6, H), Cache()
    with torch.no_grad():
        whole = layer(x)
        steps = torch.cat([layer(part, cache=cache) for part in x.split([3, 2, 1], 1)], 1)
    # Rows are cast by themselves, so FP8 gives the same codes; BF16 products may round sums the other way.
    assert sqnr(whole, steps) > (110 if recipe == "fp32" else 35)
    assert len(cache) == 6


def test_padding_on_the_left_with_positions_of_its_own():
    layer, x = llama("fp32").eval(), torch.randn(1, 6, H)
    mask, positions = torch.tensor([[False, False, True, True, True, True]]), torch.tensor([[0, 0, 0, 1, 2, 3]])
    with torch.no_grad():
        assert sqnr(layer(x[:, 2:]), layer(x, mask, positions)[:, 2:]) > 110
        assert sqnr(layer(x[:, 2:]), layer(x, mask)[:, 2:]) > 100, "scores depend on distances"


def test_the_report_tells_what_ran():
    model = converted(nn.Sequential(llama("rowwise"), nn.Linear(H, 8)), "current")
    recipes = [(f"0.{name}", "rowwise") for name in LINEAR] + [("1", "current")]
    assert [row["reason"][:9] for row in fe.inspect(model).layers] == ["never ran"] * 8
    model(torch.randn(2, 6, H)).sum().backward()
    report = fe.inspect(model)
    assert [(row["name"], row["recipe"]) for row in report.layers] == recipes
    assert all(row["ran"] and row["backend"] == "reference" and row["rows"] == 12 for row in report.layers)
    assert report.totals["fp8_flops_share"] == 1.0
    view = fe.scaling_state(model)
    assert list(view)[:21] == [f"0.{name}.{role}" for name in LINEAR for role in ("input", "weight", "grad_output")]
    assert all(int(slot.calls) == 1 and slot.amax > 0 for slot in view.values())
