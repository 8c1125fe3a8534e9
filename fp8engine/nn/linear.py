"""fe.Linear: an nn.Linear whose three matmuls follow a recipe."""

from __future__ import annotations

import torch
from torch import nn

from fp8engine.auto import attach
from fp8engine.autograd import Layer, Numerics, linear
from fp8engine.autograd.refusals import no_script
from fp8engine.errors import ParallelError
from fp8engine.nn.lazy import UNREAL, Group, read
from fp8engine.numerics.recipe import Recipe, resolve
from fp8engine.scaling.table import ScalingState


class Float8Module(nn.Module):
    """What every module with a recipe shares: `numerics` beside its parameters, and how that survives torch's calls."""

    numerics: Numerics
    fused: Group | None = None  # with whom it runs as one, after fe.convert(fuse=True)
    alone: str = ""  # why with nobody

    def numerics_of(self, parameter: str) -> Numerics | None:
        """The numerics of the matmuls by one of its parameters; None: that one is no matrix in FP8."""
        return self.numerics if parameter == "weight" else None

    def forget_copies(self) -> None:
        """Keep no FP8 copy of its weights: the next use casts them."""
        for name in self._parameters:
            if (numerics := self.numerics_of(name)) is not None:
                numerics.weight.give_up()

    def _apply(self, fn, recurse=True):
        self.forget_copies()  # torch swaps no parameter that has a weak reference, which a copy has
        result = super()._apply(fn, recurse)
        self.numerics.state.apply(fn)
        return result

    def _load_from_state_dict(self, *arguments, **options):
        self.forget_copies()
        super()._load_from_state_dict(*arguments, **options)

    def _replicate_for_data_parallel(self):
        raise ParallelError(
            f"{self.numerics.name}: nn.DataParallel copies layers every step and loses their scaling state; "
            "use torch.nn.parallel.DistributedDataParallel, one process per device"
        )

    def __prepare_scriptable__(self):  # torch.jit.script calls it on every module of a model first
        raise no_script(self.numerics.name, "torch.jit.script")

    def extra_repr(self) -> str:
        recipe = self.numerics.recipe
        casts = "x".join(str(cast.format) for cast in recipe.operands("forward"))
        return f"{super().extra_repr()}, recipe={recipe.name} ({casts}, grad {recipe.grad_output.format})"


class Linear(Float8Module, nn.Linear):
    """An nn.Linear in FP8: same parameters, state_dict and `isinstance`, matmuls under a recipe.

    recipe: a Recipe or its name.  Input [..., in_features] in FP32, BF16 or FP16; output [..., out_features] in the
    input's dtype, or autocast's.  Made by hand it keeps its own scaling state; `fe.convert` shares one per model.
    Raises UnknownName for a recipe's name, ShapeError and UnsupportedDtype for an input that does not fit.

    >>> layer = Linear(32, 16, recipe="current")
    >>> layer
    Linear(in_features=32, out_features=16, bias=True, recipe=current (E4M3xE4M3, grad E5M2))
    >>> layer(torch.ones(4, 32)).shape, isinstance(layer, nn.Linear)
    (torch.Size([4, 16]), True)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        recipe = resolve(recipe)
        super().__init__(in_features, out_features, bias, device, dtype)
        state = ScalingState([("", recipe)], self.weight.device)
        self.numerics = Numerics("Linear", recipe, state, standalone=True)
        attach([self.numerics], [(out_features, in_features)])

    def as_layer(self) -> Layer:
        """What the fused functions take of it."""
        return Layer(self.weight, self.bias, self.numerics)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.fused is not None or isinstance(input, UNREAL):
            return read(self, input)
        return linear(input, self.weight, self.bias, self.numerics)
