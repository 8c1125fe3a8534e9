"""Layers whose weight is stored as FP8 codes and FP32 scales, for inference at half the memory of 16 bits.

    y[M, N] = X[M, K] @ (codes[N, K] * scale)^T + b         X cast in every call, as the recipe's input says

One byte a weight and no 16-bit copy: the matmul reads the codes as they are stored.  Backward is an error, because
an optimizer's small update of an FP8 weight would be rounded away: training keeps its weights in 16 or 32 bits.

The scale is called `weight_scale`, or `weight_scale_inv` where it covers blocks, as checkpoints call it: both multiply.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from fp8engine.autograd import Numerics
from fp8engine.autograd.linear import in_shape_of
from fp8engine.errors import GradientError, ShapeError, UnsupportedDtype
from fp8engine.nn.linear import Float8Module
from fp8engine.numerics.formats import E4M3, FLOATS
from fp8engine.numerics.recipe import Cast, PerBlock, Recipe
from fp8engine.ops import casts, device, matmul
from fp8engine.ops.reference import Operand
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
    return casts.how(weight).scale_shape(n, k) or (1,)


class Served(Float8Module):
    """Base of served layers: codes in `weight`, their scale under `scale_name`, an optional static `input_scale`."""

    bias: torch.Tensor | None
    scale_name: str
    input_scale: torch.Tensor | None

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
        return cast(torch.Tensor, getattr(self, self.scale_name))

    def quantize_(self, weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scale) of a 16- or 32-bit weight [N, K], in the shapes of this layer's parameters."""
        return quantize_weight(weight_NK, self.numerics.recipe.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check(x)
        if torch.is_grad_enabled() and (self.weight.requires_grad or self.scale.requires_grad):
            raise GradientError(f"{self.numerics.name}: {_NO_TRAINING}")
        wants = x.requires_grad or (self.bias is not None and self.bias.requires_grad)
        if torch.is_grad_enabled() and wants:
            return _Inference.apply(x, self.bias, self)
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        numerics = self.numerics
        how, group = (casting.how[None] for casting in numerics.plan.forward)
        weight_NK, scale = self.weight_NK, self.scale
        n, k = weight_NK.shape
        x_MK = x.reshape(math.prod(x.shape[:-1]), k)
        out = x.dtype
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            out = torch.get_autocast_dtype(x.device.type)
        if not torch.compiler.is_compiling():
            numerics.ran = matmul.choose(x.device, numerics.plan.by_block, (len(x_MK), n))
        slot = numerics.slot("input", record=True)
        with torch.no_grad():
            if self.input_scale is None:
                a = casts.quantize(x_MK, how, slot)
            else:
                a = casts.quantize_given(x_MK, how, self.input_scale.reshape(()))
                slot.counts_CS[:2, slot.index] += torch.tensor([1, x_MK.numel()], device=slot.counts_CS.device)
            scale = scale.reshape(()) if group.per_tensor else scale
            b = Operand(weight_NK, scale, group.rows, group.cols, group.power_of_2)
            precision = "exact" if numerics.plan.exact else numerics.plan.precision["forward"]
            bias = None if self.bias is None else self.bias.detach()
            return in_shape_of(x, matmul.matmul(a, b, bias, out, precision))

    def _check(self, x: torch.Tensor) -> None:
        n, k = self.shape_NK
        name = self.numerics.name
        if x.dtype not in FLOATS or x.layout != torch.strided:
            raise UnsupportedDtype(f"{name}: input is {x.dtype}, {x.layout}; want dense float32, bfloat16 or float16")
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

        return super()._apply(keeping, recurse)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight in FP8"


class ServedLinear(Served, nn.Linear):
    """An nn.Linear whose weight is FP8 codes [N, K] and a scale; for inference.

    recipe: its weight cast says what one scale covers (E4M3), its input cast how x is cast.
    static: x is cast under `input_scale`, stored beside the weight, instead of by its own amax.
    Raises GradientError when something tries to train it, ShapeError and UnsupportedDtype for an input that does not
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
        codes, scale = made.quantize_(layer.weight)
        made.weight.data, made.scale.data = codes, scale
        if layer.bias is not None and made.bias is not None:
            made.bias.data = layer.bias.detach().clone()
        attach([("Linear", made)])
        return made


class _Inference(torch.autograd.Function):
    """The forward, with a backward that raises."""

    @staticmethod
    def forward(ctx, x, bias_N, layer: Served):
        ctx.name = layer.numerics.name
        return layer._multiply(x)

    @staticmethod
    def backward(ctx, *_):
        raise GradientError(f"{ctx.name}: {_NO_TRAINING}")


def quantize_weight(weight_NK: torch.Tensor, weight: Cast) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [N, K], FP32 scale of `scale_shape`) of a weight, from its own amax.

    >>> codes, scale = quantize_weight(torch.tensor([[7.0, -1.75]]), Cast(E4M3))
    >>> codes.float().tolist(), scale.tolist()
    ([[448.0, -112.0]], [0.015625])
    """
    how = casts.how(weight)._replace(delayed=False)
    with torch.no_grad():
        made = casts.quantize(weight_NK.detach(), how)
    return made.data, made.scale.float().reshape(scale_shape(weight, *weight_NK.shape))


def attach(layers: list[tuple[str, Served]]) -> list[ScalingState]:
    """Give layers with loaded weights their names, frozen parameters and a place in a scaling state per device."""
    by_device: dict[torch.device, list[tuple[str, Served]]] = {}
    for name, layer in layers:
        by_device.setdefault(layer.weight.device, []).append((name, layer))
    states = []
    for where, group in by_device.items():
        recipes = [(name, _known(layer)) for name, layer in group]
        state = ScalingState(recipes, where)
        states.append(state)
        for index, ((name, layer), (_, recipe)) in enumerate(zip(group, recipes, strict=True)):
            layer.requires_grad_(False)
            layer.numerics = Numerics(name or "Linear", recipe, state, index)
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
    "its weight is FP8 codes for inference, which no gradient can update: use torch.no_grad() or "
    "torch.inference_mode(), or train the 16-bit model under fe.convert"
)
