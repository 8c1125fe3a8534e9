"""Consumers by name on tiny Llama, GPT-2, BERT, T5, ALBERT and Mixtral; known ones on all other families."""

import copy
from dataclasses import replace

import pytest
import torch
from hf_families import FAMILIES
from support import converted, same, tables

from fp8engine.convert.select import linear_layers
from fp8engine.report import flow
from fp8engine.report.flow import Consumer, Flow

Reads = tuple[tuple[str, str], ...]
SOFTMAX: Reads = (("softmax", "attention"),)
ATTENTION: Reads = (("attention", "attention"),)
ADD: Reads = (("residual", "aten.add"),)
PRODUCT: Reads = (("activation", "aten.mul"),)
LOSS: Reads = (("loss", "aten.nll_loss_forward"), ("output", "logits"))


def norm(name: str) -> Reads:
    return (("norm", name),)


def act(name: str) -> Reads:
    return (("activation", name),)


def recorded(family: str) -> Flow:
    row = FAMILIES[family]
    return flow.record(row.build(), row.batch())


def plain(consumers: tuple[Consumer, ...]) -> Reads:
    return tuple((consumer.kind, consumer.name) for consumer in consumers)


def siblings(block: str, names: str, made_by: Reads, read_by: Reads) -> dict[str, tuple]:
    """Layers that read one tensor."""
    every = {f"{block}.{name}" for name in names.split()}
    return {name: (made_by, read_by, every - {name}) for name in every}


LLAMA, GPT2, BERT = "model.layers.1", "transformer.h.0", "bert.encoder.layer.1"
T5, MOE = "encoder.block.0.layer.1.DenseReluDense", "model.layers.0.mlp"
CROSS, OTHER = (f"decoder.block.{i}.layer.1.EncDecAttention" for i in (1, 0))
POOLED = act("bert.pooler.activation")
BEFORE_MLP = norm(f"{LLAMA}.post_attention_layernorm")
AT_EXPERTS = norm("model.layers.0.post_attention_layernorm")
# Of a layer: what made its input, what reads its result, and if it is looked at, who reads the input too.
WANTED: dict[str, dict[str, tuple]] = {
    "llama": {  # q and k through rotary positions
        **siblings(f"{LLAMA}.self_attn", "q_proj k_proj v_proj", norm(f"{LLAMA}.input_layernorm"), SOFTMAX),
        f"{LLAMA}.self_attn.o_proj": (ATTENTION, ADD),
        f"{LLAMA}.mlp.gate_proj": (BEFORE_MLP, act(f"{LLAMA}.mlp.act_fn"), {f"{LLAMA}.mlp.up_proj"}),
        f"{LLAMA}.mlp.up_proj": (BEFORE_MLP, PRODUCT, {f"{LLAMA}.mlp.gate_proj"}),
        f"{LLAMA}.mlp.down_proj": (PRODUCT, ADD),
        "lm_head": (norm("model.norm"), LOSS),
    },
    "gpt2": {
        f"{GPT2}.attn.c_attn": (norm(f"{GPT2}.ln_1"), SOFTMAX),
        f"{GPT2}.attn.c_proj": (ATTENTION, ADD),
        f"{GPT2}.mlp.c_fc": (norm(f"{GPT2}.ln_2"), act(f"{GPT2}.mlp.act")),
        f"{GPT2}.mlp.c_proj": (act(f"{GPT2}.mlp.act"), ADD),
        "lm_head": (norm("transformer.ln_f"), LOSS),
    },
    "bert": {
        **siblings(f"{BERT}.attention.self", "query key value", norm("bert.encoder.layer.0.output.LayerNorm"), SOFTMAX),
        f"{BERT}.attention.output.dense": (ATTENTION, ADD),
        f"{BERT}.intermediate.dense": (
            norm(f"{BERT}.attention.output.LayerNorm"),
            act(f"{BERT}.intermediate.intermediate_act_fn"),
        ),
        f"{BERT}.output.dense": (act(f"{BERT}.intermediate.intermediate_act_fn"), ADD),
        "classifier": (POOLED, LOSS),
    },
    "t5": {
        f"{CROSS}.q": (norm("decoder.block.1.layer.1.layer_norm"), SOFTMAX, set()),
        f"{CROSS}.k": (norm("encoder.final_layer_norm"), SOFTMAX, {f"{OTHER}.k", f"{OTHER}.v", f"{CROSS}.v"}),
        f"{CROSS}.v": (norm("encoder.final_layer_norm"), SOFTMAX),
        f"{T5}.wi": (norm("encoder.block.0.layer.1.layer_norm"), act(f"{T5}.act")),
        f"{T5}.wo": (act(f"{T5}.act"), ADD),
        "lm_head": (norm("decoder.final_layer_norm"), LOSS),
    },
    "mixtral": {
        f"{MOE}.gate": (AT_EXPERTS, (("softmax", "softmax"),)),
        f"{MOE}.experts.gate_up_proj": (AT_EXPERTS, act(f"{MOE}.experts.act_fn")),
        f"{MOE}.experts.down_proj": (act(f"{MOE}.experts.act_fn"), PRODUCT),
    },
}


@pytest.mark.parametrize("family", WANTED)
def test_who_makes_and_reads_each_layers_tensors(family: str):
    layers = recorded(family).layers
    for name, (made_by, read_by, *shared) in WANTED[family].items():
        found = layers[name]
        assert (plain(found.producer), plain(found.consumers)) == (made_by, read_by), name
        assert [set(found.shares_input_with)] * len(shared) == shared, name
    assert family != "llama" or {layer.calls for layer in layers.values()} == {1}


def test_where_a_consumer_is():
    llama, bert = recorded("llama").layers, recorded("bert").layers
    assert llama[f"{LLAMA}.self_attn.q_proj"].consumers[0].where == f"{LLAMA}.self_attn"
    assert plain(bert["bert.pooler.dense"].consumers) == POOLED


def test_albert_calls_one_block_three_times():
    layers = recorded("albert").layers
    block = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    query, first = layers[f"{block}.attention.query"], layers["albert.encoder.embedding_hidden_mapping_in"]
    assert (query.calls, first.calls) == (3, 1)
    assert plain(query.consumers) == SOFTMAX
    assert plain(query.producer) == (  # the first call's, then the others'
        ("matmul", "albert.encoder.embedding_hidden_mapping_in"),
        *norm(f"{block}.full_layer_layer_norm"),
    )
    readers = [f"{block}.attention.{name}" for name in ("query", "key", "value")]
    assert set(query.shares_input_with) == set(readers[1:])
    assert plain(first.consumers) == (*(("matmul", name) for name in readers), *ADD)


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


@pytest.mark.parametrize("name", ["llama", "bert", "albert"])
def test_a_model_is_left_as_it_was_and_eager_attention_and_copies_flow_alike(name: str):
    row = FAMILIES[name]
    model, batch = row.build(), row.batch()
    with torch.no_grad():
        plainly = model(**batch)
    found = flow.record(model, batch)
    with torch.no_grad():
        again = model(**batch)
    assert torch.equal(plainly.logits, again.logits)
    assert torch.equal(plainly.loss, again.loss)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert flow.record(copy.deepcopy(model), batch) == found
    model.set_attn_implementation("eager")
    assert flow.record(model, batch) == found


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
