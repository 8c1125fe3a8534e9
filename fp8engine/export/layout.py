"""Layouts of FP8 checkpoints: the quantization_config in config.json, and the name of each tensor.

    layout              weight's scale           scale's name, shape              read by
    compressed-tensors  per tensor               weight_scale [1]                 vLLM, transformers (a package)
                        per row                  weight_scale [N, 1]
                        per block                weight_scale [N/r, K/c]
                        per 1x32 block (MX)      weight_scale [N, K/32] of bytes, E8M0
    fp8                 per tensor               weight_scale [1]                 vLLM
                        per block                weight_scale_inv [N/r, K/c]      vLLM, transformers
    fp8engine           per tensor, row, block   as fp8; Conv1D's [K, N] too      fp8engine
                        per 1x32 block (MX)      weight_scale_inv [N, K/32] of bytes

Codes are E4M3 [N, K], scales FP32 but for those bytes, weight = codes * scale under either name; N/r and K/c round up.
A static activation scale is `input_scale` [1].  Sources: vLLM's Fp8Config and CompressedTensorsConfig, transformers'
FineGrainedFP8Config, compressed-tensors' QuantizationConfig, DeepSeek-V3's README_WEIGHTS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fp8engine.errors import ConversionError, StateError, UnknownName
from fp8engine.nn.serving import MX, config_of, scale_name, words_of
from fp8engine.numerics.cast import Cast, PerBlock, PerRow, PerTensor
from fp8engine.numerics.formats import E4M3
from fp8engine.numerics.recipe import Auto, Recipe, blockwise, current, mxfp8, rowwise

OURS = "fp8engine"
COMPRESSED = "compressed-tensors"
LAYOUTS = ("fp8", COMPRESSED, OURS)
SCHEMES = ("dynamic", "static")
STRATEGIES = {"tensor": PerTensor, "channel": PerRow, "block": PerBlock, "group": PerBlock}
PLAIN, IN_BYTES, SEVERAL = "float-quantized", "mxfp8-quantized", "mixed-precision"  # compressed-tensors' formats


@dataclass(frozen=True)
class Stored:
    """A checkpoint's quantization_config, parsed.

    recipe: of the loaded layers; its weight cast says what one stored scale covers.
    scale_name: of a weight's scale.  static: whether `input_scale` is stored too.  left: modules that are not FP8, by
    name or, under compressed-tensors, by a regular expression behind "re:".
    mixed: the recipe of every FP8 layer by name, where they differ; empty where all have `recipe`.
    """

    layout: str
    recipe: Recipe
    scale_name: str
    static: bool
    left: tuple[str, ...]
    mixed: Mapping[str, Recipe] = field(default_factory=dict)

    def recipe_of(self, *names: str) -> Recipe:
        """A layer's recipe.  names: those that it may have."""
        return next((self.mixed[name] for name in names if name in self.mixed), self.recipe)

    def leaves(self, name: str) -> bool:
        """Whether `left` has a module: by compressed-tensors' "re:" patterns, or as transformers reads others."""
        from transformers.quantizers.quantizers_utils import should_convert_module

        patterns = [entry.removeprefix("re:") for entry in self.left if entry.startswith("re:")]
        others = [entry for entry in self.left if not entry.startswith("re:")]
        return any(re.match(pattern, name) for pattern in patterns) or not should_convert_module(name, others)


def check_words(layout: str, activations: str) -> None:
    """Raises UnknownName for another layout or scheme of activations."""
    if layout != "auto" and layout not in LAYOUTS:
        raise UnknownName("layout", layout, ("auto", *LAYOUTS))
    if activations not in SCHEMES:
        raise UnknownName("activation scheme", activations, SCHEMES)


def usual(weights: Iterable[Cast]) -> str:
    """The layout that most programs read, of weights under those casts."""
    return "fp8" if all(isinstance(one.granularity, PerBlock) and one != MX for one in weights) else COMPRESSED


def choose(recipe: Recipe, layout: str, activations: str) -> Stored:
    """The layout for weights under a recipe.  layout: one of LAYOUTS, or "auto": the one that most programs read.

    Raises UnknownName for a layout or scheme, ConversionError for a recipe that the layout cannot hold.

    >>> choose(current(), "auto", "dynamic").layout, choose(blockwise(), "auto", "dynamic").scale_name
    ('compressed-tensors', 'weight_scale_inv')
    """
    check_words(layout, activations)
    if isinstance(recipe, Auto):
        raise ConversionError(
            "recipe 'auto' decides from training steps, and a plain model has run none: fe.convert(model, 'auto'), run "
            "a few steps and export the converted model, or name a recipe such as 'rowwise'"
        )
    weight, group = recipe.weight, recipe.weight.granularity
    if not (recipe.input.is_fp8 and weight.is_fp8):
        raise ConversionError(f"recipe {recipe.name!r} has no FP8 weight: name an FP8 recipe, such as 'current'")
    if weight.format != E4M3:
        raise ConversionError(f"weights of recipe {recipe.name!r} are {weight.format}; checkpoints hold E4M3")
    if layout == "auto":
        layout = usual([weight])
    if layout == "fp8" and (isinstance(group, PerRow) or weight == MX):
        raise ConversionError(f"layout 'fp8' has no scales {group} (recipe {recipe.name!r}): {COMPRESSED!r} has")
    if layout != OURS and recipe.input.format != E4M3:
        raise ConversionError(
            f"inputs of recipe {recipe.name!r} are {recipe.input.format}; {layout!r} casts them to E4M3: use "
            f"layout={OURS!r}"
        )
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
    if stored.layout == OURS:
        return config_of(stored.recipe, stored.mixed, stored.scale_name, left, scheme)
    ours = {OURS: words_of(stored.recipe, stored.mixed)}
    if stored.layout == "fp8":
        group = stored.recipe.weight.granularity
        block = [group.rows, group.cols] if isinstance(group, PerBlock) else None
        # vLLM reads ignored_layers (newer versions both), transformers modules_to_not_convert.
        names = {"modules_to_not_convert": left, "ignored_layers": left}
        return {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": block, **names, **ours}
    # Where schemes differ, by name: vLLM finds "Linear" in QKVParallelLinear before it looks for q_proj.
    targets: dict[Recipe, list[str]] = {}
    for name, recipe in stored.mixed.items():
        targets.setdefault(recipe, []).append(name)
    groups = (targets or {stored.recipe: ["Linear"]}).items()
    schemes = [_scheme(*group, stored.static) for group in groups]
    formats = [IN_BYTES if recipe.weight == MX else PLAIN for recipe, _ in groups]
    if several := len(set(formats)) > 1:
        schemes = [{**scheme, "format": format} for scheme, format in zip(schemes, formats, strict=True)]
    return {
        "quant_method": COMPRESSED,
        "format": SEVERAL if several else formats[0],
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": scheme for i, scheme in enumerate(schemes)},
        "ignore": left,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        **ours,
    }


def _scheme(recipe: Recipe, targets: list[str], static: bool) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = recipe.weight.granularity
    strategy = next(name for name, kind in STRATEGIES.items() if isinstance(group, kind))
    weights = {**number, "strategy": strategy, "dynamic": False}
    inputs: dict[str, Any] = {**number, "strategy": "tensor", "dynamic": not static}
    if recipe.weight == MX:
        byte = {"strategy": "group", "group_size": MX.cols, "scale_dtype": "torch.uint8"}
        weights, inputs = weights | byte, inputs | byte
    elif isinstance(group, PerBlock):
        weights["block_structure"] = [group.rows, group.cols]
        inputs |= {"strategy": "group", "group_size": group.cols}
    elif isinstance(recipe.input.granularity, PerRow):
        inputs["strategy"] = "token"
    return {"targets": targets, "weights": weights, "input_activations": inputs, "output_activations": None}


def parse(config: Mapping[str, Any]) -> Stored:
    """A quantization_config of any program, parsed; the recipe is the one that this engine wrote into it, if it did.

    Raises UnknownName for another quant_method, StateError for contents that this engine does not read.

    >>> parse({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}).recipe.name
    'blockwise_exact'
    """
    method = config.get("quant_method")
    if method not in LAYOUTS:
        raise UnknownName("quant_method of a checkpoint", method, LAYOUTS)
    groups: dict[str, PerTensor | PerRow | PerBlock] = {}
    if method == COMPRESSED:
        groups, static = _compressed(config)
        left, weight = config.get("ignore"), groups.pop("Linear", None)
    else:
        weight, static = _fp8(config)
        left = config.get("modules_to_not_convert") or config.get("ignored_layers")
    if not isinstance(left or [], list) or not all(isinstance(name, str) for name in left or []):
        raise _cannot_read("the list of modules left alone", left)
    try:
        [re.compile(name.removeprefix("re:")) for name in left or []]
    except re.error as error:
        raise _cannot_read("a regular expression among the modules left alone", error.pattern) from error
    written = config if method == OURS else config.get(OURS)
    written = written if isinstance(written, Mapping) else {}
    own = None if written.get("recipe") is None else Recipe.from_json(json.dumps(written["recipe"]))
    if own is None and method == OURS:
        raise StateError("quantization_config of quant_method 'fp8engine' has no recipe: export the model again")
    first = weight or next(iter(groups.values()), None)
    recipe = own if own is not None and groups else _with_scales(first, own)
    each = read_recipes(written.get("recipes", []))
    mixed = {name: _with_scales(covers, each.get(name)) for name, covers in groups.items()} or each
    if static and not isinstance(recipe.input.granularity, PerTensor):
        raise StateError(f"quantization_config: static activations beside inputs cast {recipe.input.granularity}")
    name = config.get("scale_name") if method == OURS else None
    name = name or ("weight_scale" if method == COMPRESSED else scale_name(recipe.weight))
    if name not in ("weight_scale", "weight_scale_inv"):
        raise _cannot_read("scale_name", name)
    return Stored(method, recipe, name, static, tuple(left or ()), mixed)


def read_recipes(written: Any) -> dict[str, Recipe]:
    """The recipe of every layer, from the list that `to_config` writes where they differ.  Raises StateError.

    >>> found = read_recipes([{"recipe": json.loads(rowwise().to_json()), "layers": ["a", "b"]}])
    >>> [(name, recipe.name) for name, recipe in found.items()]
    [('a', 'rowwise'), ('b', 'rowwise')]
    """
    try:
        parts = [(Recipe.from_json(json.dumps(part["recipe"])), part["layers"]) for part in written]
        return {str(name): recipe for recipe, names in parts for name in names}
    except (TypeError, KeyError, AttributeError) as error:
        raise _cannot_read("recipes", written) from error


def _with_scales(weight: Any, written: Recipe | None) -> Recipe:
    """The recipe that this engine wrote beside weights with such scales; without one a recipe that has them.

    That one has exact scales of activations, as vLLM and compressed-tensors.  weight: None where no scales are named.
    """
    if written is None:
        if weight == MX.granularity:
            return mxfp8()
        if isinstance(weight, PerBlock):
            found = blockwise(weight.cols, power_of_2=False)
            return replace(found, weight=replace(found.weight, granularity=weight))
        return rowwise(power_of_2=False) if isinstance(weight, PerRow) else current()
    if weight is not None and written.weight.granularity != weight:
        raise StateError(
            f"quantization_config contradicts itself: weights {weight}, recipe {written.name!r} has weights "
            f"{written.weight.granularity}"
        )
    return written


def _fp8(config: Mapping[str, Any]) -> tuple[PerTensor | PerBlock | None, bool]:
    scheme = config.get("activation_scheme")
    if scheme not in SCHEMES:
        raise _cannot_read("activation_scheme", scheme)
    if config.get("scale_fmt", "float") != "float":
        raise _cannot_read("scale_fmt", config["scale_fmt"])
    if config["quant_method"] == OURS:
        return None, scheme == "static"
    return _block(config.get("weight_block_size"), "weight_block_size"), scheme == "static"


def _compressed(config: Mapping[str, Any]) -> tuple[dict[str, PerTensor | PerRow | PerBlock], bool]:
    """(what a scale covers by target: "Linear", or the layers' own names; whether activations are static)."""
    readable = (PLAIN, "naive-quantized", IN_BYTES)
    if config.get("format") not in (*readable, SEVERAL):
        raise _cannot_read("format", config.get("format"))
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _cannot_read("config_groups", groups)
    found, static = {}, set()
    for group in groups.values():
        targets = group.get("targets") if isinstance(group, Mapping) else None
        names = [str(name) for name in targets] if isinstance(targets, list) else ["re:"]
        if (names != ["Linear"] or len(groups) > 1) and any(n == "Linear" or n.startswith("re:") for n in names):
            raise _cannot_read("a group of config_groups", group)
        if (format := group.get("format") or config["format"]) not in readable:
            raise _cannot_read("format of a group", format)
        weights, inputs = _number(group, "weights"), _number(group, "input_activations")
        strategy = weights["strategy"] if weights.get("strategy") in STRATEGIES else None
        if strategy is None or (strategy == "group" and weights.get("group_size") != MX.cols):
            raise _cannot_read("strategy of the weights", weights.get("strategy"))
        if strategy == "block":
            covers = _block(weights.get("block_structure"), "block_structure", True)
        else:
            covers = MX.granularity if strategy == "group" else STRATEGIES[strategy]()
        found |= dict.fromkeys(names, covers)
        static.add(inputs.get("dynamic") is False)
    if len(static) > 1:
        raise _cannot_read("activations, static in some groups only,", groups)
    return found, static.pop()


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
        "quant_method 'fp8', 'compressed-tensors' (float- or mxfp8-quantized, one group for every Linear or groups "
        "that name their layers) or 'fp8engine'"
    )
