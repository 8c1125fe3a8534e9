"""Models to measure: transformers' Llama, BERT and ViT with torch's own first weights.

Under transformers' narrow embeddings a residual stream is all matmuls, whose errors add up from layer to layer.  Each
model gives its first result, logits or hidden states, of which random gradients go back through all layers.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from fp8engine.bench.steps import Case
from fp8engine.errors import BackendError

PATCH = 4  # pixels of ViT's
# Hidden and intermediate size, heads, of keys, layers, vocabulary; tokens of a step, of a sequence.
SIZES = {"cuda": (2048, 5632, 16, 4, 12, 32000, 8192, 1024), "cpu": (128, 384, 4, 2, 2, 256, 128, 64)}


class Model(nn.Module):
    """A model of transformers; x is token ids [batch, T] or images [batch, 3, H, W]."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d):
                module.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)[0]

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers, which are alike."""
        return next(module for module in self.modules() if isinstance(module, nn.ModuleList))


def cases(where: torch.device) -> list[Case]:
    """The three models, of a size that this device trains in a moment.  Raises BackendError without transformers."""
    try:
        hf: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise BackendError("the models are those of transformers: pip install 'fp8engine[hf]'") from error
    hidden, intermediate, heads, of_keys, layers, vocabulary, tokens, sequence = SIZES[where.type]
    size: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": intermediate}
    size |= {"num_attention_heads": heads, "num_hidden_layers": layers}
    certain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    batch, side = tokens // sequence, PATCH * round(sequence**0.5)
    llama = hf.LlamaConfig(**size, num_key_value_heads=of_keys, vocab_size=vocabulary, use_cache=False)
    bert = hf.BertConfig(**size, **certain, vocab_size=vocabulary, max_position_embeddings=sequence)
    vit = hf.ViTConfig(**size, **certain, image_size=side, patch_size=PATCH)

    def ids(random: torch.Generator) -> torch.Tensor:
        return torch.randint(vocabulary, (batch, sequence), generator=random, device=where)

    def images(random: torch.Generator) -> torch.Tensor:
        return torch.randn(batch, 3, side, side, generator=random, device=where)

    about = {"size": f"h{hidden} f{intermediate} {heads}/{of_keys} heads {layers} layers", "tokens": tokens}
    return [
        Case({"network": "llama", **about}, lambda: Model(hf.LlamaForCausalLM(llama)), ids),
        Case({"network": "bert", **about}, lambda: Model(hf.BertForMaskedLM(bert)), ids),
        Case({"network": "vit", **about}, lambda: Model(hf.ViTModel(vit)), images),
    ]
