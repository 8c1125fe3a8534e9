"""How FP8 weights lie in a checkpoint: what config.json says of them, and what each tensor is called.

    layout              weight's scale           scale's name, shape              read by
    compressed-tensors  per tensor               weight_scale [1]                 vLLM, transformers (a package)
                        per row                  weight_scale [N, 1]
                        per block                weight_scale [N/r, K/c]
    fp8                 per tensor               weight_scale [1]                 vLLM
                        per block                weight_scale_inv [N/r, K/c]      vLLM, transformers
    fp8engine           per tensor, row, block   as fp8; Conv1D's [K, N] too      fp8engine

Codes are E4M3 [N, K], scales FP32, weight = codes * scale under either name; N/r and K/c round up.  A static
activation scale is `input_scale` [1].  Sources: vLLM's Fp8Config and CompressedTensorsConfig, transformers'
FineGrainedFP8Config, compressed-tensors' QuantizationConfig, DeepSeek-V3's README_WEIGHTS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fp8engine.errors import ConversionError, StateError, UnknownName
from fp8engine.formats import E4M3
from fp8engine.modules.serving import scale_name
from fp8engine.recipe import Cast, PerBlock, PerRow, PerTensor, Recipe, blockwise, current, rowwise

OURS = "fp8engine"
COMPRESSED = "compressed-tensors"
LAYOUTS = ("fp8", COMPRESSED, OURS)
SCHEMES = ("dynamic", "static")
STRATEGIES = {"tensor": PerTensor, "channel": PerRow, "block": PerBlock}


@dataclass(frozen=True)
class Stored:
    """What a checkpoint's quantization_config says.

    recipe: what layers compute in once they are loaded; its weight cast is what one stored scale covers.
    scale_name: of a weight's scale.  static: whether `input_scale` is stored too.  left: modules that are not FP8.
    """

    layout: str
    recipe: Recipe
    scale_name: str
    static: bool
    left: tuple[str, ...]

    @property
    def weight(self) -> Cast:
        """What one scale of a weight covers."""
        return self.recipe.weight


def choose(recipe: Recipe, layout: str, activations: str) -> Stored:
    """The layout for weights under a recipe.  layout: one of LAYOUTS, or "auto": the one that most programs read.

    Raises UnknownName for a layout or scheme, ConversionError for a recipe that the layout cannot hold.

    >>> choose(current(), "auto", "dynamic").layout, choose(blockwise(), "auto", "dynamic").scale_name
    ('compressed-tensors', 'weight_scale_inv')
    """
    if layout != "auto" and layout not in LAYOUTS:
        raise UnknownName("layout", layout, ("auto", *LAYOUTS))
    if activations not in SCHEMES:
        raise UnknownName("activation scheme", activations, SCHEMES)
    weight, group = recipe.weight, recipe.weight.granularity
    if not (recipe.input.is_fp8 and weight.is_fp8):
        raise ConversionError(f"recipe {recipe.name!r} has no FP8 weight: name an FP8 recipe, such as 'current'")
    if weight.format != E4M3:
        raise ConversionError(f"weights of recipe {recipe.name!r} are {weight.format}; checkpoints hold E4M3")
    if layout == "auto":
        layout = "fp8" if isinstance(group, PerBlock) else COMPRESSED
    if layout == "fp8" and isinstance(group, PerRow):
        raise ConversionError(f"layout 'fp8' has no scales per row (recipe {recipe.name!r}): {COMPRESSED!r} has")
    static = activations == "static"
    if static and not isinstance(recipe.input.granularity, PerTensor):
        raise ConversionError(
            f"activations='static' is one scale per tensor; recipe {recipe.name!r} casts inputs "
            f"{recipe.input.granularity}: use activations='dynamic', or a recipe such as 'current'"
        )
    name = "weight_scale" if layout == COMPRESSED else scale_name(weight)
    return Stored(layout, recipe, name, static, ())


def to_config(stored: Stored) -> dict[str, Any]:
    """The quantization_config of config.json; under "fp8engine" the recipe, which other programs pass over.

    >>> config = to_config(choose(blockwise(), "auto", "dynamic"))
    >>> config["quant_method"], config["weight_block_size"], config["activation_scheme"]
    ('fp8', [128, 128], 'dynamic')
    """
    scheme, left = SCHEMES[stored.static], list(stored.left)
    ours = {"recipe": json.loads(stored.recipe.to_json())}
    group = stored.weight.granularity
    if stored.layout == COMPRESSED:
        return {
            "quant_method": COMPRESSED,
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": _scheme(stored)},
            "ignore": left,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
            OURS: ours,
        }
    # vLLM reads ignored_layers (newer versions both), transformers modules_to_not_convert.
    config = {"activation_scheme": scheme, "modules_to_not_convert": left}
    if stored.layout == "fp8":
        block = [group.rows, group.cols] if isinstance(group, PerBlock) else None
        return {"quant_method": "fp8", **config, "ignored_layers": left, "weight_block_size": block, OURS: ours}
    return {"quant_method": OURS, **config, "scale_name": stored.scale_name, **ours}


def _scheme(stored: Stored) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = stored.weight.granularity
    strategy = next(name for name, kind in STRATEGIES.items() if isinstance(group, kind))
    weights = {**number, "strategy": strategy, "dynamic": False}
    inputs: dict[str, Any] = {**number, "strategy": "tensor", "dynamic": not stored.static}
    if isinstance(group, PerBlock):
        weights["block_structure"] = [group.rows, group.cols]
        inputs |= {"strategy": "group", "group_size": group.cols}
    elif isinstance(stored.recipe.input.granularity, PerRow):
        inputs["strategy"] = "token"
    return {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}


def parse(config: Mapping[str, Any]) -> Stored:
    """What a quantization_config says, whoever wrote it; the recipe is ours where we wrote it.

    Raises UnknownName for another quant_method, StateError for one that says something we cannot read.

    >>> parse({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}).recipe.name
    'blockwise'
    """
    method = config.get("quant_method")
    if method not in LAYOUTS:
        raise UnknownName("quant_method of a checkpoint", method, LAYOUTS)
    if method == COMPRESSED:
        found, left = _compressed(config), config.get("ignore")
    else:
        found = _fp8(config)
        left = config.get("modules_to_not_convert") or config.get("ignored_layers")
    if not isinstance(left or [], list) or not all(isinstance(name, str) for name in left or []):
        raise _cannot_read("the list of modules left alone", left)
    weight, static = found
    recipe = _recipe(config, method, weight)
    if static and not isinstance(recipe.input.granularity, PerTensor):
        raise StateError(f"quantization_config: static activations beside inputs cast {recipe.input.granularity}")
    name = config.get("scale_name") if method == OURS else None
    name = name or ("weight_scale" if method == COMPRESSED else scale_name(recipe.weight))
    if name not in ("weight_scale", "weight_scale_inv"):
        raise _cannot_read("scale_name", name)
    return Stored(method, recipe, name, static, tuple(left or ()))


def _recipe(config: Mapping[str, Any], method: str, weight: Any) -> Recipe:
    """Ours where it is written down and agrees with the rest; else the one whose weights are scaled so."""
    written = config if method == OURS else config.get(OURS)
    if isinstance(written, Mapping) and "recipe" in written:
        recipe = Recipe.from_json(json.dumps(written["recipe"]))
        if weight is not None and recipe.weight.granularity != weight:
            raise StateError(
                f"quantization_config contradicts itself: weights {weight}, recipe {recipe.name!r} has weights "
                f"{recipe.weight.granularity}"
            )
        return recipe
    if method == OURS:
        raise StateError("quantization_config of quant_method 'fp8engine' has no recipe: export the model again")
    if isinstance(weight, PerBlock):
        found = blockwise(weight.cols)
        return replace(found, weight=replace(found.weight, granularity=weight))
    return rowwise() if isinstance(weight, PerRow) else current()


def _fp8(config: Mapping[str, Any]) -> tuple[PerTensor | PerBlock | None, bool]:
    scheme = config.get("activation_scheme")
    if scheme not in SCHEMES:
        raise _cannot_read("activation_scheme", scheme)
    if config.get("scale_fmt", "float") != "float":
        raise _cannot_read("scale_fmt", config["scale_fmt"])
    if config["quant_method"] == OURS:
        return None, scheme == "static"
    return _block(config.get("weight_block_size"), "weight_block_size"), scheme == "static"


def _compressed(config: Mapping[str, Any]) -> tuple[PerTensor | PerRow | PerBlock, bool]:
    if config.get("format") not in ("float-quantized", "naive-quantized"):
        raise _cannot_read("format", config.get("format"))
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _cannot_read("config_groups", groups)
    (group,) = groups.values()
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        raise _cannot_read("the group of config_groups", group)
    weights, inputs = _number(group, "weights"), _number(group, "input_activations")
    strategy = weights["strategy"] if weights.get("strategy") in STRATEGIES else None
    if strategy is None:
        raise _cannot_read("strategy of the weights", weights.get("strategy"))
    static = inputs.get("dynamic") is False
    if strategy == "block":
        return _block(weights.get("block_structure"), "block_structure", needed=True), static
    return STRATEGIES[strategy](), static


def _number(group: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    number = group.get(what)
    eight_bits = isinstance(number, Mapping) and number.get("num_bits") == 8 and number.get("type") == "float"
    if not isinstance(number, Mapping) or not eight_bits or not number.get("symmetric", True):
        raise _cannot_read(f"{what} of config_groups", number)
    return number


def _block(size: Any, what: str, needed: bool = False) -> PerTensor | PerBlock:
    if size is None and not needed:
        return PerTensor()
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(s, int) and s > 0 for s in size):
        raise _cannot_read(what, size)
    return PerBlock(*size)


def _cannot_read(what: str, value: object) -> StateError:
    return StateError(
        f"quantization_config: {what} is {value!r}, which this engine does not read; it reads FP8 weights (E4M3) of "
        "quant_method 'fp8', 'compressed-tensors' (float-quantized, one group for every Linear) or 'fp8engine'"
    )
