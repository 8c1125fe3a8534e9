"""Record of what `auto` could not do: said once by name, kept for the report, an error under strict=True."""

from __future__ import annotations

import warnings

from fp8engine.errors import SamplingWarning, StrictError


class Failures:
    """Sentences by cause.  strict: raise StrictError instead of a SamplingWarning.

    >>> failures = Failures()
    >>> with warnings.catch_warnings(record=True) as said:
    ...     warnings.simplefilter("always")
    ...     for step in range(2):
    ...         failures.tell(f"step {step}: 0.input could not be sampled", "RuntimeError: no memory is left")
    >>> len(said), list(failures.told.values())
    (1, ['auto: step 0: 0.input could not be sampled: RuntimeError: no memory is left'])
    """

    def __init__(self):
        self.strict = False
        self.told: dict[str, str] = {}

    def tell(self, what: str, why: str) -> None:
        """Say in a line what failed, unless something failed for that reason before."""
        if why in self.told:
            return
        self.told[why] = text = f"auto: {what}: {' '.join(why.split())}"
        if self.strict:
            raise StrictError(f"strict=True: {text}")
        warnings.warn(text, SamplingWarning, stacklevel=2)


def some(names: list[str]) -> str:
    """Names for a sentence.

    >>> some([f"{i}.input" for i in range(40)])
    '0.input, 1.input, 2.input and 37 others'
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")
