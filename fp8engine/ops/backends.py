"""The backend that a caller asks for: `fe.backend`, a context variable.

| backend | where | what |
| --- | --- | --- |
| triton | CUDA from sm_89 (FP8), sm_80 (16 bits); any machine under TRITON_INTERPRET=1 | every matmul of a recipe |
| cublas | CUDA from sm_89; a CPU with FP8 instructions | matmuls with a scale per tensor or row; on sm_90 per block |
| reference | everywhere | everything, in plain torch; the FP8 matmul is emulated, and reports say so |

Which one runs where none is asked for: `choose` in matmul.py and in casts.py.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from fp8engine.errors import UnknownName
from fp8engine.ops import triton_backend

BACKENDS = ("triton", "cublas", "reference")
_asked: contextvars.ContextVar[str | None] = contextvars.ContextVar("fp8engine_backend", default=None)
asked = _asked.get  # the backend of the innermost `with backend(...)`, or None; no Python call


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


def running_on(name: str | None) -> contextlib.AbstractContextManager:
    """The context of a backward whose forward was asked for `name`; one that changes nothing for None."""
    return contextlib.nullcontext() if name is None else inherited(name)


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
