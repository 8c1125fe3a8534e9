"""A card that is not there: the library's own launches, compiled for sm_90 into Triton's cache, and never run.

Tensors are torch's meta tensors, which have shapes, strides, dtypes and aligned addresses, and no memory.  The library
is told that they lie on a card of sm_90; Triton is told that its driver is one.  So each launch reaches Triton's JIT
with the arguments that it has on a card, and the JIT makes the same kernel under the same key.

What reads a value (`.item()`, `if tensor`) is answered with 0 or False: a check then finds nothing wrong, and goes on.
Benchmarks check every variant, and time none.

Only for a process of its own: names inside torch and fp8engine are replaced for good.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

ARCHITECTURE = 90
CAPABILITY = (9, 0)
SHARED, PROCESSORS = 232448, 132  # of an H100 or H200
META = torch.device("meta")


class Share(NamedTuple):
    """Which of the kernels this process compiles: those whose number modulo `of` is `index`."""

    index: int = 0
    of: int = 1


EVERY = Share()
NONE = Share(-1, 1)  # to see what would be launched


class _Utils:
    def load_binary(self, name, kernel, shared, device):
        return None, None, 0, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED, "multiprocessor_count": PROCESSORS, "warpSize": 32}


class _Card:
    """The part of a Triton driver that a launch uses.  launcher: what stands for the C code of each launch."""

    utils = _Utils()

    def __init__(self, launcher: Callable[[Any, Any], Callable]):
        self.launcher_cls = launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCHITECTURE, 32)

    def get_active_torch_device(self) -> torch.device:
        return META


def nothing(source: Any, metadata: Any) -> Callable:
    """A launcher that does nothing."""
    return lambda *arguments: None


def built(source: Any, metadata: Any) -> Callable:
    """The same, after compiling the C code of the real launcher, which Triton 3.6 has for every signature.

    Needs a C compiler and libcuda; without, the group that launches the kernel says what is missing.
    """
    nvidia = importlib.import_module("triton.backends.nvidia.driver")
    if not hasattr(nvidia, "make_launcher"):  # one module launches every kernel
        return nothing(source, metadata)
    try:
        nvidia.CudaLauncher(source, metadata)
    except Exception as error:  # any: the kernel itself is compiled all the same
        print(f"no launcher for {metadata.name}: {type(error).__name__}: {error}", file=sys.stderr)
    return nothing(source, metadata)


class _Values(TorchDispatchMode):
    """Answers whoever reads a value of a tensor that has none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is torch.ops.aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def pretending(share: Share = EVERY, launcher: Callable = nothing) -> Iterator[torch.device]:
    """Within the block: the device of the pretended card.  It compiles its share, and leaves out the other kernels."""
    driver.set_active(_Card(launcher))  # pyright: ignore[reportArgumentType]
    if share != EVERY:
        knobs.runtime.jit_cache_hook = lambda *, key, fn, **rest: (
            zlib.crc32(f"{fn.name} {key}".encode()) % share.of != share.index
        )
    _replace_names()
    with warnings.catch_warnings(), _Values():
        warnings.simplefilter("ignore")
        yield META


def _replace_names() -> None:
    """Let the library take meta tensors for a card's, and benchmarks run each variant once."""
    from fp8engine.bench import cases, harness
    from fp8engine.kernels import launch
    from fp8engine.ops import casts, device, grouped, library, matmul, scaled_grouped, scaled_mm, triton_backend

    plain = (torch.Tensor, torch.nn.Parameter)
    asked = matmul.asked
    for old, new in (
        (device.capability, lambda where: CAPABILITY),
        (device.has_fp8, lambda where: True),
        (device.name, lambda where: f"a pretended card of sm_{ARCHITECTURE}"),
        (launch.processors, lambda where: PROCESSORS),
        (triton_backend.no_card, lambda where, oldest=CAPABILITY: None),
        (casts.choose, lambda where: "reference" if asked() == "reference" else "triton"),
        (matmul._choose, lambda where, by_block, *rest: (asked() or ("triton" if by_block else "cublas"), None)),
        (matmul.choose_16_bits, lambda where, shape: "triton" if asked() == "triton" else "torch"),
        (scaled_mm.matmul, _scaled),
        (grouped.groupable, lambda *tensors: True),
        (scaled_grouped.has_scaled_grouped, lambda where: True),
        (scaled_grouped.scaled_grouped, _scaled_grouped),
        (library.direct, _on_plain),
        (library.keepable, lambda x: type(x) in plain and not x.is_inference()),
        (harness.compare, _once),
        (harness.limits, lambda where, clock, *rest: harness.Limits(1.0, 1.0)),
    ):
        replace(old, new)
    cases.Truth.of = staticmethod(lambda pair: types.SimpleNamespace(error=lambda y: 0.0))  # type: ignore[method-assign]
    torch.Generator = _HostGenerator  # type: ignore[misc]
    autocast = torch.autocast
    torch.autocast = lambda kind, *rest, **more: (  # type: ignore[misc,assignment]
        _NoAutocast() if kind == "meta" else autocast(kind, *rest, **more)
    )


class _NoAutocast(contextlib.nullcontext, contextlib.ContextDecorator):
    """A context that does nothing, also round a function, as torch.autocast may be used."""


def _on_plain(*arguments: Any) -> bool:
    """library.direct, for which a meta tensor is real."""
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    return all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors) and not torch.is_grad_enabled()


def replace(old: Any, new: Any) -> None:
    """Every name in the library and the benchmarks that means `old` means `new`."""
    for module in [module for name, module in sys.modules.items() if name.startswith(("fp8engine", "benchmarks"))]:
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


class _HostGenerator(torch.Generator):
    """The host's, which says that it is the card's: there is none for meta tensors."""

    device = META  # pyright: ignore[reportIncompatibleVariableOverride]

    def __new__(cls, where=None):
        return super().__new__(cls)


def _scaled(a, b, bias_N=None, out: torch.dtype = torch.bfloat16, fast: bool = False) -> torch.Tensor:
    return torch.empty(a.data.shape[0], b.data.shape[0], dtype=out, device=a.data.device)


def _scaled_grouped(a, b, transposed: bool, ends_E: torch.Tensor, fast: bool) -> torch.Tensor:
    rows, columns = b.data.shape
    out = columns if transposed else rows // len(ends_E)
    return torch.empty(len(a.data), out, dtype=torch.bfloat16, device=a.data.device)


def _once(common, checks, derive, timer, forget=None) -> list[dict]:
    """harness.compare without time: every variant is checked, which runs it."""
    rows = []
    for name, check in checks.items():
        row = {"name": name, **common, "correct": None}
        try:
            check(row)
        except Exception as error:  # any: what cannot be followed without values is said, not raised
            row["why"] = f"{type(error).__name__}: {error}"
        rows.append(row)
    return rows
