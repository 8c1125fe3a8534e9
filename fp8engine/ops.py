"""One function per operation, the backend chosen per call; registered with torch.library, so torch.compile takes them.

| backend | where | what |
| --- | --- | --- |
| cublas | CUDA from sm_89; a CPU with FP8 instructions | matmuls with a scale per tensor or row |
| reference | everywhere | everything, in plain torch; the matmul is emulated, and reports say so |

>>> a = quantize(torch.ones(2, 4), How(torch.float8_e4m3fn, -1, -1, power_of_2=True))
>>> with backend("reference"):
...     matmul(a, a, out=torch.float32).tolist()
[[4.0, 4.0], [4.0, 4.0]]
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator

import torch
from torch._higher_order_ops import effects

from fp8engine import cublas, device, reference
from fp8engine.errors import BackendError, UnknownName
from fp8engine.recipe import Cast, PerBlock, PerRow
from fp8engine.reference import How, Operand, Slot

BACKENDS = ("triton", "cublas", "reference")
_asked: contextvars.ContextVar[str | None] = contextvars.ContextVar("fp8engine_backend", default=None)


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Within the block every matmul runs on this backend, or raises BackendError where it cannot.

    Raises UnknownName for a name that is not a backend, BackendError for one that is not there.
    """
    if name not in BACKENDS:
        raise UnknownName("backend", name, BACKENDS)
    if name == "triton":
        raise BackendError("backend 'triton' has no matmul in this version yet; use 'cublas' or 'reference'")
    token = _asked.set(name)
    try:
        yield
    finally:
        _asked.reset(token)


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


def choose(where: torch.device, by_block: bool) -> str:
    """The backend a matmul runs on: the one asked for, else the fastest that can take it.

    where: the operands' device.  by_block: whether a scale changes along K.
    """
    if (asked := _asked.get()) is not None:
        return asked
    if by_block:
        return "reference"
    if where.type == "cpu":
        return "cublas" if device.cpu_multiplies("fp8") else "reference"
    return "cublas" if device.has_fp8(where) else "reference"


def emulated(where: torch.device, name: str) -> bool:
    """Whether that backend computes without FP8 Tensor Cores there."""
    return name == "reference" or not device.has_fp8(where)


def quantize(x_MK: torch.Tensor, how: How, slot: Slot | None = None) -> Operand:
    """x as an FP8 operand, its amax and counters written to the slot."""
    if direct(x_MK):
        data, scale = reference.quantize(x_MK, how, slot)
    elif slot is None:
        data, scale = torch.ops.fp8engine.quantize.default(x_MK, str(how))
    else:
        data, scale = torch.ops.fp8engine.quantize_slot.default(x_MK, str(how), *slot[:5])
    return Operand(data, scale, how.rows, how.cols, how.power_of_2)


def quantize_given(x_MK: torch.Tensor, how: How, scale: torch.Tensor) -> Operand:
    """x as an FP8 operand under a scale that the caller chose; what does not fit saturates."""
    data = torch.ops.fp8engine.quantize_given(x_MK, str(how), scale)
    return Operand(data, scale, how.rows, how.cols, how.power_of_2)


def matmul(a: Operand, b: Operand, bias_N=None, out: torch.dtype = torch.bfloat16, precision="exact") -> torch.Tensor:
    """a @ b.T + bias on the backend that `choose` names.  out: dtype of the result.

    precision: "fast" may keep Hopper's ~13-bit partial sums, "promoted" sums in FP32; both may round once to 16 bits
    before an FP32 result; "exact" sums in FP32 and rounds only to `out`.

    Raises BackendError for a backend that was asked for and cannot run these operands, or E5M2 by E5M2.
    """
    if a.data.dtype == b.data.dtype == torch.float8_e5m2:
        raise BackendError("Tensor Cores do not multiply E5M2 by E5M2; cast one of the operands to E4M3")
    if direct(a.data):
        return _run_matmul(a, b, bias_N, out, precision)
    groups = [a.rows, a.cols, b.rows, b.cols, int(a.power_of_2 and b.power_of_2)]
    return torch.ops.fp8engine.matmul.default(a.data, b.data, a.scale, b.scale, bias_N, groups, out, precision)


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


def _run_matmul(a: Operand, b: Operand, bias_N, out: torch.dtype, precision: str) -> torch.Tensor:
    # Chosen when it runs: a compiled graph follows `with backend(...)` as eager code does.
    codes = a.data.dtype.itemsize == b.data.dtype.itemsize == 1  # values held for emulation stay with it
    if codes and choose(a.data.device, a.scaled_along_k or b.scaled_along_k) == "cublas":
        return cublas.matmul(a, b, bias_N, out, fast=precision == "fast")
    if torch._C._is_any_autocast_enabled():  # it would take codes up to 448 for an FP16 matmul, whose sums overflow
        with torch.autocast(a.data.device.type, enabled=False):
            return _emulate(a, b, bias_N, out, precision)
    return _emulate(a, b, bias_N, out, precision)


def _emulate(a: Operand, b: Operand, bias_N, out: torch.dtype, precision: str) -> torch.Tensor:
    if precision == "exact":  # products in FP32 for a 16-bit result too
        return reference.matmul_fp8(a, b, bias_N, torch.float32, exact=True).to(out)
    return reference.matmul_fp8(a, b, bias_N, out, exact=False)


def _quantize(x, text):
    return reference.quantize(x, How.parse(text))


def _quantize_slot(x, text, live, counts, *slot):
    return reference.quantize(x, How.parse(text), Slot(live, counts, *slot))


def _quantize_fake(x, text, *slot):
    how = How.parse(text)
    m, k = x.shape
    return x.new_empty(m, k, dtype=how.held or how.dtype), x.new_empty(how.scale_shape(m, k), dtype=torch.float32)


def _operands(a, b, scale_a, scale_b, groups):
    rows_a, cols_a, rows_b, cols_b, power_of_2 = groups
    return Operand(a, scale_a, rows_a, cols_a, bool(power_of_2)), Operand(b, scale_b, rows_b, cols_b, bool(power_of_2))


def _matmul(a, b, scale_a, scale_b, bias, groups, out, precision):
    return _run_matmul(*_operands(a, b, scale_a, scale_b, groups), bias, out, precision)


def _matmul_fake(a, b, scale_a, scale_b, bias, groups, out, precision):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out)


_define("quantize(Tensor x, str how) -> (Tensor, Tensor)", _quantize, _quantize_fake)
_define(
    "quantize_slot(Tensor x, str how, Tensor live, Tensor counts, int index, bool record, bool count)"
    " -> (Tensor, Tensor)",
    _quantize_slot,
    _quantize_fake,
)
_define(
    "quantize_given(Tensor x, str how, Tensor scale) -> Tensor",
    lambda x, text, scale: reference.quantize_given(x, How.parse(text), scale),
    lambda x, text, scale: x.new_empty(x.shape, dtype=How.parse(text).dtype),
)
_define(
    "matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, int[] groups, ScalarType out,"
    " str precision) -> Tensor",
    _matmul,
    _matmul_fake,
)
_define(
    "decode(Tensor codes, ScalarType dtype) -> Tensor",
    reference.decode,
    lambda codes, dtype: torch.empty_like(codes, dtype=dtype),
)
_define(
    "scale_update(Tensor history, Tensor live, Tensor rules) -> ()",
    reference.scale_update,
    lambda history, live, rules: None,
)
# These two write a model's tables, and their schemas do not say so, on purpose.  A declared write is functionalised: a
# graph works on its own copy of the table and copies all of it back, over what other graphs (the next block, compiled
# by itself) have written meanwhile, and autograd refuses the table that backward needs because its version has moved.
# As effects in order they run in place, once each, in the order written, forward and backward: tests/test_compile.py.
for _name in ("quantize_slot", "scale_update"):
    effects._register_effectful_op(f"fp8engine::{_name}", effects._EffectType.ORDERED)
