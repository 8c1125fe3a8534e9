"""The operators behind ops.py, registered with torch.library: schemas, implementations, fakes, autograd, effects.

`Library.define` and `impl` cost 1-2 us a call where `custom_op` costs 6-9; the price is that aliasing must be right by
construction: nothing returned shares memory with an input.  What an operator does: execute.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint

from fp8engine import _torch
from fp8engine.errors import GradientError
from fp8engine.ops import execute, reference
from fp8engine.ops.reference import Epilogue, How, Operand, Slot

LIBRARY = torch.library.Library("fp8engine", "DEF")
OPERATORS = torch.ops.fp8engine
# In a graph, these modes stand around what torch.utils.checkpoint runs: the first time, and to find what it made.
CHECKPOINTS = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass (a forward that runs now is a recompute)."""
    return _torch.graph_task() != -1


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


def define(schema: str, implementation, fake) -> None:
    """Register an operator for CPU and CUDA, and what it gives for fake tensors.  schema: with its name first.

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


def define_effect(schema: str, implementation, fake) -> None:
    """An operator that writes a model's tables, and whose schema does not say so, on purpose.

    A declared write is functionalised: a graph works on its own copy of the table and copies all of it back, over what
    other graphs (the next block, compiled by itself) have written meanwhile, and autograd refuses the table that
    backward needs because its version has moved.  As effects in order they run in place, once each, in the order
    written, forward and backward: tests/nn/test_compile.py.
    """
    define(schema, implementation, fake)
    _torch.ordered_effect(f"fp8engine::{schema.split('(')[0]}")


def define_recorded(call: str, results: int, implementation, fake, define: Callable = define) -> None:
    """`name`_recorded, which quantises and writes what it saw to a slot, and the two operators that it chooses from.

    name_slot     writes the slot: an effect.
    name_column   takes the slot's column of each table, and returns them as they are after the call: writes nothing.

    torch's partitioner cannot run an effect again in backward: where a graph is checkpointed, a backward that reads an
    effect's results crashes.  So there name_column runs, between an effect that takes the columns and one that puts
    them back; a backward runs it again from the columns, which are saved.

    A forward that runs inside a backward pass is a recompute too: a checkpoint stands around the graph.  `once` says
    that the call is of a forward, so that it is not counted then.

    call: name(inputs).  implementation, fake: take the inputs and the five fields of a Slot, and return `results`
    tensors.  define: registers an operator.
    """
    name, inputs = call.rstrip(")").split("(")
    most = inputs.count(",") + 6
    returns = ["Tensor"] * results

    def write(*arguments):
        *given, count = arguments[:most]
        once = arguments[most:] != (False,)  # torch leaves out a last argument that is the default
        again = once and in_backward()
        return implementation(*given, count and not again)

    def in_column(*arguments):
        *given, live, counts, record, count = arguments
        column = live.clone(), counts.clone()
        return *implementation(*given, *column, 0, record, count), *column

    def in_column_fake(*arguments):
        *given, live, counts, record, count = arguments
        return *fake(*given, live, counts, 0, record, count), torch.empty_like(live), torch.empty_like(counts)

    def recorded(*arguments):
        *given, live, counts, index, record, count = arguments
        if not any(isinstance(mode, CHECKPOINTS) for mode in _torch.dispatch_mode_stack()):
            return getattr(OPERATORS, f"{name}_slot").default(*arguments, not in_backward())
        column = _saved(OPERATORS.take_column.default, live, counts, index)
        *found, live_21, counts_C1 = getattr(OPERATORS, f"{name}_column").default(*given, *column, record, count)
        if record or count:
            OPERATORS.put_column.default(live_21, counts_C1, live, counts, index)
        return tuple(found)

    tables, flags = "Tensor live, Tensor counts", "bool record, bool count"
    slot = f"{inputs}, {tables}, int index, {flags}"
    define(f"{name}_slot({slot}, bool once=True) -> ({', '.join(returns)})", write, fake)
    _torch.ordered_effect(f"fp8engine::{name}_slot")
    define(
        f"{name}_column({inputs}, {tables}, {flags}) -> ({', '.join(returns + ['Tensor'] * 2)})",
        in_column,
        in_column_fake,
    )
    LIBRARY.define(f"{name}_recorded({slot}) -> ({', '.join(returns)})")
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


def _take_column(live, counts, index):
    return live[:, index : index + 1].clone(), counts[:, index : index + 1].clone()


def _put_column(live_21, counts_C1, live, counts, index) -> None:
    live[:, index : index + 1].copy_(live_21)
    if not in_backward():
        counts[:, index : index + 1].copy_(counts_C1)


def _scale_update(history, live, rules, ranks="", saved=None) -> None:
    if in_backward():  # a checkpoint around the graph runs all of it again
        return
    if len(history):
        execute.scale_update(history, live, rules, ranks, saved)
    else:
        live[0].fill_(-1.0)


def _quantize(x, text, slot=None):
    data, scale = execute.quantize(x, How.parse(text), slot)
    return data.contiguous(), scale  # as the fake promises; the reference keeps the layout of x


def _quantize_slot(x, text, live, counts, *slot):
    return _quantize(x, text, Slot(live, counts, *slot))


def _quantize_fake(x, text, *slot):
    how = How.parse(text)
    m, k = x.shape
    return x.new_empty(m, k, dtype=how.held or how.dtype), x.new_empty(how.scale_shape(m, k), dtype=torch.float32)


def _cast_transpose(x, text, sums, slot=None):
    data, scale, turned, *rest = execute.cast_transpose(x, How.parse(text), slot, sums)
    data = data.contiguous()
    # The reference's transpose of one row is that row.
    return data, scale, turned.clone() if turned.data_ptr() == data.data_ptr() else turned, *rest


def _cast_transpose_slot(x, text, sums, live, counts, *slot):
    return _cast_transpose(x, text, sums, Slot(live, counts, *slot))


def _cast_transpose_fake(x, text, sums, *slot):
    how = How.parse(text)
    data, scale = _quantize_fake(x, text)
    turned, scale_turned = _quantize_fake(x.t(), text)
    sums_K = scale.new_empty(x.shape[1] if sums else 0)
    return data, scale, turned, scale.new_empty(0) if how.per_tensor else scale_turned, sums_K


def _operands(a, b, scale_a, scale_b, groups):
    rows_a, cols_a, rows_b, cols_b, power_of_2 = groups
    return Operand(a, scale_a, rows_a, cols_a, bool(power_of_2)), Operand(b, scale_b, rows_b, cols_b, bool(power_of_2))


def _matmul(a, b, scale_a, scale_b, bias, groups, out, precision):
    return execute.matmul(*_operands(a, b, scale_a, scale_b, groups), bias, out, precision)


def _matmul_epilogue(a, b, scale_a, scale_b, groups, precision, *epilogue):
    return execute.matmul_epilogue(*_operands(a, b, scale_a, scale_b, groups), Epilogue(*epilogue), precision)


def _matmul_epilogue_fake(a, b, scale_a, scale_b, groups, precision, bias, out, *rest):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out)


def _matmul_fp16_fake(a, b, bias, out):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out)


def _matmul_fake(a, b, scale_a, scale_b, bias, groups, out, precision):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out)


define("quantize(Tensor x, str how) -> (Tensor, Tensor)", _quantize, _quantize_fake)
define_recorded("quantize(Tensor x, str how)", 2, _quantize_slot, _quantize_fake)
define(
    "cast_transpose(Tensor x, str how, bool sums) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _cast_transpose,
    _cast_transpose_fake,
)
define_recorded("cast_transpose(Tensor x, str how, bool sums)", 5, _cast_transpose_slot, _cast_transpose_fake)
define_effect(
    "take_column(Tensor live, Tensor counts, int index) -> (Tensor, Tensor)",
    _take_column,
    lambda live, counts, index: (live.new_empty(len(live), 1), counts.new_empty(len(counts), 1)),
)
define_effect(
    "put_column(Tensor live_column, Tensor counts_column, Tensor live, Tensor counts, int index) -> ()",
    _put_column,
    lambda *arguments: None,
)
define(
    "quantize_given(Tensor x, str how, Tensor scale) -> Tensor",
    lambda x, text, scale: execute.quantize_given(x, How.parse(text), scale),
    lambda x, text, scale: x.new_empty(x.shape, dtype=How.parse(text).dtype),
)
define(
    "matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, int[] groups, ScalarType out,"
    " str precision) -> Tensor",
    _matmul,
    _matmul_fake,
)
define_effect(
    "matmul_epilogue(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, int[] groups, str precision, Tensor? bias,"
    " ScalarType out, str activation, Tensor? scale, Tensor? amax, Tensor? counts) -> Tensor",
    _matmul_epilogue,
    _matmul_epilogue_fake,
)
define(
    "matmul_fp16(Tensor a, Tensor b, Tensor? bias, ScalarType out) -> Tensor",
    execute.matmul_fp16,
    _matmul_fp16_fake,
)
define(
    "decode(Tensor codes, ScalarType dtype) -> Tensor",
    reference.decode,
    lambda codes, dtype: torch.empty_like(codes, dtype=dtype),
)
define_effect(
    "scale_update(Tensor history, Tensor live, Tensor rules, str ranks='', Tensor? saved=None) -> ()",
    _scale_update,
    lambda history, live, rules, ranks="", saved=None: None,
)


def _keep_operands(ctx, inputs, output) -> None:
    a, b, bias, _ = inputs
    ctx.save_for_backward(a, b)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _matmul_fp16_backward(ctx, dy):
    a, b = ctx.saved_tensors
    needs_a, needs_b, needs_bias, _ = ctx.needs_input_grad
    dy_16 = dy.to(a.dtype)
    da = torch.ops.fp8engine.matmul_fp16.default(dy_16, b.t(), None, a.dtype) if needs_a else None
    db = torch.ops.fp8engine.matmul_fp16.default(dy_16.t(), a.t(), None, b.dtype) if needs_b else None
    return da, db, dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None, None


def _keep_bias(ctx, inputs, output) -> None:
    ctx.bias_dtype = None if inputs[4] is None else inputs[4].dtype


def _matmul_backward(ctx, dy):
    """Codes and scales have no gradients (functional/linear.py gives a layer's); the bias has."""
    db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[4] else None
    return None, None, None, None, db, None, None, None


torch.library.register_autograd(
    "fp8engine::matmul_fp16", _matmul_fp16_backward, setup_context=_keep_operands, lib=LIBRARY
)
torch.library.register_autograd("fp8engine::matmul", _matmul_backward, setup_context=_keep_bias, lib=LIBRARY)
