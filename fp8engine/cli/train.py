"""`fp8engine train`: a small GPT on real text under every recipe; a table, a picture, a sample of its output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fp8engine.cli.options import MANUAL, SIZES, TRAINED, Device, Watch, recipes_option
from fp8engine.cli.shared import Answer, command, console, device_named, say, say_files

if TYPE_CHECKING:
    from fp8engine.demo import Outcome, Result

INTERRUPTED = 128  # plus the signal's number: 130 after Ctrl-C


@command("train")
def run(
    ctx: typer.Context,
    recipe: Annotated[list[str] | None, recipes_option(" ".join(TRAINED))] = None,
    size: Annotated[str, typer.Option(help=f"The model: {', '.join(SIZES)}.")] = "small",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 400,
    batch: Annotated[int, typer.Option(help="Sequences in a step.")] = 8,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.", show_default="by size")] = None,
    text: Annotated[str | None, typer.Option(metavar="FILE", help="What to learn.", show_default=MANUAL)] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the batches.")] = 0,
    device: Device = None,
    out: Annotated[Path, typer.Option(help="Folder of the report and the checkpoints.")] = Path("report"),
    checkpoint_every: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 100,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoints in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that --out holds.")] = False,
    watch: Watch = False,
) -> Answer:
    """Train a small GPT on real text under every recipe, and compare.

    Ctrl-C finishes the step, keeps checkpoint and report, and exits with 130; --resume goes on from there.
    """
    from fp8engine.demo import DEFAULT, Config, DemoError, Session, train
    from fp8engine.demo.progress import shown

    config = Config(size=size, steps=steps, batch=batch, lr=lr, text=text, device=str(device_named(device)))
    recipes = tuple(recipe) if recipe else DEFAULT
    session = Session(recipes=recipes, seed=seed, out=out, checkpoint_every=checkpoint_every, resume=resume)
    screen = console(stderr=ctx.params["as_json"])
    if resume and overwrite:
        raise DemoError("--resume goes on with a run, --overwrite replaces it: give one of them")
    if not (resume or overwrite) and (held := session.held()):
        raise DemoError(
            f"{out} holds a run ({', '.join(held)}): --resume goes on from its checkpoints, --overwrite replaces it, "
            "and --out names another folder"
        )
    with shown(screen, recipes, steps, watch) as progress:
        outcome = train(config, session, progress)
    content = outcome.summary.to_dict() | {"files": [str(path) for path in outcome.files]}
    code = 0 if outcome.signal is None else INTERRUPTED + outcome.signal
    return Answer(content, lambda: _tell(screen, outcome), code)


def _tell(screen: Console, outcome: Outcome) -> None:
    screen.print(outcome.summary.table())
    for result in outcome.summary.samples():
        screen.rule(f"what the model trained in {result.recipe} writes", style="dim", align="left")
        screen.print(_printable(result.sample), markup=False, highlight=False)
    screen.rule(style="dim")
    for result in outcome.summary.results:
        _decided(screen, result)
    if outcome.signal is not None:
        say(screen, "stopped early: the report is up to here; go on with the same options and --resume")
    say_files(screen, outcome.files)


def _printable(text: str) -> str:
    r"""The text without characters that steer a terminal, which a model that has learned little writes.

    >>> _printable("a\x1b[31m\n\tb\r")
    'a\ufffd[31m\n\tb\ufffd'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _decided(screen: Console, result: Result, most: int = 5) -> None:
    """The last few changes of format; all of them are on the page."""
    from fp8engine.demo.progress import told

    if result.decisions:
        say(screen, f"{result.recipe} changed {len(result.decisions)} formats; the last:")
    say(screen, *(f"  {told(change)}" for change in result.decisions[-most:]))
