"""Parts of every command: the app, errors in one line, JSON on standard output, a console for people."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from typer.core import TyperGroup

from fp8engine.errors import Fp8EngineError, UnknownName

IMPOSSIBLE = 2  # exit code, as for a wrong option
DEBUG = "fp8engine.debug"


def _keep(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[DEBUG] = value  # meta is shared with the parent context
    return value


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines on standard output, nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", callback=_keep, help="Show a traceback with an error.")]


class Commands(TyperGroup):
    """The group of commands: what the engine refuses is one line on standard error, and exit code 2."""

    def invoke(self, ctx):
        """Run the command asked for."""
        try:
            return super().invoke(ctx)
        except Fp8EngineError as error:
            if ctx.meta.get(DEBUG):
                raise
            console(stderr=True).print(f"[bold red]error:[/] {_escape(str(error))}", soft_wrap=True, highlight=False)
            raise typer.Exit(IMPOSSIBLE) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="FP8 for PyTorch: train a demo in every precision, inspect, compare and export models, check this machine.",
)


def console(*, stderr: bool = False) -> Console:
    """A console of the terminal's width; of 160 columns in a pipe, where nothing tells."""
    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=160)


def print_json(content: dict) -> None:
    """One JSON document; NaN is not JSON, and is an error in the program."""
    typer.echo(json.dumps(content, indent=1, allow_nan=False))


def match_skips(patterns: Iterable[str], names: list[str]) -> None:
    """Raises UnknownName for a --skip that names no layer."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UnknownName("--skip pattern (no linear layer matches it)", pattern, names)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
