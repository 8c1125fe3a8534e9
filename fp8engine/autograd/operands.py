"""Operands of one call of a layer, each tensor cast once for the matmuls that read its rows and its columns.

    forward   reads X[M, K] and W[N, K], cast along K
    dgrad     reads DY[M, N] along N, and W along N
    wgrad     reads DY and X along M

A matmul on FP8 codes reads both operands along what is summed.  So where one scale, or the same groups, serve both
directions, x is transposed for wgrad, dy for wgrad and the weight for dgrad in the pass that casts them.  What sibling
layers have cast already is found in `x.fp8` (scaling/operands.py); a slot of the scaling table counts each cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fp8engine._torch import dispatch_modes, graph_task
from fp8engine.autograd.numerics import Numerics
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.recipe import ROLES, Recipe
from fp8engine.ops import casts, library, matmul, twins
from fp8engine.ops.backends import asked
from fp8engine.ops.device import cpu_multiplies
from fp8engine.ops.library import PLAIN, in_backward
from fp8engine.ops.reference import Operand, Slot, column_sums, emulation_dtype, operand
from fp8engine.scaling.columns import GraphSlots, Slots
from fp8engine.scaling.operands import Made

Either = Operand | torch.Tensor  # FP8, or the tensor itself where a recipe leaves a matmul in 16 bits
INPUT, WEIGHT, GRAD_OUTPUT = range(len(ROLES))  # places of a layer's columns in the scaling table


class Where(NamedTuple):
    """Where a call runs.

    backend: of forward's matmul; None in a graph for a CPU, which chooses when it runs.  asked: by `fe.backend`.
    on_codes: whether it multiplies FP8 codes alone, both operands lying along what is summed: what serves two matmuls
    is transposed in the pass that casts it.
    emulation: (device, size) -> dtype in which so many values wait for an emulated matmul; None for FP8 codes.
    casts, products: the modules of its casts and its matmul: those that choose a backend at each call, or ops/twins.py.
    compiling: whether a graph is traced.
    """

    backend: str | None
    asked: str | None
    on_codes: bool
    emulation: Callable[[torch.device, int], torch.dtype | None]
    casts: Any = casts
    products: Any = matmul
    compiling: bool = False


def _codes(where: torch.device, size: int) -> None:
    """No emulation: FP8 codes."""


GRAPH = Where(None, None, False, _codes, compiling=True)
GRAPH_ON_CARD = Where("cublas", None, True, _codes, compiling=True)  # a backend of the kind that will be chosen
TWINS = {name: Where("reference", name, False, emulation_dtype, twins, twins) for name in (None, "reference")}


def chosen(backend: str, asked: str | None) -> Where:
    """On that backend, whose operations choose at each call."""
    emulation = emulation_dtype if backend == "reference" else _codes
    return Where(backend, asked, backend in ("triton", "cublas"), emulation)


class Use(NamedTuple):
    """What one call of a layer has decided, in forward, and reads in backward.

    recipe: as it is now; another step may begin, under another, before this backward.
    slots: of the scaling table, by (column, record, count).  first: the column of the layer's input.
    needs_x, needs_w, needs_b: whether input, weight and bias want gradients.
    record, count: whether amaxes enter the history, and casts the counters.
    real: whether the weight is data in eager code, of which copies may be kept.
    """

    numerics: Numerics
    recipe: Recipe
    where: Where
    slots: Slots | GraphSlots
    first: int
    needs_x: bool
    needs_w: bool
    needs_b: bool
    record: bool
    count: bool
    real: bool
    bias_dtype: torch.dtype | None

    @property
    def samples(self) -> bool:
        """Whether this call's tensors are sampled: in training, and before it where `auto` awaits a forward."""
        state = self.numerics.state
        return state.samples is not None and (self.record or state.decides_next)

    def observe(self, role: str, x_MK: torch.Tensor) -> None:
        """Describe a tensor in a step that is sampled."""
        if self.samples:
            self.numerics.observe(role, x_MK)


def use_of(
    numerics: Numerics, x: torch.Tensor, weight: torch.Tensor, bias_N, needs: tuple[bool, bool, bool], record: bool
) -> Use:
    """The use of a layer by a call that begins.

    x, weight: its input and its weight [..., N, K], for their device and sizes.  needs: whether input, weight and bias
    want gradients.
    """
    recipe, state = numerics.recipe, numerics.state
    bias_dtype = None if bias_N is None else bias_N.dtype
    if torch.compiler.is_compiling():
        where = GRAPH_ON_CARD if graphs_run_on(x.device) == "cublas" else GRAPH
        return Use(numerics, recipe, where, GraphSlots(numerics.columns), 0, *needs, record, True, False, bias_dtype)
    name, plain = asked(), dispatch_modes() == 0 and type(weight) in PLAIN
    numerics.sizes = sizes = (x.numel() // max(x.shape[-1], 1), weight.shape[-2], weight.shape[-1])
    on_host = x.device.type == "cpu" and (name == "reference" or (name is None and not cpu_multiplies("fp8")))
    if on_host and plain and type(x) in PLAIN and not state.groups:  # nothing else could be chosen
        where = TWINS[name]
    else:
        fast = recipe.precision["forward"]
        where = chosen(matmul.choose(x.device, recipe.by_block, sizes, fast, numerics.kind), name)
    numerics.ran, first = where.backend, len(ROLES) * numerics.layer
    count = graph_task() == -1  # a forward that runs inside a backward is counted no second time
    real = plain and not weight.is_meta and not weight.is_inference()
    return Use(numerics, recipe, where, state.slots, first, *needs, record, count, real, bias_dtype)


def graphs_run_on(where: torch.device) -> str | None:
    """A backend of the kind that a compiled graph, which chooses when it runs, will choose there; None: any."""
    return "cublas" if where.type == "cuda" else None


def input_pair(use: Use, x_MK: torch.Tensor, kept: Made) -> tuple[Operand | None, Operand | None, bool]:
    """(X for forward, what wgrad will read, whether that is X^T already); None: x itself, in 16 bits, or nothing.

    kept: operands that another layer has made of this x.
    """
    recipe = use.recipe
    first, second = recipe.forward[0], recipe.wgrad[1]
    slot = use.slots[use.first + INPUT, use.record, use.count]
    if use.numerics.state.samples is not None:
        use.observe("input", x_MK)
    if use.needs_w and use.where.on_codes and recipe.input_serves_both:
        return *both(use, x_MK, first, kept, slot), True
    serves = use.needs_w and second is first
    a = None
    if first.is_fp8:
        held = None if serves else use.where.emulation(x_MK.device, x_MK.numel())
        a = one(use, x_MK, first, kept, slot, held)
    if serves or not use.needs_w or not second.is_fp8:
        return a, a if serves else None, False
    return a, one(use, x_MK, second, kept, use.slots[use.first + INPUT, False, False], None), False


def gradient_pair(use: Use, dy_MN: torch.Tensor, made: dict) -> tuple[Either | None, Either | None, Any]:
    """(DY for dgrad, DY^T for wgrad, FP32 sums of dy's columns before it is rounded), None for what is not needed.

    made: what an activation's backward has made of it.
    """
    recipe = use.recipe
    first, second = recipe.dgrad[0], recipe.wgrad[0]
    slot = use.slots[use.first + GRAD_OUTPUT, True, True]
    if use.numerics.state.samples is not None:
        use.observe("grad_output", dy_MN)
    d = d_t = db_N = None
    held = use.where.emulation(dy_MN.device, dy_MN.numel())
    if use.where.on_codes and use.needs_x and use.needs_w and recipe.grad_serves_both:
        if first.text in made:
            return made[first.text][0], made[first.text_of_transpose][0], made["sums"]
        if use.needs_b:
            return use.where.casts.cast_transpose(dy_MN, first, slot, sums=True)
        return *use.where.casts.cast_transpose(dy_MN, first, slot), None
    if use.needs_x:
        d = one(use, dy_MN, first, made, slot, held) if first.is_fp8 else plain(dy_MN, first)
        slot = use.slots[use.first + GRAD_OUTPUT, False, False]
    if use.needs_w:
        d_t = transposed(one(use, dy_MN, second, made, slot, held) if second.is_fp8 else plain(dy_MN, second))
    if use.needs_b:
        db_N = dy_MN.sum(0, dtype=torch.float32) if use.where.compiling else column_sums(dy_MN)
    return d, d_t, db_N


def plain(x: torch.Tensor, cast: Cast) -> torch.Tensor:
    """x as a matmul in 16 bits reads it: itself, or an FP32 one in the cast's format."""
    return x if x.dtype.itemsize == 2 else x.to(cast.dtype)


def one(use: Use, x_MK: torch.Tensor, cast: Cast, kept: Made, slot: Slot, held: torch.dtype | None) -> Operand:
    """x under a cast to FP8, made once.  slot: where the scale is read and this use of x is counted.

    held: None for FP8 codes; else x may wait as values in that dtype, because only an emulated matmul reads it.
    """
    made = kept.get(cast.text)
    # Made without gradients (an evaluation, the first forward of a reentrant checkpoint): not yet in the history.
    if made is None or (slot.record and not made[1].record):
        made = kept[cast.text] = use.where.casts.quantize(x_MK, cast, slot, held), slot
    elif (slot.count or slot.record) and not same(slot, made[1]):
        take_over(made[1], slot, x_MK.numel())
    if held is None and made[0].data.dtype != cast.dtype:  # another layer has them as values; codes are what is kept
        made = kept[cast.text] = operand(made[0].data.to(cast.dtype), made[0].scale, cast), made[1]
    return made[0]


def along_m(use: Use, x_MK: torch.Tensor, kept: Made) -> Either:
    """x as wgrad reads it, of an x made a second time: under the scale it had, not transposed and not counted."""
    slot, second = use.slots[use.first + INPUT, False, False], use.recipe.wgrad[1]
    return one(use, x_MK, second, kept, slot, None) if second.is_fp8 else plain(x_MK, second)


def input_again(use: Use, x_MK: torch.Tensor, kept: Made) -> Either:
    """X^T for wgrad, of an x that is made a second time."""
    if use.where.on_codes and use.recipe.input_serves_both:
        return transpose(use, x_MK, use.recipe.forward[0], kept, use.slots[use.first + INPUT, False, False])
    return transposed(along_m(use, x_MK, kept))


def both(use: Use, x_MK: torch.Tensor, cast: Cast, kept: Made, slot: Slot) -> tuple[Operand, Operand]:
    """x under a cast, and its transpose under the same for the matmul that reduces x's rows: one pass, made once.

    For a cast that `serves_both` says does; as FP8 codes.
    """
    made, made_t = kept.get(cast.text), kept.get(cast.text_of_transpose)
    if made is not None and made[0].data.dtype != cast.dtype:  # values, of a call that was emulated
        made = None
    if made is not None and made_t is None and made[1].record >= slot.record:  # a producer's codes, counted with them
        uncounted = Slot(*slot[:3], False, False, *slot[5:])
        made_t = use.where.casts.cast_transpose(x_MK, cast, uncounted)[1], made[1]
        kept[cast.text_of_transpose] = made_t
    if made is None or made_t is None or (slot.record and not made[1].record):
        first, second = use.where.casts.cast_transpose(x_MK, cast, slot)
        kept[cast.text], kept[cast.text_of_transpose] = (first, slot), (second, slot)
        return first, second
    if (slot.count or slot.record) and not same(slot, made[1]):
        take_over(made[1], slot, x_MK.numel())
    return made[0], made_t[0]


def transpose(use: Use, x_MK: torch.Tensor, cast: Cast, kept: Made, slot: Slot) -> Operand:
    """The second of `both` alone, for a backward whose forward has used up the first."""
    key = cast.text_of_transpose
    if key not in kept:
        kept[key] = use.where.casts.cast_transpose(x_MK, cast, slot)[1], slot
    return kept[key][0]


def same(slot: Slot, other: Slot) -> bool:
    """Whether both are one column of one table."""
    return slot.index == other.index and slot.live_2S is other.live_2S


def take_over(source: Slot, slot: Slot, size: int) -> None:
    """Another layer's slot already holds this tensor's amax: take it over instead of reading the tensor again."""
    if torch.compiler.is_compiling():
        torch.ops.fp8engine.count_again.default(source[0], *slot[:2], slot.record, size)
    else:
        _take_over(source, slot, size)


def _take_over(source: Slot, slot: Slot, size: int) -> None:
    live, counts, before = slot.live_2S, slot.counts_CS, source.live_2S
    if slot.record:
        live[0, slot.index] = torch.maximum(live[0, slot.index], before[0, source.index])
        live[1, slot.index] = before[1, source.index]
    if slot.count:
        counts[0, slot.index] += 1
        counts[1, slot.index] += size


def _count_again(source, live, counts, record: bool, size: int) -> None:
    """Of columns, as graphs have them."""
    _take_over(Slot(source, counts, 0), Slot(live, counts, 0, record, not in_backward()), size)


library.define(
    "count_again(Tensor source, Tensor live, Tensor counts, bool record, SymInt size) -> ()",
    _count_again,
    lambda *arguments: None,
    effect=True,
)


def transposed(x: Either) -> Either:
    """The transposed matrix, as a view; without a call of its own where one scale serves all of it."""
    if isinstance(x, Operand) and x.scale.dim() == 0:
        return Operand(x.data.t(), x.scale, x.cols, x.rows, x.power_of_2)
    return x.t()
