"""NumPy under its own names, imported when the first is used.

The CPU's paths and `auto` need it; the kernels of a card do not, and a card's machine may have torch and Triton alone.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    import numpy

    found = getattr(numpy, name)
    globals()[name] = found
    return found
