"""Bytes that a forward saves for backward, by family of Hugging Face models, with fusion and without.

    python benchmarks/memory.py          from a checkout with the dev extra; 3 min on a CPU, no weights are downloaded

Two blocks of each model in its published sizes (three are narrower), random weights, 1,024 words (logits would
hide the rest), 512 tokens.  SmolLM2 is whole: 30 blocks, its own vocabulary.  Recipe `current`.  "FP32 + autocast":
FP32 weights under torch.autocast to BF16, whose 16-bit copies of weights are saved too, as torch saves them; FP8 layers
save none.  Bytes do not depend on the machine; norms and attentions are transformers' own and keep what torch keeps.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from common import machine, parser, save
from torch import nn

import fp8engine as fe
from fp8engine.bench.steps import saved_bytes

TOKENS = 512
WORDS = 1024


def _sizes(width: int, between: int, heads: int, **more: Any) -> dict[str, Any]:
    few = {"num_hidden_layers": 2, "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {**few, "hidden_size": width, "intermediate_size": between, "num_attention_heads": heads, **more}


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SmolLM2-135M, whole": (
        hf.LlamaConfig,
        _sizes(576, 1536, 9, num_key_value_heads=3, num_hidden_layers=30, vocab_size=49152, tie_word_embeddings=True),
    ),
    "Qwen3-0.6B": (hf.Qwen3Config, _sizes(1024, 3072, 16, num_key_value_heads=8, head_dim=128)),
    "Gemma-2, narrow": (hf.Gemma2Config, _sizes(1152, 4608, 4, num_key_value_heads=2, head_dim=256)),
    "Gemma-3-270M": (hf.Gemma3TextConfig, _sizes(640, 2048, 4, num_key_value_heads=1, head_dim=256)),
    "Phi-3, narrow": (hf.Phi3Config, _sizes(1024, 2816, 16, num_key_value_heads=16)),
    "OLMo-2, narrow": (hf.Olmo2Config, _sizes(1024, 4096, 8)),
    "GPT-2": (hf.GPT2Config, {"n_layer": 2, "vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2}),
    "OPT-125M": (hf.OPTConfig, {"num_hidden_layers": 2, "vocab_size": WORDS, "word_embed_proj_dim": 768}),
    "BERT-base": (hf.BertConfig, _sizes(768, 3072, 12)),
    "ModernBERT-base": (hf.ModernBertConfig, _sizes(768, 1152, 12, cls_token_id=1, sep_token_id=2)),
    "DeBERTa-v3-base": (hf.DebertaV2Config, _sizes(768, 3072, 12)),
}


def build(name: str) -> nn.Module:
    """A model in FP32 and training mode, without dropout, whose forward returns what the loss is taken from."""
    kind, sizes = MODELS[name]
    config = kind(**sizes)
    for key in vars(config):
        if "drop" in key and isinstance(getattr(config, key), float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    causal = type(config) in hf.AutoModelForCausalLM._model_mapping and "bert" not in config.model_type
    return (hf.AutoModelForCausalLM if causal else hf.AutoModel).from_config(config, dtype=torch.float32).train()


def step(model: nn.Module, autocast: bool) -> Callable[[], object]:
    """A forward on TOKENS tokens."""
    ids = torch.arange(TOKENS)[None] % (WORDS - 3) + 3

    def run() -> object:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(input_ids=ids)

    return run


def measure(name: str) -> dict[str, Any]:
    """Saved bytes in BF16, and in FP32 under autocast: plain, in FP8 layer by layer, and fused."""
    row: dict[str, Any] = {"model": name}
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        found = []
        for fuse in (None, False, True):
            model = build(name).to(dtype)
            if fuse is not None:
                fe.convert(model, "current", fuse=fuse)
            found.append(saved_bytes(model, step(model, autocast)))
            del model
            gc.collect()  # modules and hooks refer to each other
        row["FP32 + autocast" if autocast else "BF16"] = dict(zip(("plain", "layers", "fused"), found, strict=True))
    return row


def main() -> None:
    """Print a row a model, and write the result file."""
    parser(__doc__).parse_args()
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    rows = []
    print(f"{'saved for backward':22} {'BF16 model':>42}   {'FP32 model + autocast to BF16':>42}")
    for name in MODELS:
        rows.append(measure(name))
        parts = []
        for how in ("BF16", "FP32 + autocast"):
            plain, layers, fused = rows[-1][how].values()
            parts.append(f"{plain / 2**20:8.1f} MiB, FP8 {layers / plain:.2f}, fused {fused / plain:.2f}".rjust(42))
        print(f"{name:22} {'   '.join(parts)}", flush=True)
    what = f"saved for backward, {TOKENS} tokens, recipe current"
    print(save("memory", {"what": what, "machine": machine(), "rows": rows}))


if __name__ == "__main__":
    main()
