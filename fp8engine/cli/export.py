"""`fp8engine export`: a Hugging Face folder's weights in FP8, in a new folder that vLLM, transformers and we read."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from fp8engine.cli.shared import AsJson, Debug, app, console, print_json
from fp8engine.convert import convert
from fp8engine.errors import ConversionError, EmulationWarning, UnknownName
from fp8engine.export import ExportReport, export
from fp8engine.export.layout import LAYOUTS

DTYPES = {"auto": "auto", "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@app.command("export")
def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face model.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; new or empty.", show_default=False)],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Its weight cast is what is written.")] = "current",
    layout: Annotated[str, typer.Option(help=f"auto, {', '.join(LAYOUTS)}.")] = "auto",
    skip: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Layers to leave alone; repeatable.")] = None,
    dtype: Annotated[str, typer.Option(help=f"Of everything else: {', '.join(DTYPES)}.")] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="Of one file.")] = "5GB",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a model's linear weights in FP8; say what was written, what was left and why."""
    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, DTYPES)
    loaded = _load(model, DTYPES[dtype])
    if skip:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmulationWarning)  # nothing is computed here
            convert(loaded, recipe, overrides=dict.fromkeys(skip, "bf16"))
    report = export(loaded, out, None if skip else recipe, layout=layout, max_shard_size=max_shard_size)
    if as_json:
        print_json(report.to_dict())
    else:
        _tell(report)


def _load(folder: Path, dtype: Any):
    """The folder's model with its weights.  Raises ConversionError, saying what was wrong."""
    if not (folder / "config.json").is_file():
        raise ConversionError(f"{folder} has no config.json: want the folder of a Hugging Face model")
    try:
        import transformers
    except ImportError as error:
        raise ConversionError("export needs transformers: pip install 'fp8engine[hf]'") from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if getattr(config, "quantization_config", None):
            method = config.quantization_config.get("quant_method")
            raise ConversionError(f"{folder} is quantised already ({method}): export takes 16- or 32-bit weights")
        named = [getattr(transformers, name, None) for name in config.architectures or []]
        kind = next((found for found in named if found is not None), transformers.AutoModel)
        return kind.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except ConversionError:
        raise
    except Exception as error:  # whatever transformers raises for a file it cannot use
        told = str(error).splitlines()[0] if str(error) else ""
        raise ConversionError(f"transformers cannot load {folder}: {type(error).__name__}: {told}") from error


def _tell(report: ExportReport) -> None:
    """What a person reads."""
    screen = console()
    table = Table(title=f"{report.path}: {report.recipe}, layout {report.layout}", title_justify="left")
    for heading in ("layer", "shape", "bytes", "in FP8"):
        table.add_column(heading, justify="left" if heading == "layer" else "right", overflow="fold")
    for layer in report.layers:
        shape = "x".join(map(str, layer["shape"]))
        table.add_row(layer["name"], shape, f"{layer['bytes_before']:,}", f"{layer['bytes_after']:,}")
    for layer in report.left:
        shape = "x".join(map(str, layer["shape"]))
        table.add_row(layer["name"], shape, "", layer["reason"], style="dim")
    screen.print(table)
    for note in report.notes:
        screen.print(f"note: {note}", markup=False, soft_wrap=True, highlight=False)
    screen.print(str(report), markup=False, soft_wrap=True, highlight=False)
