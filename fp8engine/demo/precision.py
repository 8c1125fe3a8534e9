"""From a recipe's name to how a step is computed.

| recipe | model | forward | loss scale |
| --- | --- | --- | --- |
| fp32 | plain | plain | none |
| bf16 | plain | torch.autocast(bfloat16) | none |
| fp16 | plain | torch.autocast(float16) | torch.amp.GradScaler |
| any other | fp8engine.convert.swap | CUDA: torch.autocast(bfloat16); CPU: plain | none |

Parameters are FP32 everywhere.  On a card what FP8 leaves alone (attention, norms, the head) runs in 16 bits as anyone
would train it; on a CPU autocast makes the emulated step slower, and without it the difference to fp32 is FP8's alone.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from fp8engine.convert.swap import convert
from fp8engine.demo import half
from fp8engine.errors import EmulationWarning, UnknownName
from fp8engine.numerics.recipe import RECIPES
from fp8engine.report import inspect

PLAIN = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT = ("fp32", "bf16", "fp16", "current", "delayed", "rowwise", "blockwise", "auto")


class Precision:
    """A recipe on a device: prepares a model, wraps each forward and backward, says afterwards what ran.

    Raises UnknownName for a name that is no recipe.

    >>> Precision("fp16", torch.device("cpu")).scaler.is_enabled()
    True
    """

    def __init__(self, recipe: str, device: torch.device):
        if recipe not in RECIPES:
            raise UnknownName("recipe", recipe, RECIPES)
        self.recipe, self.device = recipe, device
        beside_fp8 = torch.bfloat16 if device.type == "cuda" else None
        self.autocast = PLAIN.get(recipe, beside_fp8)
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe == "fp16")
        self.matmuls = half.matmuls(device) if recipe == "fp16" else contextlib.nullcontext()

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model as this recipe trains it.  That FP8 is emulated, the table says: no warning beside it."""
        if self.recipe in PLAIN:
            return model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmulationWarning)
            return convert(model, self.recipe)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a forward and its backward."""
        with self.matmuls:
            yield

    def forward(self) -> contextlib.AbstractContextManager:
        """Around a forward, inside `step`."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def ran(self, model: nn.Module) -> str:
        """Where the matmuls ran: "torch", or the FP8 backends; "(emulated)" where no hardware has that format."""
        if self.recipe in PLAIN:
            return "torch (emulated)" if isinstance(self.matmuls, half.SumsInFP32) else "torch"
        layers = [layer for layer in inspect(model).layers if layer["recipe"] != "none"]
        names = "+".join(sorted({layer["backend"] for layer in layers}))
        return f"{names} (emulated)" if any(layer["emulated"] for layer in layers) else names
