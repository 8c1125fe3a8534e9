"""Translation of a Hugging Face block to fe.TransformerLayer: the options of its constructor, and its parameters.

    fused qkv     its rows are q, k, v, one after the other or by head; transformers' Conv1D holds the transpose

A block with anything that TransformerLayer has not is refused, a parameter that is left over included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp8engine.autograd.attention import Rotary
from fp8engine.errors import ConversionError
from fp8engine.nn.attention import Heads
from fp8engine.nn.families import FAMILIES, Block, Experts, match
from fp8engine.nn.linear import Float8Module, Linear
from fp8engine.ops.reference.activations import GATED

INSTEAD = "fe.convert(model, recipe) puts its linear layers under a recipe as they stand"
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "silu", "swish": "silu", "quick_gelu": "qgelu", "relu2": "srelu"}
ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
CONV1D = ("Conv1D", "Float8Conv1D")  # by name: transformers need not be there
UNFIT = {"t5": "its scores have relative positions added and are not divided by sqrt(head_dim)"}
CAUSAL_OUTSIDE = ("clip_text_model",)  # causal, though is_causal of its attention is False


@dataclass
class Source:
    """A block in TransformerLayer's words.  options: of the constructor, recipe and memory left out.

    parameters: by TransformerLayer's names, not copied.  frozen: names of those that take no gradient.
    """

    options: dict[str, Any]
    parameters: dict[str, torch.Tensor]
    frozen: set[str] = field(default_factory=set)


def read_block(layer: nn.Module, config: Any = None) -> Source:
    """A block of transformers as a TransformerLayer's Source.  config: its model's, where the block does not hold it.

    Raises ConversionError for a block that is in no row of families.FAMILIES, or has what TransformerLayer has not.
    """
    config = _config(layer) if config is None else config
    who, family = type(layer).__name__, getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise ConversionError(f"{who}: model_type {family!r} is in no row of fp8engine.nn.families.FAMILIES; {INSTEAD}")
    block = match("", layer, config)
    if block is None:
        raise ConversionError(f"{who} is no block of {family!r} as fp8engine.nn.families.FAMILIES knows it; {INSTEAD}")
    if why := _unfit(block, layer, config):
        raise ConversionError(f"{who}: {why}; {INSTEAD}")
    taken: dict[str, tuple[torch.Tensor, nn.Parameter]] = {}
    _linears(block, layer, who, taken)
    norms = _norms(block, layer, taken)
    read = {id(parameter) for _, parameter in taken.values()}
    if left := [name for name, parameter in layer.named_parameters() if id(parameter) not in read]:
        raise ConversionError(f"{who}: nothing in a TransformerLayer corresponds to {', '.join(left)}; {INSTEAD}")
    options = {
        "hidden": taken["self_attn.q_proj.weight"][0].shape[1],
        "intermediate": taken["mlp.down_proj.weight"][0].shape[1],
        "heads": _heads(block, layer, config),
        "activation": _activation(block),
        "bias": [name.split(".")[1] for name in taken if name.endswith("_proj.bias")],
        "dropout": (_rate(config, block.structure.attention.dropout), _rate(config, block.structure.mlp.dropout)),
        **norms,
    }
    frozen = {name for name, (_, parameter) in taken.items() if not parameter.requires_grad}
    return Source(options, {name: tensor for name, (tensor, _) in taken.items()}, frozen)


def _config(layer: nn.Module) -> Any:
    for module in layer.modules():
        if hasattr(config := getattr(module, "config", None), "model_type"):
            return config
    raise ConversionError(f"{type(layer).__name__} holds no config: give the one of its model, config=model.config")


def _unfit(block: Block, layer: nn.Module, config: Any) -> str:
    """Why a block that the table knows is no TransformerLayer; "": it is one."""
    kind, attention = block.structure, _attention(block, layer)
    scale = getattr(attention, "scaling", getattr(attention, "scale", None))
    if why := UNFIT.get(block.family):
        return why
    if kind.cross:
        return "it has cross attention"
    if isinstance(kind.mlp, Experts):
        return "its MLP is a mixture of experts"
    if kind.placement in ("sandwich", "branch"):
        return "it normalises what attention and MLP return"
    if kind.norm == "rms zero-centered":
        return "its norms multiply by 1 + weight"
    if getattr(config, "residual_multiplier", 1.0) != 1.0:
        return f"it multiplies by {config.residual_multiplier} before each residual addition"
    if _activation(block) is None:
        return f"its activation is {block.activation!r}"
    if not isinstance(getattr(attention, "is_causal", None), bool):
        return "its attention does not say whether it is causal (is_causal)"
    if scale is not None and abs(scale * block.head_dim**0.5 - 1) > 1e-6:
        return f"its scores are multiplied by {scale}, not by 1 / sqrt({block.head_dim})"
    if getattr(config, "activation_dropout", 0.0):
        return "it drops out after the activation"
    if kind.attention.rotary:
        rope = config.rope_parameters
        if not getattr(attention, "use_rope", True):
            return "its q and k are not rotated, though those of other blocks are"
        if "rope_theta" not in rope:
            return "its rotary positions depend on the kind of block"
        if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
            return f"its rotary positions are of type {rope['rope_type']!r}"
    return ""


def _attention(block: Block, layer: nn.Module) -> Any:
    """The module that holds q."""
    names = block.structure.attention
    return layer.get_submodule((names.q or names.qkv).rpartition(".")[0])


def _linears(block: Block, layer: nn.Module, who: str, taken: dict) -> None:
    """Put weights [N, K] and biases of the linear layers in `taken`, by TransformerLayer's names."""
    places = {role: f"self_attn.{role}_proj" for role in ("q", "k", "v")} | {"out": "self_attn.o_proj"}
    places |= {role: f"mlp.{role}_proj" for role in ("gate", "up", "down")}
    for role, path in block.structure.parts().items():
        if "norm" in role:
            continue
        module: Any = layer.get_submodule(path)
        conv1d = type(module).__name__ in CONV1D
        if type(module) not in (nn.Linear, Linear) and not conv1d:
            raise ConversionError(f"{who}: {path} is a {type(module).__name__}, no plain linear layer; {INSTEAD}")
        if treated := isinstance(module, Float8Module) and module.numerics.treated:
            raise ConversionError(
                f"{who}: {path} is {treated}, a setting that is not copied: take it away (fe.smooth(..., on=False), "
                "fe.clamp(model, None)), and call fe.smooth or fe.clamp on what is made"
            )
        for key in ("weight", "bias"):
            parameter = getattr(module, key)
            if parameter is None:
                continue
            value = parameter.detach().t() if conv1d and key == "weight" else parameter.detach()
            if role == "qkv":
                parts = dict(zip(("q", "k", "v"), _rows_of_qkv(value, block), strict=True))
            elif role == "gate_up":
                parts = dict(zip(("gate", "up"), value.chunk(2), strict=True))
            else:
                parts = {role: value}
            taken |= {f"{places[part]}.{key}": (rows, parameter) for part, rows in parts.items()}


def _rows_of_qkv(value: torch.Tensor, block: Block) -> list[torch.Tensor]:
    if block.structure.attention.fused == "by head":
        by_head = value.unflatten(0, (block.heads, 3, block.head_dim))
        return [by_head[:, i].flatten(0, 1) for i in range(3)]
    rows = [heads * block.head_dim for heads in (block.heads, block.kv_heads, block.kv_heads)]
    return list(value.split(rows))


def _norms(block: Block, layer: nn.Module, taken: dict) -> dict[str, Any]:
    """Put the norms' parameters in `taken`; the constructor's options about them."""
    kind = block.structure
    paths, placement = [kind.attention.norm, kind.mlp.norm], str(kind.placement)
    names = ["input_layernorm", "post_attention_layernorm"]
    if placement == "post":
        names = ["post_attention_layernorm", "post_feedforward_layernorm"]
    elif paths[0] == paths[1]:
        paths, names, placement = paths[:1], names[:1], "parallel shared"
    places = dict(zip(names, paths, strict=True))
    if kind.attention.q_norm:
        places |= {"self_attn.q_norm": kind.attention.q_norm, "self_attn.k_norm": kind.attention.k_norm}
    modules = {name: layer.get_submodule(path) for name, path in places.items()}
    for name, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            taken[f"{name}.{key}"] = parameter.detach(), parameter
    return {"placement": placement, "norm": kind.norm, "eps": _eps(modules[names[0]])}


def _eps(norm: Any) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def _heads(block: Block, layer: nn.Module, config: Any) -> Heads:
    names, attention = block.structure.attention, _attention(block, layer)
    theta = None
    if names.rotary:
        rope = config.rope_parameters
        width = int(block.head_dim * rope.get("partial_rotary_factor", 1.0))
        theta = Rotary(rope["rope_theta"], None if width == block.head_dim else width)
        if rope.get("rope_type", "default") != "default":
            theta = theta._replace(factor=rope["factor"])
        if rope.get("rope_type") == "llama3":
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            theta = theta._replace(trained=rope["original_max_position_embeddings"], low=low, high=high)
    causal = attention.is_causal or block.family in CAUSAL_OUTSIDE
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return Heads(
        block.heads,
        None if block.kv_heads == block.heads else block.kv_heads,
        block.head_dim,
        theta,
        causal,
        _rate(config, names.of_scores),
        window if causal else None,
        _eps(layer.get_submodule(names.q_norm)) if names.q_norm else None,
    )


def _activation(block: Block) -> str | None:
    mlp, name = block.structure.mlp, ACTIVATIONS.get(block.activation)
    if not (mlp.gate or mlp.gate_up) or name is None:
        return name
    return GATED.get(name)


def _rate(config: Any, name: str) -> float:
    return float(getattr(config, name, 0.0) or 0.0) if name else 0.0
