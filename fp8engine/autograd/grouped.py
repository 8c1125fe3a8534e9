"""Grouped linear layer of E experts: each group of rows times its own expert's weight.

    forward   y[t]  = x[t] @ w[e(t)]^T + b[e(t)]       x [T, K], w [E, N, K], b [E, N]; e(t): the expert of row t
    dgrad     dx[t] = dy[t] @ w[e(t)]
    wgrad     dw[e] = sum of dy[t]^T x[t] over the rows of e, db[e] = sum of dy[t]; 0 where e has no row

One slot an operand serves the whole layer: a scale per tensor is one number for all the experts.  FP8 is a floating
point format, so that this costs an expert nothing until its amax is 2^-10 of the largest one's (nn/grouped.py).
Groups that share a scale never cross experts: 128 x 1 of x begins anew at each expert's first row, as a column's does.
So a recipe whose scales are per row or per block casts and multiplies exactly what E separate Linears do.

Two ways to multiply.  Numbers of rows that are a tensor on a card are copied to the host only for the second:

    torch's grouped matmul    takes offsets, does not wait (sm_90; on older cards torch itself does): BF16; FP8 forward
                              and dgrad where both operands are E4M3 with a scale per tensor or row
    a loop over the experts   waits, once a call: casts whose groups span rows, FP8 wgrad, a bias's gradient, the rest
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fp8engine import _torch
from fp8engine.autograd.call import ON_CODES, Call, Either, operand
from fp8engine.autograd.groups import (
    Groups,
    groupable,
    grouped_wgrad,
    has_scaled_grouped,
    of_rows,
    scaled_grouped,
    ungroupable,
)
from fp8engine.autograd.linear import check, dtype_of_result, enter
from fp8engine.autograd.numerics import Casting, Numerics
from fp8engine.autograd.ready import suited, take
from fp8engine.autograd.refusals import no_transform
from fp8engine.autograd.weight import Copies
from fp8engine.errors import ShapeError
from fp8engine.ops import casts
from fp8engine.ops.backends import asked
from fp8engine.ops.reference import How, Operand, Slot, column_sums, emulation_dtype
from fp8engine.ops.tensor import Float8Tensor
from fp8engine.scaling.shared_input import Kept


def grouped_linear(
    x_TK: torch.Tensor,
    weight_ENK: torch.Tensor,
    bias_EN: torch.Tensor | None,
    sizes: Sequence[int] | torch.Tensor,
    numerics: Numerics,
) -> torch.Tensor:
    """Each group of rows of x times its expert's weight, plus its bias: [T, N] in x's dtype, or autocast's.

    sizes: how many rows of x each expert has, in order; see `Groups` for what is allowed and what is raised.
    weight_ENK: of any strides; one stored [E, K, N] is given as its transposed view.
    Also raises ShapeError for an input that is not [T, K], and what `linear` does.  A compiled graph breaks here.

    >>> from fp8engine.numerics.recipe import rowwise
    >>> from fp8engine.scaling.table import ScalingState
    >>> numerics = Numerics("experts", rowwise(), ScalingState([("experts", rowwise())]))
    >>> weight_ENK = torch.tensor([[[1.0, 2.0]], [[4.0, 8.0]]])
    >>> grouped_linear(torch.ones(3, 2), weight_ENK, None, [1, 2], numerics).tolist()
    [[3.0], [12.0], [12.0]]
    """
    if torch.compiler.is_compiling():
        return _outside_of_graphs(x_TK, weight_ENK, bias_EN, sizes, numerics)
    return _grouped_linear(x_TK, weight_ENK, bias_EN, sizes, numerics)


def grouped_plain(x_TK, weight_ENK, bias_EN, sizes: Sequence[int] | torch.Tensor, name: str) -> torch.Tensor:
    """The same in the operands' own dtype, or autocast's: a layer of experts that no recipe touches.

    >>> grouped_plain(torch.ones(3, 2), torch.ones(2, 1, 2), None, [1, 2], "experts").tolist()
    [[2.0], [2.0], [2.0]]
    """
    if torch.compiler.is_compiling():
        return _plain_outside_of_graphs(x_TK, weight_ENK, bias_EN, sizes, name)
    return _grouped_plain(x_TK, weight_ENK, bias_EN, sizes, name)


def _grouped_plain(x_TK, weight_ENK, bias_EN, sizes, name: str) -> torch.Tensor:
    check(x_TK, weight_ENK[0], bias_EN, name)
    out = dtype_of_result(x_TK, weight_ENK, name)
    groups = Groups(sizes, x_TK, len(weight_ENK), name)
    with contextlib.nullcontext() if x_TK.is_meta else torch.autocast(x_TK.device.type, enabled=False):
        return _high_precision(x_TK, weight_ENK, bias_EN, groups, out)


class _Asked(NamedTuple):
    """Arguments of one call beside its tensors.  out: the result's dtype.  record: as `Call` takes it."""

    groups: Groups
    out: torch.dtype
    record: bool


def _grouped_linear(x_TK, weight_ENK, bias_EN, sizes, numerics: Numerics) -> torch.Tensor:
    name, (experts, _, k) = numerics.name, weight_ENK.shape
    if x_TK.dim() != 2:
        raise ShapeError(
            f"{name}: input is {list(x_TK.shape)}; want [T, {k}], the rows of each expert together: flatten and sort it"
        )
    check(x_TK, weight_ENK[0], bias_EN, name)
    if isinstance(x_TK, Float8Tensor):
        numerics.state.enter()  # a step that begins here may change this layer's recipe
        x_TK = suited(x_TK, numerics)
    groups = Groups(sizes, x_TK, experts, name)
    out = dtype_of_result(x_TK, weight_ENK, name)
    # The result's dtype is decided; autocast would now promote codes where they are concatenated.
    with contextlib.nullcontext() if x_TK.is_meta else torch.autocast(x_TK.device.type, enabled=False):
        if not numerics.plan.fp8:
            return _high_precision(x_TK, weight_ENK, bias_EN, groups, numerics.recipe.input.format.dtype).to(out)
        record = enter(x_TK, weight_ENK[0], numerics)
        return _GroupedLinear.apply(x_TK, weight_ENK, bias_EN, numerics, _Asked(groups, out, record))


# A graph would need the number of rows as constants, and so a new one every step.
_outside_of_graphs = _torch.outside_of_graphs(_grouped_linear)
_plain_outside_of_graphs = _torch.outside_of_graphs(_grouped_plain)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, weight_ENK, bias_EN, numerics: Numerics, asked_for: _Asked):
        # Without gradients torch says what would need some, and nothing will be read.
        needs = ctx.needs_input_grad[:3] if asked_for.record else (False, False, False)
        call = _Experts(numerics, x_TK, weight_ENK, bias_EN, needs, asked_for.record)
        call.groups_of_rows = asked_for.groups
        a, saved = take(call, x_TK) if isinstance(x_TK, Float8Tensor) else call.cast_rows(x_TK)
        y_TN = call.experts_forward(a, weight_ENK, bias_EN, asked_for.out)
        ctx.save_for_backward(*call.to_save(saved), weight_ENK)
        ctx.call, ctx.dtype = call, x_TK.dtype
        return y_TN

    @staticmethod
    def backward(ctx, dy_TN):
        data, scale, weight_ENK = ctx.saved_tensors  # read once: checkpoints unpack nothing a second time
        with ctx.call.as_asked():
            return *ctx.call.experts_backward(dy_TN, (data, scale), weight_ENK, ctx.dtype), None, None


class _Experts(Call):
    """The three matmuls of `Call` for a weight [E, N, K], by torch's grouped matmul or expert by expert."""

    groups_of_rows: Groups

    def cast_rows(self, x_TK: torch.Tensor) -> tuple[Either, Either | None]:
        """(X for forward, what wgrad will read), as `cast_input`."""
        plan, numerics = self.plan, self.numerics
        first, to_save = plan.forward[0], plan.wgrad[1]
        self.observe("input", x_TK)
        serves = self.needs_w and to_save is first
        hold = None if serves else self._holding(x_TK)
        a = self._rows(x_TK, first, numerics.kept_of_input(x_TK), numerics.slot("input", self.record), hold)
        if serves or not self.needs_w:
            return a, a if serves else None
        return a, self._rows(x_TK, to_save, {}, numerics.slot("input", False, count=False), None)

    def cast_again(self, x_MK: torch.Tensor, kept: Kept) -> Either:
        """What wgrad reads, of rows that forward read as codes."""
        return self._rows(x_MK, self.plan.wgrad[1], kept, self.numerics.slot("input", False, count=False), None)

    def experts_forward(self, a: Either, weight_ENK, bias_EN, out: torch.dtype) -> torch.Tensor:
        """y [T, N]; the weight's operands wait here for backward where that is worth their memory."""
        numerics, second = self.numerics, self.plan.forward[1]
        self.observe("weight", weight_ENK.flatten(0, 1))
        weights = numerics.weight.operands(weight_ENK, self.record)
        slot, hold = numerics.slot("weight", self.record), self._holding(weight_ENK)
        copies = weights if isinstance(weights, Copies) else None
        holds = self.needs_x and copies is not None and copies.held
        b = _of_weight(weight_ENK, second, weights, slot, hold)
        y_TN = self._each_row(a, b, False, bias_EN, out, "forward")
        if copies is not None and second is not self.plan.dgrad[1]:
            copies.after_forward(second.how.get(hold))
        self.weights = weights if holds else {}
        return y_TN

    def experts_backward(self, dy_TN: torch.Tensor, saved: tuple, weight_ENK, dtype: torch.dtype) -> tuple:
        """(dx [T, K], dw [E, N, K], db [E, N]), None for what is not needed."""
        numerics, plan = self.numerics, self.plan
        numerics.state.backward_seen = True
        numerics.weight.after_backward()
        if torch.is_grad_enabled():
            raise no_transform(numerics.name, "create_graph=True: its gradient has no gradient of its own")
        self.observe("grad_output", dy_TN)
        hold, made, slot = self._holding(dy_TN), {}, numerics.slot("grad_output", record=True)
        dx_TK = dw_ENK = db_EN = None
        if self.needs_x:
            a = self._rows(dy_TN, plan.dgrad[0], made, slot, hold)
            b, transposed = self._weight_for_rows_of_dy(weight_ENK)
            dx_TK = self._each_row(a, b, transposed, None, dtype, "dgrad")
            slot = numerics.slot("grad_output", False, count=False)
        if self.needs_w:
            a = self._rows(dy_TN, plan.wgrad[0], made, slot, hold)
            data, scale = saved
            b = data if self.groups is None else Operand(data, scale, *self.groups)
            dw_ENK = self._each_expert(a, b, weight_ENK)
        if self.needs_b:
            parts = dy_TN.split(self.groups_of_rows.sizes)
            db_EN = torch.stack([column_sums(part) for part in parts]).to(self.bias_dtype)
        return dx_TK, dw_ENK, db_EN

    def _holding(self, x: torch.Tensor) -> torch.dtype | None:
        """Emulation dtype of one expert's operands; None: FP8 codes."""
        if self.backend != "reference":
            return None
        return emulation_dtype(x.device, x.numel() // self.groups_of_rows.experts)

    def _rows(self, x_TK: torch.Tensor, casting: Casting, kept: Kept, slot: Slot, hold) -> Either:
        """Rows under a cast, groups that share a scale within one expert."""
        if not casting.fp8 or not _spans_rows(casting.how[hold]):
            return operand(x_TK, casting, kept, slot, hold)
        # Not kept for another consumer of x: its groups may be others.
        return _stacked(x_TK, casting.how[hold], self.groups_of_rows.sizes, slot)

    def _weight_for_rows_of_dy(self, weight_ENK: torch.Tensor) -> tuple[Either, bool]:
        """(the weight's operand for dgrad, whether it is laid out as for forward), from forward or cast now."""
        numerics, casting = self.numerics, self.plan.dgrad[1]
        # Taken out: a loss that the user still holds holds this call, and would hold what waits here.
        weights, self.weights = self.weights, {}
        slot, hold = numerics.slot("weight", False, count=False), self._holding(weight_ENK)
        if casting is self.plan.forward[1] or not casting.fp8:
            return _of_weight(weight_ENK, casting, weights, slot, hold), True
        return _of_weight(weight_ENK, casting, weights, slot, hold, transposed=True), False

    def _each_row(self, a: Either, b: Either, transposed: bool, bias_EN, out: torch.dtype, matmul: str) -> torch.Tensor:
        """Each row of a times its expert's part of b; transposed: times that part's transpose."""
        groups, fast = self.groups_of_rows, self.plan.precision[matmul] == "fast"
        rows = (b.data if isinstance(b, Operand) else b).shape[0] // groups.experts
        if isinstance(a, Operand) and isinstance(b, Operand) and self._at_once(a, b, groups.experts):
            self.numerics.ran = "cublas"
            y_TN = scaled_grouped(a, b, transposed, groups, fast)
            return (y_TN if bias_EN is None else y_TN + of_rows(bias_EN, groups)).to(out)
        parts = []
        biases = [None] * groups.experts if bias_EN is None else bias_EN.unbind()
        for a_e, b_e, bias_N in zip(_parts(a, groups.sizes), _parts(b, [rows] * groups.experts), biases, strict=True):
            # One empty group is multiplied where all are: the result has its shape, dtype and device.
            if len(a_e.data) or (groups.rows == 0 and not parts):
                parts.append(self._multiply(a_e, b_e.t() if transposed else b_e, bias_N, out, matmul))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _each_expert(self, a: Either, b: Either, weight_ENK: torch.Tensor) -> torch.Tensor:
        """dw: for each expert, the transpose of its rows of a times its rows of b."""
        groups, dtype = self.groups_of_rows, weight_ENK.dtype
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            b = b.to(a.dtype)
            if groupable(a, b):
                return grouped_wgrad(a.contiguous(), b.contiguous(), groups).to(dtype)
        dw_ENK = torch.zeros(weight_ENK.shape, dtype=dtype, device=weight_ENK.device)
        parts = zip(dw_ENK, _parts(a, groups.sizes), _parts(b, groups.sizes), strict=True)
        for dw_NK, a_e, b_e in parts:
            if len(a_e.data):
                dw_NK.copy_(self._multiply(a_e.t(), b_e.t(), None, dtype, "wgrad"))
        return dw_ENK

    def _at_once(self, a: Operand, b: Operand, experts: int) -> bool:
        allowed = self.backend in ON_CODES and asked() in (None, "cublas") and not self.plan.exact
        return allowed and has_scaled_grouped(a.data.device) and ungroupable(a, b, experts) is None


def _high_precision(x_TK, weight_ENK, bias_EN, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    """The experts with their operands in `dtype`: what a recipe without FP8 means; differentiable by torch."""
    x_TK, weight_ENK = x_TK.to(dtype), weight_ENK.to(dtype)
    bias_EN = None if bias_EN is None else bias_EN.to(dtype)
    if groupable(x_TK, weight_ENK):
        y_TN = torch.nn.functional.grouped_mm(x_TK.contiguous(), weight_ENK.mT, offs=groups.ends)
        if y_TN.requires_grad:
            y_TN.register_hook(torch.Tensor.contiguous)  # its backward refuses an expanded gradient, as of a sum
        # In FP32, in which the bias's gradient is summed then: one of 16 bits would stop growing after 2^8 rows.
        return y_TN if bias_EN is None else (y_TN + of_rows(bias_EN.float(), groups)).to(dtype)
    biases = [None] * groups.experts if bias_EN is None else bias_EN.unbind()
    parts = zip(x_TK.split(groups.sizes), weight_ENK.unbind(), biases, strict=True)
    return torch.cat([torch.nn.functional.linear(x, w_NK, b_N) for x, w_NK, b_N in parts])


def _of_weight(weight_ENK, casting: Casting, kept: Kept, slot: Slot, hold, transposed=False) -> Either:
    """The experts' weights under a cast as one stack [E * N, K]; transposed: that of their transposes, [E * K, N]."""
    stack = weight_ENK.mT if transposed else weight_ENK
    experts, rows, cols = stack.shape
    x_RC = stack.reshape(experts * rows, cols)
    if not casting.fp8:
        return operand(x_RC, casting, kept, slot, hold)
    how = casting.how[hold]
    if transposed:
        how = how._replace(rows=how.cols, cols=how.rows)
    key = (how, "of transposes") if transposed else how
    made = kept.get(key)
    # Made without gradients (an evaluation, the first forward of a reentrant checkpoint): not yet in the history.
    if made is None or (slot.record and not made[1].record):
        made = kept[key] = _stacked(x_RC, how, [rows] * experts, slot), slot
    return made[0]


def _spans_rows(how: How) -> bool:
    """Whether a scale covers several rows but not all, so that it matters where an expert's rows end."""
    return how.rows != 1 and not how.per_tensor


def _stacked(x_RC: torch.Tensor, how: How, sizes: list[int], slot: Slot) -> Operand:
    """Rows under a cast; where rows share a scale, each group of `sizes` rows is cast for itself."""
    if not _spans_rows(how) or (how.rows > 1 and not any(size % how.rows for size in sizes)):
        return casts.quantize(x_RC, how, slot)
    parts = [casts.quantize(part, how, slot) for part in x_RC.split(sizes)]
    return parts[0]._replace(data=torch.cat([p.data for p in parts]), scale=torch.cat([p.scale for p in parts]))


def _parts(x: Either, sizes: list[int]) -> Sequence:
    """The operands of each group of rows of what `_stacked` made, or of a tensor."""
    if isinstance(x, torch.Tensor):
        return x.split(sizes)
    if x.scale.dim() == 0:
        return [x._replace(data=data) for data in x.data.split(sizes)]
    scales = x.scale.split([1 if x.rows == -1 else -(-size // x.rows) for size in sizes])
    return [x._replace(data=data, scale=scale) for data, scale in zip(x.data.split(sizes), scales, strict=True)]
