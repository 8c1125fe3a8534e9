"""What every operation of helpers/operations.py owes, on the reference; on our kernels: test_interpreted_contracts.py.

its twin's results, also through the dispatcher; nothing written but what it says; memory of its own
a fake that promises what is there; torch's own check of the operator
codes that are a cast of the result beside them; nothing of nothing; a gradient that is refused and not lost
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from casts import FP8, assert_same
from contracts import GIVENS, NOTHING, Given, Watch, in_bytes, layout, slot_of, tensors
from operations import CASES, OPERATIONS, Call, calls
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from fp8engine.errors import GradientError
from fp8engine.ops import casts, library
from fp8engine.ops.reference import Operand, Slot, Store

PRODUCERS = [case for case in CASES if case[0] in ("norm_quantize", "act_quantize", "act_quantize_backward")]
# What does not depend on the activation, but on whether it has a gate.
FEW = [(name, form) for name, form in CASES if not name.startswith("act") or form in ("gelu", "swiglu")]
DIFFERENTIABLE = ("matmul", "matmul_fp16")  # of a bias, and of both operands in 16 bits
WITHOUT_GRADIENT = ("decode", "transpose_experts", "scale_update", "put_column")  # of codes; no result
SUMS = ("norm_quantize_backward", "act_quantize_backward", "cast_transpose")
OF_FAKES = ("test_autograd_registration", "test_faketensor")
OF_TORCH = ("matmul_fp16",)  # on a CPU torch's own matmul: our operator is the kernel's


def straight(call: Call) -> tuple[Any, tuple]:
    """(results, arguments afterwards) of the function itself."""
    arguments = call.arguments()
    with torch.no_grad():
        return call.operation.run(*arguments), arguments


def assert_agree(call: Call, found: tuple[Any, tuple], wanted: tuple[Any, tuple], on_kernels: bool) -> None:
    """Results and arguments, bit for bit on the reference.

    On kernels NaN has other bits, and zero may have another sign; and where sums have another order, results in 16 bits
    and more are near each other: how near is asked of each kernel beside it, in float64.
    """
    if not on_kernels:
        assert in_bytes(found) == in_bytes(wanted), call
        return
    (result, arguments), (its_result, its_arguments) = found, wanted
    result, its_result = (call.operation.defined(each, arguments) for each in (result, its_result))
    assert layout(result) == layout(its_result), call
    if call.operation.exact:
        for mine, its in zip(tensors((result, arguments)), tensors((its_result, its_arguments)), strict=True):
            assert_same(mine.double(), its.double(), str(call))
        return
    for mine, its in zip(tensors(result), tensors(its_result), strict=True):
        if mine.dtype not in FP8 and mine.dim():
            assert_near(mine.double(), its.double(), call)


def assert_near(found: torch.Tensor, wanted: torch.Tensor, call: Call, share: float = 2.0**-6) -> None:
    """Finite in the same places, and within a share of the norm there; of what cancels, FP32's rounding is left."""
    finite = wanted.isfinite()
    assert torch.equal(found.isfinite(), finite), call
    assert (found - wanted)[finite].norm() <= share * wanted[finite].norm() + 2.0**-20, call


@pytest.mark.few(70)
@pytest.mark.parametrize(("name", "form"), CASES)
def test_it_is_its_twin_straight_and_through_the_dispatcher(name: str, form: str):
    is_its_twin([*calls(name, form), *calls(name, form, NOTHING)])


def is_its_twin(asked: Sequence[Call], on_kernels: bool = False) -> None:
    """The contract of each call."""
    for call in asked:
        found, arguments = straight(call), call.arguments()
        assert_agree(call, found, (call.operation.twin(*arguments), arguments), on_kernels)
        assert_apart(call, *found)
        with torch.enable_grad():
            given = call.arguments()
            dispatched = call.operation.run(*given)
        assert in_bytes((dispatched, given)) == in_bytes(found), call
        assert layout(dispatched) == layout(found[0]), call
        assert_apart(call, dispatched, given)


def assert_apart(call: Call, result: Any, arguments: tuple) -> None:
    """Results lie in rows, and the scales of a transposed copy in columns, whatever the strides of the inputs.

    Nothing is written but what the operation says, and no two results share memory, nor one with an input.
    """
    in_columns = [x for x in tensors(result) if not x.is_contiguous()]
    assert call.name == "decode" or all(x.dtype == torch.float32 and x.t().is_contiguous() for x in in_columns), call
    results = [x for x in tensors(result) if x.dim() and x.numel()]  # one scale serves both orientations
    memory = [x.untyped_storage().data_ptr() for x in (*results, *tensors(arguments))]
    assert len({*memory[: len(results)]}) == len(results), call
    assert not {*memory[: len(results)]} & {*memory[len(results) :]}, call
    before, after = (
        [x for place, x in enumerate(each) if place not in call.operation.writes]
        for each in (call.arguments(), arguments)
    )
    assert in_bytes(before) == in_bytes(after), call


@pytest.mark.parametrize(("name", "form"), FEW)
def test_strides_of_inputs_change_nothing(name: str, form: str):
    """Bit for bit in casts; elsewhere torch's loops over other strides may round a function or a sum otherwise."""
    for call in calls(name, form, [given for given in GIVENS if given.layout != "rows"]):
        in_rows = call._replace(given=call.given._replace(layout="rows"))
        found, wanted = (call.operation.defined(*straight(each)) for each in (call, in_rows))
        if call.operation.exact:
            assert in_bytes(found) == in_bytes(wanted), call
            continue
        for mine, its in zip(tensors(found), tensors(wanted), strict=True):
            if mine.dtype not in FP8:
                assert_near(mine.double(), its.double(), call, 2.0**-19 if mine.dtype == torch.float32 else 2.0**-9)


@pytest.mark.parametrize(("name", "form"), FEW)
def test_a_fake_promises_what_is_there(name: str, form: str):
    """Fake tensors, as a graph is traced with, and tensors on "meta"; sizes over a block of 128 both ways."""
    givens = Given(130, 260), Given(131, 259, torch.float32, "columns"), Given(1, 130, torch.float16)
    for call in calls(name, form, (*givens, *NOTHING)):
        wanted, arguments = layout(straight(call)[0]), call.arguments()
        with FakeTensorMode() as mode:
            fake = on_other(arguments, mode.from_tensor)
            assert layout(call.operation.run(*fake)) == wanted, call
        found = call.operation.run(*on_other(arguments, lambda x: x.to("meta")))
        assert layout(found) == wanted, call
        assert all(x.is_meta for x in tensors(found))


def on_other(arguments: tuple, moved: Callable[[torch.Tensor], torch.Tensor]) -> tuple:
    """The arguments with every tensor moved."""
    return tree_map(lambda leaf: moved(leaf) if isinstance(leaf, torch.Tensor) else leaf, arguments)


@pytest.mark.parametrize("name", OPERATIONS)
def test_torchs_own_check(name: str):
    """Schema (nothing written, nothing aliased), fake against real, autograd registration, AOT with dynamic shapes.

    Without the schema and AOT where torch cannot compare FP8 arguments, or where tables are written, which no schema
    declares (ops/library.py).  Once for each choice of optional arguments.
    """
    first, *_, last = [*OPERATIONS[name].forms] * 2
    for form, given in (
        (first, Given(5, 7)),
        (last, Given(1, 24, torch.float32, "columns")),
    ):  # a row's transpose is a view
        operators = {}
        for call in calls(name, form, (given,)):
            with torch.no_grad(), Watch() as watch:
                call.operation.run(*call.arguments())
            assert watch.names in ([name], [f"{name}_slot"]) or name in OF_TORCH, "one call, under its own name"
            for operator, arguments in watch.seen:
                there = tuple(x is not None and not (isinstance(x, str) and not x) for x in arguments)
                operators[operator, there] = arguments
        for (operator, _), arguments in operators.items():
            whole = operator.name().endswith(name) and not any(x.dtype in FP8 for x in tensors(arguments))
            checks = (*OF_FAKES, "test_schema", "test_aot_dispatch_dynamic") if whole else OF_FAKES
            torch.library.opcheck(operator, arguments, test_utils=checks)


@pytest.mark.parametrize(("name", "form"), PRODUCERS)
def test_codes_are_a_cache(name: str, form: str):
    codes_are_a_cache(calls(name, form))


def codes_are_a_cache(asked: Iterable[Call]) -> None:
    """Codes and the slot's tables are those of a cast of the result, whatever is predicted, whatever is not finite."""
    for call in asked:
        (y, q, q_t, *_), arguments = straight(call)
        (to,), (own,) = every(Store, call.arguments()), every(Store, arguments)
        if to.cast is None or (call.name == "act_quantize_backward" and arguments[-1] is not None):
            assert (q, q_t) == (None, None), call
            continue
        cast = casts.cast_transpose if to.transposed else casts.quantize
        with torch.no_grad():
            wanted = cast(y, to.cast, to.slot)
        assert in_bytes((q, q_t) if to.transposed else q) == in_bytes(wanted), call
        assert to.transposed or q_t is None
        assert in_bytes(own.slot) == in_bytes(to.slot), call


@pytest.mark.parametrize(("name", "form"), FEW)
def test_nothing_gives_nothing(name: str, form: str):
    """Scales of 1, sums of 0, and a slot that has seen nothing."""
    for call in calls(name, form, NOTHING):
        result, arguments = straight(call)
        for q in every(Operand, result):
            assert q.data.numel() == 0 or name.endswith("experts"), call  # which have room for blocks
            assert (q.scale == 1).all(), call
        for sums in tensors(result) if name in SUMS else ():
            assert sums.dim() != 1 or not sums.any(), call
        for slot in every(Slot, arguments):
            assert in_bytes(slot[:2]) == in_bytes(slot_of(float(slot.live_2S[1, 1]))[:2]), call


def every(kind: type, tree: Any) -> list[Any]:
    """All values of a kind in results or arguments."""
    leaves = tree_leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


@pytest.mark.parametrize("name", sorted({*OPERATIONS} - {*DIFFERENTIABLE, *WITHOUT_GRADIENT}))
def test_a_gradient_is_refused_and_not_lost(name: str):
    call = next(calls(name, next(iter(OPERATIONS[name].forms)), (Given(4, 6, torch.float32),)))
    arguments = call.arguments()
    next(x for x in tensors(arguments) if x.dtype == torch.float32).requires_grad_()
    y = next(x for x in tensors(call.operation.run(*arguments)) if x.requires_grad)
    with pytest.raises(GradientError, match=f"fp8engine::{name} has no gradient"):
        y.float().sum().backward()


def test_the_dispatcher_is_left_out_where_it_adds_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "_flat", lambda *rest: pytest.fail("through the dispatcher"))
    for name, form in FEW:
        for call in calls(name, form):
            straight(call)


def test_every_operator_of_the_room_is_in_the_table():
    """But for what `operation` registers beside it: _slot, _column and _recorded."""
    sources = [path.read_text() for path in Path(library.__file__).parent.glob("*.py")]
    registered = [
        name for source in sources for name in re.findall(r'^@operation\(\s*f?"(\w+)\(', source, re.MULTILINE)
    ]
    assert sorted(registered) == sorted(OPERATIONS)
