"""Layers whose weight is stored as FP8 codes and FP32 scales: inference, and a frozen base under adapters (LoRA).

    y[M, N] = X[M, K] @ (codes[N, K] * scale)^T + b         X cast in every call, as the recipe's input says

One byte a weight and no 16-bit copy: the matmuls read the codes as they are stored (autograd/frozen.py, with gradients
of input and bias).  The weight has none, because an optimizer's small update of it would be rounded away: a weight that
is trained is kept in 16 or 32 bits.

The scale is called `weight_scale`, or `weight_scale_inv` where it covers blocks, as checkpoints call it: both multiply.
MX scales, of blocks of 1x32, are held as files hold them: E8M0, the byte b for 2^(b - 127).
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping, Sequence
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
from fp8engine.nn.together import numerics_together
from fp8engine.numerics.formats import E4M3, FLOATS
from fp8engine.numerics.recipe import Cast, PerBlock, Recipe, mxfp8
from fp8engine.ops import casts, device
from fp8engine.ops.reference import Operand, operand
from fp8engine.ops.tensor import Float8Tensor
from fp8engine.scaling.table import ROLES, ScalingState

CODES = torch.float8_e4m3fn  # Tensor Cores take E5M2 weights only beside E4M3 inputs, and no checkpoint stores them
MX = mxfp8().weight
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
    weight: torch.Tensor
    bias: torch.Tensor | None
    scale_name: str
    input_scale: torch.Tensor | None
    compute_dtype = torch.bfloat16  # of the plain layer; peft gives adapters the dtype of this name

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        """The scales that a checkpoint holds beside the weight, by name."""
        held = {name: self._parameters[name] for name in (self.scale_name, "input_scale")}
        return {name: scale for name, scale in held.items() if scale is not None}

    def _flipped(self, matrix: torch.Tensor) -> torch.Tensor:
        """[N, K] of a matrix in the layer's own layout, and the other way."""
        return matrix.t() if self.transposed else matrix

    def lay_out(self) -> None:
        """After weights have been loaded: lay them out as the matmuls read them, along K."""
        self.weight.data = self._flipped(self._flipped(self.weight.data).contiguous())

    @property
    def scale(self) -> torch.Tensor:
        """FP32, the value of what is stored; weight ≈ codes * scale."""
        held = typing.cast(torch.Tensor, getattr(self, self.scale_name))
        return held.view(torch.float8_e8m0fnu).float() if held.dtype == torch.uint8 else held

    @property
    def operand(self) -> Operand:
        """The codes [N, K] and their scale as the matmuls take them; no copy once `lay_out` has run."""
        cast, scale = self.numerics.recipe.forward[1], self.scale.detach()
        codes_NK = self._flipped(self.weight.detach()).contiguous()
        return operand(codes_NK, scale.reshape(()) if cast.per_tensor else scale, cast)

    def write(self, weight: torch.Tensor) -> None:
        """Store the codes and the scale of a 16- or 32-bit weight in the plain layer's layout."""
        self.weight.data, self.scales[self.scale_name].data = self.quantize_(weight)
        self.lay_out()

    def quantize_(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scale) of a 16- or 32-bit weight in the plain layer's layout, in the shapes of the parameters."""
        codes_NK, scale = quantize_weight(self._flipped(weight), self.numerics.recipe.weight)
        return self._flipped(codes_NK), scale

    def dequantize(self) -> torch.Tensor:
        """codes * scale in the shape and dtype of the plain layer's weight (`compute_dtype`), rounded once."""
        codes_NK, scale, *_ = self.operand
        stored = Float8Tensor(codes_NK, scale, self.numerics.recipe.weight.granularity, self.compute_dtype)
        return self._flipped(stored.values()).contiguous()

    @property
    def W_q(self) -> torch.Tensor:
        """The codes, under HQQ's name for them: peft (DoRA) calls `dequantize` of a layer that has it."""
        return self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check(x)
        if torch.is_grad_enabled() and (self.weight.requires_grad or self.scales[self.scale_name].requires_grad):
            raise GradientError(
                f"{self.numerics.name}: its weight is stored as FP8 codes, which no optimizer can update: train "
                "adapters on it (peft), or call fe.revert(model), which gives 16-bit weights back, and then fe.convert"
            )
        given = None if self.input_scale is None else self.input_scale.detach().reshape(())
        return frozen_linear(x, self.operand, self.bias, self.numerics, given)

    def _check(self, x: torch.Tensor) -> None:
        n, k = self._flipped(self.weight).shape
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

    def _load_from_state_dict(self, state_dict, prefix, *others):
        given = state_dict.get(f"{prefix}weight")
        if isinstance(given, torch.Tensor) and given.dtype != CODES:  # copied, it would be codes without a scale
            others[-1].append(
                f"{self.numerics.name}: its weight is stored as FP8 codes, and {prefix}weight is {given.dtype}: call "
                "fe.revert(model), load, and then fe.convert(frozen='fp8')"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *others)
        if f"{prefix}{self.scale_name}" in state_dict:
            self.numerics.adopt(_known(self))
            _show(self)

    def _apply(self, fn, recurse=True):
        # A change of dtype moves the model's 16-bit parts only: codes and their FP32 scales keep their dtypes.
        kept = {id(self.weight), *map(id, self.scales.values())}

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

    Raises GradientError when its weight is to be trained, ShapeError and UnsupportedDtype for an input that does not
    fit.

    >>> from fp8engine.numerics.recipe import current
    >>> layer = ServedLinear.of(nn.Linear(32, 16), current())
    >>> layer.weight.dtype, layer.weight_scale.shape, layer(torch.ones(4, 32)).shape, isinstance(layer, nn.Linear)
    (torch.float8_e4m3fn, torch.Size([1]), torch.Size([4, 16]), True)
    """

    @staticmethod
    def of(layer: nn.Linear, recipe: Recipe) -> ServedLinear:
        """An nn.Linear's weight cast to FP8 and its bias taken over, in a layer of its own."""
        made: Any = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        made.weight = layer.weight
        if layer.bias is not None:
            made.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        make_served(made, ServedLinear, recipe).write(layer.weight.detach())
        attach([("Linear", made)])
        return made


def quantize_weight(weight_NK: torch.Tensor, weight: Cast) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [N, K], scale of `scale_shape`) of a weight, from its own amax, as they are stored: MX scales as bytes.

    >>> codes, scale = quantize_weight(torch.tensor([[7.0, -1.75]]), Cast(E4M3))
    >>> codes.float().tolist(), scale.tolist()
    ([[448.0, -112.0]], [0.015625])
    """
    with torch.no_grad():
        made = casts.quantize(weight_NK.detach(), replace(weight, scaling="current"))
    scale = made.scale.float().reshape(scale_shape(weight, *weight_NK.shape))
    return made.data, scale.to(torch.float8_e8m0fnu).view(torch.uint8) if weight == MX else scale


def make_served(
    layer: nn.Module, kind: type[Served], recipe: Recipe, static: bool = False, name: str | None = None
) -> Served:
    """Make a plain linear layer a served one, in place, with empty codes and scales where its weight was.

    recipe: its weight cast says what one scale covers (E4M3), its input cast how x is cast.
    static: x is cast under `input_scale`, stored beside the weight, instead of by its own amax.
    name: of the weight's scale; None: as `scale_name` says.
    """
    weight, recipe = typing.cast(torch.Tensor, layer.weight), serving(recipe)
    where = weight.device
    change_class(layer, kind)
    served = typing.cast(Served, layer)
    served.compute_dtype, served.scale_name = weight.dtype, name or scale_name(recipe.weight)
    served.weight = nn.Parameter(torch.empty(weight.shape, dtype=CODES, device=where), requires_grad=False)
    # FP32 explicitly: transformers builds a model under another default dtype, and casts scales to what it finds.
    shape, dtype = scale_shape(recipe.weight, *served._flipped(weight).shape), torch.float32
    scale = torch.empty(shape, dtype=torch.uint8 if recipe.weight == MX else dtype, device=where)
    served.register_parameter(served.scale_name, nn.Parameter(scale, requires_grad=False))
    one = torch.empty(1, dtype=dtype, device=where)
    served.register_parameter("input_scale", nn.Parameter(one, requires_grad=False) if static else None)
    served.numerics = Numerics("Linear", recipe, ScalingState([("", recipe)], where), standalone=True)
    return served


def words_of(recipe: Recipe, mixed: Mapping[str, Recipe]) -> dict[str, Any]:
    """What a checkpoint's config.json says of recipes: that of most layers, and of each by name where they differ."""
    by_recipe: dict[Recipe, list[str]] = {}
    for name, own in mixed.items():
        by_recipe.setdefault(own, []).append(name)
    found: dict[str, Any] = {"recipe": json.loads(recipe.to_json())}
    if by_recipe:
        found["recipes"] = [{"recipe": json.loads(own.to_json()), "layers": each} for own, each in by_recipe.items()]
    return found


def config_of(
    recipe: Recipe, mixed: Mapping[str, Recipe], scale_name: str, left: Sequence[str], scheme: str = "dynamic"
) -> dict[str, Any]:
    """The quantization_config of config.json under which fe.hf.load reads served layers.

    recipe, mixed: as `words_of` takes them.  left: names of the linear layers that are not served.
    """
    config = {"quant_method": "fp8engine", "activation_scheme": scheme, "modules_to_not_convert": [*left]}
    return config | {"scale_name": scale_name, **words_of(recipe, mixed)}


def restore(layer: Served, kind: type[nn.Module]) -> None:
    """Make a served layer a plain one of class `kind` again, in place; its weight is what the codes stand for."""
    weight = nn.Parameter(layer.dequantize(), requires_grad=False)
    for name in (layer.scale_name, "input_scale"):
        del layer._parameters[name]
    for name in ("numerics", "scale_name", "compute_dtype"):
        vars(layer).pop(name, None)
    change_class(layer, kind)
    layer.weight = weight


def attach(layers: list[tuple[str, Served]]) -> list[ScalingState]:
    """Give layers whose weights are there their names and a place in a scaling state per device."""
    made, states = numerics_together([(name, _known(layer), layer.weight.device) for name, layer in layers])
    for (_, layer), numerics in zip(layers, made, strict=True):
        layer.numerics, numerics.kinds = numerics, layer.kinds
        _show(layer)
    return states


def _show(layer: Served) -> None:
    """Write the coarsest of the stored scales into the layer's slots, where reports look."""
    for role, scale in (("weight", layer.scale), ("input", layer.input_scale)):
        if scale is not None and scale.numel() and not scale.is_meta:
            slot = layer.numerics.slot(role, record=False)
            slot.live_2S[0, slot.index] = scale.detach().max() * E4M3.max
            slot.live_2S[1, slot.index] = 1.0 / scale.detach().max()


def trouble(layer: Served) -> str | None:
    """Why a layer's loaded numbers cannot be right, or None."""
    for name, scale in (layer.scales | {layer.scale_name: layer.scale}).items():
        if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
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
