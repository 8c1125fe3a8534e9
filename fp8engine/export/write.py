"""Writer of FP8 checkpoints: codes and scales in safetensors, and a config.json that describes them.

transformers' own save_pretrained writes the files (published names, ties, shards, generation config); only the weights
given to it are FP8.  Everything is written into a folder beside the wanted one, whose headers are read
back and checked before it is renamed: a folder under the wanted name is a whole export.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8engine.convert.select import Decision, weight_of
from fp8engine.errors import ConversionError, StateError
from fp8engine.export import headers
from fp8engine.export.layers import choose_layers, names_left, one_scale, scheme
from fp8engine.export.layout import OURS, Stored, check_words, choose, to_config
from fp8engine.nn.linear import Float8Module
from fp8engine.nn.serving import MX, Served, quantize_weight
from fp8engine.numerics.recipe import PerBlock, Recipe

EMBEDDING = "embedding: its rows are looked up, not multiplied"
# Files of tokenizers and processors; none of a model.
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class ExportReport:
    """Result of an export.

    layers: one dict a layer in FP8: name, shape, recipe, bytes_before, bytes_after (codes and scales).
    left: one a layer or embedding that is not, with the reason.  bytes: of all the model's tensors, before and after.
    notes: sentences on what other programs will or will not read.
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
        """Every field, in types that JSON has."""
        return dict(vars(self))

    def __str__(self) -> str:
        share = self.bytes_after / max(self.bytes_before, 1)
        return (
            f"{self.path}: {len(self.layers)} layers in FP8 ({self.recipe}; layout {self.layout}), {len(self.left)} "
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

    recipe: of a model that is not converted ("current" without); a converted one has its own, layer by layer, and of
    `auto` what it has decided.
    layout: "compressed-tensors" (scales per tensor, row or block, and layers that differ), "fp8" (128x128 blocks; per
    tensor for vLLM only), "fp8engine" (also GPT-2's Conv1D; read by `load` only), or "auto": what most programs read.
    What vLLM and transformers could not read gets a scale per row, or stays in 16 bits; layers and notes say so.
    activations: "dynamic", or "static": a converted model's latest input amaxes become stored scales.

    Other tensors keep the model's dtype: `model.to(torch.bfloat16)` first halves what was trained in FP32.
    Raises ConversionError (no transformers model, quantised already, nothing to export, a layout that does not hold
    the recipes, `auto` that has decided nothing, a folder that is not empty), StateError (no scale yet, weights that
    are not finite), OSError or SafetensorError (no space, no permission).  Nothing is left behind by an error.
    """
    target = Path(path).resolve()  # of a link: what it points to
    check_model(model)
    check_target(target)
    stored, decisions, notes = settle(model, recipe, layout, activations)
    chosen = [decision for decision in decisions if decision.recipe is not None]
    before = model.state_dict()
    made: dict[str, torch.Tensor] = {}
    for group in one_scale(chosen, stored.layout):
        made |= quantised(group, before.__getitem__, stored)
    files, beside = _write(model, before | made, stored, target, max_shard_size)
    after = Counter()
    for name, tensor in made.items():
        after[name.rpartition(".")[0]] += tensor.nbytes
    layers = [_written(decision, decision.recipe, after[decision.name]) for decision in chosen if decision.recipe]
    left = [_left(d.name, d.module, d.shape, d.reason) for d in decisions if d.recipe is None]
    tables = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    left += [_left(name, module, module.weight.shape, EMBEDDING) for name, module in tables]
    notes += _notes(chosen, stored, model, beside)
    size = sum({t.data_ptr(): t.nbytes for t in before.values()}.values())
    written = sum((target / name).stat().st_size for name in files if name.endswith(".safetensors"))
    names = ", ".join(dict.fromkeys(row["recipe"] for row in layers))
    return ExportReport(str(Path(path)), stored.layout, names, layers, left, size, written, files, notes)


def settle(
    model: nn.Module, recipe: str | Recipe | None, layout: str, activations: str
) -> tuple[Stored, list[Decision], list[str]]:
    """(the layout, a Decision for every linear layer, notes), for the arguments of `export`; raises as it does."""
    check_words(layout, activations)
    layout, decisions, notes = choose_layers(model, recipe, layout)
    recipes = {decision.name: decision.recipe for decision in decisions if decision.recipe is not None}
    stored = replace(_stored(recipes, layout, activations), left=tuple(names_left(model, decisions, layout)))
    if layout == "fp8":
        _check_patterns(stored.left, recipes)
    return stored, decisions, notes


def _stored(recipes: dict[str, Recipe], layout: str, activations: str) -> Stored:
    """The layout under the recipe that most layers have; `mixed` names the recipe of each layer where they differ."""
    schemes = {name: scheme(recipe) for name, recipe in recipes.items()}
    most, _ = Counter(schemes.values()).most_common(1)[0]
    for name, recipe in recipes.items():
        try:
            choose(recipe, layout, activations)
        except ConversionError as error:
            raise ConversionError(f"export: {name}: {error}") from error
    main = next(recipe for name, recipe in recipes.items() if schemes[name] == most)
    mixed = recipes if len(set(schemes.values())) > 1 else {}
    if mixed and layout == "fp8":
        first, other = (next(name for name in recipes if (schemes[name] == most) is same) for same in (True, False))
        raise ConversionError(
            f"export: layout='fp8' holds one recipe, and {first!r} has {recipes[first].name!r}, {other!r} "
            f"{recipes[other].name!r}: use layout='compressed-tensors'"
        )
    return replace(choose(main, layout, activations), mixed=mixed)


def check_model(model: nn.Module) -> None:
    """Raises ConversionError for a model that no checkpoint can be made of."""
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
    kinds = ((name, type(module)) for name, module in model.named_modules())
    if adapter := next((name for name, kind in kinds if kind.__module__.startswith("peft.")), None):
        raise ConversionError(
            f"export: {adapter} is an adapter of peft, which would be written under names that no program reads: merge "
            "it first (merge_and_unload()), or take it away (unload())"
        )
    if absent := next((name for name, parameter in model.named_parameters() if parameter.is_meta), None):
        raise ConversionError(
            f"export: {absent} is on the meta device (offloaded by Accelerate, or not loaded yet) and holds no numbers "
            "to write: load the whole model into memory, without offloading"
        )


def check_target(target: Path) -> None:
    """Raises ConversionError where an export would overwrite something."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(f"export: {target} exists and is not an empty folder: remove it or name another")


def _check_patterns(left: Iterable[str], fp8: Iterable[str]) -> None:
    """Raise ConversionError where the name of what is left, a pattern to transformers, matches an FP8 layer."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    for pattern, name in itertools.product(left, fp8):
        if not should_convert_module(name, [pattern]):
            raise ConversionError(
                f"export: {pattern!r} is left in 16 bits, and transformers would take that name for {name!r} "
                f"too, which is FP8: use layout={OURS!r}, or leave both"
            )


def quantised(group: list[Decision], whole: Callable[[str], torch.Tensor], stored: Stored) -> dict[str, torch.Tensor]:
    """The tensors, by name, of layers under one scale: codes in the weight's layout, scales of weight and input.

    whole: a weight by its name.  Raises StateError for one that is not finite, and for an input without a scale.
    """
    made, weights = {}, []
    for decision in group:
        weight = whole(f"{decision.name}.weight")
        if not bool(torch.isfinite(weight).all()):
            bad = int((~torch.isfinite(weight)).sum())
            raise StateError(
                f"export: {decision.name}.weight holds {bad} values that are NaN or Inf: nothing was written"
            )
        weights.append(weight if isinstance(decision.module, nn.Linear) else weight.t())  # of a Conv1D
    joined = weights[0] if len(group) == 1 else torch.cat([weight.to(weights[0].device) for weight in weights])
    codes_NK, scale = quantize_weight(joined, stored.recipe_of(group[0].name).weight)
    for decision, codes in zip(group, codes_NK.split([len(weight) for weight in weights]), strict=True):
        made[f"{decision.name}.weight"] = (
            codes.clone() if isinstance(decision.module, nn.Linear) else codes.t().contiguous()
        )
        made[f"{decision.name}.{stored.scale_name}"] = scale.clone()
        if stored.static:
            made[f"{decision.name}.input_scale"] = _input_scale(decision)
    return made


def _input_scale(decision: Decision) -> torch.Tensor:
    """amax / MAX of the layer's inputs in the latest step and in its slot's history."""
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
    """(names of the files, those copied from the model's own folder); the folder is renamed into place at the end."""
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


def _written(decision: Decision, recipe: Recipe, after: int) -> dict:
    row = {"name": decision.name, "shape": list(decision.shape), "recipe": recipe.name}
    return row | {"bytes_before": weight_of(decision.module).nbytes, "bytes_after": after}


def _left(name: str, module: nn.Module, shape: Iterable[int], reason: str) -> dict:
    return {"name": name, "kind": type(module).__name__, "shape": list(shape), "reason": reason}


def _notes(chosen: list[Decision], stored: Stored, model, beside: list[str]) -> list[str]:
    group, notes = stored.recipe.weight.granularity, []
    if isinstance(group, PerBlock) and group != PerBlock(128, 128) and stored.recipe.weight != MX:
        notes.append(f"blocks are {group.rows}x{group.cols}: vLLM's and transformers' kernels take 128x128")
    if stored.layout == "fp8" and not isinstance(group, PerBlock):
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
    stored_too = model.state_dict(keep_vars=True)
    rounded = [
        n for n, b in model.named_buffers() if n not in stored_too and b.dtype in (torch.bfloat16, torch.float16)
    ]
    if rounded:
        notes.append(
            f"{rounded[0]} is in 16 bits (model.to), and no checkpoint holds it: programs that load this export "
            "compute it in FP32, and give other results; change a model's dtype with from_pretrained(dtype=...) instead"
        )
    if not beside:
        notes.append("no tokenizer files found beside the model: tokenizer.save_pretrained writes them")
    return notes
