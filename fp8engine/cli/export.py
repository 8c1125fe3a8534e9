"""`fp8engine export`: a Hugging Face model's weights in FP8, in a folder for vLLM, transformers and `fe.hf.load`."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import fp8engine as fe
from fp8engine.cli.options import DTYPES, LAYOUTS, OF_THE_MODEL, All, Skip, recipe_option
from fp8engine.cli.shared import Answer, command, console, match_skips, say, say_columns
from fp8engine.errors import ConversionError, EmulationWarning, UnknownName

SIZE = r" *\d+(\.\d*)? *[KMGT]B *"
TEXTS, LENGTH = 64, 128  # paragraphs that auto decides from, and most tokens of each, as in `fp8engine compare`


@command("export")
def run(
    model: Annotated[str, typer.Argument(metavar="MODEL_DIR|HUB_ID", help="A model's files.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; new or empty.", show_default=False)],
    recipe: Annotated[
        str, recipe_option("Its weight cast is what is written. Not auto without --text: it decides from that.")
    ] = "current",
    layout: Annotated[str, typer.Option(help=f"auto, {', '.join(LAYOUTS)}.")] = "auto",
    skip: Skip = None,
    dtype: Annotated[str, typer.Option(help=f"Of everything else: {', '.join(DTYPES)}.")] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="Of one file.")] = "5GB",
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="What the model reads for -r auto.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FOLDER|HUB_ID|bytes", help="For --text.", show_default=OF_THE_MODEL)
    ] = None,
    every: All = False,
) -> Answer:
    """Write a model's linear weights in FP8; say what was written, what was left and why."""
    from safetensors import SafetensorError

    from fp8engine.cli.hub import folder_of
    from fp8engine.cli.models import load_weights, quiet, read_text, token_ids, tokens_of
    from fp8engine.convert.select import linear_layers
    from fp8engine.export.layout import choose
    from fp8engine.export.write import check_target
    from fp8engine.numerics.recipe import Auto, resolve
    from fp8engine.report.compare import batches, pieces, run_training_steps

    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, DTYPES)
    decides = isinstance(resolve(recipe), Auto)
    if (text is None) == decides:
        raise ConversionError(
            "recipe 'auto' decides from what the layers see while the model reads a text: give --text FILE, or a "
            "recipe such as 'rowwise'"
            if decides
            else f"--text is what recipe 'auto' decides from; recipe {recipe!r} decides nothing: leave it out"
        )
    if not re.fullmatch(SIZE, max_shard_size, re.IGNORECASE):
        raise ConversionError(f"--max-shard-size {max_shard_size!r}: want a number and KB, MB, GB or TB, such as 5GB")
    choose(fe.current() if decides else resolve(recipe), layout, "dynamic")  # an error comes before gigabytes are read
    try:
        check_target(out)
    except OSError as error:  # of a name that is too long
        raise ConversionError(f"cannot write {out}: {error.strerror}") from error
    chosen = [] if text is None else pieces(read_text(text), TEXTS)
    if (folder := folder_of(model)) is None:
        raise ConversionError(f"{model} is a function, and export reads files: give the model's folder or its hub id")
    loaded, missing, notes = load_weights(folder, dtype)
    if missing:
        raise ConversionError(
            f"{model}: {len(missing)} weights of {type(loaded).__name__} are not in its files, {missing[0]!r} the "
            "first: an export would hold random numbers; complete the folder, or name in config.json's `architectures` "
            "the class that was saved"
        )
    match_skips(skip or (), [name for name, *_ in linear_layers(loaded)])
    with quiet():
        if skip or decides:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EmulationWarning)  # nothing is timed here
                fe.convert(loaded, recipe, overrides=dict.fromkeys(skip or (), "bf16"))
        if decides:
            tokens = tokens_of(folder, tokenizer)
            ids, _ = token_ids(chosen, tokens, LENGTH)
            run_training_steps(loaded, batches(loaded, ids, tokens))
            notes.append(
                f"recipe 'auto' has decided from {len(ids)} parts of {text}; each layer's recipe is in the table"
            )
        asked = None if skip or decides else recipe
        try:
            report = fe.hf.export(loaded, out, asked, layout=layout, max_shard_size=max_shard_size)
        except (OSError, SafetensorError) as error:  # no permission, no space
            raise ConversionError(f"cannot write {out}: {error}; nothing was written") from error
    report = replace(report, notes=[*notes, *report.notes])
    return Answer(report.to_dict(), lambda: _tell(report, every))


def _tell(report: fe.hf.ExportReport, every: bool) -> None:
    from fp8engine.report.folded import groups, shape_of

    say(console(), str(report), *(f"note: {note}" for note in report.notes))
    rows = [["layer", "shape", "recipe", "bytes", "in FP8"]]
    for name, members in groups(report.layers, ("shape", "recipe"), every):
        before, after = (f"{sum(each[key] for each in members):,}" for key in ("bytes_before", "bytes_after"))
        rows.append([name, shape_of(members[0]), members[0]["recipe"], before, after])
    left = [["left alone", "shape", "why"]]
    left += [
        [name, shape_of(each), each["reason"]] for name, (each, *_) in groups(report.left, ("shape", "reason"), every)
    ]
    say_columns(rows, left)
