"""What the tests of fe.convert(fuse=True) share: one step, its exact twin, what became a producer and who reads it.

Noise as tests/hf/test_families.py derives it: depth * 10^-2.8 forward, depth * (10^-2.8 + 10^-2.5) backward, 3 dB left.
"""

import math
from typing import Any

import torch
from hf_families import FAMILIES, Family
from support import converted, sqnr
from torch import nn

import fp8engine as fe


def producers(model: nn.Module) -> list[str]:
    """Names of the modules that write codes beside their result."""
    return [name for name, module in model.named_modules() if type(module).__name__.startswith("Producing")]


def sources(model: nn.Module) -> dict[str, str]:
    """Each converted layer that has run -> the norm, activation or MLP that made its latest input, "" for another."""
    rows = [row for row in fe.inspect(model).layers if row["recipe"] != "none" and row["ran"]]
    return {row["name"]: row["fused"].removeprefix("fused: reads what ").removesuffix(" wrote") for row in rows}


def pair(name: str, before: Any = lambda model: None, **options) -> list[Any]:
    """Copies of one model of one block, given to `before` and converted: with fuse=False, and by default."""
    models = []
    depth = "num_layers" if name.startswith("t5") else "num_hidden_layers"
    for fuse in (False, None):
        torch.manual_seed(1)
        model = FAMILIES[name].build(**{depth: 1, **options})
        before(model)
        models.append(converted(model, "rowwise", fuse=fuse))
    return models


def block(model: Any) -> Any:
    """The first block of a Llama."""
    return model.model.layers[0]


def logits(output: Any) -> torch.Tensor:
    return output.logits_per_text if "logits_per_text" in output else output.logits


def step(model: Any, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, all gradients) of one training step."""
    output = model(**batch)
    output.loss.backward()
    given = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return logits(output).detach(), torch.cat(given)


def alike(family: Family, models: list[Any], rows: int = 8, seen: tuple[list, ...] = ()) -> bool:
    """Whether one training step gives both models the same numbers, and hooks that append to `seen` too.

    In FP32 both cast the same numbers but for the order of FP32 sums, 2^-24, and CPUs differ.  A value that falls to
    the other side of a rounding boundary moves by 2^-3 of itself, and a ReLU with it.  That happens on one batch in six
    (41.7 dB); the others have 100 dB and more.  Three in a row: on one CPU in 200.
    """
    for _ in range(3):
        batch, found = family.batch(rows=rows), []
        for model, kept in zip(models, seen or ([], []), strict=True):
            model.zero_grad()
            kept.clear()
            seed = torch.get_rng_state()
            found.append([*step(model, batch), *kept])
            torch.set_rng_state(seed)  # dropout draws the same for both
        if min(sqnr(one, other) for one, other in zip(*found, strict=True)) > 60:
            return True
    return False


def near(family: Family, want: tuple, found: tuple) -> None:
    forward, backward = 10**-2.8 * family.depth, (10**-2.8 + 10**-2.5) * family.depth
    assert -10 * math.log10(forward) - 3 < sqnr(want[0], found[0].float()) < 40
    assert sqnr(want[1], found[1].float()) > -10 * math.log10(backward) - 3


def exact(model: Any, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The same step in float64; transformers' grouped matmul has no such dtype, its loop over experts has."""
    model.config._experts_implementation = "eager"
    floats = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()  # noqa: E731 - one use
    return step(model.double(), {key: x.double() if floats(x) else x for key, x in batch.items()})
