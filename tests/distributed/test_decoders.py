"""decoder_plan: Hugging Face's Llama and Qwen, divided over 2 ranks with their tokens, train as one process trains.

Models are in FP32 and sums of products too: ranks.FLIPS.
"""

import warnings
from typing import Any

import pytest
import torch
from ranks import beyond, exact, gradients, whole
from support import converted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.distributed import decoder_plan

hf = pytest.importorskip("transformers")
RANKS, BATCH, T = 2, 2, 12
SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE)),
    "llama, tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, tie_word_embeddings=True)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZE, head_dim=8, sliding_window=5)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZE)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZE, head_dim=8)),
}
CASES = [*((name, "rowwise", False) for name in MODELS), ("llama", "current", False), ("qwen3", "current", True)]
WHOLE_TOKENS = ("llama", "rowwise", True)  # whose plan gathers none, so that its layers read what norms have written
OF_ROWS = ("self_attn.o_proj", "mlp.down_proj")
OF_COLUMNS = ("self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj")
PLAN: dict = {f"model.layers.*.{name}": fe.distributed.Colwise() for name in OF_COLUMNS}
PLAN |= {f"model.layers.*.{name}": fe.distributed.Rowwise() for name in OF_ROWS}


def made(name: str, recipe: str, fuse: bool) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]()
    for key, parameter in model.named_parameters():  # else gradients of norms and biases stay as they began
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float("norm" in key), std=0.1)
    return converted(model, exact(recipe), fuse=fuse)


def ran(model: Any) -> dict[str, Any]:
    ids = torch.randint(64, (BATCH, T), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # padded at the left
    loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach()} | {f"d {name}": each for name, each in gradients(model).items()}


def trained(model: Any) -> dict[str, Any]:
    """The same, the gradients' norm, and parameters after one step of SGD with clipped gradients."""
    found = ran(model)
    found["norm"] = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True))  # as on a card
    torch.optim.SGD(model.parameters(), 1.0, foreach=True).step()
    return found | {name: whole(p) for name, p in model.named_parameters()}


def how_layers_ran(model: Any) -> dict[str, str]:
    return {layer["name"]: layer["fused"] for layer in fe.inspect(model).layers}


def work(rank: int, ranks: int) -> dict:
    warnings.simplefilter("ignore")
    mesh, found = init_device_mesh("cpu", (ranks,)), {}
    for case in CASES:
        model = made(*case)
        found[case] = trained(fe.distributed.tensor_parallel(model, mesh, decoder_plan(model)))
    model = fe.distributed.tensor_parallel(made(*WHOLE_TOKENS), mesh, PLAN)
    found[WHOLE_TOKENS] = ran(model), how_layers_ran(model)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run(work, RANKS)


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_gradients_and_step_are_those_of_one_process(case, found: list[dict]):
    reference = trained(made(*case))
    for rank in found:
        assert beyond(rank[case], reference) == {}


@pytest.mark.slow
def test_layers_run_fused_as_in_one_process(found: list[dict]):
    model = made(*WHOLE_TOKENS)
    reference, fused = ran(model), how_layers_ran(model)
    assert set(fused.values()) > {""}
    for ours, ran_so in (rank[WHOLE_TOKENS] for rank in found):
        assert beyond(ours, reference) == {}
        assert ran_so == fused


def test_tied_weights_stay_tied_and_frozen_norms_frozen(group):
    model = made("llama, tied", "rowwise", False)
    model.model.norm.weight.requires_grad_(False)
    fe.distributed.tensor_parallel(model, init_device_mesh("cpu", (1,)), decoder_plan(model))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.model.norm.weight.requires_grad
    assert model.model.layers[0].input_layernorm.weight.requires_grad


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda: nn.Linear(8, 8), "Linear is no model of transformers"),
        (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=1, n_head=2)), "GPT2LMHeadModel is of gpt2"),
        (
            lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZE, num_local_experts=2)),
            "MixtralForCausalLM is of mixtral",
        ),
        (lambda: hf.FalconForCausalLM(hf.FalconConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)), ""),
    ],
)
def test_a_model_without_a_plan_is_a_named_error(model, told: str):
    with pytest.raises(fe.errors.ParallelError, match=f"decoder_plan: {told}.*llama, mistral, qwen2, qwen3 are known"):
        decoder_plan(model())
