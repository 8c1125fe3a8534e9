"""Matmuls as operations: FP8 operands with their scales, with an epilogue, and tensors of 16 bits.

    matmul           y[M, N] = sum_k a[m, k] b[n, k] * scale_a * scale_b + bias[n], rounded to `out`
    matmul_epilogue  the same, ended by an activation, statistics or an FP8 result
    matmul_fp16      the same of ordinary tensors, without scales

| backend | runs on | can multiply |
| --- | --- | --- |
| triton | Tensor Cores from sm_89 (FP8) or sm_80 (16 bits), our kernels | all of it |
| cublas | Tensor Cores from sm_89, a CPU's AMX; torch's scaled matmul | scales per tensor or row; on sm_90 blocks |
| reference | any device, in plain torch | all of it; FP8 is emulated, and reports say so |

The backend is the one that `fe.backend` asks for, else what `choose` says: triton where it was measured faster
(kernels/tuning.json, else by this card of itself, card_trials.py; never on a guess), cublas for other FP8 Tensor Cores,
else reference.  Where scales change along K, cublas only where it was measured faster or there is no Triton.  It is
chosen when the matmul runs, not when a graph is traced: a compiled graph follows `with fe.backend(...)` as eager code
does.

>>> from fp8engine.ops.backends import backend
>>> a = Operand(torch.ones(2, 4).to(torch.float8_e4m3fn), torch.tensor(2.0))
>>> with backend("reference"):
...     matmul(a, a, out=torch.float32).tolist()
[[16.0, 16.0], [16.0, 16.0]]
"""

from __future__ import annotations

from typing import Any

import torch

from fp8engine.errors import BackendError, ShapeError, UnknownName
from fp8engine.ops import card_trials, device, reference, scaled_mm, triton_backend
from fp8engine.ops.backends import asked
from fp8engine.ops.choice_file import Choice
from fp8engine.ops.library import LIBRARY, operation
from fp8engine.ops.reference import Epilogue, Operand

E5M2 = torch.float8_e5m2
BIAS = 6  # its place among the operator's arguments, behind two Operands (library.py)
ALIGNED = 16  # of K: else tensor descriptors cannot describe the rows, and there is one kernel for it
# torch's pass that adds a bias, where scales are in blocks, takes as long as its matmul of this K: 288 us beside 723
# at K 4096 on an H200 (benchmarks/results/nvidia-h200/2026-11-27-profile.txt).  Our kernels add it to their sums.
BIAS_PASS = 1632


def choose(
    where: torch.device,
    by_block: bool,
    shape: tuple[int, ...] | None = None,
    precision: str = "fast",
    kind: str | None = None,
    bias: bool = False,
) -> str:
    """The backend that an FP8 matmul runs on.

    where: the operands' device.  by_block: whether a scale changes along K.  shape: (M, N) of the result or (M, N, K),
    where it is known.  precision: "fast", "promoted" or "exact".  kind: of the scales, of card_trials.kind_of; with it
    and K, what the card measured of itself counts where the tuning table has nothing.  bias: the matmul adds one.
    """
    return _choose(where, by_block, shape, precision, kind, bias)[0]


def _choose(where, by_block: bool, shape, precision: str, kind: str | None, bias: bool) -> tuple[str, Any]:
    """(`choose`, the configuration of our kernel that the card measured as the fastest, None where it did not)."""
    if (name := asked()) is not None:
        return name, None
    if where.type == "cpu":
        return "cublas" if not by_block and device.cpu_multiplies("fp8") else "reference", None
    if not device.has_fp8(where):
        return "reference", None
    torch_can = not by_block or scaled_mm.no_blocks(where) is None
    if by_block and not triton_backend.usable():
        return "cublas" if torch_can else "reference", None
    ratio, found = _measured(where, operation_of(precision, by_block), shape, kind)
    if found is not None:
        return found.backend, found.config
    k_with_bias = shape[2] if bias and shape is not None and len(shape) > 2 else None
    return by_ratio(by_block, torch_can, ratio, k_with_bias), None


def by_ratio(by_block: bool, torch_can: bool, ratio: float, k_with_bias: int | None = None) -> str:
    """The backend where only the tuning table was measured.  ratio: torch's time over ours; 0: not measured.

    torch_can: whether torch takes such scales there.  k_with_bias: K of a matmul that adds a bias.

    >>> [by_ratio(True, True, 0.95, k) for k in (None, 4096, 65536)]
    ['cublas', 'triton', 'cublas']
    """
    if by_block:
        if k_with_bias:
            ratio *= 1 + BIAS_PASS / k_with_bias
        return "cublas" if torch_can and 0.0 < ratio < 1.0 else "triton"
    return "triton" if ratio >= 1.0 else "cublas"


def why_chosen(
    where: torch.device, shape: tuple[int, int, int], precision: str, kind: str, backend: str | None = None
) -> str:
    """Why an FP8 matmul runs on the backend that `choose` names, on a card with FP8 Tensor Cores; "" elsewhere.

    backend: that one, where it is known.
    """
    if not device.has_fp8(where):
        return ""
    ratio, found = _measured(where, operation_of(precision, "block" in kind), shape, kind)
    if found is not None:
        return str(found)
    if ratio:
        told, slower = f"kernels/tuning.json: our kernel runs {ratio:.2f} times as fast as torch's", ratio < 1.0
        if backend == "triton" and slower:
            bias = "would add the bias by a pass of its own"
            told += f", which {bias if scaled_mm.no_blocks(where) is None else 'has no such blocks'}"
        return told
    newer = triton_backend.on_blackwell(where)
    return newer.get("block" in kind, "our kernels were not measured on this card for this shape")


def operation_of(precision: str, by_block: bool) -> str:
    """The tuning table's name of an FP8 matmul."""
    if by_block:
        return "matmul_block"
    return "matmul_fp8" if precision == "fast" else "matmul_fp8_promoted"


def _measured(
    where: torch.device, operation: str, shape: tuple[int, ...] | None, kind: str | None
) -> tuple[float, Choice | None]:
    """(the tuning table's ratio or 0, what the card measured of itself where the table has nothing)."""
    if shape is None or (kind is None and operation == "matmul_block"):  # measured are blocks of 128
        return 0.0, None
    ratio = triton_backend.measured(operation, device.capability(where), *shape[:2])
    if ratio or kind is None or len(shape) < 3 or shape[2] % ALIGNED:
        return ratio, None
    return 0.0, card_trials.look(where, operation, kind, shape)


def choose_16_bits(where: torch.device, shape: tuple[int, int]) -> str:
    """The backend that a matmul of FP16 or BF16 tensors runs on: "triton" or "torch"; in a graph, Inductor's choice."""
    if torch.compiler.is_compiling():
        return "torch"
    name = asked()
    if name is not None or where.type != "cuda":
        return "triton" if name == "triton" else "torch"
    return "triton" if triton_backend.measured("matmul_fp16", device.capability(where), *shape) >= 1.0 else "torch"


def why_emulated(where: torch.device, name: str) -> str | None:
    """Why an FP8 matmul on that backend has no FP8 Tensor Cores there; None where it has them."""
    if not device.has_fp8(where):
        return device.why_no_fp8(where)
    if name != "reference":
        return None
    if asked() != "reference" and not triton_backend.usable():
        return "scales along K need Triton's kernels: pip install 'triton>=3.6,<3.10'"
    return "the reference computes in plain torch"


def matmul(a: Operand, b: Operand, bias_N=None, out: torch.dtype = torch.bfloat16, precision="exact") -> torch.Tensor:
    """a @ b.T + bias on the backend that `choose` names.  out: dtype of the result.

    precision: "fast" may keep Hopper's ~13-bit partial sums, "promoted" sums in FP32; both may round once to 16 bits
    before an FP32 result; "exact" sums in FP32 and rounds only to `out`.

    Raises ShapeError for operands, scales or a bias that do not fit together, BackendError for operands on several
    devices, a backend that was asked for and cannot run them, or E5M2 by E5M2.
    """
    _check(a, b, bias_N)
    return _matmul(a, b, bias_N, out, precision)


@operation(
    "matmul(Operand a, Operand b, Tensor? bias, ScalarType out, str precision) -> Tensor",
    lambda a, b, bias, out, precision: a.data.new_empty(a.data.shape[0], b.data.shape[0], dtype=out),
)
def _matmul(a, b, bias_N, out: torch.dtype, precision: str) -> torch.Tensor:
    name, config = _backend_of(a, b, precision, bias_N is not None)
    if name == "triton":
        return triton_backend.matmul(a, b, Epilogue(bias_N, out), precision == "fast", config)
    if name == "cublas":
        return scaled_mm.matmul(a, b, bias_N, out, fast=precision == "fast")
    return reference.emulate(a, b, bias_N, out, precision)


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
    return _matmul_epilogue(a, b, precision, *epilogue)


@operation(
    "matmul_epilogue(Operand a, Operand b, str precision, Tensor? bias, ScalarType out, str activation,"
    " Tensor? scale, Tensor? amax, Tensor? counts) -> Tensor",
    lambda a, b, precision, bias, out, *rest: a.data.new_empty(a.data.shape[0], b.data.shape[0], dtype=out),
    effect=True,
)
def _matmul_epilogue(a, b, precision, *fields):
    epilogue, (name, config) = Epilogue(*fields), _backend_of(a, b, precision)
    if name == "triton":
        return triton_backend.matmul(a, b, epilogue, precision == "fast", config)
    return reference.finish(_matmul(a, b, None, torch.float32, precision), epilogue)


def matmul_fp16(a_MK: torch.Tensor, b_NK: torch.Tensor, bias_N=None, out: torch.dtype | None = None) -> torch.Tensor:
    """a @ b.T + bias of ordinary tensors of any strides; out: dtype of the result, default a's.  Differentiable.

    >>> matmul_fp16(torch.ones(2, 3), torch.ones(1, 3)).tolist()
    [[3.0], [3.0]]
    """
    out = out or a_MK.dtype
    if a_MK.dtype.itemsize != 2 or choose_16_bits(a_MK.device, (a_MK.shape[0], b_NK.shape[0])) == "torch":
        return reference.matmul_fp16(a_MK, b_NK, bias_N, out)
    return _matmul_fp16(a_MK, b_NK, bias_N, out)


def _check(a: Operand, b: Operand, bias_N) -> None:
    if a.data.dtype == b.data.dtype == E5M2:
        raise BackendError("Tensor Cores do not multiply E5M2 by E5M2; cast one of the operands to E4M3")
    if a.data.dim() != 2 or b.data.dim() != 2 or a.data.shape[1] != b.data.shape[1]:
        raise ShapeError(f"matmul: want a [M, K] and b [N, K], got {list(a.data.shape)} and {list(b.data.shape)}")
    if bias_N is not None and bias_N.shape != b.data.shape[:1]:
        raise ShapeError(f"matmul: bias is {list(bias_N.shape)}; b {list(b.data.shape)} wants [{b.data.shape[0]}]")
    where = a.data.device
    if not (b.data.device == a.scale.device == b.scale.device == where and (bias_N is None or bias_N.device == where)):
        device.check_one("matmul", a.data, b=b.data, scale_of_a=a.scale, scale_of_b=b.scale, bias=bias_N)
    for name, (data, scale, rows, cols, _) in (("a", a), ("b", b)):
        if scale.dim() == 0:
            continue
        m, k = data.shape
        want = (1 if rows == -1 else -(-m // rows), 1 if cols == -1 else -(-k // cols))
        if tuple(scale.shape) != want:
            raise ShapeError(
                f"matmul: scale of {name} is {list(scale.shape)}; {rows} x {cols} groups of {[m, k]} have {list(want)}"
            )


def _backend_of(a: Operand, b: Operand, precision: str, bias: bool = False) -> tuple[str, Any]:
    """The backend, and the configuration of our kernel that the card measured, if it did."""
    if a.data.dtype.itemsize == b.data.dtype.itemsize == 1:
        by_block = a.scaled_along_k or b.scaled_along_k
        (m, k), n = a.data.shape, len(b.data)
        name, config = _choose(a.data.device, by_block, (m, n, k), precision, card_trials.kind_of(a, b), bias)
        if by_block and name == "cublas" and asked() is None and scaled_mm.unsupported(a, b):
            name = "triton" if triton_backend.usable() else "reference"  # other blocks than 1x128 and 128x128
        return name, config
    if asked() not in (None, "reference"):
        raise BackendError(
            f"backend {asked()!r} takes FP8 codes, and these operands are values held for an emulated matmul: "
            "quantise them (run the forward) inside the block as well"
        )
    return "reference", None


@operation(
    "matmul_fp16(Tensor a, Tensor b, Tensor? bias, ScalarType out) -> Tensor",
    lambda a, b, bias, out: a.new_empty(a.shape[0], b.shape[0], dtype=out),
)
def _matmul_fp16(a, b, bias, out):
    return triton_backend.matmul_fp16(a, b, Epilogue(bias, out))


def _keep_operands(ctx, inputs, output) -> None:
    a, b, bias, _ = inputs
    ctx.save_for_backward(a, b)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _matmul_fp16_backward(ctx, dy):
    a, b = ctx.saved_tensors
    needs_a, needs_b, needs_bias, _ = ctx.needs_input_grad
    dy_16 = dy.to(a.dtype)
    da = _matmul_fp16(dy_16, b.t(), None, a.dtype) if needs_a else None
    db = _matmul_fp16(dy_16.t(), a.t(), None, b.dtype) if needs_b else None
    return da, db, dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None, None


def _keep_bias(ctx, inputs, output) -> None:
    ctx.bias_dtype = None if inputs[BIAS] is None else inputs[BIAS].dtype


def _matmul_backward(ctx, dy):
    """Codes and scales have no gradients (autograd/linear.py gives a layer's); the bias has."""
    db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[BIAS] else None
    return *[None] * BIAS, db, None, None


torch.library.register_autograd(
    "fp8engine::matmul_fp16", _matmul_fp16_backward, setup_context=_keep_operands, lib=LIBRARY
)
torch.library.register_autograd("fp8engine::matmul", _matmul_backward, setup_context=_keep_bias, lib=LIBRARY)
