"""Table of Hugging Face's model families: the names of a block's parts, and how they are joined.

    pre       y = x + A(n1(x))        z = y + M(n2(y))
    post      y = n1(x + A(x))        z = n2(y + M(y))
    parallel  z = x + A(n1(x)) + M(n2(x))                   n2 may be n1
    sandwich  y = x + n3(A(n1(x)))    z = y + n4(M(n2(y)))  n3 and n4 have no role: no layer reads them
    branch    y = x + n1(A(x))        z = y + n2(M(y))

A(h) = out(softmax(q k^T) v), with q, k, v = h W^T of three layers or of one; M(h) = down(act(up h)), or
down(act(gate h) * up h), gate and up of two layers or of one.  A row of FAMILIES is a config's `model_type`, and the
structures its blocks may have; a name in a structure leads from the block to a module.  The names are those of
transformers 5.  Nothing here imports transformers, and nothing is changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

# Fields that are no role, or need a prefix.
NOT_PARTS = ("norm", "activation", "fused", "kv_from", "heads", "rotary", "dropout", "of_scores")


@dataclass(frozen=True)
class Attention:
    """Names of an attention's parts; q, k and v, or one qkv.

    norm: of its input, or after the residual where norms come after.  kv_from: whose states k and v read.
    fused: how the rows of qkv lie: "stacked" q, then k, then v; "by head" q, k, v of head 0, then of head 1, ...
    heads: the config's name for how many there are.  rotary: q and k are rotated by their positions.
    dropout, of_scores: the config's names for the rates of dropout after `out` ("": none), and of the softmax.
    """

    norm: str
    out: str
    q: str = ""
    k: str = ""
    v: str = ""
    qkv: str = ""
    q_norm: str = ""
    k_norm: str = ""
    fused: Literal["", "stacked", "by head"] = ""
    kv_from: Literal["self", "encoder"] = "self"
    heads: str = "num_attention_heads"
    rotary: bool = False
    dropout: str = ""
    of_scores: str = "attention_dropout"


@dataclass(frozen=True)
class MLP:
    """Names of an MLP's parts: up and down; gate and up; or one gate_up, gate's rows first.

    norm: of its input, or after the residual.  activation: the config's name for it.
    dropout: the config's name for the rate of dropout after `down` ("": none).
    """

    norm: str
    down: str
    up: str = ""
    gate: str = ""
    gate_up: str = ""
    activation: str = "hidden_act"
    dropout: str = ""


@dataclass(frozen=True)
class Experts(MLP):
    """An MLP that a router chooses: `experts` holds 3-D parameters gate_up_proj [E, 2F, K] and down_proj [E, K, F].

    shared_*: an expert that every token passes, and the layer that weighs it.
    """

    experts: str = ""
    router: str = ""
    shared_gate: str = ""
    shared_up: str = ""
    shared_down: str = ""
    shared_weigh: str = ""


@dataclass(frozen=True)
class Structure:
    """One kind of block.  norm: "rms" divides by the root mean square, "layer" also takes the mean away.

    "rms zero-centered" multiplies by 1 + weight instead of by the weight.
    when: (name, value) that the config must have, where names alone do not tell two structures apart.
    """

    placement: Literal["pre", "post", "parallel", "sandwich", "branch"]
    norm: Literal["rms", "rms zero-centered", "layer"]
    attention: Attention
    mlp: MLP
    cross: Attention | None = None
    when: tuple[str, Any] | None = None

    def parts(self) -> dict[str, str]:
        """Role -> name of every part that this kind of block has; roles of cross attention begin with `cross_`."""
        roles = {"attention_norm": self.attention.norm, "mlp_norm": self.mlp.norm}
        for prefix, group in (("", self.attention), ("", self.mlp), ("cross_", self.cross)):
            names = {} if group is None else vars(group)
            roles |= {f"{prefix}{key}": name for key, name in names.items() if key not in NOT_PARTS}
        if self.cross:
            roles["cross_norm"] = self.cross.norm
        return {role: name for role, name in roles.items() if name}


def _attention(path: str, norm: str, names: str = "q_proj k_proj v_proj out_proj", **more: Any) -> Attention:
    q, k, v, out = (f"{path}.{name}" for name in names.split())
    return Attention(norm, out, q, k, v, **more)


_GATED = {"down": "mlp.down_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj"}
_ROUTED = {"down": "", "experts": "mlp.experts", "router": "mlp.gate"}
_SHARED = {f"shared_{role}": f"mlp.shared_expert.{role}_proj" for role in ("gate", "up", "down")}
_PRE, _NEXT = "input_layernorm", "post_attention_layernorm"

_RESID: dict[str, Any] = {"dropout": "resid_pdrop"}
_DROP: dict[str, Any] = {"dropout": "dropout"}
_HIDDEN: dict[str, Any] = {"dropout": "hidden_dropout_prob"}
_PROBS = {"of_scores": "attention_probs_dropout_prob"}

_LLAMA = Structure(
    "pre", "rms", _attention("self_attn", _PRE, "q_proj k_proj v_proj o_proj", rotary=True), MLP(_NEXT, **_GATED)
)
_QWEN3 = replace(_LLAMA, attention=replace(_LLAMA.attention, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"))
_MIXTRAL = replace(_LLAMA, mlp=Experts(_NEXT, **_ROUTED))
_QWEN2_MOE = replace(_LLAMA, mlp=Experts(_NEXT, **_ROUTED, **_SHARED, shared_weigh="mlp.shared_expert_gate"))
_GPT_OSS = replace(_LLAMA, mlp=Experts(_NEXT, down="", experts="mlp.experts", router="mlp.router"))
_GEMMA = replace(_LLAMA, norm="rms zero-centered")
_BEFORE: dict[str, Any] = {"norm": "pre_feedforward_layernorm", "activation": "hidden_activation"}
_GEMMA2 = replace(_GEMMA, placement="sandwich", mlp=MLP(**_BEFORE, **_GATED))
_OLMO2 = replace(
    _QWEN3,
    placement="branch",
    attention=replace(_QWEN3.attention, norm=_NEXT),
    mlp=MLP("post_feedforward_layernorm", **_GATED),
)
_PHI3 = replace(
    _LLAMA,
    attention=Attention(_PRE, "self_attn.o_proj", qkv="self_attn.qkv_proj", fused="stacked", rotary=True, **_RESID),
    mlp=MLP(_NEXT, "mlp.down_proj", gate_up="mlp.gate_up_proj", **_RESID),
)
_PHI = Structure(
    "parallel",
    "layer",
    _attention("self_attn", _PRE, "q_proj k_proj v_proj dense", rotary=True, **_RESID),
    MLP(_PRE, "mlp.fc2", "mlp.fc1", **_RESID),
)
_NEOX = Structure(
    "parallel",
    "layer",
    Attention(
        _PRE,
        "attention.dense",
        qkv="attention.query_key_value",
        fused="by head",
        rotary=True,
        dropout="hidden_dropout",
    ),
    MLP(_NEXT, "mlp.dense_4h_to_h", "mlp.dense_h_to_4h", dropout="hidden_dropout"),
    when=("use_parallel_residual", True),
)
_GPT2 = Structure(
    "pre",
    "layer",
    Attention("ln_1", "attn.c_proj", qkv="attn.c_attn", fused="stacked", of_scores="attn_pdrop", **_RESID),
    MLP("ln_2", "mlp.c_proj", "mlp.c_fc", activation="activation_function", **_RESID),
)
_OPT = Structure(
    "pre",
    "layer",
    _attention("self_attn", "self_attn_layer_norm", **_DROP),
    MLP("final_layer_norm", "fc2", "fc1", activation="activation_function", **_DROP),
    when=("do_layer_norm_before", True),
)
_WHISPER = replace(_OPT, when=None)
_WHISPER_DECODER = replace(
    _WHISPER,
    attention=replace(_OPT.attention, heads="decoder_attention_heads"),
    cross=_attention("encoder_attn", "encoder_attn_layer_norm", kv_from="encoder", heads="decoder_attention_heads"),
)
_BERT = Structure(
    "post",
    "layer",
    _attention(
        "attention", "attention.output.LayerNorm", "self.query self.key self.value output.dense", **_HIDDEN, **_PROBS
    ),
    MLP("output.LayerNorm", "output.dense", "intermediate.dense", **_HIDDEN),
)
_DEBERTA = replace(
    _BERT,
    attention=_attention(
        "attention",
        "attention.output.LayerNorm",
        "self.query_proj self.key_proj self.value_proj output.dense",
        **_HIDDEN,
        **_PROBS,
    ),
)
_MPNET = replace(
    _BERT,
    attention=_attention("attention", "attention.LayerNorm", "attn.q attn.k attn.v attn.o", **_HIDDEN, **_PROBS),
)
_MODERNBERT = Structure(
    "pre",
    "layer",
    Attention("attn_norm", "attn.Wo", qkv="attn.Wqkv", fused="stacked", rotary=True),
    MLP("mlp_norm", "mlp.Wo", gate_up="mlp.Wi", activation="hidden_activation"),
)
_DISTILBERT = Structure(
    "post",
    "layer",
    _attention("attention", "sa_layer_norm", "q_lin k_lin v_lin out_lin"),
    MLP("output_layer_norm", "ffn.lin2", "ffn.lin1", activation="activation", **_DROP),
)
_ALBERT = Structure(
    "post",
    "layer",
    _attention("attention", "attention.LayerNorm", "query key value dense", **_HIDDEN, **_PROBS),
    MLP("full_layer_layer_norm", "ffn_output", "ffn"),
)
_VIT = Structure(
    "pre",
    "layer",
    _attention("attention", "layernorm_before", "q_proj k_proj v_proj o_proj", **_HIDDEN, **_PROBS),
    MLP("layernorm_after", "mlp.fc2", "mlp.fc1", **_HIDDEN),
)
_DINOV2 = replace(
    _VIT,
    attention=_attention("attention", "norm1", "q_proj k_proj v_proj o_proj", **_HIDDEN, **_PROBS),
    mlp=MLP("norm2", "mlp.fc2", "mlp.fc1"),
)
_WAV2VEC2 = Structure(
    "post",
    "layer",
    _attention("attention", "layer_norm", dropout="hidden_dropout"),
    MLP("final_layer_norm", "feed_forward.output_dense", "feed_forward.intermediate_dense", dropout="hidden_dropout"),
    when=("do_stable_layer_norm", False),
)
_STARCODER2 = Structure(
    "pre",
    "layer",
    replace(_LLAMA.attention, dropout="residual_dropout"),
    MLP(_NEXT, "mlp.c_proj", "mlp.c_fc", dropout="residual_dropout"),
)
_CLIP = Structure("pre", "layer", _attention("self_attn", "layer_norm1"), MLP("layer_norm2", "mlp.fc2", "mlp.fc1"))


def _t5(decoder: bool, gated: bool) -> Structure:
    last = f"layer.{1 + decoder}"
    up = {"gate": f"{last}.DenseReluDense.wi_0", "up": f"{last}.DenseReluDense.wi_1"}
    up = up if gated else {"up": f"{last}.DenseReluDense.wi"}
    cross = _attention("layer.1.EncDecAttention", "layer.1.layer_norm", "q k v o", kv_from="encoder")
    return Structure(
        "pre",
        "rms",
        _attention("layer.0.SelfAttention", "layer.0.layer_norm", "q k v o"),
        MLP(f"{last}.layer_norm", f"{last}.DenseReluDense.wo", **up, activation="dense_act_fn"),
        cross if decoder else None,
    )


# A block is the first structure of its row that it has every part of.
FAMILIES: dict[str, tuple[Structure, ...]] = {
    "llama": (_LLAMA,),
    "mistral": (_LLAMA,),
    "qwen2": (_LLAMA,),
    "qwen3": (_QWEN3,),
    "qwen2_5_vl_text": (_LLAMA,),
    "qwen3_vl_text": (_QWEN3,),
    "smollm3": (_LLAMA,),
    "granite": (_LLAMA,),
    "olmo2": (_OLMO2,),
    "olmo3": (_OLMO2,),
    "gemma": (_GEMMA,),
    "gemma2": (_GEMMA2,),
    "gemma3_text": (replace(_GEMMA2, attention=_QWEN3.attention),),
    "stablelm": (replace(_LLAMA, norm="layer"),),
    "starcoder2": (_STARCODER2,),
    "phi": (_PHI,),
    "phi3": (_PHI3,),
    "gpt2": (_GPT2,),
    "gpt_neox": (_NEOX, replace(_NEOX, placement="pre", when=("use_parallel_residual", False))),
    "opt": (_OPT, replace(_OPT, placement="post", when=("do_layer_norm_before", False))),
    "bert": (_BERT,),
    "roberta": (_BERT,),
    "xlm-roberta": (_BERT,),
    "camembert": (_BERT,),
    "electra": (_BERT,),
    "deberta-v2": (_DEBERTA,),
    "mpnet": (_MPNET,),
    "modernbert": (_MODERNBERT,),
    "distilbert": (_DISTILBERT,),
    "albert": (_ALBERT,),
    "vit": (_VIT,),
    "clip": (_CLIP,),
    "clip_text_model": (_CLIP,),
    "clip_vision_model": (_CLIP,),
    "siglip_text_model": (_CLIP,),
    "siglip_vision_model": (_CLIP,),
    "dinov2": (_DINOV2,),
    "wav2vec2": (_WAV2VEC2, replace(_WAV2VEC2, placement="pre", when=("do_stable_layer_norm", True))),
    "t5": tuple(_t5(decoder, gated) for decoder in (True, False) for gated in (True, False)),
    "whisper": (_WHISPER_DECODER, _WHISPER),
    "bart": (replace(_WHISPER_DECODER, placement="post"), replace(_WHISPER, placement="post")),
    "mixtral": (_MIXTRAL,),
    "gpt_oss": (_GPT_OSS,),
    "qwen2_moe": (_QWEN2_MOE, _LLAMA),
    "qwen3_moe": (replace(_MIXTRAL, attention=_QWEN3.attention), _QWEN3),
}


@dataclass(frozen=True)
class Block:
    """A block that was recognised.  parts: role -> its module's name in the model.  head_dim: features of one head."""

    name: str
    family: str
    structure: Structure
    parts: dict[str, str]
    activation: str
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        kind, mlp = self.structure, self.structure.mlp
        fewer = f" ({self.kv_heads} of k and v)" if self.kv_heads != self.heads else ""
        how = "experts, " if isinstance(mlp, Experts) else "gated " if mlp.gate or mlp.gate_up else ""
        return (
            f"{self.name}: {self.family}, {kind.placement} {kind.norm} norm, "
            f"{self.heads} heads of {self.head_dim}{fewer}, {how}{self.activation}"
        )


def match(name: str, module: nn.Module, config: Any) -> Block | None:
    """The module as a block of its config's family, or None."""
    for structure in FAMILIES[config.model_type]:
        if structure.when and getattr(config, structure.when[0], None) != structure.when[1]:
            continue
        found = {role: _below(module, path) for role, path in structure.parts().items()}
        if all(part is not None for part in found.values()):
            parts = {role: f"{name}.{path}" if name else path for role, path in structure.parts().items()}
            heads = getattr(config, structure.attention.heads)
            kv_heads = getattr(config, "num_key_value_heads", None) or heads
            first = found.get("q") or found["qkv"]
            shared = heads if "q" in found else heads + 2 * kv_heads
            activation = str(getattr(config, structure.mlp.activation))
            rows = _rows(first)
            return Block(name, config.model_type, structure, parts, activation, heads, kv_heads, rows // shared)
    return None


def _below(module: nn.Module, path: str) -> nn.Module | None:
    for part in path.split("."):
        module = module._modules.get(part)  # pyright: ignore[reportAssignmentType]
        if module is None:
            return None
    return module


def _rows(module: Any) -> int:
    """Output features of a linear layer, a Conv1D, or an adapter around one."""
    module = getattr(module, "base_layer", module)
    return getattr(module, "out_features", None) or getattr(module, "nf", None) or len(module.weight)
