"""Grouped linear layer of E experts: each group of rows times its own expert's weight.

    forward   y[t]  = x[t] @ w[e(t)]^T + b[e(t)]       x [T, K], w [E, N, K], b [E, N]; e(t): the expert of row t
    dgrad     dx[t] = dy[t] @ w[e(t)]
    wgrad     dw[e] = sum of dy[t]^T x[t] over the rows of e, db[e] = sum of dy[t]; 0 where e has no row

One slot an operand serves the whole layer: a scale per tensor is one number for all the experts.  FP8 is a floating
point format, so that this costs an expert nothing until its amax is 2^-10 of the largest one's (nn/grouped.py).
Groups that share a scale never cross experts: 128 x 1 of x begins anew at each expert's first row, as a column's does.
So a recipe whose scales are per row or per block casts and multiplies exactly what E separate Linears do.

How many rows an expert has stays where it is, on the card as a rule: casts and matmuls take `bounds` (groups.py), are
one launch for all experts, and have shapes that do not depend on it, so that a compiled graph holds them.  Where there
is no such launch (ops/grouped.py) the operation itself goes from expert to expert.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence

import torch

from fp8engine import _torch
from fp8engine.autograd.groups import bounds
from fp8engine.autograd.linear import begin, check, dtype_of_result
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.operands import (
    GRAD_OUTPUT,
    INPUT,
    WEIGHT,
    Either,
    Use,
    kept_of,
    kept_of_weight,
    one,
    plain,
    resumed,
    use_of,
)
from fp8engine.autograd.ready import suited, take
from fp8engine.errors import ShapeError
from fp8engine.numerics.cast import Cast
from fp8engine.ops import casts, grouped
from fp8engine.ops.backends import running_on
from fp8engine.ops.reference import Operand, Slot, emulation_dtype
from fp8engine.ops.reference.grouped import BLOCK, bounds_of_equal, parts_of
from fp8engine.ops.tensor import Float8Tensor
from fp8engine.scaling.operands import Made
from fp8engine.scaling.sample import outside_of_autocast

RAN = {"torch": "cublas", "triton": "triton"}  # reports name the backend; torch's grouped matmul is CUTLASS


def grouped_linear(
    x_TK: torch.Tensor,
    weight_ENK: torch.Tensor,
    bias_EN: torch.Tensor | None,
    sizes: Sequence[int] | torch.Tensor,
    numerics: Numerics,
) -> torch.Tensor:
    """Each group of rows of x times its expert's weight, plus its bias: [T, N] in x's dtype, or autocast's.

    sizes: how many rows of x each expert has, in order; see `bounds` for what is allowed and what is raised.
    weight_ENK: of any strides; one stored [E, K, N] is given as its transposed view.
    Also raises ShapeError for an input that is not [T, K], and what `linear` does.

    >>> from fp8engine.numerics.recipe import rowwise
    >>> from fp8engine.scaling.table import ScalingState
    >>> numerics = Numerics("experts", rowwise(), ScalingState([("experts", rowwise())]))
    >>> weight_ENK = torch.tensor([[[1.0, 2.0]], [[4.0, 8.0]]])
    >>> grouped_linear(torch.ones(3, 2), weight_ENK, None, [1, 2], numerics).tolist()
    [[3.0], [12.0], [12.0]]
    """
    name, (experts, _, k) = numerics.name, weight_ENK.shape
    if x_TK.dim() != 2:
        raise ShapeError(
            f"{name}: input is {list(x_TK.shape)}; want [T, {k}], the rows of each expert together: flatten and sort it"
        )
    out, compiling = begin(x_TK, weight_ENK[0], bias_EN, numerics)
    if isinstance(x_TK, Float8Tensor):
        x_TK = suited(x_TK, numerics, compiling)
    bounds_2E1 = bounds(sizes, x_TK, experts, name)
    # The result's dtype is decided; autocast would now promote codes where they are concatenated.
    with outside_of_autocast(x_TK.device):
        if not numerics.recipe.is_fp8:
            return _in_16_bits(x_TK, weight_ENK, bias_EN, bounds_2E1, numerics.recipe.input.format.dtype).to(out)
        use = use_of(numerics, x_TK, weight_ENK, bias_EN, compiling)
        return _GroupedLinear.apply(x_TK, weight_ENK, bias_EN, bounds_2E1, use, out)


def grouped_plain(x_TK, weight_ENK, bias_EN, sizes: Sequence[int] | torch.Tensor, name: str) -> torch.Tensor:
    """The same in the operands' own dtype, or autocast's: a layer of experts that no recipe touches.

    >>> grouped_plain(torch.ones(3, 2), torch.ones(2, 1, 2), None, [1, 2], "experts").tolist()
    [[2.0], [2.0], [2.0]]
    """
    check(x_TK, weight_ENK[0], bias_EN, name)
    out = dtype_of_result(x_TK, weight_ENK, name)
    bounds_2E1 = bounds(sizes, x_TK, len(weight_ENK), name)
    with outside_of_autocast(x_TK.device):
        return _in_16_bits(x_TK, weight_ENK, bias_EN, bounds_2E1, out)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, weight_ENK, bias_EN, bounds_2E1, use: Use, out: torch.dtype):
        call = _Experts(use, x_TK.device, bounds_2E1)
        a, saved = call.take(x_TK) if isinstance(x_TK, Float8Tensor) else call.cast_rows(x_TK)
        y_TN = call.experts_forward(a, weight_ENK, bias_EN, out)
        data, scale, *ctx.groups = saved if isinstance(saved, Operand) else (saved, None)
        ctx.save_for_backward(data, scale, weight_ENK)
        ctx.call, ctx.dtype = call, x_TK.dtype
        return y_TN

    @staticmethod
    def backward(ctx, dy_TN):
        data, scale, weight_ENK = ctx.saved_tensors  # read once: checkpoints unpack nothing a second time
        call, use = ctx.call, resumed(ctx.call.use, dy_TN)
        if use is not call.use:  # never so in a graph, which allows no such write
            call.use = use
        with running_on(use.where.asked):
            saved = Operand(data, scale, *ctx.groups) if ctx.groups else data
            return *call.experts_backward(dy_TN, saved, weight_ENK, ctx.dtype), None, None, None


class _Experts:
    """The three matmuls of a weight [E, N, K], and of rows that `bounds_2E1` divides."""

    def __init__(self, use: Use, device: torch.device, bounds_2E1: torch.Tensor):
        self.use, self.numerics, self.recipe = use, use.numerics, use.recipe
        self.bounds_2E1, self.experts = bounds_2E1, bounds_2E1.shape[1] - 1
        self.copies: Made = {}
        of_dy, of_x = self.recipe.wgrad
        # Whether wgrad reads transposes in blocks, else rows as they are.
        self.blocks = of_dy.is_fp8 and of_x.is_fp8 and grouped.in_blocks(device, of_dy, of_x, use.where.compiling)

    def slot(self, place: int, record: bool = False, count: bool = False) -> Slot:
        """The slot of one of the layer's operands."""
        return self.use.slots[place, record, count]

    def take(self, x: Float8Tensor) -> tuple[Either, Either | None]:
        """`cast_rows` of an input that is in FP8 already: wgrad transposes the codes when it reads them."""
        return take(self.use, x, self.cast_again)

    def cast_rows(self, x_TK: torch.Tensor) -> tuple[Either, Either | None]:
        """(X for forward, what wgrad will read)."""
        use, recipe = self.use, self.recipe
        first, to_save = recipe.forward[0], recipe.wgrad[1]
        if use.sampled:
            use.numerics.observe("input", x_TK, use.sampled)
        serves = use.needs_w and to_save is first and (first.per_tensor or not self.blocks)
        held = None if serves else self._holding(x_TK)
        a = self._rows(x_TK, first, kept_of(use, x_TK, asks=False), self.slot(INPUT, use.record, use.count), held)
        if serves or not use.needs_w:
            return a, a if serves else None
        return a, self.cast_again(x_TK, {})

    def cast_again(self, x_MK: torch.Tensor, kept: Made) -> Either:
        """What wgrad reads, of rows that forward read as codes."""
        return self._for_wgrad(x_MK, self.recipe.wgrad[1], kept, self.slot(INPUT), None)

    def experts_forward(self, a: Either, weight_ENK, bias_EN, out: torch.dtype) -> torch.Tensor:
        """y [T, N]; the weight's operands wait here for backward where that is worth their memory."""
        use, second = self.use, self.recipe.forward[1]
        if use.sampled:
            use.numerics.observe("weight", weight_ENK.flatten(0, 1))
        weights, wait, outlive = kept_of_weight(use, weight_ENK)
        slot, held = self.slot(WEIGHT, use.record, use.count), self._holding(weight_ENK)
        b = _of_weight(weight_ENK, second, weights, slot, held)
        y_TN = self._each_row(a, b, False, bias_EN, out, "forward")
        if not outlive and second is not self.recipe.dgrad[1]:
            weights.pop(second.text, None)  # forward has read it, and backward will not
        if not use.where.compiling:
            self.copies = weights if use.needs_x and wait else {}
        return y_TN

    def experts_backward(self, dy_TN: torch.Tensor, saved: Either, weight_ENK, dtype: torch.dtype) -> tuple:
        """(dx [T, K], dw [E, N, K], db [E, N]), None for what is not needed."""
        use, recipe = self.use, self.recipe
        if use.sampled:
            use.numerics.observe("grad_output", dy_TN, use.sampled)
        held, made, slot = self._holding(dy_TN), {}, self.slot(GRAD_OUTPUT, True, True)
        dx_TK = dw_ENK = db_EN = None
        if use.needs_x:
            a = self._rows(dy_TN, recipe.dgrad[0], made, slot, held)
            b, transposed = self._weight_for_rows_of_dy(weight_ENK)
            dx_TK = self._each_row(a, b, transposed, None, dtype, "dgrad")
            slot = self.slot(GRAD_OUTPUT)
        if use.needs_w:
            a = self._for_wgrad(dy_TN, recipe.wgrad[0], made, slot, held)
            dw_ENK = self._each_expert(a, saved, weight_ENK.dtype)
        if use.needs_b:
            db_EN = grouped.column_sums(dy_TN, self.bounds_2E1).to(use.bias_dtype)
        return dx_TK, dw_ENK, db_EN

    def _holding(self, x: torch.Tensor) -> torch.dtype | None:
        """Emulation dtype of one expert's operands; None: FP8 codes."""
        if self.use.where.backend != "reference":
            return None
        return emulation_dtype(x.device, x.numel() // self.experts)

    def _rows(self, x_TK: torch.Tensor, cast: Cast, kept: Made, slot: Slot, held) -> Either:
        """Rows under a cast, groups that share a scale within one expert."""
        if not cast.is_fp8:
            return plain(x_TK, cast)
        if not grouped.spans_rows(cast):
            return one(self.use, x_TK, cast, kept, slot, held)
        # Not kept for another consumer of x: its groups may be others.
        return grouped.quantize(x_TK, cast, self.bounds_2E1, slot, held=held)

    def _for_wgrad(self, x_TK: torch.Tensor, cast: Cast, kept: Made, slot: Slot, held) -> Either:
        """Rows under a cast along them: in blocks where wgrad reads those, but for codes that are transposed later."""
        if not self.blocks or cast.per_tensor:
            return self._rows(x_TK, cast, kept, slot, held)
        return grouped.quantize(x_TK, cast, self.bounds_2E1, slot, transposed=True)

    def _weight_for_rows_of_dy(self, weight_ENK: torch.Tensor) -> tuple[Either, bool]:
        """(the weight's operand for dgrad, whether it is laid out as for forward), from forward or cast now."""
        cast = self.recipe.dgrad[1]
        weights: Made = {}
        if not self.use.where.compiling:
            # Taken out: a loss that the user still holds holds this call, and would hold what waits here.
            weights, self.copies = self.copies, weights
        slot, held = self.slot(WEIGHT), self._holding(weight_ENK)
        if cast is self.recipe.forward[1] or not cast.is_fp8:
            return _of_weight(weight_ENK, cast, weights, slot, held), True
        return _of_weight(weight_ENK, cast, weights, slot, held, transposed=True), False

    def _each_row(self, a: Either, b: Either, transposed: bool, bias_EN, out: torch.dtype, matmul: str) -> torch.Tensor:
        """Each row of a times its expert's part of b; transposed: times that part's transpose."""
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            b_ENK = b.unflatten(0, (self.experts, -1))
            return _in_16_bits(a, b_ENK.mT if transposed else b_ENK, bias_EN, self.bounds_2E1, a.dtype).to(out)
        a, b = typing.cast("Operand", a), typing.cast("Operand", b)  # one recipe's casts: both are FP8, or neither
        precision = self.recipe.precision[matmul]
        if not self.use.where.compiling and matmul == "forward":
            self.numerics.ran = RAN.get(grouped.runs_on(a, b, self.experts, precision), self.numerics.ran)
        return grouped.rows(a, b, self.bounds_2E1, bias_EN, out, (precision, transposed))

    def _each_expert(self, a: Either, b: Either, dtype: torch.dtype) -> torch.Tensor:
        """dw: for each expert, the transpose of its rows of a times its rows of b."""
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return grouped.sums_16(a, b.to(a.dtype), self.bounds_2E1, dtype)
        a, b = typing.cast("Operand", a), typing.cast("Operand", b)
        if self.blocks:
            a, b = (grouped.transpose(x, self.bounds_2E1) if x.scale.dim() == 0 else x for x in (a, b))
        return grouped.sums(a, b, self.bounds_2E1, dtype, (self.recipe.precision["wgrad"], self.blocks))


def _in_16_bits(x_TK, weight_ENK, bias_EN, bounds_2E1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The experts with their operands in `dtype`: what a recipe without FP8 means; differentiable by torch."""
    x_TK, weight_ENK = x_TK.to(dtype), weight_ENK.to(dtype)
    bias_EN = None if bias_EN is None else bias_EN.to(dtype)
    if not grouped.groupable(x_TK, weight_ENK):
        return _one_by_one(x_TK, weight_ENK, bias_EN, bounds_2E1)
    ends_E = bounds_2E1[0, 1:].contiguous()
    y_TN = torch.nn.functional.grouped_mm(grouped.in_rows(x_TK), weight_ENK.mT, offs=ends_E)
    if y_TN.requires_grad:
        y_TN.register_hook(grouped.in_rows)  # its backward refuses an expanded gradient, as of a sum
    # In FP32, in which the bias's gradient is summed then: one of 16 bits would stop growing after 2^8 rows.
    return y_TN if bias_EN is None else (y_TN + grouped.of_rows(bias_EN.float(), ends_E, len(x_TK))).to(dtype)


@_torch.outside_of_graphs  # sizes of rows are numbers on the host
def _one_by_one(x_TK, weight_ENK, bias_EN, bounds_2E1: torch.Tensor) -> torch.Tensor:
    """What torch's grouped matmul does not take, expert after expert: waits for a card, and breaks a graph."""
    if bounds_2E1.is_meta:
        return x_TK.new_empty(len(x_TK), weight_ENK.shape[1])
    found = []
    for e, part in enumerate(parts_of(bounds_2E1)):
        x_RK = x_TK[part.start : part.end]
        found.append(torch.nn.functional.linear(x_RK, weight_ENK[e], None if bias_EN is None else bias_EN[e]))
    return torch.cat(found)


def _of_weight(weight_ENK, cast: Cast, kept: Made, slot: Slot, held, transposed=False) -> Either:
    """The experts' weights under a cast as one stack [E * N, K]; transposed: that of their transposes, [E * K, N]."""
    stack = weight_ENK.mT if transposed else weight_ENK
    experts, rows, cols = stack.shape
    x_RC = stack.reshape(experts * rows, cols)
    if not cast.is_fp8:
        return plain(x_RC, cast)
    key = cast.text
    if transposed:
        cast, key = cast.t(), cast.text_of_transpose
    made = kept.get(key)
    # Made without gradients (an evaluation, the first forward of a reentrant checkpoint): not yet in the history.
    # Or it is values, of a call that was emulated.
    values = made is not None and held is None and made[0].data.dtype != cast.dtype
    if made is None or values or (slot.record and not made[1].record):
        made = kept[key] = _stacked(x_RC, cast, experts, slot, held), slot
    return made[0]


def _stacked(x_RC: torch.Tensor, cast: Cast, experts: int, slot: Slot, held: torch.dtype | None) -> Operand:
    """Weights under a cast; where rows share a scale, each expert's are cast for themselves."""
    rows = x_RC.shape[0] // experts
    if not grouped.spans_rows(cast) or (cast.rows != -1 and rows % BLOCK == 0):
        return casts.quantize(x_RC, cast, slot, held)
    made = grouped.quantize(x_RC, cast, bounds_of_equal(rows, experts, x_RC.device), slot, held=held)
    down = experts if cast.rows == -1 else experts * -(-rows // BLOCK) * (BLOCK // cast.rows)
    return made._replace(scale=made.scale[:down])
