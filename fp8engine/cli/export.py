"""`fp8engine export`: a Hugging Face folder's weights in FP8, in a new folder that vLLM, transformers and we read."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from safetensors import SafetensorError

from fp8engine.cli.pretrained import load_weights, quiet
from fp8engine.cli.shared import AsJson, Debug, app, console, print_json
from fp8engine.convert import convert
from fp8engine.errors import ConversionError, EmulationWarning, UnknownName
from fp8engine.export import ExportReport, export
from fp8engine.export.layout import LAYOUTS, choose
from fp8engine.export.write import check_target
from fp8engine.recipe import resolve

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
    choose(resolve(recipe), layout, "dynamic")  # said before gigabytes are read
    check_target(out)
    loaded, random = load_weights(model, DTYPES[dtype])
    with quiet():
        if skip:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EmulationWarning)  # nothing is computed here
                convert(loaded, recipe, overrides=dict.fromkeys(skip, "bf16"))
        try:
            report = export(loaded, out, None if skip else recipe, layout=layout, max_shard_size=max_shard_size)
        except (OSError, SafetensorError) as error:  # no permission, no space
            raise ConversionError(f"cannot write {out}: {error}; nothing was written") from error
    report = replace(report, notes=random + report.notes)
    if as_json:
        print_json(report.to_dict())
    else:
        _tell(report)


def _tell(report: ExportReport) -> None:
    """What a person reads."""
    screen = console()
    table = Table(title=f"{report.path}: {report.recipe}, layout {report.layout}", title_justify="left")
    for heading in ("layer", "shape", "bytes", "in FP8", "left alone"):
        table.add_column(heading, justify="left" if heading[0] == "l" else "right", overflow="fold")
    for layer in report.layers:
        shape = "x".join(map(str, layer["shape"]))
        table.add_row(layer["name"], shape, f"{layer['bytes_before']:,}", f"{layer['bytes_after']:,}", "")
    for layer in report.left:
        table.add_row(layer["name"], "x".join(map(str, layer["shape"])), "", "", layer["reason"], style="dim")
    screen.print(table)
    for note in report.notes:
        screen.print(f"note: {note}", markup=False, soft_wrap=True, highlight=False)
    screen.print(str(report), markup=False, soft_wrap=True, highlight=False)
