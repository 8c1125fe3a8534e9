"""Options that several commands have, and the names in their help, which is shown without importing the engine.

tests/cli/test_cli_help.py holds each tuple of names to the table of the engine that it stands for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from fp8engine.numerics.names import KnownRecipe

RECIPES = get_args(KnownRecipe)
TRAINED = ("fp32", "bf16", "fp16", "current", "delayed", "rowwise", "blockwise", "auto")
SIZES = ("tiny", "small", "medium")
LAYOUTS = ("fp8", "compressed-tensors", "fp8engine")
SHAPES = ("llm", "tune", "square", "small")
DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Llama 3 by its published sizes: (hidden size, of the MLP, layers, heads); 8 heads of keys and values.
LLAMAS = {
    "llama-3-8b": (4096, 14336, 32, 32),
    "llama-3-70b": (8192, 28672, 80, 64),
    "llama-3-405b": (16384, 53248, 126, 128),
}
LLAMA_NAMES = ", ".join(LLAMAS)

MANUAL = "Python's own manual"
OF_THE_MODEL = "the model's"


def recipe_option(help: str, default: str | None = None):
    """`--recipe`, or `-r`.  default: what the help shows instead of the parameter's own default."""
    return typer.Option("--recipe", "-r", help=help, show_default=True if default is None else default)


def recipes_option(default: str):
    """`--recipe`, which may be given several times."""
    return recipe_option(f"May be repeated: {', '.join(RECIPES)}.", default)


def _keep(ctx: typer.Context, param: typer.CallbackParam, value: bool) -> bool:
    ctx.meta[f"fp8engine.{param.name}"] = value  # meta is shared with the parent context
    return value


DEBUG, JSON = "fp8engine.debug", "fp8engine.as_json"  # in a context's meta
AsJson = Annotated[
    bool, typer.Option("--json", callback=_keep, help="Print JSON for machines on standard output, nothing else.")
]
Debug = Annotated[bool, typer.Option("--debug", callback=_keep, help="Show a traceback with an error.")]

Model = Annotated[
    str, typer.Argument(metavar="MODEL_DIR|HUB_ID|MODULE:FUNCTION", help="The model.", show_default=False)
]
Device = Annotated[str | None, typer.Option(help="As torch names it.", show_default="cuda if there is one")]
Skip = Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Layers to leave alone; repeatable.")]
All = Annotated[bool, typer.Option("--all", help="A row for every layer, also where blocks repeat.")]
Result = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result there, as JSON.")]
