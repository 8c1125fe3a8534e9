"""Every Hugging Face family the engine names, as a tiny random model built from its config: nothing is downloaded.

Weights are drawn anew so that every layer matters: N(0, 1/K) for a matrix that reduces K, so that each branch is as
large as the residual it joins (transformers starts at 0.02, which hides a branch's error under the embedding's).
"""

from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

VOCABULARY, WIDTH, LABELS = 64, 32, 16
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZE = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 2, "max_position_embeddings": 64}
_DECODER = {**_SIZE, **_HEADS, **TOKENS}
_GROUPED = {**_DECODER, "num_key_value_heads": 1}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = {**_SIZE, **_HEADS, **_QUIET, "pad_token_id": 0, "num_labels": LABELS}
_PICTURE = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
_PICTURE |= {"image_size": 8, "patch_size": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}


@dataclass(frozen=True)
class Family:
    """A tiny model and what goes into it.

    model, config: names of transformers' classes.  options: of the config.  kind: what a batch holds.
    depth: converted layers whose errors meet in one output: those on the longest way from the input, and for CLIP's
    products of two outputs, on both ways.
    blocks: how many blocks it has, as `fe.hf.describe` counts them.
    """

    model: str
    config: str
    options: dict[str, Any]
    kind: str = "causal"
    depth: int = 8  # two blocks of v, out, up, down
    blocks: int = 2

    def build(self, **options: Any) -> Any:
        """The model, in evaluation mode and without dropout, with weights that matter."""
        config = getattr(hf, self.config)(**{**self.options, **options})
        return lively(getattr(hf, self.model)(config)).eval()

    def batch(self, rows: int = 4, length: int = 12) -> dict[str, Any]:
        """Arguments of one forward, labels included."""
        ids = torch.randint(3, VOCABULARY, (rows, length))
        classes = torch.randint(0, LABELS, (rows,))
        match self.kind:
            case "causal":
                return {"input_ids": ids, "labels": ids}
            case "classes":
                return {"input_ids": ids, "attention_mask": _padding(ids), "labels": classes}
            case "pictures":
                return {"pixel_values": torch.randn(rows, 3, 8, 8), "labels": classes}
            case "pairs":
                return {"input_ids": ids, "pixel_values": torch.randn(rows, 3, 8, 8), "return_loss": True}
            case "waves":
                return {"input_values": torch.randn(rows, 64), "labels": classes}
            case "sequences":
                return {"input_ids": ids, "attention_mask": _padding(ids), "labels": ids.flip(1)}
            case _:
                return {"input_features": torch.randn(rows, 8, 32), "labels": ids}

    def build_smooth(self) -> Any:
        """The model without its one step function: every expert takes every token, so no choice can flip."""
        return self.build(num_experts_per_tok=4) if self.experts else self.build()

    @property
    def experts(self) -> bool:
        """Whether a router chooses experts."""
        return self.config in ("MixtralConfig", "Qwen2MoeConfig", "Qwen3MoeConfig", "GptOssConfig")

    @property
    def generates(self) -> bool:
        """Whether it has a generate()."""
        return self.kind in ("causal", "sequences", "sounds")


def lively(model: Any) -> Any:
    """Every matrix N(0, 1/K), every vector of a norm near 1; q and k small enough that attention stays soft."""
    for name, module in model.named_modules():
        for key, weight in module.named_parameters(recurse=False):
            if weight.dim() < 2 and "bias" in key:
                nn.init.normal_(weight, std=0.1)
            elif isinstance(module, nn.Embedding) and "relative" not in name:
                nn.init.normal_(weight)
            elif weight.dim() in (2, 3):
                reduced = 0 if type(module).__name__ == "Conv1D" else -1
                nn.init.normal_(weight, std=weight.shape[reduced] ** -0.5)
    for module in model.modules():
        if type(module).__name__ == "T5Attention":  # it does not divide by sqrt(d): its q is trained to
            with torch.no_grad():
                module.q.weight.mul_(module.key_value_proj_dim**-0.5)
    model.tie_weights()
    return model


def _padding(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return mask


_GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": VOCABULARY, **TOKENS}
_GPT2 |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_OPT = {**_DECODER, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH, "dropout": 0.0}
_T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 16, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 2}
_T5 |= {"dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
_DISTIL = {"vocab_size": VOCABULARY, "dim": WIDTH, "hidden_dim": 2 * WIDTH, "n_layers": 2, "n_heads": 2}
_DISTIL |= {"max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
_DISTIL |= {"num_labels": LABELS}
_WHISPER = {"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8}
_WHISPER |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 2 * WIDTH}
_WHISPER |= {"decoder_ffn_dim": 2 * WIDTH, "max_source_positions": 16, "max_target_positions": 32, "dropout": 0.0}
_WHISPER |= {**TOKENS, "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
_TEXT = {**_SIZE, **_HEADS, **TOKENS}

FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 8}),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 16}),
    "phi": Family("PhiForCausalLM", "PhiConfig", {**_DECODER, "resid_pdrop": 0.0}, depth=4),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", {**_GROUPED, "resid_pdrop": 0.0}),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_DECODER, "hidden_dropout": 0.0}, depth=4),
    "opt": Family("OPTForCausalLM", "OPTConfig", _OPT),
    "opt-350m": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {**_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        depth=10,
    ),
    "bert": Family("BertForSequenceClassification", "BertConfig", _ENCODER, "classes", depth=9),
    "roberta": Family("RobertaForSequenceClassification", "RobertaConfig", _ENCODER, "classes", depth=9),
    "distilbert": Family("DistilBertForSequenceClassification", "DistilBertConfig", _DISTIL, "classes", depth=9),
    "albert": Family(
        "AlbertForSequenceClassification",
        "AlbertConfig",
        {**_ENCODER, "embedding_size": 16, "num_hidden_layers": 3, "classifier_dropout_prob": 0.0},
        "classes",
        depth=14,
        blocks=1,
    ),
    "vit": Family("ViTForImageClassification", "ViTConfig", {**_PICTURE, **_QUIET, "num_labels": LABELS}, "pictures"),
    "clip": Family(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": _TEXT, "vision_config": _PICTURE, "projection_dim": 16},
        "pairs",
        depth=16,
        blocks=4,
    ),
    "t5": Family("T5ForConditionalGeneration", "T5Config", _T5, "sequences", depth=20, blocks=4),
    "t5-v1.1": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "sequences",
        depth=20,
        blocks=4,
    ),
    "whisper": Family("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, "sounds", depth=20, blocks=4),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_GROUPED, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": WIDTH},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_GROUPED, **_EXPERTS, "head_dim": 16, "num_experts": 4}
    ),
}

# Families whose blocks are joined as one above is, or nearly: tests of fusing and of blocks run them, others do not.
_GEMMA = {**_GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16}
_BART = {"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0, **TOKENS}
_BART |= {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in (("attention_heads", 2), ("ffn_dim", 64))}
_BART |= {"max_position_embeddings": 64, "decoder_start_token_id": 2, "forced_eos_token_id": None}
_SPEECH = {**_SIZE, "num_attention_heads": 2, "conv_dim": (16, 16), "conv_stride": (2, 2), "conv_kernel": (3, 3)}
_SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}
_SPEECH |= dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0)
_SPEECH |= {"layerdrop": 0.0, "final_dropout": 0.0, "num_labels": LABELS, "classifier_proj_size": WIDTH}
_VISION = {"depth": 1, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_heads": 2, "out_hidden_size": WIDTH}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
MORE = {
    "gemma": Family("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 16}),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", _GEMMA),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA),
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config", _GROUPED),
    "olmo3": Family("Olmo3ForCausalLM", "Olmo3Config", _GROUPED),
    "granite": Family("GraniteForCausalLM", "GraniteConfig", {**_GROUPED, "residual_multiplier": 0.5}),
    "smollm3": Family("SmolLM3ForCausalLM", "SmolLM3Config", {**_GROUPED, "no_rope_layers": [1, 0]}),
    "stablelm": Family("StableLmForCausalLM", "StableLmConfig", _GROUPED),
    "starcoder2": Family("Starcoder2ForCausalLM", "Starcoder2Config", {**_GROUPED, "residual_dropout": 0.0}),
    "gpt_oss": Family("GptOssForCausalLM", "GptOssConfig", {**_GROUPED, "head_dim": 16, "num_local_experts": 4}),
    "qwen2.5-vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            "text_config": {**_GROUPED, "rope_parameters": _ROPE},
            "vision_config": _VISION,
        },
    ),
    "qwen3-vl": Family(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {
            "text_config": {**_GROUPED, "head_dim": 16, "rope_parameters": _ROPE},
            "vision_config": {**_VISION, "deepstack_visual_indexes": [0]},
        },
    ),
    "xlm-roberta": Family("XLMRobertaForSequenceClassification", "XLMRobertaConfig", _ENCODER, "classes", depth=9),
    "camembert": Family("CamembertForSequenceClassification", "CamembertConfig", _ENCODER, "classes", depth=9),
    "electra": Family("ElectraForSequenceClassification", "ElectraConfig", _ENCODER, "classes", depth=9),
    "mpnet": Family("MPNetForSequenceClassification", "MPNetConfig", _ENCODER, "classes", depth=9),
    "deberta-v2": Family("DebertaV2ForSequenceClassification", "DebertaV2Config", _ENCODER, "classes", depth=9),
    "modernbert": Family("ModernBertForSequenceClassification", "ModernBertConfig", _ENCODER, "classes", depth=9),
    "siglip": Family(
        "SiglipForImageClassification",
        "SiglipConfig",
        {"vision_config": _PICTURE, "text_config": _TEXT, "num_labels": LABELS},
        "pictures",
    ),
    "dinov2": Family(
        "Dinov2ForImageClassification", "Dinov2Config", {**_PICTURE, **_QUIET, "num_labels": LABELS}, "pictures"
    ),
    "bart": Family("BartForConditionalGeneration", "BartConfig", _BART, "sequences", depth=20, blocks=4),
    "wav2vec2": Family("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _SPEECH, "waves", depth=9),
    "wav2vec2-stable": Family(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        {**_SPEECH, "do_stable_layer_norm": True, "feat_extract_norm": "layer"},
        "waves",
        depth=9,
    ),
}
