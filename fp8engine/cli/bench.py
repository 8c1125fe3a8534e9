"""`fp8engine bench gemm | quantize | linear | block | model | tune`: benchmarks of this machine, and the tuner.

`bench predict` is in predict.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from fp8engine import files
from fp8engine.bench import cases, casts, generate, linear, steps
from fp8engine.bench import gemm as matmuls
from fp8engine.bench.tune import OPERATIONS, difference, dump, tune
from fp8engine.cli.shared import AsJson, Debug, app, console, print_json
from fp8engine.errors import BackendError

HELP = "Measure the matmuls on this machine; tune the kernels on a card; predict without one."
bench = typer.Typer(no_args_is_help=True, help=HELP)
app.add_typer(bench, name="bench")

Device = Annotated[str | None, typer.Option(help="As torch names it.", show_default="cuda if there is one")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result there, as JSON.")]
LISTS = f"{', '.join(cases.LISTS)} or M,N,K; several joined by semicolons."


@bench.command("gemm")
def gemm(
    shapes: Annotated[str | None, typer.Option(help=LISTS, show_default="llm on a card, small on a CPU")] = None,
    device: Device = None,
    out: Out = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Every matmul there is here: checked against float64, then timed beside torch's; no ratio for a wrong result."""
    where = _where(device)
    asked = cases.parse(shapes if shapes is not None else "llm" if where.type == "cuda" else "small")
    result = matmuls.gemm(asked, where)
    if out is not None:
        _save(out, result)
    if as_json:
        print_json(result)
    else:
        tell(result)


@bench.command("quantize")
def quantize(
    shapes: Annotated[str | None, typer.Option(help="M,K; several joined by semicolons.", show_default="a few")] = None,
    device: Device = None,
    out: Out = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Every cast there is here: checked bit for bit, then its bytes over its time, beside the machine's copy."""
    where = _where(device)
    asked = casts.parse(shapes) if shapes is not None else casts.SHAPES[where.type]
    _give(casts.casts(asked, where), casts.line, out, as_json)


@bench.command("linear")
def linear_layer(
    shapes: Annotated[
        str | None, typer.Option(help="M,N,K; several joined by semicolons.", show_default="a few")
    ] = None,
    device: Device = None,
    out: Out = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """A Linear's forward and backward under every recipe, checked, then timed beside nn.Linear in BF16."""
    where = _where(device)
    asked = cases.parse(shapes) if shapes is not None else linear.SHAPES[where.type]
    _give(linear.linear(asked, where), linear.line, out, as_json)


@bench.command("amp", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def amp(debug: Debug = False) -> None:
    """Moved out of the package: it needs a checkout."""
    raise BackendError("'bench amp' has left the package: run python benchmarks/amp.py in a checkout of the repository")


@bench.command("block")
def block(
    device: Device = None,
    out: Out = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """A decoder block's forward and backward under every recipe, checked, then timed beside BF16's; bytes saved."""
    where = _where(device)
    _give(steps.steps(steps.CASES[where.type], where), steps.line, out, as_json)


@bench.command("model")
def model(
    writing: Annotated[bool, typer.Option("--generate", help="Write tokens one by one, instead of training.")] = False,
    device: Device = None,
    out: Out = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Models like Llama, BERT and ViT: forward and backward under every recipe, or generation, beside BF16's."""
    where = _where(device)
    if writing:
        _give(generate.generate(generate.CASES[where.type], where), generate.line, out, as_json)
    else:
        _give(steps.steps(steps.MODELS[where.type], where), steps.line, out, as_json)


@bench.command("tune")
def command(
    operation: Annotated[
        list[str] | None,
        typer.Option("--operation", help=f"May be repeated: {', '.join(OPERATIONS)}.", show_default="all"),
    ] = None,
    shapes: Annotated[str, typer.Option(help=LISTS)] = "tune",
    device: Device = None,
    replace: Annotated[
        bool, typer.Option("--write/--dry-run", help="Replace kernels/tuning.json, or only show the difference.")
    ] = False,
    limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="After it, no further candidates.", show_default="none")
    ] = math.inf,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Search the kernels' configurations on this card: each verified, then timed; the fastest goes into the table.

    Candidates that are predicted to be fast come first; what is measured decides.
    """
    where = _where(device)
    table, tried = tune(operation, cases.parse(shapes), where, lambda line: typer.echo(line, err=True), limit)
    from fp8engine.kernels.tuning import TABLE  # optional, and there once `tune` has run

    new = dump(table)
    diff = difference(TABLE.read_text(), new)
    if replace:
        files.write(TABLE, new)
    if as_json:
        print_json({"table": table, "tried": tried, "diff": diff, "written": str(TABLE) if replace else None})
    else:
        typer.echo(diff or "nothing changes", nl=not diff)
        typer.echo(f"written to {TABLE}" if replace else "not written: --write replaces the table", err=True)


def _where(name: str | None) -> torch.device:
    """The device meant.  Raises BackendError for one that is not there."""
    try:
        where = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise BackendError(f"no device {name!r}; want cpu, cuda or cuda:1") from None
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise BackendError(f"no device {name!r}: torch finds {torch.cuda.device_count()} CUDA devices")
    return where


def _give(result: dict, line: Callable[[dict], str], out: Path | None, as_json: bool) -> None:
    """Print a result as JSON or a line a row; `out` gets it as JSON."""
    if out is not None:
        _save(out, result)
    if as_json:
        print_json(result)
        return
    about = result["machine"]
    typer.echo(f"{about['card'] or about['cpu']}, torch {about['torch']}: {result['what']}")
    for row in result["rows"]:
        typer.echo(line(row))


def _save(path: Path, result: dict) -> None:
    try:
        files.write(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise BackendError(f"cannot write {path}: {error.strerror}") from None


def tell(result: dict) -> None:
    """Print the result of `bench gemm` as a table a shape."""
    screen, about, most = console(), result["machine"], result["limits"]
    screen.print(f"{about['card'] or about['cpu']}, torch {about['torch']}: {result['what']}", soft_wrap=True)
    screen.print(
        f"measured limits: {most['matmul_16_bits_tflops']:.3g} TFLOP/s in 16 bits, "
        f"{most['copy_gb_per_s']:.4g} GB/s copied"
    )
    for shape in dict.fromkeys(tuple(row["shape"]) for row in result["rows"]):
        table = Table(title="M, N, K = {}, {}, {}".format(*shape), title_justify="left")
        table.add_column("matmul")
        for heading in ("error", "ms", "spread", "TFLOP/s", "of 16-bit rate", "x torch's same", "x torch 16 bits"):
            table.add_column(heading, justify="right")
        for row in result["rows"]:
            if tuple(row["shape"]) == shape:
                table.add_row(row["name"] + (" (emulated)" if row["emulated"] else ""), *_cells(row))
        screen.print(table)
    for name, found in result["summary"].items():
        if name != "best_tflops":
            mean, least = found["geometric_mean"], found["minimum"]
            note = found["note"] if mean is None else f"geometric mean {mean:.3f}, least {least:.3f} of torch's speed"
            screen.print(f"{name}: {note}", highlight=False)


def _cells(row: dict) -> list[str]:
    if row["correct"] is None:
        return [f"[yellow]{row['why']}".replace("[sm", r"\[sm")]
    error = "not finite" if row["error"] is None else f"{row['error']:.1e}"
    if not row["correct"]:
        return [f"[red]{error}", "wrong"]
    rate = [
        f"{1e3 * row['seconds']:.3f}",
        f"{row['spread']:.0%}",
        f"{row['tflops']:.3g}",
        f"{row['of_16_bit_rate']:.0%}",
    ]
    ratios = ("" if row[key] is None else f"{row[key]:.2f}" for key in ("over_peer", "over_16_bits"))
    return [error, *rate, *ratios]
