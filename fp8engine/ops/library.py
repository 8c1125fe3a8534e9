"""Registration of operations with torch: an operator for graphs and modes, a direct call for eager code.

    @operation("quantize(Tensor x, str cast) -> (Tensor, Tensor)", shapes, slot=True)
    def _quantize(x_MK, cast, slot=None): ...

    data, scale = _quantize(x_MK, cast, slot=slot)

Eager code on plain tensors (`direct`) calls the decorated function itself.  torch.compile, dispatch modes and tensor
subclasses call the operator, with the same values: a cast travels as its text, a Slot as five fields, an Operand as its
fields (`_flat`).  `Library.define` and `impl` cost 1-2 us a call where `custom_op` costs 6-9; the price is that
aliasing must be right by construction (`owned`).

An operator that writes a slot, or another table of a model, does not declare it in its schema.  A declared write is
functionalised: a graph works on its own copy of the table and copies all of it back, over what other graphs (the next
block, compiled by itself) have written meanwhile, and autograd refuses the table that backward needs because its
version has moved.  Registered as effects in order, they run in place, once each, in the order written, forward and
backward: tests/nn/test_compile.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint

from fp8engine import _torch
from fp8engine.errors import GradientError
from fp8engine.numerics.cast import Cast
from fp8engine.ops.reference import Operand, Slot

LIBRARY = torch.library.Library("fp8engine", "DEF")
OPERATORS = torch.ops.fp8engine
F = TypeVar("F", bound=Callable)
PLAIN = (torch.Tensor, torch.nn.Parameter)
CAST, OPERAND = "str cast", "Operand"  # of a schema: an argument that stands for a Cast; the type of an Operand
TABLES, FLAGS = "Tensor live, Tensor counts", "bool record, bool count"  # the fields of a Slot, less its index


def direct(*arguments: Any) -> bool:
    """Whether the dispatcher has nothing to add for any tensor: eager code, real data, no mode active.

    Saves 8 us a call.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or _torch.dispatch_modes():
        return False
    for x in arguments:  # noqa: SIM110 - a generator costs a Python call for each
        if isinstance(x, torch.Tensor) and (type(x) not in PLAIN or x.is_meta):
            return False
    return True


def keepable(x: torch.Tensor) -> bool:
    """Whether x is real data in eager code, so that operands made from it can be kept and found again."""
    return (
        not torch.compiler.is_compiling()
        and _torch.dispatch_modes() == 0
        and type(x) in PLAIN
        and not x.is_meta
        and not x.is_inference()
    )


def in_backward() -> bool:
    """Whether this thread is inside a backward pass (a forward that runs now is a recompute)."""
    return _torch.graph_task() != -1


def operation(schema: str, fake: Callable, slot: bool = False, effect: bool = False) -> Callable[[F], F]:
    """Register the decorated function as an operator; what is returned calls the one or the other, as `direct` says.

    schema: with its name first.  The function and `fake` take its arguments in order.  Of "str cast" they take a Cast,
        or None for ""; "Operand a" is an Operand: these come before all others, and a cast beside none.
    fake: returns what the operator gives for fake tensors.  Of several results one that is not there is None.
    slot: the function takes a Slot as its keyword `slot` too, and writes it: `name_recorded` is registered as well.
    effect: the function writes a table.
    """
    name, kinds = schema.split("(")[0], schema[schema.index("(") + 1 : schema.index(")")].split(", ")
    operands = sum(kind.startswith(OPERAND) for kind in kinds)
    schema = _of_fields(schema, [kind.split()[1] for kind in kinds[:operands]])
    size = schema[: schema.index(")")].count(",") + 1
    place = kinds.index(CAST) if CAST in kinds else None

    def decorate(function: F) -> F:
        def run(*flat):
            given, fields = _values(flat[:size], operands, place), flat[size:]
            found = function(*given, slot=Slot(*fields)) if fields else function(*given)
            return owned(found) if isinstance(found, tuple) else found

        def run_fake(*flat):
            found = fake(*_values(flat[:size], operands, place))
            if isinstance(found, tuple):
                return tuple(found[0].new_empty(0) if x is None else x for x in found)
            return found

        @functools.wraps(function)
        def dispatched(*values, slot=None):
            if direct(values[0].data) if operands else direct(*values):
                return function(*values) if slot is None else function(*values, slot=slot)
            flat = _flat(values, operands, place)
            return operator(*flat) if slot is None else recorded(*flat, *slot[:5])

        define(schema, run, run_fake, effect)
        operator = recorded = getattr(OPERATORS, name).default
        if slot:
            _define_recorded(schema, run, run_fake)
            recorded = getattr(OPERATORS, f"{name}_recorded").default
        return cast(F, dispatched)

    return decorate


def _of_fields(schema: str, names: Sequence[str]) -> str:
    """The operator's schema: of Operands of these names, their matrices first, as torch's own matmuls have them.

    A list of groups: each integer of its own would cost 1/2 us a call.

    >>> _of_fields("product(Operand a, Operand b, bool fast) -> Tensor", ["a", "b"])
    'product(Tensor a, Tensor b, Tensor a_scale, int[] a_groups, Tensor b_scale, int[] b_groups, bool fast) -> Tensor'
    """
    fields = [f"Tensor {name}" for name in names] + [f"Tensor {name}_scale, int[] {name}_groups" for name in names]
    return schema.replace(", ".join(f"{OPERAND} {name}" for name in names), ", ".join(fields), 1) if names else schema


def _flat(values: Sequence, operands: int, place: int | None) -> list:
    """What an operator is given for the values that its function takes.

    operands: how many Operands come first.  place: of the cast.
    """
    flat: list[Any] = [data for data, *_ in values[:operands]]
    for _, scale, *groups in values[:operands]:
        flat += scale, [*map(int, groups)]
    flat += values[operands:]
    if place is not None:
        flat[place] = "" if flat[place] is None else flat[place].text
    return flat


def _values(flat: Sequence, operands: int, place: int | None) -> list:
    """The inverse of `_flat`."""
    values: list[Any] = []
    for i in range(operands):
        scale, (rows, cols, power_of_2) = flat[operands + 2 * i : operands + 2 * i + 2]
        values.append(Operand(flat[i], scale, rows, cols, bool(power_of_2)))
    values += flat[3 * operands :]
    if place is not None:
        values[place] = Cast.parse(values[place]) if values[place] else None
    return values


def owned(results: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """Tensors without gaps that share no memory with each other, as torch asks of an operator's results.

    Row-major, or column-major as the scales of a transposed copy are.  An empty one for what there is not (None); the
    first there is.
    """
    made: list[torch.Tensor] = []
    for x in results:
        if x is None:
            x = made[0].new_empty(0)
        elif not (x.dim() == 2 and x.t().is_contiguous()):
            x = x.contiguous()
        shared = x.numel() and any(x.data_ptr() == other.data_ptr() for other in made)
        made.append(x.clone() if shared else x)
    return tuple(made)


def define(schema: str, implementation: Callable, fake: Callable, effect: bool = False) -> None:
    """Register an operator for CPU and CUDA.

    Layers call operators without gradients, because their Functions are the gradients.  A graph of torch.export holds
    the operators of the forward alone and runs them as it is called: there the forward runs, and its backward raises.
    """
    name = schema.split("(")[0]

    def run(*arguments):
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments):
            return _ForwardAlone.apply(name, implementation, *arguments)
        return implementation(*arguments)

    LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"fp8engine::{name}", fake, lib=LIBRARY)
    if effect:
        _torch.ordered_effect(f"fp8engine::{name}")


def refuse_gradient(*names: str) -> None:
    """Let the backward of these operators raise GradientError: their gradients are operations of their own."""
    for name in names:

        def refuse(ctx, *gradients, name=name):
            raise GradientError(
                f"fp8engine::{name} has no gradient of its own: call it in a torch.autograd.Function, beside the "
                "operation that computes its gradient, or under torch.no_grad()"
            )

        torch.library.register_autograd(f"fp8engine::{name}", refuse, lib=LIBRARY)


class _ForwardAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name: str, implementation, *arguments):
        ctx.name = name
        return implementation(*arguments)

    @staticmethod
    def backward(ctx, *gradients):
        raise GradientError(
            f"fp8engine::{ctx.name} has no gradient: a graph made by torch.export holds the forward of FP8 layers "
            "alone; run it under torch.no_grad(), and train the module that it was made from"
        )


def _define_recorded(schema: str, implementation: Callable, fake: Callable) -> None:
    """`name_recorded`, which quantises and writes amax and counters to a slot, by one of two operators.

    name_slot     writes the slot: an effect.
    name_column   takes the slot's column of each table, and returns them as they are after the call: writes nothing.

    torch's partitioner cannot run an effect again in backward: where a graph is checkpointed, a backward that reads an
    effect's results crashes.  So there name_column runs, between an effect that takes the columns and one that puts
    them back; a backward runs it again from the columns, which are saved.

    A forward that runs inside a backward pass is a recompute too: a checkpoint stands around the graph.  `once` says
    that the call is of a forward, so that it is not counted then.
    """
    name, rest = schema.split("(", 1)
    inputs, returns = rest.split(") -> (")

    def write(*arguments):
        *given, count, once = arguments
        recompute = once and in_backward()
        return implementation(*given, count and not recompute)

    def in_column(*arguments):
        *given, live, counts, record, count = arguments
        column = live.clone(), counts.clone()
        return *implementation(*given, *column, 0, record, count), *column

    def in_column_fake(*arguments):
        *given, live, counts, record, count = arguments
        return *fake(*given, live, counts, 0, record, count), torch.empty_like(live), torch.empty_like(counts)

    def recorded(*arguments):
        *given, live, counts, index, record, count = arguments
        if not _torch.in_checkpoint_of_graph():
            return getattr(OPERATORS, f"{name}_slot").default(*arguments, not in_backward())
        column = _saved(OPERATORS.take_column.default, live, counts, index)
        *found, live_21, counts_C1 = getattr(OPERATORS, f"{name}_column").default(*given, *column, record, count)
        if record or count:
            OPERATORS.put_column.default(live_21, counts_C1, live, counts, index)
        return tuple(found)

    slot = f"{inputs}, {TABLES}, int index, {FLAGS}"
    define(f"{name}_slot({slot}, bool once) -> ({returns}", write, fake, effect=True)
    define(
        f"{name}_column({inputs}, {TABLES}, {FLAGS}) -> ({returns.removesuffix(')')}, Tensor, Tensor)",
        in_column,
        in_column_fake,
    )
    LIBRARY.define(f"{name}_recorded({slot}) -> ({returns}")
    LIBRARY.impl(f"{name}_recorded", recorded, "CompositeImplicitAutograd")


def _saved(operator, *arguments):
    """What an effect returns; a graph saves it for its backward, also where everything around it is recomputed."""
    tracing = get_proxy_mode()
    if tracing is None:
        return operator(*arguments)
    nodes = tracing.tracer.graph.nodes
    before = len(nodes)
    found = operator(*arguments)
    for node in itertools.islice(reversed(nodes), len(nodes) - before):
        node.meta["recompute"] = checkpoint.CheckpointPolicy.MUST_SAVE
    return found


@operation(
    "take_column(Tensor live, Tensor counts, int index) -> (Tensor, Tensor)",
    lambda live, counts, index: (live.new_empty(len(live), 1), counts.new_empty(len(counts), 1)),
    effect=True,
)
def _take_column(live, counts, index):
    return live[:, index : index + 1].clone(), counts[:, index : index + 1].clone()


@operation(
    "put_column(Tensor live_column, Tensor counts_column, Tensor live, Tensor counts, int index) -> ()",
    lambda *arguments: None,
    effect=True,
)
def _put_column(live_21, counts_C1, live, counts, index) -> None:
    # `.data` has a version counter of its own.  A graph saves the tables for its backward, which writes and reads them
    # as they are then; with their own counter a write by another block's graph would be autograd's error.
    live.data[:, index : index + 1].copy_(live_21)
    if not in_backward():
        counts.data[:, index : index + 1].copy_(counts_C1)
