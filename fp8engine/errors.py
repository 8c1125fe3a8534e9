"""Exceptions and warnings of the engine; each message names the rule that was broken, the place, and the remedy.

All are subclasses of ValueError, TypeError or RuntimeError, so code that catches those keeps working.

>>> raise_for = UnknownName("recipe", "curent", ["current", "delayed"])
>>> print(raise_for)
unknown recipe 'curent'; did you mean 'current'? known: current, delayed
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from types import UnionType

SHOWN = 20  # names of a list that a message has in full; of a longer one, the nearest three


class Fp8EngineError(Exception):
    """Base class of all exceptions of the engine: `except fe.errors.Fp8EngineError` catches every refusal."""

    @classmethod
    def unless(cls, value: object, kind: type | UnionType, what: str) -> None:
        """Raise this error unless a value is of that kind; what: which argument of which call takes what.

        >>> ConversionError.unless(True, bool | None, "convert: fuse takes True, False or None")
        """
        if not isinstance(value, kind):
            raise cls(f"{what}, not {type(value).__name__}")


class UnknownName(Fp8EngineError, ValueError):
    """A name that is not in the list it should come from; of a long list the message has the nearest three alone.

    >>> print(UnknownName("pattern", "*.dwn", [f"layers.{i}.{part}" for i in range(7) for part in ("up", "down", "q")]))
    unknown pattern '*.dwn'; did you mean 'layers.0.down', 'layers.0.q' or 'layers.0.up'? 21 are known
    """

    def __init__(self, kind: str, name: object, known: Iterable[str]):
        known = list(known)
        self.args = (kind, name, known)
        if len(known) > SHOWN:
            # One layer for all blocks, unless it is one with the very number that was asked for.
            asked = re.findall(r"\d+", str(name))
            apart = {re.sub(r"\d+", lambda found: found[0] if found[0] in asked else "", n): n for n in known[::-1]}
            near = difflib.get_close_matches(str(name), apart, n=3, cutoff=0.0)
            *others, last = (repr(apart[n]) for n in near)
            told = f"did you mean {', '.join(others)} or {last}? {len(known)} are known"
        else:
            in_any_case = {n.lower(): n for n in known}
            near = [in_any_case[n] for n in difflib.get_close_matches(str(name).lower(), in_any_case, n=3, cutoff=0.5)]
            hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
            told = f"{hint}known: {', '.join(known)}"
        self.message = f"unknown {kind} {name!r}; {told}"

    def __str__(self) -> str:
        return self.message


class InvalidRecipe(Fp8EngineError, ValueError):
    """A recipe or cast whose parts contradict each other."""


class UnsupportedDtype(Fp8EngineError, TypeError):
    """A tensor whose dtype or layout cannot be cast to FP8 (float64, integer, complex, sparse)."""


class ShapeError(Fp8EngineError, RuntimeError):
    """Shapes that do not fit together; RuntimeError, as torch raises for a matmul."""


class BackendError(Fp8EngineError, RuntimeError):
    """A backend asked for by name that cannot run here, or a matmul that hardware would refuse."""


class ConversionError(Fp8EngineError, ValueError):
    """A model that cannot be converted as asked: nothing in it has been changed."""


class StrictError(Fp8EngineError, RuntimeError):
    """strict=True met something that would have been emulated, skipped or done otherwise than asked."""


class StateError(Fp8EngineError, ValueError):
    """Scaling state, a checkpoint or a plan that does not belong to this model: nothing was loaded."""


class VersionError(Fp8EngineError, RuntimeError):
    """An installed package is too old or too new; the message names both versions."""


class ParallelError(Fp8EngineError, RuntimeError):
    """A way to run on several devices that the engine does not support (nn.DataParallel)."""


class GradientError(Fp8EngineError, RuntimeError):
    """A gradient that the engine does not compute: a second derivative, or one of an operation without a backward."""


class ScriptError(Fp8EngineError, RuntimeError):
    """A converted layer given to torch.jit.script or torch.jit.trace, or to torch.fx without a module around it."""


class OpListError(Fp8EngineError, ValueError):
    """Lists of autocast that contradict each other: a function in two of them."""


class OptimizerError(Fp8EngineError, RuntimeError):
    """An optimizer that cannot be wrapped as asked, or whose steps are called out of order."""


class LossScaleError(Fp8EngineError, ValueError):
    """A loss scale of zero, Inf or NaN, or gradients that a loss scaler cannot unscale."""


class FusionWarning(UserWarning):
    """Warning, once per model: fuse=True found no block that it knows, so every layer runs by itself."""


class ParallelWarning(UserWarning):
    """Warning: a way of sharding costs more than the one asked for, or a state has amaxes of several ranks."""


class BypassWarning(UserWarning):
    """Warning, once per model after its first forward: the model reads a layer's weight without calling the layer."""


class ResumeWarning(UserWarning):
    """Warning, once per model: weights and an optimizer were loaded from a checkpoint, and no scaling state."""


class SamplingWarning(UserWarning):
    """Warning, once per cause: `auto` could not sample a tensor or decide on a sample; the training went on."""


class BudgetWarning(UserWarning):
    """Warning: `fe.keep_budget` measured that FP8 may cost more of the loss than the budget, and could not help."""


class AttentionWarning(UserWarning):
    """Warning, once per attention: FP8 was asked for, and it runs in 16 bits; the message says why."""


class FrozenWarning(UserWarning):
    """Warning, once per fe.convert(frozen="fp8"): some frozen layers keep their weights in 16 or 32 bits."""


class ReportError(Fp8EngineError, ValueError):
    """A report that cannot be written: losses that are not numbers, a missing folder, a missing package."""


class ReportWarning(UserWarning):
    """Warning, once per LiveReport: a part of what it writes is left out, because a package is missing."""


class EmulationWarning(UserWarning):
    """Warning, once per model, on the first rank: no FP8 Tensor Cores here: FP8 is emulated, and nothing is faster."""
