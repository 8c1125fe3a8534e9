"""Which backend a matmul runs on: the one asked for, else the fastest that can take it.

| backend | where | what |
| --- | --- | --- |
| triton | CUDA from sm_89 (FP8), sm_80 (16 bits); any machine under TRITON_INTERPRET=1 | every matmul of a recipe |
| cublas | CUDA from sm_89; a CPU with FP8 instructions | matmuls with a scale per tensor or row |
| reference | everywhere | everything, in plain torch; the FP8 matmul is emulated, and reports say so |

Where both triton and cublas can, triton is taken for shapes at which it was measured faster (kernels/tuning.json),
and never on a guess.  Scales along K have no cuBLASLt path here: triton, where there are FP8 Tensor Cores.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch

from fp8engine.errors import UnknownName
from fp8engine.ops import device, triton_backend

BACKENDS = ("triton", "cublas", "reference")
_asked: contextvars.ContextVar[str | None] = contextvars.ContextVar("fp8engine_backend", default=None)


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Within the block every matmul runs on this backend, or raises BackendError where it cannot.

    Raises UnknownName for a name that is not a backend, BackendError or VersionError for "triton" without a Triton
    that it can use.
    """
    if name not in BACKENDS:
        raise UnknownName("backend", name, BACKENDS)
    if name == "triton":
        triton_backend.require()
    token = _asked.set(name)
    try:
        yield
    finally:
        _asked.reset(token)


@contextlib.contextmanager
def inherited(name: str | None) -> Iterator[None]:
    """Within the block `name` is asked for, unless a backend already is: what a backward takes over from its forward.

    autograd runs a card's backward in a thread of its own, which does not see the `with` of the caller.
    """
    token = _asked.set(_asked.get() or name)
    try:
        yield
    finally:
        _asked.reset(token)


def asked() -> str | None:
    """The backend of the innermost `with backend(...)`, or None."""
    return _asked.get()


def choose(where: torch.device, by_block: bool, shape: tuple[int, int] | None = None, precision: str = "fast") -> str:
    """The backend that an FP8 matmul runs on.

    where: the operands' device.  by_block: whether a scale changes along K.  shape: (M, N) of the result, where it is
    known.  precision: "fast", "promoted" or "exact".
    """
    if (name := _asked.get()) is not None:
        return name
    if where.type == "cpu":
        return "cublas" if not by_block and device.cpu_multiplies("fp8") else "reference"
    if not device.has_fp8(where):
        return "reference"
    if by_block:
        return "triton" if triton_backend.usable() else "reference"
    operation = "matmul_fp8" if precision == "fast" else "matmul_fp8_promoted"
    faster = shape is not None and triton_backend.measured(operation, device.capability(where), *shape) >= 1.0
    return "triton" if faster else "cublas"


def choose_16_bits(where: torch.device, shape: tuple[int, int]) -> str:
    """The backend that a matmul of FP16 or BF16 tensors runs on: "triton" or "torch"; in a graph, Inductor's choice."""
    if torch.compiler.is_compiling():
        return "torch"
    name = _asked.get()
    if name is not None or where.type != "cuda":
        return "triton" if name == "triton" else "torch"
    return "triton" if triton_backend.measured("matmul_fp16", device.capability(where), *shape) >= 1.0 else "torch"


def choose_casts(where: torch.device) -> str:
    """The backend that casts, and the update of scales, run on: "triton" or "reference".

    Both give the same codes and scales bit for bit, so that "cublas", which has matmuls only, leaves the choice open.
    """
    name = _asked.get()
    if name == "reference":
        return name
    if where.type == "cuda":
        return "triton" if device.has_fp8(where) and triton_backend.usable() else "reference"
    return "triton" if name == "triton" and triton_backend.no_card(where) is None else "reference"


def emulated(where: torch.device, name: str) -> bool:
    """Whether an FP8 matmul on that backend computes without FP8 Tensor Cores there."""
    return why_emulated(where, name) is not None


def why_emulated(where: torch.device, name: str) -> str | None:
    """Why an FP8 matmul on that backend has no FP8 Tensor Cores there; None where it has them."""
    if not device.has_fp8(where):
        return f"{device.name(where)} has no FP8 Tensor Cores"
    if name != "reference":
        return None
    if _asked.get() != "reference" and not triton_backend.usable():
        return "scales along K need Triton's kernels: pip install 'triton>=3.6,<3.10'"
    return "the reference computes in plain torch"
