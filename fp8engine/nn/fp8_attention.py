"""Choice between FP8 and 16 bits for the two products of an attention's softmax, and what has run, for the report.

| asked | what runs |
| --- | --- |
| "16 bits" | torch's scaled_dot_product_attention |
| "fp8" | the FP8 kernels, q and k rotated before their cast; 16 bits for what they do not take, said once |
| "fp8 unrotated" | the same without the rotation: cheaper casts, more error where q and k have outliers |
| "auto" | 16 bits, until a sample of q, k and v predicts at least 22 dB for the output; then as "fp8" |

What FP8 does not take, by name: a mask tensor, dropout, a scale that is not positive, head dims other than 64, 96 and
128, heads of v of another width, a batch that is broadcast, nested tensors, transforms of torch.func, a checkpoint
that begins inside of the module's forward.  Under strict that is an error instead.

`auto` samples in eager code, without waiting for the device, and decides anew with each sample, but not while the
backward of an earlier call is to come: a checkpoint computes that call again.  A graph of torch.compile keeps what was
decided when it was made.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fp8engine import _torch
from fp8engine.auto.attention import LEAST_DB, predicted_db, sample
from fp8engine.autograd.attention import Scores, attention
from fp8engine.autograd.fp8_attention import fp8_attention
from fp8engine.autograd.packed import Packed, slow
from fp8engine.errors import AttentionWarning, StrictError, UnknownName
from fp8engine.files import HostCopy
from fp8engine.nn.class_swap import Mixin
from fp8engine.numerics.formats import FLOATS
from fp8engine.ops.attention import unsupported
from fp8engine.ops.device import has_fp8, why_no_fp8
from fp8engine.ops.library import in_backward, keepable
from fp8engine.ops.reference.attention import Form

FORMATS = ("16 bits", "fp8", "fp8 unrotated", "auto")
INTERVAL = 64  # forwards between two samples of `auto`


class Wanted(NamedTuple):
    """One call of attention beside q, k and v.

    mask: a tensor, or None.  causal: query i sees keys up to i + offset; window: only so many of them (0: all).
    again: whether a checkpoint inside of the module's forward computes it again, where it is torch's attention.
    """

    mask: torch.Tensor | None
    dropout: float
    causal: bool
    window: int
    offset: int
    scale: float
    again: bool = False


class _Call:
    """One call of `auto` whose backward is to come; only the graph holds it."""


class Softmax:
    """What computes one module's attention: `asked`, one of FORMATS, and what ran last and why.

    name: of the module, for messages.  strict: raise StrictError where 16 bits would run instead of FP8.
    Raises UnknownName for a format.

    >>> softmax, q = Softmax("fp8", "attn"), torch.randn(1, 1, 2, 64)
    >>> softmax.form(q, q, q, Wanted(None, 0.0, True, 0, 0, 0.125))
    Form(scale=0.125, causal=True, window=0, offset=0, rotated=True)
    >>> softmax.ran
    'fp8'
    """

    def __init__(self, asked: str, name: str, strict: bool = False):
        if asked not in FORMATS:
            raise UnknownName("format of attention", asked, FORMATS)
        self.asked, self.name, self.strict = asked, name, strict
        self.ran, self.why = ("16 bits", "asked for") if asked == "16 bits" else ("", "")
        self.said = False
        self.predicted: float | None = None
        self.forwards = 0
        self._copy: HostCopy | None = None
        self._open = weakref.WeakSet[_Call]()

    def __getstate__(self) -> dict:
        return {key: value for key, value in vars(self).items() if key not in ("_copy", "_open")}  # of this process

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _copy=None, _open=weakref.WeakSet())

    def form(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wanted: Wanted) -> Form | None:
        """How the FP8 kernels compute this call; None where torch's attention does."""
        if self.asked == "16 bits":
            return None
        if why := refused(q, k, v, wanted):
            return self.leave(why)
        if self.asked == "auto" and (why := self._doubts(q, k, v, wanted)):
            return self._in_16_bits(why)
        emulated = _emulated(q.device)
        if emulated and self.strict:
            raise StrictError(f"strict=True: {self.name}: attention would be emulated, {why_no_fp8(q.device)}")
        found = "" if self.predicted is None else f"predicted SQNR {self.predicted:.1f} dB"
        self.ran, self.why = "fp8", "; ".join(filter(None, ("emulated" if emulated else "", found)))
        return Form(wanted.scale, wanted.causal, wanted.window, wanted.offset, self.asked != "fp8 unrotated")

    def leave(self, why: str) -> None:
        """Attention runs in 16 bits though FP8 was asked for; raises StrictError instead where `strict` says so."""
        if self.strict:
            raise StrictError(f"strict=True: {self.name}: attention would run in 16 bits: {why}")
        self._say(f"attention runs in 16 bits: {why}")
        self._in_16_bits(why)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | Packed | None, scores: Scores
    ) -> torch.Tensor:
        """`fp8engine.autograd.attention.attention`, in the format that was asked for."""
        if isinstance(mask, Packed):
            self._say_packed(q)
            return attention(q, k, v, mask, scores)
        if self.asked == "16 bits":
            return attention(q, k, v, mask, scores)
        offset, window = k.shape[2] - q.shape[2], scores.window or 0
        wanted = Wanted(mask, scores.dropout, scores.causal, window, offset, q.shape[-1] ** -0.5)
        q, k, v = autocast(q, k, v)
        form = self.form(q, k, v, wanted)
        return self._followed(attention(q, k, v, mask, scores) if form is None else fp8_attention(q, k, v, form))

    def sdpa(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given, again: bool = False, **how
    ) -> torch.Tensor:
        """torch's scaled_dot_product_attention, in the format that was asked for.

        is_causal: query i sees keys up to i, as in torch, whatever the number of keys.  again: as in `Wanted`.
        """
        if self.asked == "16 bits":
            return F.scaled_dot_product_attention(query, key, value, *given, **how)
        call: dict[str, Any] = dict(zip(("attn_mask", "dropout_p", "is_causal"), given, strict=False)) | how
        scale = call.get("scale")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        causal, dropout = call.get("is_causal", False), call.get("dropout_p", 0.0)
        query, key, value = autocast(query, key, value)
        form = None
        if call.get("enable_gqa") or not _shared(query, key):  # else torch refuses it
            form = self.form(query, key, value, Wanted(call.get("attn_mask"), dropout, causal, 0, 0, scale, again))
        if form is None:
            return self._followed(F.scaled_dot_product_attention(query, key, value, *given, **how))
        return self._followed(fp8_attention(query, key, value, form))

    def _say_packed(self, q: torch.Tensor) -> None:
        """Say once what packed sequences do not get: FP8 where it was asked for, and a CPU's speed."""
        why = "packed sequences, which the FP8 kernels do not take" if self.asked != "16 bits" else ""
        why = "; ".join(filter(None, (why, slow(q))))
        if why and self.strict:
            raise StrictError(f"strict=True: {self.name}: {why}")
        if why:
            self._say(why)
        self._in_16_bits(why)

    def _say(self, what: str) -> None:
        """Warn of the first thing that is not as it was asked for, and whenever a graph of it is traced until then."""
        if not self.said:
            if not torch.compiler.is_compiling():  # in a graph that would be a guard, which the next call fails
                self.said = True
            _warn(f"{self.name}: {what}")

    def _in_16_bits(self, why: str) -> None:
        self.ran, self.why = "16 bits", why

    def _doubts(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wanted: Wanted) -> str | None:
        """Why `auto` does not take FP8 now; None where it does.  A recompute in a backward decides nothing."""
        if keepable(q.detach()) and not in_backward():
            if self._copy is not None and not self._open and self._copy.done():
                self.predicted, self._copy = predicted_db(self._copy.wait(), wanted.scale, q.shape[3]), None
            if self.forwards % INTERVAL == 0:
                self._copy = HostCopy(sample(q, k, v))
            self.forwards += 1
        if self.predicted is None:
            return "auto has seen no sample yet"
        return f"predicted SQNR {self.predicted:.1f} dB < {LEAST_DB:g} dB" if self.predicted < LEAST_DB else None

    def _followed(self, o: torch.Tensor) -> torch.Tensor:
        """o; while its backward is to come, `auto` does not decide anew."""
        if self.asked == "auto" and o.requires_grad and not torch.compiler.is_compiling() and not in_backward():
            call, calls = _Call(), self._open
            calls.add(call)
            o.register_hook(lambda _: calls.discard(call))
        return o


def _warn(what: str) -> None:
    warnings.warn(what, AttentionWarning, stacklevel=4)


def _emulated(device: torch.device) -> bool:
    """Whether FP8 is computed without Tensor Cores for it there."""
    return not has_fp8(device)


_torch.constant_in_graphs(_emulated)  # Dynamo calls the two while it traces
_torch.constant_in_graphs(_warn)


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v as autocast gives them to torch's attention.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     [x.dtype for x in autocast(torch.ones(1), torch.ones(1, dtype=torch.float64))]
    [torch.bfloat16, torch.float64]
    """
    where = tensors[0].device
    if where.type == "meta" or not torch.is_autocast_enabled(where.type):
        return tensors
    dtype = torch.get_autocast_dtype(where.type)
    return tuple(x.to(dtype) if x.dtype in FLOATS else x for x in tensors)


def _shared(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether several heads of q share each of several heads of k, which torch takes with enable_gqa alone."""
    return q.dim() == k.dim() == 4 and q.shape[1] > k.shape[1] > 1


def refused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wanted: Wanted) -> str | None:
    """Why the FP8 kernels do not take this call, or None where they do.

    >>> q = torch.zeros(1, 1, 2, 64)
    >>> refused(q, q, q, Wanted(None, 0.1, False, 0, 0, 0.125))
    'dropout of 0.1; FP8 attention has none'
    """
    if wanted.again:
        return (
            "a checkpoint begins inside of the module's forward, and computes it again outside: checkpoint the module"
        )
    if _torch.transforms_active() or (not torch.compiler.is_compiling() and _torch.tracing()):
        return "a transform of torch.func or a trace of torch.jit; FP8 attention runs in plain code and torch.compile"
    if wanted.mask is not None:
        return "a mask tensor; FP8 attention takes causality and windows"
    if wanted.dropout:
        return f"dropout of {wanted.dropout:g}; FP8 attention has none"
    return unsupported(q, k, v, wanted.scale)


class Float8Sdpa(Mixin):
    """A module that calls torch's scaled_dot_product_attention: its calls are computed as `fp8_softmax` says."""

    fp8_softmax: Softmax  # many an attention has a `softmax` of its own

    def forward(self, *args, **kwargs):
        """The module's own forward."""
        mode = _Intercept(self.fp8_softmax)
        with mode:
            result = super().forward(*args, **kwargs)
        if not mode.called and self.fp8_softmax.asked != "16 bits":
            self.fp8_softmax.leave(UNCALLED)
        return result


UNCALLED = (
    "the module's forward has not called torch's scaled_dot_product_attention (transformers calls it with "
    'attn_implementation="sdpa")'
)


class _Intercept(TorchFunctionMode):
    """Within it scaled_dot_product_attention is `Softmax.sdpa`.  called: whether it was.

    around: those of modules around this one, which let pass what this one calls.
    """

    def __init__(self, softmax: Softmax):
        super().__init__()
        self.softmax, self.called, self.passes = softmax, False, False
        modes = () if torch.compiler.is_compiling() else _torch.function_modes()
        self.around = [mode for mode in modes if isinstance(mode, _Intercept)]
        self.outside = None if torch.compiler.is_compiling() else _checkpoint()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not self.passes:
            self.called = True
            again = self.outside is not None and self.outside != _checkpoint()
            with self._alone():
                return self.softmax.sdpa(*args, again=again, **kwargs)
        if func is torch.Tensor.unflatten:  # calls super(), which torch.compile does not trace below a mode
            func = torch.unflatten
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        for mode in self.around:
            mode.passes = True
        try:
            yield
        finally:
            for mode in self.around:
                mode.passes = False


def _checkpoint() -> Any:
    """The innermost checkpoint whose forward runs here, as far as gradients will be taken; None where they will not.

    A reentrant checkpoint runs without gradients.
    """
    if not torch.is_grad_enabled():
        return None
    pack, _ = _torch.saved_tensors_hooks(False) or (None, None)
    return pack if getattr(pack, "__qualname__", "").startswith("_checkpoint_hook") else ""
