"""`fp8engine compare`: a model on real text, in its own precision and under FP8 recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8engine.cli.options import Device, Model, Text, Tokenizer, recipes_option
from fp8engine.cli.shared import Answer, command, console, device_named, say, say_files

if TYPE_CHECKING:
    from fp8engine.report.compare import Comparison

NOISE = "bf16"  # always the first row: the error that 16 bits have already


@command("compare")
def run(
    target: Model,
    recipe: Annotated[list[str] | None, recipes_option("auto")] = None,
    text: Text = None,
    tokenizer: Tokenizer = None,
    texts: Annotated[int, typer.Option(min=1, help="Paragraphs (or lines) of the text to read.")] = 64,
    length: Annotated[int, typer.Option(min=2, help="Most tokens of each.")] = 128,
    device: Device = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where JSON and picture go.")] = Path("report"),
) -> Answer:
    """Compare a model in bf16 and under FP8 with itself in fp32: loss, top-1 agreement, embeddings, SQNR by layer."""
    from fp8engine.cli.models import load_pretrained, read_text, token_ids
    from fp8engine.demo import disk
    from fp8engine.numerics.recipe import Auto, resolve
    from fp8engine.report.compare import batches, compare_recipes, pieces

    recipes = [resolve(name) for name in dict.fromkeys([NOISE, *(recipe or ["auto"])])]
    chosen, where = pieces(read_text(text), texts), device_named(device)
    disk.check_writable(out)
    model, tokens, notes = load_pretrained(target, tokenizer)
    model.to(where)
    ids, cut = token_ids(chosen, tokens, length)
    if cut:
        notes.append(f"{cut} of {len(ids)} texts were cut to {length} tokens")
    for asked in recipes:
        if isinstance(asked, Auto):
            notes.append(f"{asked.name} has run a few training steps on the text first, without an optimizer")
        elif asked.delayed:
            notes.append(
                f"{asked.name} has read the text first (at most {asked.window} batches), for its predicted scales"
            )
    found = compare_recipes(model, batches(model, ids, tokens), recipes)
    one = "one text has no standard error, so no ± is given: --texts and a longer --text compare more"
    several = "± is one standard error over the texts; a change of less than two may be chance"
    notes.append(one if found.texts == 1 else several)
    content = {"target": target, "text": str(text or "Python's manual (pydoc_data.topics)"), "notes": notes}
    content |= found.to_dict()
    written = _write(out, found, content)
    return Answer(content | {"files": [str(path) for path in written]}, lambda: _tell(found, notes, written))


def _write(out: Path, found: Comparison, content: dict) -> list[Path]:
    from fp8engine.demo import disk
    from fp8engine.report.compare import picture

    written = [out / "compare.json"]
    disk.write(written[0], json.dumps(content, indent=1, allow_nan=False).encode())
    if (image := picture.draw(found)) is not None:
        written.append(out / "compare.png")
        disk.write(written[1], image)
    return written


def _tell(found: Comparison, notes: list[str], written: list[Path]) -> None:
    from fp8engine.report.compare import show

    screen = console()
    screen.print(show.table(found))
    if (worst := show.layer_table(found)) is not None:
        screen.print(worst)
    say(screen, *show.choices(found), *show.left_alone(found), *(f"note: {note}" for note in notes))
    say_files(screen, written)
