"""`fp8engine plan`: bytes, memory and predicted time of a sharded training step, on one core and no card."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

import fp8engine as fe
from fp8engine.cli.options import Planned, recipe_option
from fp8engine.cli.shared import Answer, command, console, say, table


@command("plan")
def run(
    target: Planned,
    ranks: Annotated[int, typer.Option(min=1, help="Cards.", show_default=False)],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step, for each card.")] = 8192,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence.", show_default="all of a card's")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Cards that share each layer (tensor parallel).")] = 1,
    recipe: Annotated[str, recipe_option("Of every layer that can. auto: as it begins, between samples.")] = "rowwise",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Compute each block again in backward, and keep its input alone.")
    ] = False,
) -> Answer:
    """Plan a training step on many cards: what each sends and holds, and the predicted time."""
    from fp8engine.cli.models import load_sizes

    made = fe.distributed.plan(
        load_sizes(target), ranks, tokens, recipe, tp=tp, sequence=sequence, checkpointing=checkpointing
    )
    found = made.to_dict()
    return Answer({"model": target, **found}, lambda: _tell(target, found, made.verdict()))


def _tell(target: str, found: dict, verdict: Iterable[str]) -> None:
    screen = console()
    size = f"{found['parameters'] / 1e9:.2f} B parameters, {found['ranks']} ranks, {found['tokens']} tokens a rank"
    say(screen, f"{target}: {size}, {found['recipe']}")
    _show_sizes(screen, "sent by a rank in a step, GB", _sent(found["traffic"]))
    _show_sizes(screen, "held by a rank, GB", found["memory"])
    times = table("predicted seconds of a step", ("cluster", "", "compute", "communication", "step", "hides from"))
    for cluster, ways in found["predicted"].items():
        for way, seconds in ways.items():
            cells = (f"{seconds[key]:.3f}" for key in ("compute", "communication", "step"))
            times.add_row(cluster, way, *cells, f"{seconds['hidden_from_tokens']} tokens a card")
    screen.print(times)
    say(screen, *verdict)
    if found["tp"] > 1:
        say(screen, f"tensor parallel over {found['tp']}: {found['tensor_parallel']}")
    run = " and ".join(map(str, found["blocks_run"]))
    say(screen, f"bytes: exact, of {run} blocks run, for {found['blocks']}; times: predicted; docs/distributed.md")


def _sent(traffic: dict) -> dict[str, dict[str, int]]:
    """Bytes by way and kind, without the calls."""
    return {way: {kind: sent["bytes"] for kind, sent in kinds.items()} for way, kinds in traffic.items()}


def _show_sizes(screen, title: str, ways: dict[str, dict[str, int]]) -> None:
    """A row for each kind, a column for each way, and their sums."""
    shown = table(title, ("", *ways), right=tuple(ways))
    kinds = dict.fromkeys(kind for sizes in ways.values() for kind in sizes)
    for kind in kinds:
        shown.add_row(kind, *(f"{sizes[kind] / 1e9:.3f}" if kind in sizes else "-" for sizes in ways.values()))
    shown.add_row("sum", *(f"{sum(sizes.values()) / 1e9:.3f}" for sizes in ways.values()), style="bold")
    screen.print(shown)
