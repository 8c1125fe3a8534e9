"""The table of operations: for each its function, its twin, and arguments of any size, dtype and layout.

What holds for all of them is asked in tests/ops/test_contracts.py on the reference, and in
tests/interpreted/test_interpreted_contracts.py on our kernels.  An operation that is added to fp8engine/ops is added
here, and has all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from activations import EXACT, OF_GATE, SQUARED
from casts import E4M3, E5M2, FP8, cast_of
from contracts import GIVENS, Given, Operation, slot_of

from fp8engine.numerics.cast import Cast
from fp8engine.ops import attention, casts, grouped, matmul, norm_act, reference
from fp8engine.ops.library import OPERATORS
from fp8engine.ops.reference import Epilogue, Norm, Operand, Slot, Store
from fp8engine.ops.reference import grouped as of_experts
from fp8engine.ops.reference.attention import Form
from fp8engine.ops.reference.operand import COUNTERS
from fp8engine.ops.reference.quantize import quantize_operand
from fp8engine.ops.scale_update import GradientCasts, scale_update

HALF = (torch.bfloat16, torch.float16)
CASTS = {
    cast.text: cast
    for cast in (
        cast_of(E4M3),
        cast_of(E5M2, power_of_2=True),
        cast_of(E4M3, delayed=True),
        cast_of(E5M2, delayed=True),
        cast_of(E4M3, 1, -1, True),
        cast_of(E5M2, 1, -1),
        cast_of(E4M3, -1, 1),
        cast_of(E5M2, 1, 128),
        cast_of(E4M3, 128, 1, True),
        cast_of(E4M3, 128, 128),
        cast_of(E5M2, 64, 128),
        cast_of(E4M3, 2, 4),
    )
}
# None, or what a slot predicts and whether it records and counts: nothing, what holds, and what saturates.
SLOTS: tuple[Any, ...] = (
    None,
    (0.0,),
    (2.0**-20,),
    (2.0**20,),
    (2.0**20, False),
    (0.0, True, False),
    (1.0, False, False),
)


def slotted(way: tuple | None) -> Slot | None:
    """A slot of SLOTS with tables of its own."""
    return None if way is None else slot_of(*way)


NORMS = {
    str(norm): norm for norm in (Norm("rms"), Norm("rms", 1e-3, True), Norm("layer", 1e-6), Norm("layer", 1e-3, True))
}
# (cast, transposed, slot) of codes beside a result in 16 bits
STORED = [cast_of(E4M3), cast_of(E5M2, -1, -1, True, True), cast_of(E4M3, 1, -1, True), cast_of(E5M2, 1, 128)]
STORES = [
    (None, False, None),
    *itertools.product([*STORED, cast_of(E4M3, 128, 128)], (False, True), (None, (0.0,))),
    *itertools.product(STORED[1:2], (False, True), SLOTS[2:]),
]


def stored(way: tuple) -> Store:
    """One of STORES."""
    cast, transposed, slot = way
    return Store(cast, transposed, slotted(slot))


def vector(x: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A weight or a bias that goes with x."""
    return (torch.arange(x.shape[1], dtype=torch.float32) % 7 / 4 - offset).to(x.dtype)


def _norm(given: Given, norm: Norm, way: tuple) -> tuple:
    x = given.matrix(given.m, given.k)
    bare = way[0] is None or not way[1]  # no weight, no bias
    return x, None if bare else vector(x), None if bare else vector(x, 1), norm, stored(way)


def _norm_backward(given: Given, norm: Norm, way: bool) -> tuple:
    x = given.matrix(given.m, given.k)
    rows = reference.norm_quantize(x, None, None, norm)[3]
    return given.matrix(given.m, given.k), x, vector(x).float() if way else None, rows, norm


def _act(given: Given, kind: str, way: tuple) -> tuple:
    m, n, apart = given.m, given.k, kind in OF_GATE and (way[0] is None or way[1])
    x, up = given.matrix(m, n if apart or kind not in OF_GATE else 2 * n), given.matrix(m, n) if apart else None
    return x / 16 if kind in SQUARED else x, kind, stored(way), up  # squares stay in FP16


def _act_backward(given: Given, kind: str, way: tuple) -> tuple:
    x, _, to, up = _act(given, kind, (way[0], False, way[2]))
    return given.matrix(given.m, given.k), x, kind, to._replace(transposed=way[1]), up


GROUPS = {
    "tensor x tensor": (cast_of(E4M3), cast_of(E4M3, power_of_2=True)),
    "row x tensor": (cast_of(E5M2, 1, -1), cast_of(E4M3)),
    "row x row": (cast_of(E4M3, 1, -1, True), cast_of(E4M3, 1, -1, True)),
    "1x128 x 128x128": (cast_of(E4M3, 1, 128, True), cast_of(E4M3, 128, 128, True)),
    "1x128 x row": (cast_of(E5M2, 1, 128), cast_of(E4M3, 1, -1)),
}
PRODUCTS = list(itertools.product((torch.bfloat16, torch.float16, torch.float32), ("fast", "promoted", "exact")))
ENDS = list(itertools.product((torch.bfloat16, E4M3, E5M2), ("none", "relu", "gelu"), (False, True)))


def _pair(given: Given, form: tuple[Cast, Cast]) -> tuple[Operand, Operand]:
    return given.codes(given.m, given.k, form[0]), given.codes(19, given.k, form[1])


def _end(way: tuple) -> Epilogue:
    out, kind, statistics = way
    amax, counts = (torch.full((1,), 0.125), torch.tensor([5, 7])) if statistics else (None, None)
    return Epilogue(torch.arange(19.0), out, kind, torch.tensor(0.75) if out in FP8 else None, amax, counts)


def _ended(a: Operand, b: Operand, end: Epilogue, precision: str) -> torch.Tensor:
    return reference.finish(reference.emulate(a, b, None, torch.float32, precision), end)


def _tables(given: Given, form: int, way: bool) -> tuple:
    slots = 4 * given.k
    live = torch.stack([torch.rand(slots) - 0.3, torch.rand(slots)])
    live[0, 1::4].abs_()  # each weight ran: the amax of none is entered again
    rules = torch.stack([torch.full((slots,), 448.0), torch.arange(slots) % 5, torch.full((slots,), float(way))])
    counts, none = torch.zeros(len(COUNTERS), slots, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    casts = GradientCasts(counts, none.clone(), waits=False)
    return torch.rand(form, slots), live, rules, "", none, casts


def _bounds(given: Given) -> torch.Tensor:
    """Two experts, of which one may have no rows."""
    first = given.m // 3 if given.m > 8 else 0
    return of_experts.bounds_of(torch.tensor([first, given.m - first]))


def _rows(given: Given, form: tuple[Cast, Cast], way: tuple) -> tuple:
    out, precision, biased = way
    a, b = given.codes(given.m, given.k, form[0]), given.codes(2 * 128, given.k, form[1])
    return a, b, _bounds(given), torch.randn(2, 128) if biased else None, out, (precision, False)


def _product(precision: str) -> Callable[..., torch.Tensor]:
    return lambda a, b, bias_N, out: reference.emulate(a, b, bias_N, out, precision)


def _rows_twin(a: Operand, b: Operand, bounds, bias_EN, out, way: tuple[str, bool]) -> torch.Tensor:
    return of_experts.grouped_rows(a, b, bounds, bias_EN, out, _product(way[0]))


def _sums_twin(a: Operand, b: Operand, bounds, out, way: tuple[str, bool]) -> torch.Tensor:
    return of_experts.grouped_sums(a, b, bounds, out, way[1], _product(way[0]))


def _experts_twin(x, cast: Cast, bounds, slot, transposed: bool) -> Operand:
    q, scale = reference.quantize_experts(x, cast, bounds, slot, transposed)
    rows, cols = (cast.cols, cast.rows) if transposed else (cast.rows, cast.cols)
    return Operand(q, scale, rows, cols, cast.power_of_2)


def _in_used_blocks(q: Operand, arguments: tuple) -> Operand:
    """Codes and scales of the blocks that hold rows."""
    _, cast, bounds, _, transposed = arguments
    used = of_experts.BLOCK * int(bounds[1, -1])
    data = q.data[:, :used] if transposed else q.data
    if cast.rows == -1:
        return q._replace(data=data)
    groups = used // cast.rows
    return q._replace(data=data, scale=q.scale[:, :groups] if transposed else q.scale[:groups])


def _columns_used(q: Operand, arguments: tuple) -> Operand:
    return q._replace(data=q.data[:, : of_experts.BLOCK * int(arguments[1][1, -1])])


def _heads(given: Given, count: int = 3) -> tuple:
    """q or do of two heads, k and v of one."""
    heads = (2, 1, 1, 2)[:count]
    return tuple(torch.randn(2, given.m, h, 64).to(given.dtype).transpose(1, 2) for h in heads)


def _taken(live, counts, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return live[:, index : index + 1].clone(), counts[:, index : index + 1].clone()


def _put(live_column, counts_column, live, counts, index: int) -> None:
    live[:, index : index + 1], counts[:, index : index + 1] = live_column, counts_column


FORMS_OF_EXPERTS = {
    cast.text: cast for cast in (cast_of(E4M3, -1, 1), cast_of(E5M2, 128, 1, True), cast_of(E4M3, 16, 16))
}
ATTENDED = {"full": Form(0.125), "causal": Form(0.125, True), "window": Form(0.1, True, 5, 2, False)}
BOTH = {"both": None}
OPERATIONS: dict[str, Operation] = {
    "quantize": Operation(
        casts.quantize, quantize_operand, CASTS, SLOTS,
        lambda given, cast, way: (given.matrix(given.m, given.k), cast, slotted(way)), writes=(2,),
    ),
    "cast_transpose": Operation(
        casts.cast_transpose, reference.cast_transpose, CASTS, [*itertools.product(SLOTS, (False, True))],
        lambda given, cast, way: (given.matrix(given.m, given.k), cast, slotted(way[0]), way[1]), writes=(2,),
        defined=lambda result, arguments: result[:2],  # sums have another order
    ),
    "quantize_given": Operation(
        casts.encode, reference.quantize_given, CASTS, (False, True),
        lambda given, cast, way: (
            given.matrix(given.m, given.k), cast,
            torch.rand(cast.scale_shape(given.m, given.k) if way else ()) * 99 + 0.01,
        ),
    ),
    "decode": Operation(
        casts.decode, reference.decode, {"e4m3": E4M3, "e5m2": E5M2}, (torch.float32, *HALF),
        lambda given, format, way: (given.matrix(given.m, given.k, format), way),
    ),
    "matmul": Operation(
        matmul.matmul, reference.emulate, GROUPS, PRODUCTS,
        lambda given, form, way: (*_pair(given, form), torch.arange(19.0) if given.m % 2 else None, *way), exact=False,
    ),
    "matmul_epilogue": Operation(
        matmul.matmul_epilogue, _ended, GROUPS, ENDS,
        lambda given, form, way: (*_pair(given, form), _end(way), "exact"), exact=False, writes=(2,),
    ),
    "matmul_fp16": Operation(
        matmul.matmul_fp16, reference.matmul_fp16, {"bf16": HALF[0], "fp16": HALF[1]}, (None, torch.float32),
        lambda given, dtype, way: (
            given.matrix(given.m, given.k, dtype), given.matrix(19, given.k, dtype), torch.arange(19).to(dtype), way,
        ), exact=False,
    ),
    "norm_quantize": Operation(
        norm_act.norm_quantize, reference.norm_quantize, NORMS, STORES, _norm, exact=False, writes=(4,)
    ),
    "norm_quantize_backward": Operation(
        norm_act.norm_quantize_backward, reference.norm_quantize_backward, NORMS, (False, True), _norm_backward,
        exact=False,
    ),
    "act_quantize": Operation(
        norm_act.act_quantize, reference.act_quantize, {kind: kind for kind in EXACT}, STORES, _act,
        exact=False, writes=(2,),
    ),
    "act_quantize_backward": Operation(
        norm_act.act_quantize_backward, reference.act_quantize_backward, {kind: kind for kind in EXACT}, STORES,
        _act_backward, exact=False, writes=(3,),
    ),
    "grouped_rows": Operation(
        grouped.rows, _rows_twin, GROUPS, [*itertools.product(HALF, ("fast", "exact"), (False, True))], _rows,
        exact=False,
    ),
    "grouped_sums": Operation(
        grouped.sums, _sums_twin, BOTH, PRODUCTS,
        lambda given, form, way: (
            given.codes(given.m, given.k, cast_of(E4M3)), given.codes(given.m, 19, cast_of(E4M3)), _bounds(given),
            way[0], (way[1], False),
        ), exact=False,
    ),
    "grouped_sums_16": Operation(
        grouped.sums_16, of_experts.sums_16, BOTH, (torch.bfloat16, torch.float32),
        lambda given, form, way: (
            given.matrix(given.m, given.k), given.matrix(given.m, 19), _bounds(given), way,
        ), exact=False,
    ),
    "quantize_experts": Operation(
        grouped.quantize, _experts_twin, FORMS_OF_EXPERTS, [*itertools.product((None, (0.0,)), (False, True))],
        lambda given, cast, way: (given.matrix(given.m, given.k), cast, _bounds(given), slotted(way[0]), way[1]),
        writes=(3,), defined=_in_used_blocks,
    ),
    "transpose_experts": Operation(
        grouped.transpose, lambda q, bounds: q._replace(data=reference.transpose_experts(q.data, bounds)), BOTH,
        (None,), lambda given, form, way: (given.codes(given.m, given.k, cast_of(E4M3)), _bounds(given)),
        defined=_columns_used,
    ),
    "expert_sums": Operation(
        grouped.column_sums, reference.expert_sums, BOTH, (None,),
        lambda given, form, way: (given.matrix(given.m, given.k), _bounds(given)), exact=False,
    ),
    "attention": Operation(
        attention.attention, reference.attention, ATTENDED, (None,),
        lambda given, form, way: (*_heads(given), form), exact=False,
    ),
    "attention_backward": Operation(
        attention.attention_backward, reference.attention_backward, ATTENDED,
        (None,),
        lambda given, form, way: (*[_heads(given, 4)[place] for place in (3, 0, 1, 2)], form), exact=False,
    ),
    "scale_update": Operation(
        scale_update, lambda *given: reference.scale_update(*given[:3]), {str(rows): rows for rows in (1, 3, 16)},
        (False, True), _tables, writes=(0, 1),
    ),
    "take_column": Operation(
        OPERATORS.take_column.default, _taken, BOTH, (None,), lambda *_: (*slot_of(3.0)[:2], 1)
    ),
    "put_column": Operation(
        OPERATORS.put_column.default, _put, BOTH, (None,),
        lambda *_: (torch.ones(2, 1), torch.ones(len(COUNTERS), 1, dtype=torch.int64), *slot_of()[:2], 1),
        writes=(2, 3),
    ),
}  # fmt: skip


class Call(NamedTuple):
    """An operation at one form, way and size."""

    name: str
    form: Any
    way: Any
    given: Given

    @property
    def operation(self) -> Operation:
        """Its row."""
        return OPERATIONS[self.name]

    def arguments(self) -> tuple:
        """Fresh ones, of equal values every time."""
        torch.manual_seed(1)
        return self.operation.arguments(self.given, self.form, self.way)


def calls(name: str, form: str, givens: Sequence[Given] = GIVENS) -> Iterator[Call]:
    """Every way and every size of a form, each way beside another size."""
    operation = OPERATIONS[name]
    first = list(operation.forms).index(form) * 3
    turned = [*givens[first % len(givens) :], *givens[: first % len(givens)]]
    for i in range(max(len(operation.ways), len(givens))):
        yield Call(name, operation.forms[form], operation.ways[i % len(operation.ways)], turned[i % len(givens)])


CASES = [(name, form) for name, operation in OPERATIONS.items() for form in operation.forms]
