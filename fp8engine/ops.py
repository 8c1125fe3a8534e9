"""One function per operation, the backend chosen per call; registered with torch.library, so torch.compile takes them.

Which backend a matmul runs on: fp8engine/dispatch.py.

>>> a = quantize(torch.ones(2, 4), How(torch.float8_e4m3fn, -1, -1, power_of_2=True))
>>> with backend("reference"):
...     matmul(a, a, out=torch.float32).tolist()
[[4.0, 4.0], [4.0, 4.0]]
"""

from __future__ import annotations

import functools

import torch
from torch._higher_order_ops import effects

from fp8engine import execute, reference
from fp8engine.dispatch import backend, choose, choose_16_bits, emulated, why_emulated
from fp8engine.errors import BackendError, ShapeError, UnknownName
from fp8engine.recipe import Cast, PerBlock, PerRow
from fp8engine.reference import Epilogue, How, Operand, Slot

__all__ = [
    "backend",
    "cast_transpose",
    "choose",
    "choose_16_bits",
    "decode",
    "direct",
    "emulated",
    "how",
    "matmul",
    "matmul_epilogue",
    "matmul_fp16",
    "quantize",
    "quantize_given",
    "scale_update",
    "why_emulated",
]


@functools.cache
def how(cast: Cast, held: torch.dtype | None = None) -> How:
    """A recipe's cast in the words of the kernels.

    >>> from fp8engine.formats import E4M3
    >>> str(how(Cast(E4M3, PerBlock(1, 128), power_of_2=True)))
    'float8_e4m3fn 1x128 p2'
    """
    group = cast.granularity
    rows, cols = -1, -1
    if isinstance(group, PerBlock):
        rows, cols = group.rows, group.cols
    elif isinstance(group, PerRow):
        rows, cols = (1, -1) if group.dim == -1 else (-1, 1)
    return How(cast.format.dtype, rows, cols, cast.power_of_2, cast.delayed, held)


def quantize(x_MK: torch.Tensor, how: How, slot: Slot | None = None) -> Operand:
    """x as an FP8 operand, its amax and counters written to the slot."""
    if direct(x_MK):
        data, scale = execute.quantize(x_MK, how, slot)
    elif slot is None:
        data, scale = torch.ops.fp8engine.quantize.default(x_MK, str(how))
    else:
        data, scale = torch.ops.fp8engine.quantize_slot.default(x_MK, str(how), *slot[:5])
    return Operand(data, scale, how.rows, how.cols, how.power_of_2)


def cast_transpose(x_MK: torch.Tensor, how: How, slot: Slot | None = None) -> tuple[Operand, Operand]:
    """x quantised for the matmul that reduces its columns, and its transpose [K, M] for the one that reduces its rows.

    Both contiguous, from one read of x.  Groups of 1 x 128 of x are joined by groups of 1 x 128 of its transpose.
    """
    if direct(x_MK):
        data, scale, turned, scale_turned = execute.cast_transpose(x_MK, how, slot)
    elif slot is None:
        data, scale, turned, scale_turned = torch.ops.fp8engine.cast_transpose.default(x_MK, str(how))
    else:
        found = torch.ops.fp8engine.cast_transpose_slot.default(x_MK, str(how), *slot[:5])
        data, scale, turned, scale_turned = found
    first = Operand(data, scale, how.rows, how.cols, how.power_of_2)
    # Down x's columns is along the transpose's rows: 1 x -1 of x is cast again as -1 x 1, which lies as 1 x -1 there.
    return first, first._replace(data=turned, scale=scale if how.per_tensor else scale_turned)


def quantize_given(x_MK: torch.Tensor, how: How, scale: torch.Tensor) -> Operand:
    """x as an FP8 operand under a scale that the caller chose; what does not fit saturates."""
    data = torch.ops.fp8engine.quantize_given(x_MK, str(how), scale)
    return Operand(data, scale, how.rows, how.cols, how.power_of_2)


def matmul(a: Operand, b: Operand, bias_N=None, out: torch.dtype = torch.bfloat16, precision="exact") -> torch.Tensor:
    """a @ b.T + bias on the backend that `choose` names.  out: dtype of the result.

    precision: "fast" may keep Hopper's ~13-bit partial sums, "promoted" sums in FP32; both may round once to 16 bits
    before an FP32 result; "exact" sums in FP32 and rounds only to `out`.

    Raises ShapeError for operands, scales or a bias that do not fit together, BackendError for a backend that was
    asked for and cannot run these operands, or E5M2 by E5M2.
    """
    _check(a, b, bias_N)
    if direct(a.data):
        return execute.matmul(a, b, bias_N, out, precision)
    return torch.ops.fp8engine.matmul.default(a.data, b.data, a.scale, b.scale, bias_N, _groups(a, b), out, precision)


def matmul_epilogue(a: Operand, b: Operand, epilogue: Epilogue, precision: str = "exact") -> torch.Tensor:
    """`matmul` with an activation, statistics or an FP8 result decided before the store; one launch on Triton.

    Elsewhere the FP32 product is finished in plain torch.  Raises as `matmul` does; UnknownName for an activation.

    >>> one = Operand(torch.ones(1, 2).to(torch.float8_e4m3fn), torch.tensor(1.0))
    >>> end = Epilogue(None, torch.float8_e4m3fn, "relu", torch.tensor(0.5))
    >>> matmul_epilogue(one, one, end).float().item()  # 2 = 4 * 0.5
    4.0
    """
    _check(a, b, epilogue.bias_N)
    if epilogue.activation not in reference.KINDS:
        raise UnknownName("activation of a matmul", epilogue.activation, reference.KINDS)
    if direct(a.data):
        return execute.matmul_epilogue(a, b, epilogue, precision)
    return torch.ops.fp8engine.matmul_epilogue.default(
        a.data, b.data, a.scale, b.scale, _groups(a, b), precision, *epilogue
    )


def matmul_fp16(a_MK: torch.Tensor, b_NK: torch.Tensor, bias_N=None, out: torch.dtype | None = None) -> torch.Tensor:
    """a @ b.T + bias of ordinary tensors of any strides; out: dtype of the result, default a's.  Differentiable.

    >>> matmul_fp16(torch.ones(2, 3), torch.ones(1, 3)).tolist()
    [[3.0], [3.0]]
    """
    out = out or a_MK.dtype
    if a_MK.dtype.itemsize != 2 or choose_16_bits(a_MK.device, (a_MK.shape[0], b_NK.shape[0])) == "torch":
        return reference.matmul_fp16(a_MK, b_NK, bias_N, out)
    return torch.ops.fp8engine.matmul_fp16.default(a_MK, b_NK, bias_N, out)


def decode(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP8 codes as values held in `dtype`, exact."""
    return torch.ops.fp8engine.decode(codes, dtype)


def scale_update(history_HS: torch.Tensor, live_2S: torch.Tensor, rules_3S: torch.Tensor) -> None:
    """Enter a step's amaxes into the windows and predict the next scales: one call for a whole model."""
    torch.ops.fp8engine.scale_update(history_HS, live_2S, rules_3S)


# Registration.  `Library.define` and `impl` cost 1-2 us a call where `custom_op` costs 6-9; the price is that aliasing
# must be right by construction: nothing returned shares memory with an input.
_LIBRARY = torch.library.Library("fp8engine", "DEF")


def _define(schema: str, implementation, fake) -> None:
    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"fp8engine::{name}", fake, lib=_LIBRARY)


def direct(x: torch.Tensor) -> bool:
    """Whether the dispatcher has nothing to add: eager code, real data, no mode watching.  Saves 8 us a call."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not x.is_meta
        and not torch.is_grad_enabled()
    )


def _check(a: Operand, b: Operand, bias_N) -> None:
    if a.data.dtype == b.data.dtype == torch.float8_e5m2:
        raise BackendError("Tensor Cores do not multiply E5M2 by E5M2; cast one of the operands to E4M3")
    if a.data.dim() != 2 or b.data.dim() != 2 or a.data.shape[1] != b.data.shape[1]:
        raise ShapeError(f"matmul: want a [M, K] and b [N, K], got {list(a.data.shape)} and {list(b.data.shape)}")
    if bias_N is not None and bias_N.shape != b.data.shape[:1]:
        raise ShapeError(f"matmul: bias is {list(bias_N.shape)}; b {list(b.data.shape)} wants [{b.data.shape[0]}]")
    for name, (data, scale, rows, cols, _) in (("a", a), ("b", b)):
        if scale.dim() == 0:
            continue
        m, k = data.shape
        want = (1 if rows == -1 else -(-m // rows), 1 if cols == -1 else -(-k // cols))
        if tuple(scale.shape) != want:
            raise ShapeError(
                f"matmul: scale of {name} is {list(scale.shape)}; {rows} x {cols} groups of {[m, k]} have {list(want)}"
            )


def _quantize(x, text):
    return execute.quantize(x, How.parse(text))


def _quantize_slot(x, text, live, counts, *slot):
    return execute.quantize(x, How.parse(text), Slot(live, counts, *slot))


def _quantize_fake(x, text, *slot):
    how = How.parse(text)
    m, k = x.shape
    return x.new_empty(m, k, dtype=how.held or how.dtype), x.new_empty(how.scale_shape(m, k), dtype=torch.float32)


def _cast_transpose(x, text):
    return execute.cast_transpose(x, How.parse(text))


def _cast_transpose_slot(x, text, live, counts, *slot):
    return execute.cast_transpose(x, How.parse(text), Slot(live, counts, *slot))


def _cast_transpose_fake(x, text, *slot):
    how = How.parse(text)
    data, scale = _quantize_fake(x, text)
    turned, scale_turned = _quantize_fake(x.t(), text)
    return data, scale, turned, scale.new_empty(0) if how.per_tensor else scale_turned


def _groups(a: Operand, b: Operand) -> list[int]:
    return [a.rows, a.cols, b.rows, b.cols, int(a.power_of_2 and b.power_of_2)]


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


_define("quantize(Tensor x, str how) -> (Tensor, Tensor)", _quantize, _quantize_fake)
_define(
    "quantize_slot(Tensor x, str how, Tensor live, Tensor counts, int index, bool record, bool count)"
    " -> (Tensor, Tensor)",
    _quantize_slot,
    _quantize_fake,
)
_define("cast_transpose(Tensor x, str how) -> (Tensor, Tensor, Tensor, Tensor)", _cast_transpose, _cast_transpose_fake)
_define(
    "cast_transpose_slot(Tensor x, str how, Tensor live, Tensor counts, int index, bool record, bool count)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _cast_transpose_slot,
    _cast_transpose_fake,
)
_define(
    "quantize_given(Tensor x, str how, Tensor scale) -> Tensor",
    lambda x, text, scale: execute.quantize_given(x, How.parse(text), scale),
    lambda x, text, scale: x.new_empty(x.shape, dtype=How.parse(text).dtype),
)
_define(
    "matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, int[] groups, ScalarType out,"
    " str precision) -> Tensor",
    _matmul,
    _matmul_fake,
)
_define(
    "matmul_epilogue(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, int[] groups, str precision, Tensor? bias,"
    " ScalarType out, str activation, Tensor? scale, Tensor? amax, Tensor? counts) -> Tensor",
    _matmul_epilogue,
    _matmul_epilogue_fake,
)
_define(
    "matmul_fp16(Tensor a, Tensor b, Tensor? bias, ScalarType out) -> Tensor",
    execute.matmul_fp16,
    _matmul_fp16_fake,
)
_define(
    "decode(Tensor codes, ScalarType dtype) -> Tensor",
    reference.decode,
    lambda codes, dtype: torch.empty_like(codes, dtype=dtype),
)
_define(
    "scale_update(Tensor history, Tensor live, Tensor rules) -> ()",
    execute.scale_update,
    lambda history, live, rules: None,
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
    "fp8engine::matmul_fp16", _matmul_fp16_backward, setup_context=_keep_operands, lib=_LIBRARY
)
torch.library.register_autograd("fp8engine::matmul", _matmul_backward, setup_context=_keep_bias, lib=_LIBRARY)
# These write a model's tables, and their schemas do not say so, on purpose.  A declared write is functionalised: a
# graph works on its own copy of the table and copies all of it back, over what other graphs (the next block, compiled
# by itself) have written meanwhile, and autograd refuses the table that backward needs because its version has moved.
# As effects in order they run in place, once each, in the order written, forward and backward: tests/test_compile.py.
for _name in ("quantize_slot", "cast_transpose_slot", "scale_update", "matmul_epilogue"):
    effects._register_effectful_op(f"fp8engine::{_name}", effects._EffectType.ORDERED)
