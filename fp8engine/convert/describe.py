"""Description of a Hugging Face model by the table of families, block by block and part by part.

Nothing here imports transformers, and nothing is changed: fe.convert needs no row of the table to convert a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8engine.convert.select import linear_layers
from fp8engine.errors import ConversionError
from fp8engine.nn.families import FAMILIES, Block, match


@dataclass(frozen=True)
class Description:
    """Result of `describe`.  outside: linear layers in no block.  why: one line for each config that is in no row."""

    blocks: tuple[Block, ...]
    outside: tuple[str, ...]
    why: tuple[str, ...]

    def __str__(self) -> str:
        lines = [str(block) for block in self.blocks]
        lines += [f"outside blocks: {', '.join(self.outside)}"] if self.outside else []
        return "\n".join([*lines, *self.why])


def describe(model: nn.Module) -> Description:
    """The blocks of a Hugging Face model that the table knows, part by part; the model is left as it is.

    Each module is compared with the row of the nearest config above it, so a model made of several is described too.
    Raises ConversionError where no module has a config.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=1, vocab_size=64))
    >>> print(describe(model))
    model.layers.0: llama, pre rms norm, 4 heads of 8 (2 of k and v), gated silu
    outside blocks: lm_head
    >>> describe(model).blocks[0].parts["down"]
    'model.layers.0.mlp.down_proj'
    """
    blocks, why = [], {}
    configs: dict[str, Any] = {}
    for name, module in model.named_modules():
        config: Any = getattr(module, "config", None) or configs.get(name.rpartition(".")[0])
        if not hasattr(config, "model_type"):
            continue
        configs[name] = config
        if config.model_type not in FAMILIES:
            why.setdefault(config.model_type, f"model_type {config.model_type!r} is in no row of fp8engine.hf.FAMILIES")
        elif block := match(name, module, config):
            blocks.append(block)
    if not configs:
        raise ConversionError(f"{type(model).__name__} has no config: describe takes a model of transformers")
    inside = tuple(f"{part}." for block in blocks for part in block.parts.values())
    outside = tuple(name for name, *_ in linear_layers(model) if not f"{name}.".startswith(inside))
    return Description(tuple(blocks), outside, tuple(why.values()))
