"""Write a model as an FP8 checkpoint: codes and scales in safetensors, and a config.json that says so.

What transformers' own save_pretrained does (names of the published checkpoints, ties, shards, generation config) it
does here too; only the weights given to it are FP8.  Everything is written into a folder beside the wanted one,
read back, and renamed: a folder under the wanted name is a whole export.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8engine.convert import RECORD
from fp8engine.errors import ConversionError, StateError
from fp8engine.export import headers
from fp8engine.export.layout import OURS, Stored, choose, to_config
from fp8engine.modules.linear import Float8Module
from fp8engine.modules.serving import Served, quantize_weight
from fp8engine.recipe import PerBlock, Recipe
from fp8engine.select import Decision, decide, is_conv1d, linear_layers, parameter_of, weight_of

# What a tokenizer or a processor is saved as, and nothing of a model.
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip

EXPERTS = "experts in one 3-D parameter: written in 16 bits"


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    layers: one dict a layer in FP8: name, shape, bytes_before, bytes_after (codes and scales).
    left: one a layer or embedding that is not, with the reason.  bytes: of all the model's tensors, before and after.
    notes: what another program will make of it that a user should know.
    """

    path: str
    layout: str
    recipe: str
    layers: list[dict]
    left: list[dict]
    bytes_before: int
    bytes_after: int
    files: list[str]
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""
        return dict(vars(self))

    def __str__(self) -> str:
        share = self.bytes_after / max(self.bytes_before, 1)
        return (
            f"{self.path}: {len(self.layers)} layers in FP8 ({self.recipe}, layout {self.layout}), {len(self.left)} "
            f"left alone; {self.bytes_before:,} bytes became {self.bytes_after:,} ({share:.0%})"
        )


def export(
    model: nn.Module,
    path: str | os.PathLike,
    recipe: str | Recipe | None = None,
    *,
    layout: str = "auto",
    activations: str = "dynamic",
    max_shard_size: int | str = "5GB",
) -> ExportReport:
    """Write a transformers model to a new folder with its linear weights in FP8, for vLLM, transformers and `load`.

    recipe: of a model that is not converted ("current" without); a converted one has its own, layer by layer.
    layout: "compressed-tensors" (scales per tensor or row), "fp8" (128x128 blocks; per tensor for vLLM only),
    "fp8engine" (also GPT-2's Conv1D; read by `load` only), or "auto": the one that most programs read.
    activations: "dynamic", or "static": a converted model's latest input amaxes become stored scales.

    Other tensors keep the model's dtype: `model.to(torch.bfloat16)` first halves what was trained in FP32.
    Raises ConversionError (no transformers model, quantised already, nothing to export, several recipes, a folder
    that is not empty), StateError (no scale yet, weights that are not finite), OSError or SafetensorError (no space, no
    permission).  Nothing is left behind by an error.
    """
    target = Path(path)
    _check(model, target)
    decisions = _decisions(model, recipe)
    stored = choose(_one_recipe(decisions), layout, activations)
    decisions = [_settle(decision, model, stored) for decision in decisions]
    chosen = [decision for decision in decisions if decision.recipe is not None]
    if not chosen:
        raise ConversionError(f"export: nothing to write in FP8 in {type(model).__name__}: {_grouped(decisions)}")
    stored = replace(stored, left=tuple(_left_modules(decisions)))
    _check_patterns(stored, chosen)
    before = model.state_dict()
    size = sum({t.data_ptr(): t.nbytes for t in before.values()}.values())
    layers, tensors = [], dict(before)
    for decision in chosen:
        made = _quantised(decision, stored)
        key = f"{decision.name}.weight" if decision.name else "weight"
        tensors |= {key.removesuffix("weight") + name: tensor for name, tensor in made.items()}
        after = sum(tensor.nbytes for tensor in made.values())
        row = {"name": decision.name, "shape": list(decision.shape)}
        layers.append(row | {"bytes_before": before[key].nbytes, "bytes_after": after})
    files, beside = _write(model, tensors, stored, target, max_shard_size)
    left = [_row(d) for d in decisions if d.recipe is None] + _embeddings(model)
    notes = _notes(chosen, stored, model, beside)
    written = sum((target / name).stat().st_size for name in files if name.endswith(".safetensors"))
    return ExportReport(str(target), stored.layout, stored.recipe.name, layers, left, size, written, files, notes)


def _check(model: nn.Module, target: Path) -> None:
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise ConversionError("export needs transformers: pip install 'fp8engine[hf]'") from error
    if not isinstance(model, PreTrainedModel):
        hint = " (merge its adapters first: merge_and_unload())" if "peft" in type(model).__module__ else ""
        raise ConversionError(f"export takes a transformers PreTrainedModel, not {type(model).__name__}{hint}")
    if getattr(model, "is_quantized", False) or any(isinstance(module, Served) for module in model.modules()):
        raise ConversionError(
            f"export: {type(model).__name__} is quantised already: its own save_pretrained writes it; "
            "to write another layout, load the 16-bit weights"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConversionError("export: parameters on the meta device (or offloaded) hold no numbers to write")
    check_target(target)


def check_target(target: Path) -> None:
    """Raises ConversionError where an export would overwrite something."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(f"export: {target} exists and is not an empty folder: remove it or name another")


def _decisions(model: nn.Module, recipe: str | Recipe | None) -> list[Decision]:
    record = getattr(model, RECORD, None)
    if record is None:
        if any(isinstance(module, Float8Module) for module in model.modules()):
            raise ConversionError("export: parts of the model were converted by themselves: convert the whole model")
        made = decide(model, recipe or "current")
        return [d if d.parameter == "weight" else replace(d, recipe=None, reason=EXPERTS) for d in made]
    if recipe is not None:
        raise ConversionError("export: the model is converted, and its layers have recipes: leave out recipe=")
    found = []
    for name, module, shape in linear_layers(model):
        if isinstance(module, Float8Module) and parameter_of(name, module) == "weight":
            own = module.numerics.recipe
            used = own if own.weight.is_fp8 and own.input.is_fp8 else None
            reason = f"recipe: {own.name}" if used else f"asked for {own.name}"
            found.append(Decision(name, module, used, reason, shape))
        else:
            why = EXPERTS if isinstance(module, Float8Module) else record.why_left(name)
            found.append(Decision(name, module, None, why, shape))
    return found


def _one_recipe(decisions: list[Decision]) -> Recipe:
    """The recipe of all; layers that differ in forward's casts cannot share a checkpoint's one config."""
    chosen = [(d.name, d.recipe) for d in decisions if d.recipe is not None]
    if not chosen:
        raise ConversionError(f"export: nothing to write in FP8: {_grouped(decisions)}")
    first, recipe = chosen[0]
    for name, other in chosen:
        if other.operands("forward") != recipe.operands("forward"):
            raise ConversionError(
                f"export: {first!r} has recipe {recipe.name!r} and {name!r} {other.name!r}; a checkpoint has one: "
                "convert with one recipe, and 'bf16' for the layers to leave"
            )
    return recipe


def _grouped(decisions: list[Decision]) -> str:
    """Each reason once, with the first of its layers and how many more."""
    by_reason: dict[str, list[str]] = {}
    for decision in decisions:
        by_reason.setdefault(decision.reason, []).append(decision.name)
    return (
        "; ".join(
            names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "") + f": {reason}"
            for reason, names in by_reason.items()
        )
        or "it has no linear layers"
    )


def _settle(decision: Decision, model: nn.Module, stored: Stored) -> Decision:
    """Leave a layer alone that readers of the layout would not take back."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    if decision.recipe is None:
        return decision
    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    conv1d = is_conv1d(decision.module) or not isinstance(decision.module, nn.Linear)
    high = getattr(model, "_keep_in_fp32_modules", None)
    why = None
    if shared[id(decision.module.weight)] > 1:
        why = "its weight is shared with another module, which reads it in 16 bits"
    elif conv1d and stored.layout != OURS:
        why = f"{stored.layout!r} holds nn.Linear only, and this is a Conv1D (layout='fp8engine' holds both)"
    elif high and not should_convert_module(decision.name, list(high)):
        why = "transformers keeps it in FP32 (_keep_in_fp32_modules)"
    return decision if why is None else replace(decision, recipe=None, reason=why)


def _left_modules(decisions: list[Decision]) -> list[str]:
    """Names of modules that readers must not look for FP8 in; experts in 3-D parameters go by their module's name."""
    names = (
        d.name.rpartition(".")[0] if len(d.shape) == 3 else d.name for d in decisions if d.recipe is None and d.name
    )
    return list(dict.fromkeys(names))


def _check_patterns(stored: Stored, chosen: list[Decision]) -> None:
    """transformers reads the list as prefixes, suffixes and patterns: none may take in a layer that is FP8."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    if stored.layout != "fp8":
        return
    for left in stored.left:
        for decision in chosen:
            if not should_convert_module(decision.name, [left]):
                raise ConversionError(
                    f"export: {left!r} is left in 16 bits, and transformers would take that name for {decision.name!r} "
                    f"too, which is FP8: use layout={OURS!r}, or leave both"
                )


def _quantised(decision: Decision, stored: Stored) -> dict[str, torch.Tensor]:
    """The layer's tensors by name: codes in the shape of its weight, the scale, and a static input's."""
    weight = weight_of(decision.module).detach()
    if not bool(torch.isfinite(weight).all()):
        bad = int((~torch.isfinite(weight)).sum())
        raise StateError(f"export: {decision.name}.weight holds {bad} values that are NaN or Inf: nothing was written")
    turned = tuple(weight.shape) != decision.shape or not isinstance(decision.module, nn.Linear)
    codes, scale = quantize_weight(weight.t() if turned else weight, stored.weight)
    made = {"weight": codes.t().contiguous() if turned else codes, stored.scale_name: scale}
    if stored.static:
        made["input_scale"] = _input_scale(decision)
    return made


def _input_scale(decision: Decision) -> torch.Tensor:
    """amax / MAX of what the layer has read: of the latest step, and of those that a predicted scale remembers."""
    module = decision.module
    amax = torch.zeros(1)
    if isinstance(module, Float8Module):
        slot = module.numerics.state.view(decision.name, module.numerics.layer, "input")
        amax = torch.cat([slot.amax.reshape(1), slot.history]).max().reshape(1)
    if not float(amax) > 0:
        raise StateError(
            f"export: {decision.name} has no input scale yet, which activations='static' stores: convert the model and "
            "run a few forwards with gradients enabled first, or use activations='dynamic'"
        )
    return amax.float() / decision.recipe.input.format.max if decision.recipe else amax


def _write(model, tensors: dict[str, torch.Tensor], stored: Stored, target: Path, max_shard_size) -> tuple:
    """(names of the files, those copied from where the model came from), the folder renamed into place at the end."""
    folder = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True)
        model.save_pretrained(folder, state_dict=tensors, max_shard_size=max_shard_size)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = to_config(stored)
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        source = Path(getattr(model, "name_or_path", "") or folder)
        beside = [name for name in BESIDE if (source / name).is_file() and source != folder]
        for name in beside:
            shutil.copy2(source / name, folder / name)
        headers.fp8_layers(headers.read(headers.files_of(folder)), stored)
        os.replace(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return sorted(path.name for path in target.iterdir()), beside


def _row(decision: Decision) -> dict:
    kind = type(decision.module).__name__
    return {"name": decision.name, "kind": kind, "shape": list(decision.shape), "reason": decision.reason}


def _embeddings(model: nn.Module) -> list[dict]:
    reason = "embedding: its rows are looked up, not multiplied"
    return [
        {"name": name, "kind": type(module).__name__, "shape": list(module.weight.shape), "reason": reason}
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    ]


def _notes(chosen: list[Decision], stored: Stored, model, beside: list[str]) -> list[str]:
    group, notes = stored.weight.granularity, []
    if isinstance(group, PerBlock):
        sizes = (group.rows, group.cols)
        ragged = [d.name for d in chosen if any(s > g and s % g for s, g in zip(d.shape, sizes, strict=True))]
        if group != PerBlock(128, 128):
            notes.append(f"blocks are {group.rows}x{group.cols}: vLLM's and transformers' kernels take 128x128")
        if ragged:
            notes.append(
                f"{len(ragged)} weights are no whole number of blocks ({ragged[0]} the first): vLLM refuses such a "
                "layer inside a fused q/k/v or gate/up, and transformers 5 misreads it where it dequantises while "
                "loading (no FP8 card); fe.hf.load reads it"
            )
    elif stored.layout == "fp8":
        notes.append("layout 'fp8' with a scale per tensor is vLLM's (weight_scale); transformers calls it otherwise")
    get = getattr(model, "get_output_embeddings", lambda: None)
    if (head := get()) is not None and any(d.module is head for d in chosen):
        notes.append("the output head is FP8, as asked: vLLM reads heads in 16 bits only")
    if stored.layout == OURS:
        notes.append("layout 'fp8engine' is read by fe.hf.load only")
    if any(p.dtype == torch.float32 for p in model.parameters()):
        notes.append(
            "what is not FP8 is FP32, as in the model: model.to(torch.bfloat16) before, or --dtype bf16, halves it"
        )
    if not beside:
        notes.append("no tokenizer files found beside the model: tokenizer.save_pretrained writes them")
    return notes
