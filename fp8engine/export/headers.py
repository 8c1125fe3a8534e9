"""Headers of a checkpoint's safetensors files, checked against its config.json without reading the weights.

    every E4M3 tensor     is a 2-D `<layer>.weight`, has its scale beside it in FP32, in 16 bits or as bytes (E8M0)
    every scale           has its E4M3 weight
    modules left alone    hold none

All of it is checked before a module is built, so that nothing is half loaded; the shape of each scale when its layer is
there (quantizer.py), before a weight is read.  Names here are the files' own; the names of a model's modules may differ
(transformers renames while it loads).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fp8engine.errors import StateError
from fp8engine.export.layout import Stored

FP8 = "F8_E4M3"  # safetensors' name of float8_e4m3fn
OTHER_FP8 = ("F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0")
SCALES, E8M0 = ("F32", "BF16", "F16"), "U8"
SCALE_NAMES = ("weight_scale", "weight_scale_inv", "input_scale", "activation_scale")
WEIGHT = ".weight"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Header(NamedTuple):
    """One tensor of a file: its dtype by safetensors' name, its shape, and the file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder.  Raises StateError where there are none, or one is missing."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise StateError(f"{folder} holds neither {SINGLE} nor {INDEX}: FP8 weights are read from safetensors")
        return [folder / SINGLE]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise StateError(f"{index} is damaged ({type(error).__name__}: {error}): export the model again") from error
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise StateError(f"{folder}: {len(missing)} of {len(names)} files are missing, {missing[0]} the first")
    return [folder / name for name in names]


def read(files: Iterable[Path | str]) -> dict[str, Header]:
    """Header of every tensor.  Raises StateError for a file that is no safetensors file, is cut off or damaged."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Header] = {}
    for file in map(Path, files):
        if file.suffix != ".safetensors":
            raise StateError(f"{file}: FP8 weights are read from safetensors files; save the model as such first")
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                    piece = opened.get_slice(name)
                    found[name] = Header(piece.get_dtype(), tuple(piece.get_shape()), file)
        except (SafetensorError, OSError) as error:
            raise StateError(f"{file} cannot be read, cut off or damaged: {error}") from error
    return found


def fp8_layers(heads: Mapping[str, Header], stored: Stored) -> list[str]:
    """The layers whose weights are FP8, each with the scale it needs.

    Raises StateError for anything that does not fit together, naming tensor and file.
    """
    layers = []
    for name, head in heads.items():
        if head.dtype in OTHER_FP8:
            raise StateError(f"{name} in {head.file.name} is {head.dtype}; weights are read as {FP8}")
        if head.dtype == FP8:
            if not name.endswith(WEIGHT) or len(head.shape) != 2:
                raise StateError(f"{name} in {head.file.name} is {FP8} {list(head.shape)}, not a layer's 2-D weight")
            layers.append(name.removesuffix(WEIGHT))
    if not layers:
        raise StateError(
            f"the files hold no {FP8} weight, and config.json says quant_method {stored.layout!r}: "
            "it belongs to another checkpoint"
        )
    for layer in layers:
        _check_scale(layer, heads, stored)
    scales = {f"{layer}.{key}" for layer in layers for key in (stored.scale_name, "input_scale")}
    for name, head in heads.items():
        if name.rpartition(".")[2] in SCALE_NAMES and name not in scales:
            raise StateError(
                f"{name} in {head.file.name} has no {FP8} weight that it belongs to under quant_method "
                f"{stored.layout!r}, whose scales are {stored.scale_name}"
            )
    if stray := sorted(set(layers) & set(stored.left)):
        raise StateError(f"{stray[0]}.weight is {FP8}, and config.json lists it among the modules that are not")
    return layers


def _check_scale(layer: str, heads: Mapping[str, Header], stored: Stored) -> None:
    for key in (stored.scale_name, "input_scale") if stored.static else (stored.scale_name,):
        head = heads.get(f"{layer}.{key}")
        if head is None:
            other = next((k for k in ("weight_scale", "weight_scale_inv") if f"{layer}.{k}" in heads), None)
            hint = f" (there is a {other})" if other else ""
            file = heads[layer + WEIGHT].file.name
            raise StateError(f"{layer}.weight in {file} is {FP8} without its {key}{hint}: layer not usable")
        if head.dtype not in (*SCALES, E8M0):
            raise StateError(f"{layer}.{key} in {head.file.name} is {head.dtype}; want F32")
