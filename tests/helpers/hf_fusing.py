"""What the tests of fe.convert(fuse=True) share: one step, its exact twin, and what ran together.

Noise as tests/hf/test_families.py derives it: depth * 10^-2.8 forward, depth * (10^-2.8 + 10^-2.5) backward, 3 dB left.
"""

import math
from typing import Any

import torch
from hf_families import Family
from support import sqnr
from torch import nn

from fp8engine.nn.linear import Float8Module


def groups(model: nn.Module) -> dict[str, str]:
    """What runs together -> "" or why it did not, of the latest forward; numbered, as blocks have the same names."""
    found = {id(m.fused): m.fused for m in model.modules() if isinstance(m, Float8Module) and m.fused is not None}
    return {f"{i} {group.label}": group.note for i, group in enumerate(found.values())}


def logits(output: Any) -> torch.Tensor:
    return output.logits_per_text if "logits_per_text" in output else output.logits


def step(model: Any, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, all gradients) of one training step."""
    output = model(**batch)
    output.loss.backward()
    given = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return logits(output).detach(), torch.cat(given)


def near(family: Family, want: tuple, found: tuple) -> None:
    forward, backward = 10**-2.8 * family.depth, (10**-2.8 + 10**-2.5) * family.depth
    assert -10 * math.log10(forward) - 3 < sqnr(want[0], found[0].float()) < 40
    assert sqnr(want[1], found[1].float()) > -10 * math.log10(backward) - 3


def exact(model: Any, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The same step in float64; transformers' grouped matmul has no such dtype, its loop over experts has."""
    model.config._experts_implementation = "eager"
    floats = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()  # noqa: E731 - one use
    return step(model.double(), {key: x.double() if floats(x) else x for key, x in batch.items()})
