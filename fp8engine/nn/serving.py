"""Layers whose weight is stored as FP8 codes and FP32 scales: inference, and a frozen base under adapters (LoRA).

    y[M, N] = X[M, K] @ (codes[N, K] * scale)^T + b         X cast in every call, as the recipe's input says

One byte a weight and no 16-bit copy: the matmuls read the codes as they are stored (autograd/frozen.py, with gradients
of input and bias).  The weight has none, because an optimizer's small update of it would be rounded away: a weight that
is trained is kept in 16 or 32 bits.

The scale is called `weight_scale`, or `weight_scale_inv` where it covers blocks, as checkpoints call it: both multiply.
"""

from __future__ import annotations

import json
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8engine.autograd import Numerics
from fp8engine.autograd.features import FROZEN
from fp8engine.autograd.frozen import frozen_linear
from fp8engine.errors import GradientError, ShapeError, UnsupportedDtype
from fp8engine.nn.class_swap import change_class
from fp8engine.nn.linear import Float8Module
from fp8engine.numerics.formats import E4M3, FLOATS
from fp8engine.numerics.recipe import Cast, PerBlock, Recipe
from fp8engine.ops import casts, device
from fp8engine.ops.reference import operand
from fp8engine.ops.tensor import Float8Tensor
from fp8engine.scaling.table import ROLES, ScalingState

CODES = torch.float8_e4m3fn  # Tensor Cores take E5M2 weights only beside E4M3 inputs, and no checkpoint stores them
NAN_CODE = 0x7F  # S.1111.111, the only NaN of E4M3 but for its sign (OCP 8-bit floating point specification, table 1)


def serving(recipe: Recipe) -> Recipe:
    """The recipe for inference: the forward's two casts, with current scaling in place of delayed.

    >>> from fp8engine.numerics.recipe import delayed, resolve
    >>> serving(delayed()).name, serving(resolve("rowwise_gw_hp")).fp8_share
    ('current', 1.0)
    """
    casts = {role: replace(getattr(recipe, role), scaling="current") for role in ROLES}
    others = dict.fromkeys(("weight_for_dgrad", "input_for_wgrad", "grad_output_for_wgrad"))
    return replace(recipe, **casts, **others, stored=None, name="current" if recipe.delayed else recipe.name)


def scale_name(weight: Cast) -> str:
    """Name, in checkpoints, of the scale of a weight under this cast.

    >>> scale_name(Cast(E4M3)), scale_name(Cast(E4M3, PerBlock(128, 128)))
    ('weight_scale', 'weight_scale_inv')
    """
    return "weight_scale_inv" if isinstance(weight.granularity, PerBlock) else "weight_scale"


def scale_shape(weight: Cast, n: int, k: int) -> tuple[int, ...]:
    """Shape in which the scale of an [N, K] weight is stored: (1,), (N, 1) or (ceil(N / rows), ceil(K / cols)).

    >>> scale_shape(Cast(E4M3, PerBlock(128, 128)), 300, 128)
    (3, 1)
    """
    return weight.scale_shape(n, k) or (1,)


class Served(Float8Module):
    """Base of served layers: codes in `weight`, their scale under `scale_name`, an optional static `input_scale`."""

    kinds = (FROZEN,)
    bias: torch.Tensor | None
    scale_name: str
    input_scale: torch.Tensor | None
    compute_dtype = torch.bfloat16  # of the plain layer; peft gives adapters the dtype of this name

    def _store(self, recipe: Recipe, name: str, static: bool, device: torch.device | str | None) -> None:
        """Empty codes and scales in place of the weight; numerics that `attach` replaces once the weights are there."""
        n, k = self.shape_NK
        self.scale_name = name
        codes = torch.empty(tuple(self.weight.shape), dtype=CODES, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        # FP32 explicitly: transformers builds a model under another default dtype, and casts scales to what it finds.
        scale = torch.empty(scale_shape(recipe.weight, n, k), dtype=torch.float32, device=device)
        self.register_parameter(name, nn.Parameter(scale, requires_grad=False))
        one = torch.empty(1, dtype=torch.float32, device=device)
        self.register_parameter("input_scale", nn.Parameter(one, requires_grad=False) if static else None)
        self.numerics = Numerics("Linear", recipe, ScalingState([("", recipe)], device or "cpu"), standalone=True)

    def rename_scale(self, name: str) -> None:
        """Use a checkpoint's name for the scale."""
        if name != self.scale_name:
            self.register_parameter(name, self._parameters.pop(self.scale_name))
            self.scale_name = name

    @property
    def scales(self) -> list[str]:
        """Names of the scales that a checkpoint holds beside the weight."""
        return [self.scale_name] + ["input_scale"] * (self.input_scale is not None)

    def without_dimension(self, name: str) -> None:
        """Give a scale of one number the shape [] in place of [1], as some checkpoints store it."""
        self.register_parameter(name, nn.Parameter(getattr(self, name).new_empty(()), requires_grad=False))

    def lay_out(self) -> None:
        """After weights have been loaded: lay them out as the matmuls read them."""

    @property
    def shape_NK(self) -> tuple[int, int]:
        """(out features, in features)."""
        n, k = self.weight.shape
        return n, k

    @property
    def weight_NK(self) -> torch.Tensor:
        """The codes, contiguous along K as the matmuls read them."""
        return self.weight

    @property
    def scale(self) -> torch.Tensor:
        """FP32, as stored; weight ≈ codes * scale."""
        return typing.cast(torch.Tensor, getattr(self, self.scale_name))

    def quantize_(self, weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scale) of a 16- or 32-bit weight [N, K], in the shapes of this layer's parameters."""
        return quantize_weight(weight_NK, self.numerics.recipe.weight)

    def dequantize(self) -> torch.Tensor:
        """codes * scale in the shape and dtype of the plain layer's weight (`compute_dtype`), rounded once."""
        weight = self.numerics.recipe.weight
        scale = self.scale.reshape(()) if self.numerics.recipe.forward[1].per_tensor else self.scale
        return Float8Tensor(self.weight_NK.detach(), scale.detach(), weight.granularity, self.compute_dtype).values()

    @property
    def W_q(self) -> torch.Tensor:
        """The codes, under HQQ's name for them: peft (DoRA) calls `dequantize` of a layer that has it."""
        return self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check(x)
        if torch.is_grad_enabled() and (self.weight.requires_grad or self.scale.requires_grad):
            raise GradientError(f"{self.numerics.name}: {_NO_TRAINING}")
        group = self.numerics.recipe.forward[1]
        scale = self.scale.reshape(()) if group.per_tensor else self.scale
        weight = operand(self.weight_NK.detach(), scale.detach(), group)
        given = None if self.input_scale is None else self.input_scale.detach().reshape(())
        return frozen_linear(x, weight, self.bias, self.numerics, given)

    def _check(self, x: torch.Tensor) -> None:
        n, k = self.shape_NK
        name = self.numerics.name
        if x.dtype not in FLOATS or x.layout != torch.strided:
            asked = "; the code around it casts to its weight's dtype: leave it in 16 bits" if x.dtype == CODES else ""
            raise UnsupportedDtype(
                f"{name}: input is {x.dtype}, {x.layout}; want dense float32, bfloat16 or float16{asked}"
            )
        if x.dim() == 0 or x.shape[-1] != k:
            raise ShapeError(f"{name}: input is {list(x.shape)}; a weight of {[n, k]} wants [..., {k}]")
        device.check_one(name, x, weight=self.weight, bias=self.bias)

    def __getstate__(self) -> dict:
        # Weight as bytes: torch's pickle of an FP8 storage cannot be read back outside torch.save.
        return {**self.__dict__, "_parameters": {**self._parameters, "weight": self.weight.detach().view(torch.uint8)}}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._parameters["weight"] = nn.Parameter(state["_parameters"]["weight"].view(CODES), requires_grad=False)

    def _apply(self, fn, recurse=True):
        # A change of dtype moves the model's 16-bit parts only: codes and their FP32 scales keep their dtypes.
        kept = {id(self.weight), id(self.scale), id(self.input_scale)}

        def keeping(x: torch.Tensor) -> torch.Tensor:
            if id(x) not in kept:
                return fn(x)
            bits = torch.uint8 if x.dtype.itemsize == 1 else torch.int32
            return fn(x.detach().view(bits)).view(x.dtype)

        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return super()._apply(keeping, recurse)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight in FP8"


class ServedLinear(Served, nn.Linear):
    """An nn.Linear whose weight is FP8 codes [N, K] and a scale; input and bias have gradients.

    recipe: its weight cast says what one scale covers (E4M3), its input cast how x is cast.
    static: x is cast under `input_scale`, stored beside the weight, instead of by its own amax.
    Raises GradientError when its weight is to be trained, ShapeError and UnsupportedDtype for an input that does not
    fit.

    >>> from fp8engine.numerics.recipe import current
    >>> layer = ServedLinear.of(nn.Linear(32, 16), current())
    >>> layer.weight.dtype, layer.weight_scale.shape, layer(torch.ones(4, 32)).shape, isinstance(layer, nn.Linear)
    (torch.float8_e4m3fn, torch.Size([1]), torch.Size([4, 16]), True)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe,
        static: bool = False,
        device: torch.device | str | None = None,
    ):
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device="meta"))
        self._store(serving(recipe), scale_name(recipe.weight), static, device)
        made = nn.Parameter(torch.zeros(out_features, device=device), requires_grad=False) if bias else None
        self.register_parameter("bias", made)

    @staticmethod
    def of(layer: nn.Linear, recipe: Recipe) -> ServedLinear:
        """An nn.Linear's weight cast to FP8 and its bias taken over, in a layer of its own."""
        n, k = layer.weight.shape
        made = ServedLinear(k, n, layer.bias is not None, recipe=recipe, device=layer.weight.device)
        made.compute_dtype = layer.weight.dtype
        codes, scale = made.quantize_(layer.weight)
        made.weight.data, made.scale.data = codes, scale
        if layer.bias is not None and made.bias is not None:
            made.bias.data = layer.bias.detach().clone()
        attach([("Linear", made)])
        return made


def quantize_weight(weight_NK: torch.Tensor, weight: Cast) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [N, K], FP32 scale of `scale_shape`) of a weight, from its own amax.

    >>> codes, scale = quantize_weight(torch.tensor([[7.0, -1.75]]), Cast(E4M3))
    >>> codes.float().tolist(), scale.tolist()
    ([[448.0, -112.0]], [0.015625])
    """
    with torch.no_grad():
        made = casts.quantize(weight_NK.detach(), replace(weight, scaling="current"))
    return made.data, made.scale.float().reshape(scale_shape(weight, *weight_NK.shape))


def store(layer: nn.Module, kind: type[Served], recipe: Recipe) -> None:
    """Make a plain linear layer a served one, in place: its 16- or 32-bit weight gives way to codes and scale."""
    weight = typing.cast(torch.Tensor, layer.weight).detach()
    change_class(layer, kind)
    served = typing.cast(Served, layer)
    served.compute_dtype = weight.dtype
    served._store(serving(recipe), scale_name(recipe.weight), False, weight.device)
    codes, scale = served.quantize_(weight if isinstance(layer, nn.Linear) else weight.t())
    served.weight.data, served.scale.data = codes, scale
    served.lay_out()


def words_of(recipe: Recipe, mixed: Mapping[str, Recipe]) -> dict[str, Any]:
    """What a checkpoint's config.json says of recipes: that of most layers, and of each by name where they differ."""
    by_recipe: dict[Recipe, list[str]] = {}
    for name, own in mixed.items():
        by_recipe.setdefault(own, []).append(name)
    found: dict[str, Any] = {"recipe": json.loads(recipe.to_json())}
    if by_recipe:
        found["recipes"] = [{"recipe": json.loads(own.to_json()), "layers": each} for own, each in by_recipe.items()]
    return found


def config_of(layers: list[tuple[str, Served]], left: list[str]) -> dict[str, Any]:
    """The quantization_config of config.json for a model with these served layers, as fe.hf.load reads it.

    left: names of the linear layers that are not served.
    """
    recipes = {name: layer.numerics.recipe for name, layer in layers}
    [(most, count)] = Counter(recipes.values()).most_common(1)
    return {
        "quant_method": "fp8engine",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": left,
        "scale_name": layers[0][1].scale_name,
        **words_of(most, recipes if count < len(recipes) else {}),
    }


def restore(layer: Served, kind: type[nn.Module]) -> None:
    """Make a served layer a plain one of class `kind` again, in place; its weight is what the codes stand for."""
    weight = nn.Parameter(layer.dequantize(), requires_grad=False)
    for name in (*layer.scales, "input_scale"):
        layer._parameters.pop(name, None)
    for name in ("numerics", "scale_name", "compute_dtype"):
        vars(layer).pop(name, None)
    change_class(layer, kind)
    layer.weight = weight


def attach(layers: list[tuple[str, Served]]) -> list[ScalingState]:
    """Give layers whose weights are there their names and a place in a scaling state per device."""
    by_device: dict[torch.device, list[tuple[str, Served]]] = {}
    for name, layer in layers:
        by_device.setdefault(layer.weight.device, []).append((name, layer))
    states = []
    for where, group in by_device.items():
        recipes = [(name, _known(layer)) for name, layer in group]
        state = ScalingState(recipes, where)
        states.append(state)
        for index, ((name, layer), (_, recipe)) in enumerate(zip(group, recipes, strict=True)):
            layer.numerics = Numerics(name or "Linear", recipe, state, index, kinds=layer.kinds)
            for role, scale in (("weight", layer.scale), ("input", layer.input_scale)):
                if scale is not None and scale.numel() and where.type != "meta":  # as reports show: the coarsest
                    slot = state.slot(len(ROLES) * index + ROLES.index(role), record=False)
                    slot.live_2S[0, slot.index] = scale.max() * E4M3.max
                    slot.live_2S[1, slot.index] = 1.0 / scale.max()
    return states


def trouble(layer: Served) -> str | None:
    """Why a layer's loaded numbers cannot be right, or None."""
    for name in (layer.scale_name, "input_scale"):
        scale = getattr(layer, name)
        if scale is not None and not bool((torch.isfinite(scale) & (scale >= 0)).all()):
            return f"{name} holds NaN, Inf or a negative number"
    if bool(((layer.weight.detach().view(torch.uint8) & NAN_CODE) == NAN_CODE).any()):
        return "weight holds NaN codes"
    return None


def _known(layer: Served) -> Recipe:
    """The layer's recipe, whose weight has power_of_2 only if every loaded scale is a power of two.

    Triton folds such scales into 16-bit values, which is exact for powers of two only.
    """
    recipe, scale = layer.numerics.recipe, layer.scale
    powers = scale.device.type != "meta" and bool((torch.frexp(scale).mantissa == 0.5).all())
    return replace(recipe, weight=replace(recipe.weight, power_of_2=powers and recipe.weight.power_of_2))


_NO_TRAINING = (
    "its weight is stored as FP8 codes, which no optimizer can update: train adapters on it (peft), or call "
    "fe.revert(model), which gives 16-bit weights back, and then fe.convert"
)
