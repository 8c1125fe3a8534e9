"""Casts and matmuls of one call of a layer: forward, dgrad and wgrad, for every autograd Function that has them.

    forward   y[M, N]  = X[M, K]  @ W[N, K]^T + b        X, W reduced along -1
    dgrad     dx[M, K] = DY[M, N] @ (W^T)[K, N]^T        W cast along 0
    wgrad     dw[N, K] = (DY^T)[N, M] @ (X^T)[K, M]^T    DY, X cast along 0;  db = sum of dy over rows

Saved for backward: X as FP8 codes in the orientation wgrad reads (or in 16 bits where wgrad is), its scale, and the
parameter itself.  What the 16-bit alternative keeps, x, is not.  A weight that needs no gradient saves no X; an x that
needs none spends no dgrad.

A matmul on FP8 codes reads both operands along what is summed.  So x is transposed for wgrad, dy for wgrad and the
weight for dgrad in the pass that casts them, and the sums of dy's columns are db.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fp8engine._torch import graph_task
from fp8engine.autograd import gathered, stored
from fp8engine.autograd.numerics import Casting, Numerics
from fp8engine.autograd.refusals import no_transform
from fp8engine.autograd.weight import Copies
from fp8engine.numerics.recipe import ROLES
from fp8engine.ops import casts, matmul
from fp8engine.ops.backends import asked, inherited
from fp8engine.ops.reference import Operand, Slot, Store, column_sums, emulation_dtype
from fp8engine.scaling.operands import Kept

ON_CODES = ("triton", "cublas")  # backends that multiply FP8 codes, both operands lying along what is summed
Either = Operand | torch.Tensor  # FP8, or the tensor itself where a recipe leaves a matmul in 16 bits
NOTHING = (None, None)
INPUT, WEIGHT, GRAD_OUTPUT = range(len(ROLES))


def graphs_run_on(where: torch.device) -> str | None:
    """A backend of the kind that a compiled graph, which chooses when it runs, will choose there; None: any."""
    return "cublas" if where.type == "cuda" else None


class Gradient(NamedTuple):
    """dy as the matmuls read it: for dgrad, transposed for wgrad, and the sums of its columns before it was rounded."""

    q: Either | None = None
    q_t: Either | None = None
    db_N: torch.Tensor | None = None


class Call:
    """Decisions of one call of a layer, made in forward and read in backward, beside the tensors that are saved.

    x, weight: its input and its weight [..., N, K], for their device and sizes.  needs: whether input, weight and bias
    want gradients.  record: whether amaxes enter the history.
    """

    def __init__(
        self, numerics: Numerics, x: torch.Tensor, weight: torch.Tensor, bias_N, needs: Sequence[bool], record: bool
    ):
        self.numerics, self.record = numerics, record
        self.plan = plan = numerics.plan  # as it is now: another step may begin, under another, before this backward
        self.needs_x, self.needs_w, self.needs_b = needs
        self.compiling = torch.compiler.is_compiling()
        if self.compiling:
            self.backend, self.asked, self.count = graphs_run_on(x.device), None, True
        else:
            rows = x.numel() // max(x.shape[-1], 1)
            numerics.sizes = sizes = (rows, weight.shape[-2], weight.shape[-1])
            precision = plan.precision["forward"]
            self.backend = numerics.ran = matmul.choose(x.device, plan.by_block, sizes, precision, plan.kind)
            self.asked = asked()
            self.count = graph_task() == -1  # a forward inside a backward is counted no second time
        on_codes = self.backend in ON_CODES
        self.transposes_input = self.needs_w and on_codes and plan.input_serves_both
        self.transposes_weight = on_codes and plan.weight_serves_both
        self.transposes_grad = self.needs_x and self.needs_w and on_codes and plan.grad_serves_both
        self.bias_dtype = None if bias_N is None else bias_N.dtype
        self.groups: list | None = None  # what an Operand has beside data and scale, of the saved input
        self.weights: Kept = {}

    def observe(self, role: str, x_MK: torch.Tensor) -> None:
        """Describe a tensor in a step that is sampled."""
        if self.samples:
            self.numerics.observe(role, x_MK)

    @property
    def samples(self) -> bool:
        """Whether this call's tensors are sampled: in training, and before it where `auto` awaits a forward."""
        state = self.numerics.state
        return state.samples is not None and (self.record or state.decides_next)

    def cast_input(self, x_MK: torch.Tensor, kept: Kept) -> tuple[Either, Either | None]:
        """(X for forward, what wgrad will read).  kept: operands that another layer has made of this x."""
        first, to_save, slot = self.plan.forward[0], self.plan.wgrad[1], self._slot(INPUT, self.record, self.count)
        if self.numerics.state.samples is not None:
            self.observe("input", x_MK)
        if self.transposes_input:
            return both(x_MK, first, kept, slot)
        serves = self.needs_w and to_save is first
        a = operand(x_MK, first, kept, slot, None if serves else self._emulation(x_MK))
        if serves or not self.needs_w:
            return a, a if serves else None
        return a, operand(x_MK, to_save, kept, self._slot(INPUT, False, False))

    def cast_again(self, x_MK: torch.Tensor, kept: Kept) -> Either:
        """What wgrad reads, of an x made a second time: under the scale it had, and counted no more."""
        slot = self._slot(INPUT, False, False)
        if self.transposes_input:
            return transpose(x_MK, self.plan.forward[0], kept, slot)
        return operand(x_MK, self.plan.wgrad[1], kept, slot)

    def store(self, again: bool = False) -> Store | None:
        """How a norm or an activation stores what this layer reads; None: in 16 bits, to be cast.

        again: it is made a second time, under the scale it had, and counted no more.
        """
        plan = self.plan
        if not (plan.forward[0].fp8 and (plan.input_serves_both or not self.needs_w)):
            return None
        transposed = self.transposes_input or (self.needs_w and plan.wgrad[1] is not plan.forward[0])
        slot = self._slot(INPUT, self.record and not again, self.count and not again)
        if slot.group and plan.forward[0].per_tensor:
            return None
        return Store(plan.forward[0].how[None], transposed, slot)

    def stored(self, q: Operand, q_t: Operand | None) -> tuple[Operand, Operand | None]:
        """(X for forward, what wgrad will read) of what was stored as `store` said."""
        if not self.needs_w:
            return q, None
        if q_t is None:
            return q, q
        return q, q_t if self.transposes_input else q_t.t()

    def forward(
        self, a: Either, weight_NK: torch.Tensor, bias_N, out: torch.dtype, fp8: bool = False
    ) -> tuple[torch.Tensor, tuple]:
        """(y, the weight's transpose as (codes, scale) where a graph saves it; else it waits here).

        fp8: y may be a Float8Tensor, where the recipe stores it so.
        """
        numerics, plan = self.numerics, self.plan
        second, sampled = plan.forward[1], numerics.state.samples is not None and self.samples
        if sampled and type(weight_NK) is not gathered.GatheredWeight:  # distributed/weight_samples.py
            self.observe("weight", weight_NK)
        weights = numerics.kept_of_weight(weight_NK, self.record)
        slot, emulation = self._slot(WEIGHT, self.record, self.count), self._emulation(weight_NK)
        copies = weights if isinstance(weights, Copies) else None  # None: nothing outlives the call
        holds = self.needs_x and (self.compiling or (copies is not None and copies.held))
        transposed = NOTHING
        if type(weight_NK) is gathered.GatheredWeight:
            b = gathered.for_forward(weight_NK, second, slot)
        elif self.transposes_weight and holds:
            b, b_t = both(weight_NK, second, weights, slot)
            transposed = b_t[:2] if self.compiling else transposed
        else:
            b = operand(weight_NK, second, weights, slot, emulation)
        if fp8 and plan.stored is not None and not self.compiling:
            y_MN = stored.multiply(numerics, plan, (a, b, bias_N), out, self.record)
        else:
            y_MN = self._multiply(a, b, bias_N, out, "forward")
            if fp8 and sampled and numerics.samples_output:
                self.observe("output", y_MN)
        if not self.compiling:
            if copies is not None and (self.transposes_weight or second is not plan.dgrad[1]):
                copies.after_forward(second.how.get(emulation))
            self.weights = weights if holds else {}
        return y_MN, transposed

    def to_save(self, saved: Either | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(data, scale) of what wgrad will read, for save_for_backward."""
        if isinstance(saved, Operand):
            data, scale, *self.groups = saved
            return data, scale
        return saved, None

    def as_asked(self):
        """The backward's context: it runs where its forward was asked to."""
        return contextlib.nullcontext() if self.asked is None else inherited(self.asked)

    def store_grad(self) -> Store | None:
        """How an activation's backward stores this layer's dy; None: in 16 bits, to be cast."""
        first, second = self.plan.dgrad[0], self.plan.wgrad[0]
        if not first.fp8 or (first.per_tensor and self._slot(GRAD_OUTPUT, True).group):
            return None
        if self.needs_x and self.needs_w:
            serves, transposed = self.plan.grad_serves_both, self.transposes_grad or second is not first
        else:  # wgrad alone reads, and its slot counts, the cast along 0
            serves, transposed = self.needs_x or (self.needs_w and second is first), False
        return Store(first.how[None], transposed, self._slot(GRAD_OUTPUT, True)) if serves else None

    def stored_grad(self, q: Operand, q_t: Operand | None, db_N: torch.Tensor) -> Gradient:
        """What was stored as `store_grad` said, and the sums of its columns."""
        return Gradient(q, q_t or (q.t() if self.needs_w else None), db_N)

    def backward(self, dy: torch.Tensor | Gradient, saved: tuple, weight: tuple, dtype: torch.dtype) -> tuple:
        """(dx [M, K] in `dtype`, dw, db), None for what is not needed.

        dy: [M, N], or what `stored_grad` gave.  saved: what `to_save` gave.  weight: the parameter, then what `forward`
        gave beside y.
        """
        numerics, compiling = self.numerics, torch.compiler.is_compiling()
        if not compiling:
            numerics.state.backward_seen = True
            numerics.weight.after_backward()
            if torch.is_grad_enabled():
                raise no_transform(numerics.name, "create_graph=True: its gradient has no gradient of its own")
        made, dx_MK, dw_NK = {}, None, None
        if isinstance(dy, torch.Tensor):
            if numerics.state.samples is not None:
                self.observe("grad_output", dy)
            a, a_t, db_N = self._cast_gradient(dy, made)
        else:
            a, a_t, db_N = dy
        if self.needs_x:
            dx_MK = self._multiply(a, self._weight_for_dgrad(*weight), None, dtype, "dgrad")
        if self.needs_w:
            if a_t is None and isinstance(dy, torch.Tensor):
                slot = self._slot(GRAD_OUTPUT, not self.needs_x, not self.needs_x)
                a_t = _transposed(operand(dy, self.plan.wgrad[0], made, slot, self._emulation(dy)))
            data, scale = saved
            b = data if self.groups is None else Operand(data, scale, *self.groups)
            b = b if self.transposes_input else _transposed(b)
            dw_NK = self._multiply(a_t, b, None, weight[0].dtype, "wgrad")
        if not self.needs_b:
            return dx_MK, dw_NK, None
        if db_N is None and isinstance(dy, torch.Tensor):
            db_N = dy.sum(0, dtype=torch.float32) if compiling else column_sums(dy)
        return dx_MK, dw_NK, db_N if db_N is None or db_N.dtype == self.bias_dtype else db_N.to(self.bias_dtype)

    def _cast_gradient(self, dy_MN: torch.Tensor, made: Kept) -> Gradient:
        """dy for dgrad, with what the same pass gives."""
        if not self.needs_x:
            return Gradient()
        first, slot = self.plan.dgrad[0], self._slot(GRAD_OUTPUT, True)
        if self.transposes_grad and self.needs_b:
            return Gradient(*casts.cast_transpose(dy_MN, first.how[None], slot, sums=True))
        if self.transposes_grad:
            return Gradient(*casts.cast_transpose(dy_MN, first.how[None], slot))
        return Gradient(operand(dy_MN, first, made, slot, self._emulation(dy_MN)))

    def _weight_for_dgrad(self, weight_NK: torch.Tensor, codes, scale) -> Either:
        """The weight's transpose [K, N]: from forward where it waits, else cast now."""
        forward, slot = self.plan.forward[1], self._slot(WEIGHT, False, False)
        if codes is not None:
            how = forward.how[None]
            return Operand(codes, scale, how.rows, how.cols, how.power_of_2)
        weights: Kept = {}
        if not torch.compiler.is_compiling():
            # Taken out: a loss that the user keeps alive keeps this call alive, and with it these operands.
            weights, self.weights = self.weights, weights
        if type(weight_NK) is gathered.GatheredWeight:
            return _transposed(gathered.for_dgrad(weight_NK, forward, self.plan.dgrad[1], slot))
        if self.transposes_weight:
            return transpose(weight_NK, forward, weights, slot)
        return _transposed(operand(weight_NK, self.plan.dgrad[1], weights, slot, self._emulation(weight_NK)))

    def _multiply(self, a, b, bias_N, out: torch.dtype, which: str) -> torch.Tensor:
        """One of the three matmuls, in FP8 where its operands are."""
        if isinstance(a, Operand):
            plan = self.plan
            return matmul.matmul(a, b, bias_N, out, "exact" if plan.exact else plan.precision[which])
        y_MN = matmul.matmul_fp16(a, b.to(a.dtype)).to(out)
        return y_MN if bias_N is None else y_MN + bias_N

    def _slot(self, role: int, record: bool, count: bool = True) -> Slot:
        """The layer's slot of ROLES[role], as `Numerics.slot` gives it; without a call where it was made before."""
        if torch.compiler.is_compiling():
            return self.numerics.columns[role].slot(record, count)
        key, state = (len(ROLES) * self.numerics.layer + role, record, count), self.numerics.state
        made = state.slots.get(key)
        return state.slot(*key) if made is None else made

    def _emulation(self, x: torch.Tensor) -> torch.dtype | None:
        """In which dtype an operand made from x and not saved waits for its matmul: None, unless that is emulated."""
        return emulation_dtype(x.device, x.numel()) if self.backend == "reference" else None


def operand(x_MK: torch.Tensor, casting: Casting, kept: Kept, slot: Slot, emulation=None) -> Either:
    """x under a cast, made once: FP8 with its scale, or the tensor itself where the cast is to 16 or 32 bits.

    slot: where the scale is read and this use of x is counted.
    emulation: dtype of an operand that only an emulated matmul reads; None for FP8 codes.
    """
    if not casting.fp8:
        return x_MK if x_MK.dtype.itemsize == 2 else x_MK.to(casting.cast.format.dtype)
    how = casting.how[emulation]
    made = kept.get(how)
    # Made without gradients (an evaluation, the first forward of a reentrant checkpoint): not yet in the history.
    if made is None or (slot.record and not made[1].record):
        made = kept[how] = casts.quantize(x_MK, how, slot), slot
    elif (slot.count or slot.record) and slot.index != made[1].index:
        take_over(made[1], slot, x_MK.numel())
    return made[0]


def both(x_MK: torch.Tensor, casting: Casting, kept: Kept, slot: Slot) -> tuple[Operand, Operand]:
    """x under a cast, and its transpose under the same for the matmul that reduces x's rows: one pass, made once.

    For a cast that `serves_both` says does; as FP8 codes.
    """
    how = casting.how[None]
    made, transposed = kept.get(how), kept.get((how, "transposed"))
    if made is None or transposed is None or (slot.record and not made[1].record):
        first, second = casts.cast_transpose(x_MK, how, slot)
        kept[how], kept[how, "transposed"] = (first, slot), (second, slot)
        return first, second
    if (slot.count or slot.record) and slot.index != made[1].index:
        take_over(made[1], slot, x_MK.numel())
    return made[0], transposed[0]


def transpose(x_MK: torch.Tensor, casting: Casting, kept: Kept, slot: Slot) -> Operand:
    """The second of `both` alone, for a backward whose forward has used up the first."""
    key = (casting.how[None], "transposed")
    if key not in kept:
        kept[key] = casts.cast_transpose(x_MK, casting.how[None], slot)[1], slot
    return kept[key][0]


def take_over(source: Slot, slot: Slot, size: int) -> None:
    """Another layer's slot already holds this tensor's amax: take it over instead of reading the tensor again."""
    live, counts, before = slot.live_2S, slot.counts_CS, source.live_2S
    if slot.record:
        live[0, slot.index] = torch.maximum(live[0, slot.index], before[0, source.index])
        live[1, slot.index] = before[1, source.index]
    if slot.count:
        counts[0, slot.index] += 1
        counts[1, slot.index] += size


def _transposed(x: Either) -> Either:
    """The transposed matrix, as a view; without a call of its own where one scale serves all of it."""
    if isinstance(x, Operand) and x.scale.dim() == 0:
        return Operand(x.data.t(), x.scale, x.cols, x.rows, x.power_of_2)
    return x.t()
