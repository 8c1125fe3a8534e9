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
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "num_experts": 4}


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


def causal(name: str, options: dict[str, Any], **more: Any) -> Family:
    return Family(f"{name}ForCausalLM", f"{name}Config", options, **more)


def classifier(name: str, options: dict[str, Any], kind: str = "classes", depth: int = 9, blocks: int = 2) -> Family:
    """Of texts, waves or pictures."""
    task = "ImageClassification" if kind == "pictures" else "SequenceClassification"
    return Family(f"{name}For{task}", f"{name}Config", options, kind, depth, blocks)


def encoder_and_decoder(name: str, options: dict[str, Any], kind: str = "sequences") -> Family:
    return Family(f"{name}ForConditionalGeneration", f"{name}Config", options, kind, depth=20, blocks=4)


_ALBERT = {**_ENCODER, "embedding_size": 16, "num_hidden_layers": 3, "classifier_dropout_prob": 0.0}
_CLIP = {"text_config": _TEXT, "vision_config": _PICTURE, "projection_dim": 16}
FAMILIES = {
    "llama": causal("Llama", _GROUPED),
    "mistral": causal("Mistral", {**_GROUPED, "sliding_window": 8}),
    "qwen2": causal("Qwen2", _GROUPED),
    "qwen3": causal("Qwen3", {**_GROUPED, "head_dim": 16}),
    "phi": causal("Phi", {**_DECODER, "resid_pdrop": 0.0}, depth=4),
    "phi3": causal("Phi3", {**_GROUPED, "resid_pdrop": 0.0}),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt_neox": causal("GPTNeoX", {**_DECODER, "hidden_dropout": 0.0}, depth=4),
    "opt": causal("OPT", _OPT),
    "opt-350m": causal("OPT", {**_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}, depth=10),
    "bert": classifier("Bert", _ENCODER),
    "roberta": classifier("Roberta", _ENCODER),
    "distilbert": classifier("DistilBert", _DISTIL),
    "albert": classifier("Albert", _ALBERT, depth=14, blocks=1),
    "vit": classifier("ViT", {**_PICTURE, **_QUIET, "num_labels": LABELS}, "pictures", depth=8),
    "clip": Family("CLIPModel", "CLIPConfig", _CLIP, "pairs", depth=16, blocks=4),
    "t5": encoder_and_decoder("T5", _T5),
    "t5-v1.1": encoder_and_decoder("T5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "whisper": encoder_and_decoder("Whisper", _WHISPER, "sounds"),
    "mixtral": causal("Mixtral", {**_GROUPED, "num_local_experts": 4}),
    "qwen2_moe": causal("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": WIDTH}),
    "qwen3_moe": causal("Qwen3Moe", {**_EXPERTS, "head_dim": 16}),
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
_TEXT_OF_QWEN = {**_GROUPED, "rope_parameters": _ROPE}
_QWEN2_5_VL = {"text_config": _TEXT_OF_QWEN, "vision_config": _VISION}
_QWEN3_VL = {
    "text_config": {**_TEXT_OF_QWEN, "head_dim": 16},
    "vision_config": {**_VISION, "deepstack_visual_indexes": [0]},
}
_SIGLIP = {"vision_config": _PICTURE, "text_config": _TEXT, "num_labels": LABELS}
_STABLE = {**_SPEECH, "do_stable_layer_norm": True, "feat_extract_norm": "layer"}
MORE = {
    "gemma": causal("Gemma", {**_GROUPED, "head_dim": 16}),
    "gemma2": causal("Gemma2", _GEMMA),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA),
    "olmo2": causal("Olmo2", _GROUPED),
    "olmo3": causal("Olmo3", _GROUPED),
    "granite": causal("Granite", {**_GROUPED, "residual_multiplier": 0.5}),
    "smollm3": causal("SmolLM3", {**_GROUPED, "no_rope_layers": [1, 0]}),
    "stablelm": causal("StableLm", _GROUPED),
    "starcoder2": causal("Starcoder2", {**_GROUPED, "residual_dropout": 0.0}),
    "gpt_oss": causal("GptOss", {**_GROUPED, "head_dim": 16, "num_local_experts": 4}),
    "qwen2.5-vl": Family("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", _QWEN2_5_VL),
    "qwen3-vl": Family("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", _QWEN3_VL),
    "xlm-roberta": classifier("XLMRoberta", _ENCODER),
    "camembert": classifier("Camembert", _ENCODER),
    "electra": classifier("Electra", _ENCODER),
    "mpnet": classifier("MPNet", _ENCODER),
    "deberta-v2": classifier("DebertaV2", _ENCODER),
    "modernbert": classifier("ModernBert", _ENCODER),
    "siglip": classifier("Siglip", _SIGLIP, "pictures", depth=8),
    "dinov2": classifier("Dinov2", {**_PICTURE, **_QUIET, "num_labels": LABELS}, "pictures", depth=8),
    "bart": encoder_and_decoder("Bart", _BART),
    "wav2vec2": classifier("Wav2Vec2", _SPEECH, "waves"),
    "wav2vec2-stable": classifier("Wav2Vec2", _STABLE, "waves"),
}
