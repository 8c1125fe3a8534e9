"""The operators behind ops.py, registered with torch.library: schemas, implementations, fakes, autograd, effects.

`Library.define` and `impl` cost 1-2 us a call where `custom_op` costs 6-9; the price is that aliasing must be right by
construction: nothing returned shares memory with an input.  What an operator does: execute.py.
"""

from __future__ import annotations

import torch
from torch._higher_order_ops import effects

from fp8engine import execute, reference
from fp8engine.errors import GradientError
from fp8engine.reference import Epilogue, How, Operand, Slot

LIBRARY = torch.library.Library("fp8engine", "DEF")


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
define(
    "quantize_slot(Tensor x, str how, Tensor live, Tensor counts, int index, bool record, bool count)"
    " -> (Tensor, Tensor)",
    _quantize_slot,
    _quantize_fake,
)
define(
    "cast_transpose(Tensor x, str how, bool sums) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _cast_transpose,
    _cast_transpose_fake,
)
define(
    "cast_transpose_slot(Tensor x, str how, bool sums, Tensor live, Tensor counts, int index, bool record, bool count)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _cast_transpose_slot,
    _cast_transpose_fake,
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
define(
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
define(
    "scale_update(Tensor history, Tensor live, Tensor rules, str ranks='', Tensor? saved=None) -> ()",
    execute.scale_update,
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
# These write a model's tables, and their schemas do not say so, on purpose.  A declared write is functionalised: a
# graph works on its own copy of the table and copies all of it back, over what other graphs (the next block, compiled
# by itself) have written meanwhile, and autograd refuses the table that backward needs because its version has moved.
# As effects in order they run in place, once each, in the order written, forward and backward: tests/test_compile.py.
for _name in ("quantize_slot", "cast_transpose_slot", "scale_update", "matmul_epilogue"):
    effects._register_effectful_op(f"fp8engine::{_name}", effects._EffectType.ORDERED)
