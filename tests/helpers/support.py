"""What the tests of whole layers share: recipes, models, and a Linear in NumPy that knows nothing of the engine.

    y = X W^T + b       dx = DY W       dw = DY^T X       db = sum of dy over rows

each operand cast by `dequantised`, products and sums in float64.
"""

import io
import math
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from casts import MAX, ROUNDING, clamped_cast, factor, groups, values
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.autograd import Numerics
from fp8engine.nn.linear import Float8Module
from fp8engine.numerics.recipe import RECIPES, Cast, Recipe, resolve
from fp8engine.ops import casts as operations
from fp8engine.ops import matmul as multiplying
from fp8engine.ops import twins
from fp8engine.scaling.table import ScalingState

# Those that compute the same at every step; "auto" has tests of its own.
EVERY_FP8_RECIPE = [name for name in RECIPES if resolve(name).is_fp8 and name != "auto"]
# Without the one that differs from "blockwise" in its groups' sizes alone: the laws and what names it take it.
FP8_RECIPES = [name for name in EVERY_FP8_RECIPE if name != "mxfp8"]
# Scales that are no powers of two, which no named recipe has for rows and blocks.
EXACT_SCALES = [
    pytest.param(recipe, id=recipe.name) for recipe in (fe.rowwise(power_of_2=False), fe.blockwise(power_of_2=False))
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNIT = ROUNDING


class Products(NamedTuple):
    """A Linear's results, float64, and for each the sum of |products|, which bounds the error of summing in FP32.

    straight: y before the bias.
    """

    y: np.ndarray
    dx: np.ndarray
    dw: np.ndarray
    db: np.ndarray
    y_abs: np.ndarray
    dx_abs: np.ndarray
    dw_abs: np.ndarray
    db_abs: np.ndarray
    straight: np.ndarray


def converted(model: nn.Module, recipe: str | Recipe = "current", **options) -> Any:
    """fe.convert without its word about emulation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fe.errors.EmulationWarning)
        return fe.convert(model, recipe, **options)


def pickled(model: Any) -> Any:
    """What torch.save has written, read."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def numerics_of(layer: nn.Module) -> Numerics:
    """A converted layer's numerics."""
    assert isinstance(layer.numerics, Numerics)
    return layer.numerics


def states(model: nn.Module) -> list[ScalingState]:
    """Each scaling state of a model once, in the order of its layers."""
    found = {id(m.numerics.state): m.numerics.state for m in model.modules() if isinstance(m, Float8Module)}
    return list(found.values())


def state_of(model: nn.Module) -> ScalingState:
    """The one scaling state of a converted model."""
    (state,) = states(model)
    return state


def tables(model: nn.Module) -> list[torch.Tensor]:
    """Copies of a model's history, live values and counters."""
    state = state_of(model)
    return [table.clone() for table in (state.history_HS, state.live_2S, state.counts_CS)]


def same(a, b) -> bool:
    """Bitwise equal lists of tensors."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def sqnr(wanted, found) -> float:
    """Signal to quantisation noise, 10 log10(sum wanted^2 / sum (found - wanted)^2), in dB."""
    wanted, found = (np.asarray(x.detach().double() if isinstance(x, torch.Tensor) else x) for x in (wanted, found))
    noise = np.square(found - wanted).sum()
    return math.inf if noise == 0 else 10 * math.log10(np.square(wanted).sum() / noise)


def dequantised(x: torch.Tensor, cast: Cast) -> np.ndarray:
    """x [M, K] under a cast with current scaling, as float64: groups, scales and rounding of DESIGN section 5."""
    if not cast.is_fp8:
        return (
            x.detach().double().numpy() if x.dtype.itemsize == 2 else x.detach().to(cast.format.dtype).double().numpy()
        )
    wide, dtype = x.detach().float().numpy(), cast.format.dtype
    found = np.zeros(wide.shape)
    for place in groups(wide.shape, cast):
        s = factor(float(np.abs(wide[place]).max()), MAX[dtype], cast.power_of_2)
        codes = torch.from_numpy(clamped_cast(wide[place], s, dtype)).view(dtype)
        found[place] = values(codes) * np.float64(np.float32(1) / s)
    return found


def turned(cast: Cast) -> Cast:
    """The cast for a matmul that reduces rows instead of columns: a scale per column, or blocks turned."""
    group = cast.granularity
    if isinstance(group, fe.PerRow):
        group = fe.PerRow(0)
    elif isinstance(group, fe.PerBlock):
        group = fe.PerBlock(group.cols, group.rows)
    return replace(cast, granularity=group)


def products(recipe: Recipe, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dy: torch.Tensor) -> Products:
    """The three matmuls of a Linear under a recipe, from matrices x [M, K], w [N, K], b [N], dy [M, N]."""
    x_y, w_y = dequantised(x, recipe.input), dequantised(w, recipe.weight)
    dy_x, w_x = dequantised(dy, recipe.grad_output), dequantised(w, recipe.weight_for_dgrad or turned(recipe.weight))
    dy_w = dequantised(dy, recipe.grad_output_for_wgrad or turned(recipe.grad_output))
    x_w = dequantised(x, recipe.input_for_wgrad or turned(recipe.input))
    return multiplied((x_y, w_y.T), (dy_x, w_x), (dy_w.T, x_w), b, dy)


def multiplied(forward, dgrad, wgrad, b: torch.Tensor | None, dy: torch.Tensor) -> Products:
    """The three matmuls of pairs of matrices that are cast."""
    pairs = (forward, dgrad, wgrad)
    y, dx, dw = (one @ other for one, other in pairs)
    y_abs, dx_abs, dw_abs = (np.abs(one) @ np.abs(other) for one, other in pairs)
    db, db_abs = (each.double().sum(0).numpy() for each in (dy, dy.double().abs()))
    return Products(y + (0 if b is None else b.detach().double().numpy()), dx, dw, db, y_abs, dx_abs, dw_abs, db_abs, y)


def exact(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dy: torch.Tensor) -> Products:
    """The same without any cast."""
    return products(fe.high_precision(fe.FP32), *(t.double() for t in (x, w, b, dy)))


def assert_within(found: torch.Tensor, wanted: np.ndarray, bound: np.ndarray, what: str) -> None:
    """|found - wanted| <= bound, element by element; says by how much it is missed."""
    error = np.abs(found.detach().double().numpy() - wanted)
    assert error.shape == bound.shape, f"{what}: shape {error.shape}, want {bound.shape}"
    over = error > bound
    assert not np.isnan(error).any(), f"{what}: NaN"
    worst = (error / np.maximum(bound, 1e-300)).max(initial=0)
    assert not over.any(), f"{what}: {over.sum()} of {error.size} beyond the bound, the worst by {worst:.2f}x"


def bound(
    value: np.ndarray, before_bias: np.ndarray, absolute: np.ndarray, sums: int, dtype, rounds: bool
) -> np.ndarray:
    """How far a Linear's result may lie from `products`, element by element: the sum of

    products leave in BF16 unless the recipe's output is FP32    2^-8 |y - b|
    sums of K products in FP32, in any order                     K 2^-24 sum |a b|
    one rounding to the layer's dtype                            u |y|, or half the smallest subnormal
    scales: a reciprocal and a product in FP32                   2^-22 |y|
    scales folded into both operands before their products       2 2^-24 sum |a b|
    """
    tiny = torch.finfo(dtype).smallest_normal * UNIT[dtype]
    # 1.01: the errors of later roundings on earlier errors
    return 1.01 * (
        rounds * 2.0**-8 * np.abs(before_bias)
        + (sums + 2) * 2.0**-24 * absolute
        + (UNIT[dtype] + 2.0**-22) * np.abs(value)
        + tiny
    )


def assert_products(found: Any, want: Products, shape: tuple[int, int, int], dtype, rounds: bool) -> None:
    """(y, dx, dw, db) of a layer, of shape M, K, N, are its products within `bound`; None: there is none."""
    m, k, n = shape
    terms = (want.straight, want.y_abs, k), (want.dx, want.dx_abs, n), (want.dw, want.dw_abs, m)
    terms += ((np.zeros(n), want.db_abs, m),)  # sums of dy alone, which is rounded before
    for name, each, (before_bias, absolute, sums) in zip(("y", "dx", "dw", "db"), found, terms, strict=True):
        if each is not None:
            value = getattr(want, name)
            assert_within(each, value, bound(value, before_bias, absolute, sums, dtype, rounds), name)


class Block(nn.Module):
    """A gated MLP with a norm and a residual: two layers that read one tensor, one that reads a product."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Net(nn.Module):
    """Two Blocks.  reentrant: None for no checkpointing, else which kind of torch.utils.checkpoint."""

    def __init__(self, width: int = 32, reentrant: bool | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def train(
    model: nn.Module, forward=None, steps: int = 4, rows=(24,), width: int = 32, growth: float = 1.0
) -> list[float]:
    """Losses of a few steps of SGD on random numbers that depend on nothing but their count; rows cycle.

    growth: of the inputs from step to step, so that delayed scaling has something to get wrong.
    """
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        x = (torch.randn(rows[step % len(rows)], width, generator=generator) * growth**step).requires_grad_()
        loss = (model if forward is None else forward)(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved(model: nn.Module, *given: Any) -> list[torch.Tensor]:
    """Tensors that a forward keeps for its backward, parameters left out; once for each time they are kept."""
    kept = []
    own = {p.data_ptr() for p in model.parameters()}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.data_ptr() not in own:
            kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(*given)
    return kept


def spy_on(monkeypatch, name: str, spy) -> None:
    """Let `spy(real, *arguments)` stand in for the operation of that name, whether layers choose a backend or not."""
    for module in (operations, multiplying, twins):
        if hasattr(module, name):
            real = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *given, real=real, **more: spy(real, *given, **more))
