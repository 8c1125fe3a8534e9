"""torch.autocast with lists of functions that a user may change (fe.amp.autocast).

Without changed lists it is torch.autocast and nothing else.  With them, a torch function mode runs before it:

    white  y = f(cast(x, dtype))        black  y = f(cast(x, FP32))        gray  y = f(cast(x, widest dtype of the x))

and f runs with autocast off, so that nothing inside it is cast again.  Casts are ordinary differentiable ones: each
gradient arrives in its input's dtype.  As with torch.autocast, FP64, integers, tensors of other devices, functions in
place and those with out= are left alone.

The mode sees functions of torch called from Python, by any of their names (torch.softmax, F.softmax, x.softmax, `@`),
in nn.Modules too.  It does not see what a function computes inside itself, as scaled_dot_product_attention does its
softmax.  Where that matters the first such call warns and names the function to list instead.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from fp8engine import _torch
from fp8engine._torch import tree_leaves, tree_map
from fp8engine.amp.lists import UNCHANGED, OpLists
from fp8engine.amp.tensors import NARROW, SIXTEEN_BIT
from fp8engine.errors import BackendError, OpListError, UnknownName, UnsupportedDtype

BF16_CAPABILITY = (8, 0)  # A100: the first Tensor Cores with BF16; a V100 would convert each operand to FP32 and back

# They write to running statistics given after the input.  A cast copy would take the update and be thrown away, so only
# the input is cast; torch's kernels take FP32 parameters beside a 16-bit input.
_WITH_STATISTICS = ("batch_norm", "instance_norm")

# Given a max_norm they write to the weight.  So nothing but the result is cast, whose rows are those of a cast weight.
_WITH_MAX_NORM = ("embedding", "embedding_bag")


class _Anew:
    """A context manager whose region begins anew each time it is entered: again, inside itself, in other threads."""

    def __init__(self, region: Callable[[], contextlib.AbstractContextManager[None]]):
        self._region = region
        self._entered: dict[int, list[contextlib.AbstractContextManager[None]]] = {}  # by thread, innermost last

    def __enter__(self) -> Self:
        region = self._region()
        region.__enter__()
        self._entered.setdefault(_thread(), []).append(region)
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered[_thread()].pop().__exit__(*error)


class autocast(_Anew):
    """torch.autocast with lists: a context manager, and a decorator.

    device_type, or device by keyword: "cuda" or "cpu", or another that torch.autocast knows; None takes CUDA where one
    is.
    dtype: torch.float16 or torch.bfloat16; None takes torch's default (FP16 on CUDA, BF16 on a CPU).
    enabled=False turns all casting off inside, that of surrounding lists too.
    cache_enabled: as torch.autocast's; it holds for the functions that torch casts.
    lists: changes to torch's lists; None changes nothing.  A nested autocast adds its own: of two entries for a
    function the inner one wins.

    Threads: as torch's, the state belongs to the thread; enter it in the forward that nn.DataParallel replicates.
    Checkpointing: torch restores its own autocast for the recomputation, not these lists.  Checkpoint the decorated
    function, which enters them again: `checkpoint(amp(block), x)` with amp = fe.amp.autocast(...), reentrant or not;
    or give the other kind `context_fn=fe.amp.keep_lists`.
    torch.compile: write `with fe.amp.autocast(...)` in the compiled function or around it, or decorate it.  An object
    made outside and entered inside breaks the graph.  Inside a checkpoint in a compiled function Dynamo (torch 2.13)
    drops every function mode, and these lists with it: compile the decorated block, and checkpoint that.
    Backward: call it after the block.  Inside, torch's autocast casts the products of backward as it casts any,
    those of black functions too.  torch.amp.custom_bwd restores torch's autocast, not these lists.

    Raises UnknownName (device), BackendError (no such device here; BF16 on a card without it), UnsupportedDtype
    (neither 16-bit dtype), OpListError (lists that are no OpLists).

    >>> x, lists = torch.randn(4, 4), OpLists(black=["matmul"])
    >>> with autocast("cpu", dtype=torch.float16, lists=lists):
    ...     (x @ x).dtype, torch.mm(x, x).dtype
    (torch.float32, torch.float16)
    """

    def __init__(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        lists: OpLists | None = None,
        device: str | torch.device | None = None,
    ):
        device_type = _device_type(device_type, device)
        OpListError.unless(lists, OpLists | None, "autocast(lists=) takes fe.amp.OpLists(white=[...], ...)")
        if device_type is None:
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
        if not _has_autocast(device_type):
            raise UnknownName("device type for autocast", device_type, ("cuda", "cpu"))
        device_type = device_type.partition(":")[0]  # "cuda:0", as torch takes it
        if enabled and dtype is not None and dtype not in SIXTEEN_BIT:
            raise UnsupportedDtype(
                f"autocast(dtype={dtype}): autocast computes in torch.float16 or torch.bfloat16; "
                f"for {dtype} throughout say enabled=False"
            )
        if enabled:
            _check_hardware(device_type, dtype)
        self.device_type, self.dtype, self.enabled = device_type, dtype, enabled
        self.cache_enabled, self.lists = cache_enabled, UNCHANGED if lists is None else lists
        super().__init__(self._casting)

    @contextlib.contextmanager
    def _casting(self) -> Iterator[None]:
        with torch.autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled):
            if self.enabled and self.lists.places:
                with _ListsMode(self.device_type, self.lists):
                    yield
            else:
                yield

    def __call__(self, function: Callable) -> Callable:
        """`function` under this autocast: each call enters it anew, so that threads and recursion do not mix."""

        @functools.wraps(function)
        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with self._region():
                return function(*args, **kwargs)

        return under_autocast

    def __repr__(self) -> str:
        state = "" if self.enabled else ", enabled=False"
        return f"autocast({self.device_type!r}, dtype={self.dtype}{state}, lists={self.lists!r})"


def keep_lists() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """For torch.utils.checkpoint: `checkpoint(block, x, use_reentrant=False, context_fn=fe.amp.keep_lists)`.

    The recomputation in backward then sees the lists that the forward saw; torch restores the rest of autocast itself.

    >>> from torch.utils.checkpoint import checkpoint
    >>> x = torch.randn(4, 4, requires_grad=True)
    >>> with autocast("cpu", lists=OpLists(black=["matmul"])):
    ...     y = checkpoint(lambda x: (x @ x).exp(), x, use_reentrant=False, context_fn=keep_lists)
    >>> y.sum().backward()
    """
    stack = _torch.function_modes()
    lists = [(mode.device_type, mode.lists) for mode in stack if isinstance(mode, _ListsMode)]
    return contextlib.nullcontext(), _Anew(functools.partial(_kept, lists))


@contextlib.contextmanager
def _kept(lists: list[tuple[str, OpLists]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device_type, some in lists:
            stack.enter_context(_ListsMode(device_type, some))
        yield


class _ListsMode(TorchFunctionMode):
    """Casts for the functions that lists moved, while autocast is on; the rest goes on to torch."""

    def __init__(self, device_type: str, lists: OpLists):
        super().__init__()
        self.device_type, self.lists = device_type, lists

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not torch.is_autocast_enabled(self.device_type):
            return func(*args, **kwargs)
        kind = self.lists.places.get(name)
        if kind is None and (spot := self.lists.blind_spots.get(f"{self.device_type} {name}")) is not None:
            _warn(spot)
        if kind is None or kwargs.get("out") is not None or kwargs.get("inplace") is True:
            return func(*args, **kwargs)
        dtype = self._dtype(kind, (args, kwargs))
        writes = name in _WITH_MAX_NORM and kwargs.get("max_norm", args[3] if len(args) > 3 else None) is not None
        if name in _WITH_STATISTICS:
            args = (_cast(args[0], self.device_type, dtype), *args[1:])
        elif not writes:
            args, kwargs = tree_map(lambda value: _cast(value, self.device_type, dtype), (args, kwargs))
        with torch.autocast(self.device_type, enabled=False):
            result = func(*args, **kwargs)
        return _cast(result, self.device_type, dtype) if writes else result

    def _dtype(self, kind: str, values: object) -> torch.dtype:
        if kind == "white":
            return torch.get_autocast_dtype(self.device_type)
        if kind == "black":
            return torch.float32
        given = [value.dtype for value in tree_leaves(values) if _casts(value, self.device_type)]
        return functools.reduce(torch.promote_types, given) if given else torch.float32


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


_torch.constant_in_graphs(_warn)  # Dynamo calls it while it traces: one warning, and nothing in the graph


def _casts(value: object, device_type: str) -> bool:
    """Whether autocast casts it: torch's rule, which leaves FP64 and other devices' tensors as they are."""
    return isinstance(value, torch.Tensor) and value.device.type == device_type and value.dtype in NARROW


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    return value.to(dtype) if _casts(value, device_type) else value


def _device_type(device_type: str | None, device: str | torch.device | None) -> str | None:
    """The device type, given as `device_type` (torch's parameter) or as `device`."""
    if device is None:
        return device_type
    named = device.type if isinstance(device, torch.device) else device
    if device_type not in (None, named):
        raise UnknownName("device for autocast beside device_type", named, [str(device_type)])
    return named


def _has_autocast(device_type: object) -> bool:
    if device_type in ("cpu", "cuda"):  # torch 2.11's Dynamo cannot trace the call below
        return True
    try:
        return isinstance(device_type, str) and torch.amp.is_autocast_available(device_type)
    except RuntimeError:  # no device of any kind
        return False


def _check_hardware(device_type: str, dtype: torch.dtype | None) -> None:
    if device_type != "cuda":
        return
    if not torch.cuda.is_available():
        raise BackendError('autocast("cuda"): there is no CUDA device here; say "cpu", or leave device_type out')
    here = torch.device("cuda", torch.cuda.current_device())
    wanted = torch.get_autocast_dtype("cuda") if dtype is None else dtype
    if wanted == torch.bfloat16:
        check_bf16("autocast", here, "with fe.amp.GradScaler")


def check_bf16(call: str, card: torch.device, with_what: str) -> None:
    """Raise BackendError, naming the call and the card, where a CUDA card has no BF16 Tensor Cores."""
    if (has := torch.cuda.get_device_capability(card)) < BF16_CAPABILITY:
        raise BackendError(
            f"{call}(dtype=torch.bfloat16): {torch.cuda.get_device_name(card)} (sm_{has[0]}{has[1]}) has no BF16 "
            f"Tensor Cores, which come with sm_80; take dtype=torch.float16 {with_what}"
        )


def _thread() -> int:
    """This thread's number; a function being compiled is traced by one thread, and Dynamo knows no thread numbers."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
