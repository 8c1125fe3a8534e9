"""Consumers by name on tiny Llama, GPT-2, BERT, ViT, T5, ALBERT and Mixtral; known ones on all other families."""

import copy
from dataclasses import replace

import pytest
import torch
from hf_families import FAMILIES
from support import converted, same, tables

from fp8engine.convert.select import linear_layers
from fp8engine.report import flow
from fp8engine.report.flow import Consumer, Flow, Layer

ATTENTION = ("softmax", "attention")
ADD = ("residual", "aten.add")
LOSS = (("loss", "aten.nll_loss_forward"), ("output", "logits"))


def recorded(family: str) -> Flow:
    row = FAMILIES[family]
    return flow.record(row.build(), row.batch())


def plain(consumers: tuple[Consumer, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((consumer.kind, consumer.name) for consumer in consumers)


def reads(layer: Layer) -> tuple:
    """(what made the input, what reads the output), kinds and names."""
    return plain(layer.producer), plain(layer.consumers)


def test_llama():
    layers = recorded("llama").layers
    block = "model.layers.1"
    for name, others in (("q", "kv"), ("k", "qv"), ("v", "qk")):  # q and k through rotary positions
        layer = layers[f"{block}.self_attn.{name}_proj"]
        assert reads(layer) == ((("norm", f"{block}.input_layernorm"),), (ATTENTION,))
        assert layer.consumers[0].where == f"{block}.self_attn"
        assert set(layer.shares_input_with) == {f"{block}.self_attn.{other}_proj" for other in others}
    assert reads(layers[f"{block}.self_attn.o_proj"]) == ((("attention", "attention"),), (ADD,))
    norm = (("norm", f"{block}.post_attention_layernorm"),)
    gate, up, down = (layers[f"{block}.mlp.{name}_proj"] for name in ("gate", "up", "down"))
    assert reads(gate) == (norm, (("activation", f"{block}.mlp.act_fn"),))
    assert reads(up) == (norm, (("activation", "aten.mul"),))
    assert up.shares_input_with == (f"{block}.mlp.gate_proj",)
    assert reads(down) == ((("activation", "aten.mul"),), (ADD,))
    assert reads(layers["lm_head"]) == ((("norm", "model.norm"),), LOSS)
    assert {layer.calls for layer in layers.values()} == {1}


def test_gpt2():
    layers = recorded("gpt2").layers
    block = "transformer.h.0"
    assert reads(layers[f"{block}.attn.c_attn"]) == ((("norm", f"{block}.ln_1"),), (ATTENTION,))
    assert reads(layers[f"{block}.attn.c_proj"]) == ((("attention", "attention"),), (ADD,))
    activation = (("activation", f"{block}.mlp.act"),)
    assert reads(layers[f"{block}.mlp.c_fc"]) == ((("norm", f"{block}.ln_2"),), activation)
    assert reads(layers[f"{block}.mlp.c_proj"]) == (activation, (ADD,))
    assert reads(layers["lm_head"]) == ((("norm", "transformer.ln_f"),), LOSS)


def test_bert():
    layers = recorded("bert").layers
    block = "bert.encoder.layer.1"
    before = (("norm", "bert.encoder.layer.0.output.LayerNorm"),)
    for name in ("query", "key", "value"):
        assert reads(layers[f"{block}.attention.self.{name}"]) == (before, (ATTENTION,))
    assert layers[f"{block}.attention.self.value"].shares_input_with == (
        f"{block}.attention.self.query",
        f"{block}.attention.self.key",
    )
    assert reads(layers[f"{block}.attention.output.dense"]) == ((("attention", "attention"),), (ADD,))
    activation = (("activation", f"{block}.intermediate.intermediate_act_fn"),)
    assert reads(layers[f"{block}.intermediate.dense"])[1] == activation
    assert reads(layers[f"{block}.output.dense"]) == (activation, (ADD,))
    assert reads(layers["bert.pooler.dense"])[1] == (("activation", "bert.pooler.activation"),)
    assert reads(layers["classifier"]) == ((("activation", "bert.pooler.activation"),), LOSS)


def test_vit():
    layers = recorded("vit").layers
    block = "vit.layers.0"
    for name in "qkv":
        assert reads(layers[f"{block}.attention.{name}_proj"]) == (
            (("norm", f"{block}.layernorm_before"),),
            (ATTENTION,),
        )
    assert reads(layers[f"{block}.attention.o_proj"])[1] == (ADD,)
    activation = (("activation", f"{block}.mlp.activation_fn"),)
    assert reads(layers[f"{block}.mlp.fc1"]) == ((("norm", f"{block}.layernorm_after"),), activation)
    assert reads(layers[f"{block}.mlp.fc2"]) == (activation, (ADD,))
    assert reads(layers["classifier"]) == ((("norm", "vit.layernorm"),), LOSS)


def test_t5():
    layers = recorded("t5").layers
    cross = "decoder.block.1.layer.1.EncDecAttention"
    assert reads(layers[f"{cross}.q"]) == ((("norm", "decoder.block.1.layer.1.layer_norm"),), (ATTENTION,))
    assert layers[f"{cross}.q"].shares_input_with == ()
    for name in "kv":
        assert reads(layers[f"{cross}.{name}"]) == ((("norm", "encoder.final_layer_norm"),), (ATTENTION,))
    other = "decoder.block.0.layer.1.EncDecAttention"
    assert set(layers[f"{cross}.k"].shares_input_with) == {f"{other}.k", f"{other}.v", f"{cross}.v"}
    dense = "encoder.block.0.layer.1.DenseReluDense"
    norm, activation = (("norm", "encoder.block.0.layer.1.layer_norm"),), (("activation", f"{dense}.act"),)
    assert reads(layers[f"{dense}.wi"]) == (norm, activation)
    assert reads(layers[f"{dense}.wo"]) == (activation, (ADD,))
    assert reads(layers["lm_head"]) == ((("norm", "decoder.final_layer_norm"),), LOSS)


def test_albert_calls_one_block_three_times():
    layers = recorded("albert").layers
    block = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    query = layers[f"{block}.attention.query"]
    assert query.calls == 3
    assert plain(query.consumers) == (ATTENTION,)
    assert plain(query.producer) == (  # the first call's, then the others'
        ("matmul", "albert.encoder.embedding_hidden_mapping_in"),
        ("norm", f"{block}.full_layer_layer_norm"),
    )
    assert set(query.shares_input_with) == {f"{block}.attention.key", f"{block}.attention.value"}
    first = layers["albert.encoder.embedding_hidden_mapping_in"]
    assert first.calls == 1
    assert plain(first.consumers) == (
        *(("matmul", f"{block}.attention.{name}") for name in ("query", "key", "value")),
        ADD,
    )


def test_mixtral():
    layers = recorded("mixtral").layers
    mlp = "model.layers.0.mlp"
    norm = (("norm", "model.layers.0.post_attention_layernorm"),)
    assert reads(layers[f"{mlp}.gate"]) == (norm, (("softmax", "softmax"),))
    activation = (("activation", f"{mlp}.experts.act_fn"),)
    assert reads(layers[f"{mlp}.experts.gate_up_proj"]) == (norm, activation)
    assert reads(layers[f"{mlp}.experts.down_proj"]) == (activation, (("activation", "aten.mul"),))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_known_consumers_of_the_layers_that_convert_names(name: str):
    row = FAMILIES[name]
    model = row.build()
    layers = flow.record(model, row.batch()).layers
    assert set(layers) == {layer for layer, *_ in linear_layers(model)}
    for layer in layers.values():
        assert layer.calls > 0
        assert layer.consumers
        assert layer.producer
        assert "unknown" not in layer.kinds


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_eager_attention_is_the_same_attention(name: str):
    row = FAMILIES[name]
    model, batch = row.build(), row.batch()
    fused = flow.record(model, batch)
    model.set_attn_implementation("eager")
    assert flow.record(model, batch) == fused


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral"])
def test_a_converted_model_flows_alike_and_is_left_as_it_was(name: str):
    row = FAMILIES[name]
    model, batch = row.build(), row.batch()
    before = flow.record(model, batch)
    converted(model, "delayed").train()
    model(**batch).loss.backward()  # scales, histories and counters that are not the first ones
    state, drawn = tables(model), torch.get_rng_state()
    after = flow.record(model, batch)
    assert same(tables(model), state)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(module.training for module in model.modules())
    # Experts in FP8 are multiplied by one after another, where torch has no grouped matmul for them.
    once = {name: replace(layer, calls=before.layers[name].calls) for name, layer in after.layers.items()}
    assert once == before.layers
    assert all(layer.calls == once[name].calls or "experts" in name for name, layer in after.layers.items())


@pytest.mark.parametrize("name", ["llama", "bert", "albert"])
def test_results_are_bitwise_the_same_after_and_a_copy_flows_alike(name: str):
    row = FAMILIES[name]
    model, batch = row.build(), row.batch()
    with torch.no_grad():
        plainly = model(**batch)
    twin = flow.record(copy.deepcopy(model), batch)
    assert flow.record(model, batch) == twin
    with torch.no_grad():
        again = model(**batch)
    assert torch.equal(plainly.logits, again.logits)
    assert torch.equal(plainly.loss, again.loss)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
