"""Operands of one call of a layer, each tensor cast once for the matmuls that read its rows and its columns.

    forward   reads X[M, K] and W[N, K], cast along K
    dgrad     reads DY[M, N] along N, and W along N
    wgrad     reads DY and X along M

A matmul on FP8 codes reads both operands along what is summed.  So where one scale, or the same groups, serve both
directions, x is transposed for wgrad, dy for wgrad and the weight for dgrad in the pass that casts them.  What sibling
layers have cast already is found in `x.fp8` (scaling/operands.py); a slot of the scaling table counts each cast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fp8engine._torch import batched_by_autograd, dispatch_modes, forward_ad, graph_task, tracing, transforms_active
from fp8engine.autograd import gathered
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.refusals import check_caller, check_classes, check_graph, not_one_gradient
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.recipe import ROLES, Recipe
from fp8engine.ops import casts, library, matmul, twins
from fp8engine.ops.backends import asked
from fp8engine.ops.device import cpu_multiplies
from fp8engine.ops.library import PLAIN, in_backward, keepable
from fp8engine.ops.reference import Operand, Slot, column_sums, emulation_dtype, operand
from fp8engine.scaling.columns import GraphSlots, Slots
from fp8engine.scaling.operands import Made, Operands, carries, in_graph
from fp8engine.scaling.sample import ALONE, Call

NOTHING = (None, None)
Either = Operand | torch.Tensor  # FP8, or the tensor itself where a recipe leaves a matmul in 16 bits
INPUT, WEIGHT, GRAD_OUTPUT = range(len(ROLES))  # places among a layer's columns of the scaling table


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
    slots: the layer's, by (place, record, count).
    needs_x, needs_w, needs_b: whether input, weight and bias want gradients.
    record, count: whether amaxes enter the history, and casts the counters.
    real: whether the weight is data in eager code, of which copies may be kept.
    sampled: its number, where its tensors are described: in training, and before it where `auto` awaits a forward.
    """

    numerics: Numerics
    recipe: Recipe
    where: Where
    slots: Slots | GraphSlots
    needs_x: bool
    needs_w: bool
    needs_b: bool
    record: bool
    count: bool
    real: bool
    sampled: Call | None
    bias_dtype: torch.dtype | None


def use_of(numerics: Numerics, x: torch.Tensor, weight: torch.Tensor, bias_N, compiling: bool) -> Use:
    """The use of a layer in FP8 by a call that begins.  Raises for what refusals.py lists, naming the layer.

    x, weight [..., N, K]: for their device, their sizes and what they are.  compiling: whether a graph is traced.
    """
    recipe, state = numerics.recipe, numerics.state
    if type(x) not in PLAIN or type(weight) not in PLAIN:
        check_classes(x, weight, numerics.name)
    if not compiling and (transforms_active() or tracing() or forward_ad._current_level >= 0):
        check_caller(x, weight, bias_N, numerics.name)
    record, needs = torch.is_grad_enabled(), (False, False, False)
    if record:
        needs = x.requires_grad, weight.requires_grad, bias_N is not None and bias_N.requires_grad
    elif not compiling:
        record = graph_task() != -1
    bias_dtype = None if bias_N is None else bias_N.dtype
    samples = state.samples if record or state.decides_next else None
    if compiling:
        if record:
            check_graph(numerics)
        if numerics.standalone:
            state.begin_in_graph()
        where, slots = GRAPH_ON_CARD if graphs_run_on(x.device) == "cublas" else GRAPH, GraphSlots(numerics.columns)
        return Use(numerics, recipe, where, slots, *needs, record, True, False, samples and ALONE, bias_dtype)
    name, plain = asked(), dispatch_modes() == 0 and type(weight) in PLAIN
    numerics.sizes = sizes = (x.numel() // max(x.shape[-1], 1), weight.shape[-2], weight.shape[-1])
    on_host = x.device.type == "cpu" and (name == "reference" or (name is None and not cpu_multiplies("fp8")))
    if on_host and plain and type(x) in PLAIN and not state.groups:  # nothing else could be chosen
        where = TWINS[name]
    else:
        fast = recipe.precision["forward"]
        where = chosen(matmul.choose(x.device, recipe.by_block, sizes, fast, numerics.kind, bias_N is not None), name)
    numerics.ran = where.backend
    count = graph_task() == -1  # a forward that runs inside a backward is counted no second time
    real = plain and not weight.is_meta and not weight.is_inference()
    call = None if samples is None else samples.call(numerics.layer, sizes[0])
    return Use(numerics, recipe, where, state.slots[numerics.layer], *needs, record, count, real, call, bias_dtype)


def resumed(use: Use, dy: torch.Tensor) -> Use:
    """The use of a call whose backward begins with dy: where that runs, on the tables as they are now.

    Raises GradientError where the gradient is to have a gradient, and for a batch of gradients.
    """
    numerics = use.numerics
    if torch.compiler.is_compiling():
        if use.where.compiling:
            return use
        where = GRAPH_ON_CARD if use.where.on_codes else GRAPH  # compiled autograd: of a forward in eager code
        return use._replace(where=where, slots=GraphSlots(numerics.columns))
    if torch.is_grad_enabled() or batched_by_autograd(dy) or transforms_active():
        raise not_one_gradient(numerics.name)
    numerics.state.backward_seen = True
    numerics.weight.after_backward()
    if asked() not in (None, use.where.asked):
        use = use._replace(where=chosen(use.where.backend or "reference", use.where.asked))
    if use.slots is not (slots := numerics.state.slots[numerics.layer]):  # the tables have moved since
        use = use._replace(slots=slots)
    return use


def graphs_run_on(where: torch.device) -> str | None:
    """A backend of the kind that a compiled graph, which chooses when it runs, will choose there; None: any."""
    return "cublas" if where.type == "cuda" else None


def matrix(x: torch.Tensor) -> torch.Tensor:
    """x with its leading dimensions as rows; their product is spelt out because -1 is ambiguous beside a 0."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def kept_of(use: Use, x: torch.Tensor, asks: bool = True) -> Operands:
    """Operands that other layers, or what made x, have made of this very tensor.

    asks: whether what made x learns of the layer, to write its codes beside the next one.
    """
    if use.where.compiling:
        return in_graph(x)
    numerics = use.numerics
    parent, made = numerics.state.parents[numerics.layer], type(vars(x).get("fp8")) is Operands
    numerics.source = ""
    if not (made or parent is not None) or not (carries(x) if made else keepable(x)):
        return Operands()
    found = numerics.state.forward.operands(x, numerics.layer, parent)
    if found.producer is not None and asks:
        numerics.source = found.producer.name
        found.producer.read_by(numerics, use.needs_w and use.where.on_codes)
    return found


def input_pair(use: Use, x_MK: torch.Tensor, kept: Made) -> tuple[Operand | None, Operand | None, bool]:
    """(X for forward, what wgrad will read, whether that is X^T already); None: x itself, in 16 bits, or nothing.

    kept: operands that another layer has made of this x.
    """
    recipe = use.recipe
    first, second = recipe.forward[0], recipe.wgrad[1]
    slot = use.slots[INPUT, use.record, use.count]
    if use.sampled:
        use.numerics.observe("input", x_MK, use.sampled)
    if use.needs_w and use.where.on_codes and recipe.input_serves_both:
        return *both(use, x_MK, first, kept, slot), True
    serves = use.needs_w and second is first
    a = None
    if first.is_fp8:
        held = None if serves else use.where.emulation(x_MK.device, x_MK.numel())
        a = one(use, x_MK, first, kept, slot, held)
    if serves or not use.needs_w or not second.is_fp8:
        return a, a if serves else None, False
    return a, one(use, x_MK, second, kept, use.slots[INPUT, False, False], None), False


def kept_of_weight(use: Use, weight: torch.Tensor) -> tuple[Made, bool, bool]:
    """As `KeptWeight.operands`; of a weight that is no real data nothing is found, and a graph saves what it makes."""
    if not use.real:
        return {}, use.where.compiling, True
    host, predicted = use.slots.host, (0, 0.0)
    if use.recipe.predicts_weight:  # by a graph too, of which a CPU's table tells and the host's count does not
        s = 0.0 if host is None else float(host[0][1, use.slots[WEIGHT, False, False].index])
        predicted = use.numerics.state.predictions, s
    return use.numerics.weight.operands(weight, use.record, *predicted)


def weight_pair(use: Use, weight_NK: torch.Tensor) -> tuple[Either, tuple, Made]:
    """(W for forward; W^T as (codes, scale) where a graph saves it; copies that wait for backward)."""
    recipe, slot = use.recipe, use.slots[WEIGHT, use.record, use.count]
    second = recipe.forward[1]
    if type(weight_NK) is gathered.GatheredWeight:  # distributed/weight_scales.py describes it
        return gathered.for_forward(weight_NK, second, slot, use.where.compiling), NOTHING, {}
    if use.sampled:
        use.numerics.observe("weight", weight_NK)
    made, wait, outlive = kept_of_weight(use, weight_NK)
    holds, weight_KN, transposes = use.needs_x and wait, NOTHING, use.where.on_codes and recipe.weight_serves_both
    if not second.is_fp8:
        b: Either = plain(weight_NK, second)
    elif holds and transposes:
        b, b_t = both(use, weight_NK, second, made, slot)
        weight_KN = b_t[:2] if use.where.compiling else NOTHING
    else:
        b = one(use, weight_NK, second, made, slot, use.where.emulation(weight_NK.device, weight_NK.numel()))
    if not outlive and (transposes or second is not recipe.dgrad[1]):
        made.pop(second.text, None)  # forward has read it, and backward will not
    return b, weight_KN, made if holds and not use.where.compiling else {}


def weight_for_dgrad(use: Use, weight_NK: torch.Tensor, weight_KN: tuple, copies: Made) -> Either:
    """W^T [K, N]: from forward where it waits, else cast now."""
    first, second = use.recipe.forward[1], use.recipe.dgrad[1]
    codes, scale = weight_KN
    if codes is not None:
        return operand(codes, scale, first)
    slot = use.slots[WEIGHT, False, False]
    if type(weight_NK) is gathered.GatheredWeight:
        return transposed(gathered.for_dgrad(weight_NK, (first, second), slot, use.where.compiling))
    if use.where.on_codes and use.recipe.weight_serves_both:
        return transpose(use, weight_NK, first, copies, slot)
    if not second.is_fp8:
        return plain(weight_NK, second).t()
    held = use.where.emulation(weight_NK.device, weight_NK.numel())
    return transposed(one(use, weight_NK, second, copies, slot, held))


def gradient_pair(use: Use, dy_MN: torch.Tensor, made: dict) -> tuple[Either | None, Either | None, Any]:
    """(DY for dgrad, DY^T for wgrad, FP32 sums of dy's columns before it is rounded), None for what is not needed.

    made: what an activation's backward has made of it.
    """
    recipe = use.recipe
    first, second = recipe.dgrad[0], recipe.wgrad[0]
    slot = use.slots[GRAD_OUTPUT, True, True]
    if use.sampled:
        use.numerics.observe("grad_output", dy_MN, use.sampled)
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
        slot = use.slots[GRAD_OUTPUT, False, False]
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
        take_over(use, made[1], slot, x_MK.numel())
    if held is None and made[0].data.dtype != cast.dtype:  # another layer has them as values; codes are what is kept
        made = kept[cast.text] = operand(made[0].data.to(cast.dtype), made[0].scale, cast), made[1]
    return made[0]


def along_m(use: Use, x_MK: torch.Tensor, kept: Made) -> Either:
    """x as wgrad reads it, of an x made a second time: under the scale it had, not transposed and not counted."""
    slot, second = use.slots[INPUT, False, False], use.recipe.wgrad[1]
    return one(use, x_MK, second, kept, slot, None) if second.is_fp8 else plain(x_MK, second)


def input_again(use: Use, x_MK: torch.Tensor, kept: Made) -> Either:
    """X^T for wgrad, of an x that is made a second time."""
    if use.where.on_codes and use.recipe.input_serves_both:
        return transpose(use, x_MK, use.recipe.forward[0], kept, use.slots[INPUT, False, False])
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
        take_over(use, made[1], slot, x_MK.numel())
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


def take_over(use: Use, source: Slot, slot: Slot, size: int) -> None:
    """Another layer's slot already holds this tensor's amax: take it over instead of reading the tensor again."""
    if use.where.compiling:
        torch.ops.fp8engine.count_again.default(source[0], *slot[:2], slot.record, size)
    else:
        enter_again(source, slot, size)


def enter_again(source: Slot | None, slot: Slot, size: int) -> None:
    """Enter one more use of a tensor into a slot, with the amax and the scale of the slot that has counted it.

    source: that slot; None: it is not known, and the tensor is counted alone.  Of no elements nothing is entered.
    """
    on_host = slot.host is not None and (source is None or source.host is not None)
    live, counts = slot.host if on_host and slot.host else (slot.live_2S, slot.counts_CS)
    if slot.count and size:
        counts[0, slot.index] += 1
        counts[1, slot.index] += size
    if slot.record and size and source is not None:
        before = source.host[0] if on_host and source.host else source.live_2S
        largest = max if on_host else torch.maximum
        live[0, slot.index] = largest(live[0, slot.index], before[0, source.index])
        live[1, slot.index] = before[1, source.index]


def _count_again(source, live, counts, record: bool, size: int) -> None:
    """Of columns, as graphs have them."""
    enter_again(Slot(source, counts, 0), Slot(live, counts, 0, record, not in_backward()), size)


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
