"""fe.Linear, an nn.Linear whose three matmuls follow a recipe; Float8Module, the base of all such modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from fp8engine.auto import attach
from fp8engine.autograd import Layer, Numerics, linear
from fp8engine.autograd.refusals import no_script
from fp8engine.errors import ConversionError, ParallelError, ScriptError
from fp8engine.numerics.names import RecipeName
from fp8engine.numerics.recipe import Recipe, resolve
from fp8engine.scaling.table import ScalingState


class Float8Module(nn.Module):
    """Base of every module with a recipe: its `numerics`, and how they follow torch's moves, loads and copies.

    transposed: whether the layer multiplies by its weight's transpose, the weight being [K, N].
    kinds: what its weight is, in words of autograd/features.py.
    """

    numerics: Numerics
    transposed = False
    kinds: tuple[str, ...] = ()

    def numerics_of(self, parameter: str) -> Numerics | None:
        """The numerics of the matmuls by one of its parameters; None: that one is no matrix with a recipe."""
        return self.numerics if parameter == "weight" else None

    def forget_copies(self) -> None:
        """Drop the FP8 copies of its weights: the next use casts them."""
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
        recipe: Recipe | RecipeName,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        recipe = resolve(recipe)
        super().__init__(in_features, out_features, bias, device, dtype)
        state = ScalingState([("", recipe)], self.weight.device)
        self.numerics = Numerics("Linear", recipe, state, standalone=True)
        attach([self.numerics], [(out_features, in_features)])

    def as_layer(self) -> Layer:
        """Weight [N, K], bias and numerics."""
        return Layer(self.weight, self.bias, self.numerics)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, Proxy):
            return leaf(self, input)  # pyright: ignore[reportReturnType]
        run = linear if self.numerics.feature is None else self.numerics.feature.run
        return run(input, self.weight, self.bias, self.numerics)


def leaf(layer: Any, x: Proxy) -> Proxy:
    """The layer, or a module that makes what one reads, as one node of the graph that torch.fx traces.

    Raises ScriptError for a layer that is traced by itself.
    """
    tracer: Any = x.tracer
    place = tracer.path_of_module(layer)
    if not place:
        raise ScriptError(f"{layer.numerics.name}: a leaf of torch.fx; symbolic_trace takes the module that holds it")
    return tracer.create_proxy("call_module", place, (x,), {})


def float8_modules(model: nn.Module) -> list[Float8Module]:
    """Every module of `model` that has a recipe, itself included."""
    return [module for module in model.modules() if isinstance(module, Float8Module)]


def weights_changed(model: nn.Module) -> None:
    """Cast every weight of `model` again at its next use.

    Call it on a card after a write that does not move a parameter's version counter: `p.data.copy_(...)`, a collective
    into `p.data`, a CUDA graph that was captured elsewhere.  Writes that torch counts (optimizers, `load_state_dict`,
    in-place operations under `no_grad`) need no call.  On a CPU none does, but for recipes with cache_weights=True, of
    whose weights only samples are compared.  The first forward afterwards casts.
    Under fe.distributed.fsdp a loop without an optimizer of torch calls it after each update: there a step ends.
    Raises ConversionError where `model` has no converted layer.

    >>> layer = Linear(32, 16, recipe="current")
    >>> layer.weight.data.zero_()[0, 0]
    tensor(0.)
    >>> weights_changed(layer)
    """
    ConversionError.unless(model, nn.Module, "weights_changed takes an nn.Module")
    layers = float8_modules(model)
    if not layers:
        raise ConversionError(f"weights_changed: {type(model).__name__} has no converted layers; call fe.convert first")
    for layer in layers:
        layer.forget_copies()
    for state in {id(layer.numerics.state): layer.numerics.state for layer in layers}.values():
        state.optimizer_steps += 1
