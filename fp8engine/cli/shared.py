"""Parts shared by all commands: the app, errors in one line, JSON on standard output, text and tables.

No module of a command imports the engine, and with it torch, before the command runs: its help is shown without.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

import fp8engine
from fp8engine.cli.options import AsJson, Debug
from fp8engine.errors import BackendError, Fp8EngineError, UnknownName
from fp8engine.report.columns import columns, terminal_width

if TYPE_CHECKING:
    import torch

IMPOSSIBLE = 2  # exit code, as for a wrong option


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="FP8 for PyTorch: train a demo in every precision, inspect, compare and export models, check this machine.",
)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fp8engine {fp8engine.__version__}")
        raise typer.Exit


@app.callback()
def of_the_app(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of `fp8engine` itself."""


class Answer(NamedTuple):
    """What a command found.  content: what --json prints.  tell: prints it for a person.  code: the exit code."""

    content: dict
    tell: Callable[[], None]
    code: int = 0


@contextlib.contextmanager
def in_one_line(debug: bool = False) -> Iterator[None]:
    """Within it, what the engine refuses is one line on standard error, and exit code 2.  debug: a traceback."""
    try:
        yield
    except Fp8EngineError as error:
        if debug:
            raise
        text = str(error).replace("[", r"\[")  # no markup
        console(stderr=True).print(f"[bold red]error:[/] {text}", soft_wrap=True, highlight=False)
        raise typer.Exit(IMPOSSIBLE) from None


def command(name: str, group: typer.Typer = app) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Make a command of a function that gives an Answer; --json and --debug are added to its options."""

    def register(function: Callable[..., Answer]) -> Callable[..., Answer]:
        @functools.wraps(function)
        def run(as_json: bool, debug: bool, **options) -> None:
            with in_one_line(debug):
                import_engine()
                answer = function(**options)
                if as_json:
                    typer.echo(json.dumps(answer.content, indent=1, allow_nan=False))  # NaN would be our error
                else:
                    answer.tell()
            if answer.code:
                raise typer.Exit(answer.code)

        more = {"as_json": AsJson, "debug": Debug}
        kind = inspect.Parameter.KEYWORD_ONLY
        added = [inspect.Parameter(key, kind, default=False, annotation=hint) for key, hint in more.items()]
        own = inspect.signature(function, eval_str=True)
        run.__dict__["__signature__"] = own.replace(parameters=[*own.parameters.values(), *added])
        group.command(name)(run)
        return function

    return register


def import_engine() -> None:
    """Complete `import fp8engine`, of which the command line's start has imported what needs no torch."""
    if not hasattr(fp8engine, "convert"):
        importlib.import_module("torch")
        importlib.reload(fp8engine)


def device_named(asked: str | None) -> torch.device:
    """The device to run on: the one asked for, else cuda where there is one.

    Raises BackendError for one that is not there, or is neither a card nor a CPU.
    """
    import torch

    name = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # no such device; a torch without CUDA asserts
        raise BackendError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    if (where := torch.device(name)).type not in ("cpu", "cuda"):
        raise BackendError(f"device {name!r} cannot be used: want 'cuda' or 'cpu'")
    return where


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or 160 columns in a pipe."""
    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=160)


def say(screen: Console, *lines: str) -> None:
    """Print lines as they are: no markup in them, and not wrapped."""
    for line in lines:
        screen.print(line, markup=False, highlight=False, soft_wrap=True)


def table(title: str, headings: Iterable[str], right: Collection[str] = ()) -> Table:
    """An empty table.  right: the headings of columns that are aligned right."""
    made = Table(title=title, title_justify="left")
    for heading in headings:
        made.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return made


def say_columns(*tables: Sequence[Sequence[str]]) -> None:
    """Print the tables that have rows below their headings, as wide as the terminal, unwrapped in a pipe."""
    for rows in tables:
        if rows[1:]:
            say(console(), "", *columns(rows, terminal_width()))


def say_files(screen: Console, files: Sequence[Path]) -> None:
    """The files that a command wrote, and why there is no picture among them."""
    if not any(path.suffix == ".png" for path in files):
        say(screen, "no picture: matplotlib is not installed (pip install 'fp8engine[report]')")
    say(screen, f"written: {', '.join(map(str, files))}")


def match_skips(patterns: Iterable[str], names: list[str]) -> None:
    """Raise UnknownName for a --skip that names no layer."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UnknownName("--skip pattern (no linear layer matches it)", pattern, names)
