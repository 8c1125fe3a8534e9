"""Examples in docstrings of the benchmarks, which pytest's own collection does not reach."""

import doctest
from types import ModuleType

import digits
import pytest

from benchmarks import amp, distance
from benchmarks.machine_code import ceilings, judge, keys, sass, tables, traffic

MODULES = (amp, digits, judge, keys, sass, ceilings, traffic, tables, distance)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_in_docstrings(module: ModuleType):
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert (found.attempted > 0, found.failed) == (True, 0)
