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


MODELS = "MODEL_DIR|HUB_ID|MODULE:FUNCTION"
SEVERAL = "M,N,K; several joined by semicolons."


def argument(help: str, metavar: str):
    """An argument that has to be given."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def option(help: str, default: str | None = None, metavar: str | None = None):
    """An option.  default: what the help shows instead of the parameter's own default."""
    return typer.Option(help=help, show_default=True if default is None else default, metavar=metavar)


def recipe_option(help: str, default: str | None = None):
    """`--recipe`, or `-r`."""
    return typer.Option("--recipe", "-r", help=help, show_default=True if default is None else default)


def recipes_option(default: str):
    """`--recipe`, which may be given several times."""
    return recipe_option(f"May be repeated: {', '.join(RECIPES)}.", default)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines on standard output, nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")]

Model = Annotated[str, argument("The model.", MODELS)]
Planned = Annotated[str, argument(f"Or {LLAMA_NAMES}.", f"{MODELS}|LLAMA")]
Predicted = Annotated[str, argument(f"A model, or {LLAMA_NAMES}, or the sizes of one layer.", f"{MODELS}|LLAMA|M,N,K")]
Device = Annotated[str | None, option("As torch names it.", "cuda if there is one")]
Text = Annotated[Path | None, option("What to read.", MANUAL, "FILE")]
Tokenizer = Annotated[str | None, option("Of the model.", OF_THE_MODEL, "FOLDER|HUB_ID|bytes")]
Skip = Annotated[list[str] | None, option("Layers to leave alone; repeatable.", metavar="GLOB")]
Override = Annotated[list[str] | None, option("Another recipe for some; repeatable.", metavar="GLOB=RECIPE")]
All = Annotated[bool, typer.Option("--all", help="A row for every layer, also where blocks repeat.")]
Watch = Annotated[bool, typer.Option("--watch", help="On a terminal: every layer's formats, SQNR and warnings, live.")]
GemmShapes = Annotated[str | None, option(f"{', '.join(SHAPES)} or {SEVERAL}", "llm on a card, small on a CPU")]
LinearShapes = Annotated[str | None, option(SEVERAL, "a few")]
Result = Annotated[Path | None, option("Write the result there, as JSON.", metavar="FILE")]
