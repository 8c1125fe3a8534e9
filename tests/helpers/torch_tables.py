"""torch's own tables of what autocast casts, from its test suite.

That module imports `expecttest`, a package for torch's developers, and takes one class from it, which the tables do not
use: an empty stand-in serves where the package is not installed.
"""

import importlib.util
import operator
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch

with pytest.MonkeyPatch.context() as patch:
    if importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        vars(stand_in)["TestCase"] = unittest.TestCase
        patch.setitem(sys.modules, "expecttest", stand_in)
    from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

__all__ = ["AutocastCPUTestLists", "AutocastTestLists", "opened"]


def opened(case: Any) -> tuple[str, Callable, tuple, dict]:
    """A row of a table: the name of a function, the function, its arguments and its keywords."""
    name, args = case[:2]
    kwargs = case[2] if len(case) > 2 else {}
    spaces = [operator.attrgetter(path)(torch) for path in ("_VF", "nn.functional", "_C._nn", "_C._linalg")]
    return name, next(getattr(space, name) for space in (torch, *spaces) if hasattr(space, name)), args, kwargs
