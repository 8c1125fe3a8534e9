"""How fast a model like Llama writes: it reads a prompt at once, then a token at a time from kept keys and values.

    bf16               the model in BF16, eager
    fp8engine X        fe.convert with the recipe X; the weights' FP8 copies are kept between tokens ("inference")
    served X           weights stored as FP8 codes (fe.hf.load), inputs cast as X says

A variant is checked before it is timed: the logits of a given text, read piece by piece, against the FP32 model's,
which reads it at once.  At one token a step the matmuls are bound by reading weights, so that what counts is bytes; on
a CPU FP8 is emulated.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8engine.autograd.attention import Cache
from fp8engine.bench.cases import sqnr
from fp8engine.bench.networks import NETWORKS, Size
from fp8engine.bench.run import machine
from fp8engine.bench.steps import BASE, LEAST_SQNR
from fp8engine.bench.timing import Clock, clock, measure
from fp8engine.convert.swap import convert
from fp8engine.errors import EmulationWarning
from fp8engine.nn.serving import ServedLinear
from fp8engine.numerics.recipe import resolve
from fp8engine.ops import device


class Case(NamedTuple):
    """A model, how many texts at once, tokens of the prompt, tokens to write."""

    size: Size
    batch: int
    prompt: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.size}, {self.batch} x ({self.prompt} + {self.tokens}) tokens"


CASES = {
    "cuda": (
        Case(Size(2048, 5632, 16, 4, 12, 32000), 8, 512, 64),
        Case(Size(2048, 5632, 16, 4, 12, 32000), 1, 512, 64),
    ),
    "cpu": (Case(Size(128, 384, 4, 2, 2), 2, 32, 8),),
}


def write(model: nn.Module, prompt_BT: torch.Tensor, tokens: int) -> torch.Tensor:
    """The most likely next tokens [B, tokens], one after another."""
    with torch.inference_mode():
        caches = [Cache() for _ in model.blocks]  # pyright: ignore[reportGeneralTypeIssues]
        written = [model(prompt_BT, caches)[:, -1].argmax(-1, keepdim=True)]
        for _ in range(tokens - 1):
            written.append(model(written[-1], caches)[:, -1].argmax(-1, keepdim=True))
        return torch.cat(written, 1)


def piecewise(model: nn.Module, text_BT: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits [B, T, vocabulary] of a given text, its first tokens read at once and the others one by one."""
    with torch.inference_mode():
        caches = [Cache() for _ in model.blocks]  # pyright: ignore[reportGeneralTypeIssues]
        pieces = text_BT.split([prompt, *[1] * (text_BT.shape[1] - prompt)], 1)
        return torch.cat([model(piece, caches) for piece in pieces], 1)


def variants() -> dict[str, Callable[[nn.Module], nn.Module]]:
    """What can be measured, made of the FP32 model."""
    found: dict[str, Callable[[nn.Module], nn.Module]] = {BASE: lambda model: model.bfloat16()}
    found |= {f"fp8engine {recipe}": _converted(recipe) for recipe in ("current", "rowwise", "blockwise")}
    return found | {f"served {recipe}": _served(recipe) for recipe in ("current", "blockwise")}


def generate(
    cases: Sequence[Case],
    where: torch.device,
    ways: dict[str, Callable[[nn.Module], nn.Module]] | None = None,
    ticks: Clock | None = None,
    turns: int | None = None,
) -> dict[str, Any]:
    """Check and time every variant of every case: {"machine", "what", "rows"}."""
    ways = variants() if ways is None else ways
    ticks = clock(where) if ticks is None else ticks
    turns = (10 if where.type == "cuda" else 3) if turns is None else turns
    rows = [row for case in cases for row in _compare(case, where, ways, ticks, turns)]
    what = "generation" + ("" if device.has_fp8(where) else "; FP8 emulated: values, not speed")
    return {"machine": machine(where), "what": what, "rows": rows}


def _compare(case: Case, where: torch.device, ways, ticks: Clock, turns: int) -> list[dict]:
    torch.manual_seed(0)
    plain = NETWORKS["llama"].make(case.size).to(where).eval()
    text = torch.randint(case.size.vocabulary, (case.batch, case.prompt + 4), device=where)
    with torch.inference_mode():
        wanted = plain(text)
    rows, calls = {}, {}
    for label, make in ways.items():
        row: dict[str, Any] = {"name": label, "case": str(case), "correct": None}
        rows[label] = row
        try:
            model = make(copy.deepcopy(plain))
            row["sqnr"] = round(sqnr(piecewise(model, text, case.prompt), wanted), 1)
        except Exception as error:  # any: a kernel or a recipe that does not take this
            row["why"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            continue
        row["weights"] = sum(p.nbytes for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters(False))
        row["correct"] = row["sqnr"] >= LEAST_SQNR
        if row["correct"]:
            calls[label] = lambda turn, model=model: write(model, text[:, : case.prompt], case.tokens)
        else:
            row["why"] = f"wrong: {row['sqnr']} dB; no time, no ratio"
    times = measure(calls, ticks, turns) if calls else {}
    for label, timing in times.items():
        base = times[BASE].median / timing.median if BASE in times else None
        speed = case.batch * case.tokens / timing.median
        rows[label] |= {"seconds": timing.median, "spread": timing.spread, "tokens_per_s": speed, "over_bf16": base}
    return list(rows.values())


def _converted(recipe: str) -> Callable[[nn.Module], nn.Module]:
    def make(model: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmulationWarning)  # the result says it
            return convert(model.bfloat16(), recipe)

    return make


def _served(recipe: str) -> Callable[[nn.Module], nn.Module]:
    def make(model: nn.Module) -> nn.Module:
        model = model.bfloat16()
        for name, layer in list(model.named_modules()):
            if isinstance(layer, nn.Linear) and name != "lm_head":
                parent, _, key = name.rpartition(".")
                setattr(model.get_submodule(parent), key, ServedLinear.of(layer, resolve(recipe)))
        return model

    return make


def line(row: dict[str, Any]) -> str:
    """A row as plain text."""
    name = f"{row['name']:20s} {row['case']}"
    if not row["correct"]:
        return f"{name} {'cannot run' if row['correct'] is None else 'WRONG'}: {row['why']}"
    ratio = f" {row['over_bf16']:5.2f}x bf16" if row["over_bf16"] else ""
    return (
        f"{name} {1e3 * row['seconds']:9.2f} ms {row['spread']:4.0%} {row['tokens_per_s']:9.0f} tokens/s{ratio}"
        f"   logits {row['sqnr']:.0f} dB   weights {row['weights'] / 2**20:.1f} MiB"
    )
