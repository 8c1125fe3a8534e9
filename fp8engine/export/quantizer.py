"""Quantizer that transformers calls for `from_pretrained(path, quantization_config=Fp8EngineConfig(...))`.

16-bit weights are cast one by one as they are read from disk, so that the 16-bit model is never whole in memory; FP8
checkpoints ("fp8engine", "fp8", "compressed-tensors") keep their codes and scales bit for bit.  The files are checked
against the config before a module is built (headers.py), and the loaded numbers afterwards.

Importing this file registers "fp8engine" with transformers, as its documentation asks of a quantisation method.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import nn

from fp8engine.convert.kinds import classes_for, is_conv1d, is_plain_linear
from fp8engine.convert.record import RECORD, Record
from fp8engine.convert.select import decide
from fp8engine.convert.undo import revert
from fp8engine.errors import BackendError, ConversionError, StateError, UnknownName, VersionError
from fp8engine.export import headers
from fp8engine.export.layers import SHARED, needed_in_16_bits
from fp8engine.export.layout import OURS, Stored, choose, read_recipes, to_config
from fp8engine.nn.serving import Served, attach, make_served, trouble
from fp8engine.numerics.recipe import Recipe, resolve

if int(transformers.__version__.split(".")[0]) < 5:  # the loader that quantises weight by weight came with 5.0
    raise VersionError(
        f"transformers {transformers.__version__} is installed; Fp8EngineConfig needs transformers>=5: "
        "pip install 'transformers>=5'"
    )

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin


class Fp8EngineConfig(QuantizationConfigMixin):
    """Options under which transformers loads a model into FP8 for inference.

    recipe: a Recipe or its name; weights are stored under its weight cast (E4M3, one byte a weight), inputs are cast
    under its input cast in every call.  modules_to_not_convert: names or globs of layers that stay in 16 bits, beside
    those that fe.convert would leave (heads, tied weights).  The other options are written by `to_dict` into
    config.json; recipes: of its layers, by name, where they differ.
    Raises UnknownName and ConversionError for a recipe that cannot be served.

    >>> Fp8EngineConfig("blockwise").to_dict()["scale_name"]
    'weight_scale_inv'
    """

    quant_method: Any

    def __init__(
        self,
        recipe: str | Recipe | dict = "current",
        modules_to_not_convert: Iterable[str] | None = None,
        activation_scheme: str = "dynamic",
        scale_name: str | None = None,
        quant_method: str = OURS,
        recipes: list | None = None,
    ):
        if quant_method != OURS:
            raise UnknownName("quant_method of Fp8EngineConfig", quant_method, [OURS])
        if isinstance(recipe, dict):
            recipe = Recipe.from_json(json.dumps(recipe))
        stored = choose(resolve(recipe), OURS, activation_scheme)
        self.quant_method, self.recipe = OURS, stored.recipe
        self.modules_to_not_convert = list(modules_to_not_convert or [])
        self.activation_scheme = activation_scheme
        self.scale_name = scale_name or stored.scale_name
        self.mixed = read_recipes(recipes or [])

    def stored(self) -> Stored:
        """The config as `export` and `load` use it."""
        left = tuple(self.modules_to_not_convert)
        return Stored(OURS, self.recipe, self.scale_name, self.activation_scheme == "static", left, self.mixed)

    def to_dict(self) -> dict[str, Any]:
        """The quantization_config of config.json."""
        return to_config(self.stored())


class Quantize(ConversionOps):
    """The cast of a weight read from disk to codes and scale."""

    def convert(self, input_dict: dict, *, model: nn.Module, **_) -> dict[str, torch.Tensor]:
        made = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            module, _ = get_module_from_name(model, name)
            if tuple(weight.shape) != tuple(module.weight.shape) or not bool(torch.isfinite(weight).all()):
                raise StateError(f"{name}: {list(weight.shape)} with NaN or Inf, or not {list(module.weight.shape)}")
            codes, scale = module.quantize_(weight)
            made |= {name: codes, f"{name.removesuffix('weight')}{module.scale_name}": scale}
        return made


class Fp8EngineQuantizer(HfQuantizer):
    """Swaps a model's linear layers for served ones before its weights are read, and checks them afterwards."""

    quantization_config: Fp8EngineConfig

    def validate_environment(self, *args, device_map=None, **kwargs):
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise BackendError("device_map puts layers on disk; FP8 codes are not offloaded there: use cpu or a device")
        if not self.pre_quantized and self.quantization_config.activation_scheme == "static":
            raise ConversionError(
                "activation_scheme='static' needs input scales, which 16-bit checkpoints do not hold: export a "
                "calibrated model with fe.hf.export(activations='static'), or use 'dynamic'"
            )

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        if not checkpoint_files:
            raise ConversionError("Fp8EngineConfig loads from safetensors files; use fe.hf.export on a model in memory")
        heads = headers.read(checkpoint_files)
        name_in_file = _names_in_file(model, heads)
        stored = self.quantization_config.stored()
        if self.pre_quantized:
            layers, self.left = _stored_layers(model, heads, name_in_file, stored)
        else:
            layers, self.left = self._chosen_layers(model, heads, name_in_file)
        recipes, self.classes = {}, {name: type(module) for name, module in layers}
        for name, module in layers:
            key = name_in_file[f"{name}.weight"].removesuffix(".weight")
            recipes[name] = stored.recipe_of(key, name)
            kind = classes_for(module)[1]
            served = make_served(module, kind, recipes[name], stored.static, stored.scale_name)
            if self.pre_quantized:
                _fit_scales(served, f"{key}.", heads)
        self.quantization_config.mixed = recipes if stored.mixed else {}
        self.quantization_config.modules_to_not_convert = list(self.left)

    def _chosen_layers(self, model, heads, name_in_file) -> tuple[list, dict[str, str]]:
        """(layers to cast, other layers -> why they are left) of a model whose files hold 16- or 32-bit weights."""
        if found := [name for name, head in heads.items() if head.dtype == headers.FP8]:
            raise StateError(f"{found[0]} is FP8 already, and config.json has no quantization_config to read it by")
        decisions = decide(model, self.quantization_config.recipe)
        names = [decision.name for decision in decisions]
        for pattern in self.quantization_config.modules_to_not_convert:
            if not fnmatch.filter(names, pattern):
                raise UnknownName("modules_to_not_convert pattern (no linear layer matches it)", pattern, names)
        needed, skipped = needed_in_16_bits(model), self.quantization_config.modules_to_not_convert
        layers, left = [], {}
        for decision in decisions:
            name = decision.name
            why = decision.reason if decision.recipe is None else needed.get(id(decision.module))
            if decision.parameter != "weight":
                why = why or "experts in one 3-D parameter: read in 16 bits"
            elif any(fnmatch.fnmatchcase(name, pattern) for pattern in skipped):
                why = "modules_to_not_convert"
            elif f"{name}.weight" not in name_in_file:
                why = why or "its weight is not in the checkpoint"
            if why is None:
                layers.append((name, decision.module))
            else:
                left[name] = why
        if not layers:
            why = "; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:4])
            raise ConversionError(f"nothing to load into FP8 in {type(model).__name__}: {why or 'no linear layers'}")
        return layers, left

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        module, name = get_module_from_name(model, param_name)
        return not self.pre_quantized and isinstance(module, Served) and name == "weight"

    def get_quantize_ops(self) -> Quantize:
        return Quantize()

    def _process_model_after_weight_loading(self, model, **kwargs):
        layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Served)]
        for name, layer in layers:
            if why := trouble(layer):
                raise StateError(f"{name}: {why}: the checkpoint is damaged")
            layer.lay_out()
            layer.requires_grad_(False)
        setattr(model, RECORD, Record(dict(self.left), attach(layers), classes=self.classes))
        return model

    def _dequantize(self, model, dtype=None):
        of_the_model = model.config.dtype
        for tensor in itertools.chain(revert(model).parameters(), model.buffers()):
            if tensor.dtype == of_the_model:  # not what it keeps in FP32, such as rotary frequencies
                tensor.data = tensor.data.to(dtype)
        return model

    @property
    def is_trainable(self) -> bool:
        return True  # adapters on it: transformers' Trainer asks for them

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True


register_quantization_config(OURS)(Fp8EngineConfig)
register_quantizer(OURS)(Fp8EngineQuantizer)


def _names_in_file(model, heads: dict[str, headers.Header]) -> dict[str, str]:
    """A parameter's name in the model -> in the file, as transformers' loader renames."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    parameters = model.state_dict()
    found = {}
    for name in heads:
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        if renamed not in parameters and name in parameters:
            renamed = name
        found[renamed] = name
    return found


def _fit_scales(served: Served, key: str, heads: dict[str, headers.Header]) -> None:
    """Give scales what the files have: the shape [] or [1] for one number, bytes (E8M0) or numbers.

    Raises StateError for another shape, and for bytes where the recipe is not MX.
    """
    for name, scale in served.scales.items():
        head, shape = heads[key + name], tuple(scale.shape)
        if head.shape != shape and not (head.shape == () and shape == (1,)):
            raise StateError(f"{key}{name} in {head.file.name} is {list(head.shape)}; this layer has {list(shape)}")
        dtype = torch.uint8 if head.dtype == headers.E8M0 else torch.float32
        if dtype == torch.uint8 and scale.dtype != torch.uint8:
            raise StateError(f"{key}{name} in {head.file.name} is {head.dtype}; want F32")
        empty = torch.empty(head.shape, dtype=dtype, device=scale.device)
        served.register_parameter(name, nn.Parameter(empty, requires_grad=False))


def _stored_layers(model, heads, name_in_file: dict[str, str], stored: Stored) -> tuple[list, dict[str, str]]:
    """(layers that are FP8 in the files, other layers -> why not).  Raises StateError where the config contradicts."""
    fp8 = set(headers.fp8_layers(heads, stored))
    layers, left, used, needed = [], {}, set(), needed_in_16_bits(model)
    for name, module in model.named_modules():
        if not (is_plain_linear(type(module)) or is_conv1d(module)):
            continue
        key = name_in_file.get(f"{name}.weight", "").removesuffix(".weight")
        if key not in fp8:
            names = {name, key} - {""}
            if key and not any(stored.leaves(one) for one in names):
                head = heads[f"{key}.weight"]
                raise StateError(
                    f"{key}.weight in {head.file.name} is {head.dtype} without a scale, and config.json does not list "
                    "it among the modules that are not FP8"
                )
            why = "in 16 bits in the checkpoint" if key else "its weight is not in the checkpoint"
            left[name] = needed.get(id(module), why)
            continue
        if needed.get(id(module)) == SHARED:
            where = f"{type(model).__name__} ties {name} to a layer that is not"
            raise StateError(f"{key}.weight is FP8, and {where}: write the files anew from a model in 16 bits")
        shape = heads[f"{key}.weight"].shape
        if shape != tuple(module.weight.shape):
            raise StateError(f"{key}.weight is {list(shape)}; {name} of this config has {list(module.weight.shape)}")
        layers.append((name, module))
        used.add(key)
    known = {key.removesuffix(".weight") for parameter, key in name_in_file.items() if parameter in model.state_dict()}
    if lost := sorted((fp8 & known) - used):
        raise StateError(f"{lost[0]}.weight is FP8, and is no linear layer of {type(model).__name__}")
    if not layers:
        raise StateError(f"no FP8 weight of the files belongs to a layer of {type(model).__name__}: another model's?")
    return layers, left
