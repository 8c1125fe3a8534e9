"""Benchmark of generation with a model like Llama: a prompt read at once, then a token at a time from a cache.

    bf16               the model in BF16, eager
    fp8engine X        fe.convert with the recipe X; the weights' FP8 copies are kept between tokens ("inference")
    served X           weights stored as FP8 codes (fe.hf.load), inputs cast as X says

A result is right if the logits of a given text, read piece by piece, are no further from the FP32 model's, which reads
it at once, than the formats explain.  At one token a step the matmuls are bound by reading weights, so that what counts
is bytes; on a CPU FP8 is emulated.  Run by `python -m benchmarks.model`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.networks import NETWORKS, Size
from fp8engine.autograd.attention import Cache
from fp8engine.bench import harness
from fp8engine.bench.cases import sqnr
from fp8engine.bench.harness import Row, Timer
from fp8engine.bench.steps import BASE, LEAST_SQNR, converted
from fp8engine.nn.serving import ServedLinear
from fp8engine.numerics.recipe import resolve


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
    """Variants that can be measured, each made of the FP32 model."""
    found: dict[str, Callable[[nn.Module], nn.Module]] = {BASE: lambda model: model.bfloat16()}
    found |= {f"fp8engine {recipe}": converted(recipe) for recipe in ("current", "rowwise", "blockwise")}
    return found | {f"served {recipe}": _served(recipe) for recipe in ("current", "blockwise")}


def generate(
    cases: Sequence[Case],
    where: torch.device,
    ways: dict[str, Callable[[nn.Module], nn.Module]] | None = None,
    timer: Timer | None = None,
) -> dict[str, Any]:
    """Check and time every variant of every case: {"machine", "what", "rows"}."""
    ways = variants() if ways is None else ways
    timer = timer or Timer.of(where, 10, 3)
    return harness.result(where, "generation", [row for case in cases for row in compare(case, where, ways, timer)])


def compare(case: Case, where: torch.device, ways, timer: Timer) -> list[Row]:
    """One case's rows."""
    torch.manual_seed(0)
    with where:
        plain = NETWORKS["llama"](case.size).eval()
    text = torch.randint(case.size.vocabulary, (case.batch, case.prompt + 4), device=where)
    with torch.inference_mode():
        wanted = plain(text)

    def check(row: Row, make: Callable[[nn.Module], nn.Module]) -> harness.Call:
        model = make(copy.deepcopy(plain))
        row["sqnr"] = round(sqnr(piecewise(model, text, case.prompt), wanted), 1)
        row["weights"] = sum(p.nbytes for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters(False))
        row["correct"] = row["sqnr"] >= LEAST_SQNR
        if not row["correct"]:
            row["why"] = f"wrong: {row['sqnr']} dB; no time, no ratio"
        return lambda turn: write(model, text[:, : case.prompt], case.tokens)

    def derive(name: str, seconds: float, over: Callable) -> Row:
        return {"tokens_per_s": case.batch * case.tokens / seconds, "over_bf16": over(BASE)}

    checks = {name: lambda row, make=make: check(row, make) for name, make in ways.items()}
    return harness.compare({"case": str(case)}, checks, derive, timer)


def _served(recipe: str) -> Callable[[nn.Module], nn.Module]:
    def make(model: nn.Module) -> nn.Module:
        model = model.bfloat16()
        for name, layer in list(model.named_modules()):
            if isinstance(layer, nn.Linear) and name != "lm_head":
                parent, _, key = name.rpartition(".")
                setattr(model.get_submodule(parent), key, ServedLinear.of(layer, resolve(recipe)))
        return model

    return make
