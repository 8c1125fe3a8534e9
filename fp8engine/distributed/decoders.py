"""decoder_plan: how `tensor_parallel` divides the Llama and Qwen decoders of Hugging Face, tokens divided in between.

embedding   whole on every rank: positions and masks are made from the whole sequence
block 0     its input is divided along the sequence; norms and residuals of all blocks run on a rank's tokens
q, k, v; gate, up     by columns: FP8 codes of the tokens are gathered, a rank computes its heads and features
o; down     by rows: sums over ranks, of which a rank keeps its tokens
head        gathers the last norm's tokens; by columns, or whole where it is the embedding's weight
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, SequenceParallel

from fp8engine.distributed.styles import Colwise, Rowwise
from fp8engine.errors import ParallelError
from fp8engine.nn.linear import Float8Module

DECODERS = ("llama", "qwen2", "qwen3")  # a config's model_type
SEQUENCE, HEADS = 1, 2  # dimensions of [batch, sequence, features], and of [batch, sequence, heads, features]


def decoder_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """The plan by which `tensor_parallel` divides a Llama, Qwen2 or Qwen3 decoder of Hugging Face.

    model: its ForCausalLM, or the decoder alone, converted or not yet.  Each rank is given the same token ids, of a
    sequence that the ranks divide, and returns the logits of all tokens.
    Raises ParallelError for a model of another family, or without the parts of one.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    >>> plan = decoder_plan(LlamaForCausalLM(LlamaConfig(**size, vocab_size=64)))
    >>> plan["model.layers.*.mlp.down_proj"]
    Rowwise(input_layouts=S(-1), output_layouts=S(1), use_local_output=True)
    >>> tensor_parallel(fe.convert(model, "rowwise"), mesh, decoder_plan(model), dim="tp")  # doctest: +SKIP
    """
    name, decoder = _decoder(model)
    tokens = Shard(SEQUENCE)
    columns, rows = Colwise(input_layouts=tokens), Rowwise(output_layouts=tokens)
    block = {
        "input_layernorm": SequenceParallel(),
        "self_attn.[qkv]_proj": columns,
        "self_attn.o_proj": rows,
        "post_attention_layernorm": SequenceParallel(),
        "mlp.gate_proj": columns,
        "mlp.up_proj": columns,
        "mlp.down_proj": rows,
    }
    if hasattr(decoder.layers[0].self_attn, "q_norm"):  # of a head's features: its ranks' heads share the weight
        block["self_attn.[qk]_norm"] = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
    prefix = f"{name}." if name else ""
    divide = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=tokens, use_local_output=True)
    plan = {f"{prefix}layers.0": divide, **{f"{prefix}layers.*.{part}": style for part, style in block.items()}}
    plan[f"{prefix}norm"] = SequenceParallel(use_local_output=True)
    return plan | _head(model, decoder)


def _decoder(model: nn.Module) -> tuple[str, Any]:
    """(name, module) of the part that holds the blocks."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in DECODERS:
        raise ParallelError(
            f"decoder_plan: {type(model).__name__}{f', of model_type {kind!r},' if kind else ''} is no decoder that it "
            f"knows, which are Hugging Face's {', '.join(DECODERS)}: write the plan, as docs/tensor-parallel.md shows"
        )
    parts = ("embed_tokens", "layers", "norm")
    for name, module in model.named_modules():
        if all(hasattr(module, part) for part in parts):
            return name, module
    raise ParallelError(f"decoder_plan: {type(model).__name__} has no part with {', '.join(parts)}: give the decoder")


def _head(model: nn.Module, decoder: Any) -> dict[str, ParallelStyle]:
    """How the head gets all tokens; without one, the last norm's result stays divided: nothing."""
    head = getattr(model, "lm_head", None)
    if head is None:
        return {}
    tokens = Shard(SEQUENCE)
    if head.weight is decoder.embed_tokens.weight:
        whole = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate(), use_local_output=True)
        return {"lm_head": whole}
    style = Colwise if isinstance(head, Float8Module) else ColwiseParallel
    return {"lm_head": style(input_layouts=tokens, output_layouts=Replicate())}
