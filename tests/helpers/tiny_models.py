"""Tiny, randomly initialised transformers models, built from config objects: nothing is downloaded."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from torch import nn

VOCABULARY, WIDTH = 64, 32


def gpt2(**options) -> nn.Module:
    """Conv1D layers, an output head tied to the embedding."""
    size = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0, **options))


def llama(**options) -> nn.Module:
    """q, k, v and gate, up from one input; heads shared by queries."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_decoder(), **options}))


def llama_of_blocks() -> nn.Module:
    """A llama whose weights are whole numbers of 128x128 blocks."""
    return llama(hidden_size=128, intermediate_size=256, num_key_value_heads=2, num_hidden_layers=1)


def byte_llama(folder: Path) -> None:
    """Write a llama of two blocks and a tokenizer of bytes as a folder that from_pretrained reads."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)
    model: Any = llama(vocab_size=256, hidden_size=128, intermediate_size=256, max_position_embeddings=256)
    model.save_pretrained(folder)


def mixtral() -> nn.Module:
    """Experts kept in 3-D parameters."""
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_decoder(), num_local_experts=2, num_experts_per_tok=1)
    )


def zamba2() -> nn.Module:
    """A hybrid of Mamba and attention whose attention layers are one another's, tied by transformers."""
    mamba: dict[str, Any] = {"mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 1}
    shared: dict[str, Any] = {"layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1, "adapter_rank": 8}
    sizes: dict[str, Any] = {**_sizes(), "num_hidden_layers": 4, "chunk_size": 8}
    return transformers.Zamba2ForCausalLM(transformers.Zamba2Config(**mamba, **shared, **sizes))


def bert(**options) -> nn.Module:
    """An encoder with a classifier."""
    return transformers.BertForSequenceClassification(transformers.BertConfig(**_encoder(), **options))


def albert() -> nn.Module:
    """One layer, called three times."""
    config = transformers.AlbertConfig(**{**_encoder(), "num_hidden_layers": 3}, embedding_size=16, num_hidden_groups=1)
    return transformers.AlbertForSequenceClassification(config)


def tokens(rows: int = 2, length: int = 8) -> torch.Tensor:
    """Random token ids."""
    return torch.randint(0, VOCABULARY, (rows, length))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The loss of a language model on its own input, or of a classifier on class 0."""
    causal = type(model).__name__.endswith(("CausalLM", "LMHeadModel"))
    labels = ids if causal or "peft" in type(model).__module__ else torch.zeros(len(ids), dtype=torch.long)
    return model(input_ids=ids, labels=labels).loss


def _decoder() -> dict:
    return {**_sizes(), "num_key_value_heads": 1, "pad_token_id": 0}


def _encoder() -> dict:
    return {**_sizes(), "num_labels": 2}


def _sizes() -> dict:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
