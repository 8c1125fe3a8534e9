"""Attention in FP8 in models: fe.Attention, fe.convert's `attention`, `auto`, what is refused, and the report."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from attention_models import Model, Plain, llama, near, step, x_of
from support import same
from torch import nn

import fp8engine as fe
from fp8engine.autograd.attention import Cache
from fp8engine.autograd.packed import Packed
from fp8engine.errors import AttentionWarning, ConversionError, StrictError, UnknownName
from fp8engine.nn.fp8_attention import INTERVAL

pytestmark = pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")


def test_fe_attention_in_fp8_is_near_its_16_bits_and_is_reported():
    found = {}
    for softmax in ("16 bits", "fp8", "fp8 unrotated"):
        torch.manual_seed(0)
        heads = fe.Heads(4, of_keys=2, width=64, theta=1e4, causal=True, window=50, softmax=softmax)
        layer = fe.Attention(128, heads, recipe="current")
        found[softmax] = step(layer, x_of())
        (row,) = fe.inspect(layer).attention
        assert (row["asked"], row["ran"]) == (softmax, softmax.split(" unrotated")[0])
        assert row["why"] == ("asked for" if softmax == "16 bits" else "emulated")
        assert ("attention  ran in fp8" in str(fe.inspect(layer))) == (softmax != "16 bits")
    for softmax in ("fp8", "fp8 unrotated"):
        for ours, plain in zip(found[softmax], found["16 bits"], strict=True):
            assert 0 < near(ours, plain) < 0.15  # a projection's weight gradient: 19 dB
    assert not torch.equal(found["fp8"][0], found["fp8 unrotated"][0])
    with pytest.raises(UnknownName, match="fp8 unrotated"):
        fe.Attention(128, fe.Heads(2, softmax="fp9"), recipe="current")


def test_packed_sequences_run_in_16_bits():
    layer = fe.Attention(128, fe.Heads(2, causal=True, softmax="fp8"), recipe="current")
    with pytest.warns(AttentionWarning, match="packed sequences, which the FP8 kernels do not take"):
        layer(x_of(5)[0], Packed(torch.tensor([0, 2, 5], dtype=torch.int32), 3))


def test_cached_keys_are_seen_as_in_one_call():
    torch.manual_seed(0)
    layer = fe.Attention(64, fe.Heads(1, causal=True, softmax="fp8"), recipe="bf16")
    x = x_of(20)[..., :64]
    with torch.no_grad():
        whole, cache = layer(x), Cache()
        parts = [layer(x[:, :12], cache=cache), layer(x[:, 12:], cache=cache)]
    assert near(torch.cat(parts, 1), whole) < 0.06  # blocks of 64 rows have other scales


def test_convert_puts_sdpa_in_fp8_and_revert_takes_it_back():
    model: Any = Model()
    x = x_of()
    wanted = step(model, x)
    found = step(fe.convert(model, "bf16", attention="fp8"), x)
    assert all(0 < near(a, b) < 0.2 for a, b in zip(found, wanted, strict=True))
    rows = fe.inspect(model).attention
    assert [(row["name"], row["ran"]) for row in rows] == [("first", "fp8"), ("second", "fp8")]
    assert "attention first and 1 more ran in fp8" in str(fe.inspect(model))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(step(again, x), found)
    fe.revert(model)
    assert type(model.first) is Plain
    assert same(step(model, x), wanted)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"attn_mask": torch.ones(70, 70, dtype=torch.bool)}, "a mask tensor; FP8 attention takes causality"),
        ({"is_causal": True, "dropout_p": 0.1}, "dropout of 0.1; FP8 attention has none"),
        ({"is_causal": True, "scale": 0.0}, "a scale of 0 for the scores; FP8 attention takes"),
    ],
)
def test_what_fp8_does_not_take_runs_in_16_bits_said_once(options: dict, why: str):
    model: Any = Model()
    model.first.options = options
    fe.convert(model, "bf16", attention="fp8")
    with pytest.warns(AttentionWarning, match=f"first: attention runs in 16 bits: {why}"):
        model(x_of())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x_of())
    first, second = fe.inspect(model).attention
    assert (first["ran"], second["ran"]) == ("16 bits", "fp8")
    assert why in first["why"]
    assert why in str(fe.inspect(model))
    model.first.fp8_softmax.strict = True
    with pytest.raises(StrictError, match=r"first: attention would run in 16 bits"):
        model(x_of())


def test_emulation_is_refused_where_strict_is_asked():
    model: Any = fe.convert(Model(), "bf16", attention="fp8")
    model.first.fp8_softmax.strict = True
    with pytest.raises(StrictError, match=r"first: attention would be emulated, .*CPU has no FP8 Tensor Cores"):
        model(x_of())


def test_convert_refuses_what_has_no_attention_and_changes_nothing():
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ConversionError, match="no module of Sequential calls torch's scaled_dot_product_attention"):
        fe.convert(model, "bf16", attention="fp8")
    with pytest.raises(UnknownName, match="format of attention"):
        fe.convert(model, "bf16", attention="fp9")
    assert type(model[0]) is nn.Linear


def test_auto_takes_fp8_where_the_predicted_error_allows_it():
    model: Any = fe.convert(Model(), "bf16", attention="auto")
    x = x_of()
    with torch.no_grad():
        model.second.qkv.weight[:256].mul_(40)  # scores far beyond one
        model(x)
        assert [row["why"] for row in fe.inspect(model).attention] == ["auto has seen no sample yet"] * 2
        model(x)
        first, second = fe.inspect(model).attention
        assert (first["ran"], second["ran"]) == ("fp8", "16 bits")
        assert "predicted SQNR" in first["why"]
        assert "< 22 dB" in second["why"]
        model.second.qkv.weight[:256].div_(40)
        for _ in range(INTERVAL):
            model(x)
        assert fe.inspect(model).attention[1]["ran"] == "fp8"


def test_a_transformers_model_in_fp8():
    model: Any = llama(num_key_value_heads=1)
    ids = torch.arange(40).view(1, 40)
    wanted = model(ids).logits.detach()
    fe.convert(model, "bf16", attention="fp8")
    found = model(ids, labels=ids)
    found.loss.backward()
    (row,) = fe.inspect(model).attention
    assert (row["name"], row["ran"]) == ("model.layers.0.self_attn", "fp8")
    assert 0 < near(found.logits.detach(), wanted) < 0.1
