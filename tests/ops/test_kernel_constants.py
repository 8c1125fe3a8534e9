"""Constants of the kernels' modules, which Triton compares at every launch."""

import copy
import importlib
import pkgutil

import pytest
import triton.language as tl

from fp8engine.kernels.constant import Constant

MODULES = [name for _, name, _ in pkgutil.iter_modules(importlib.import_module("fp8engine.kernels").__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_every_constant_of_a_kernel_is_its_own_copy(name: str):
    """A `tl.constexpr` would cost 1.8 us of the host's time at each launch of each kernel that uses it."""
    module = importlib.import_module(f"fp8engine.kernels.{name}")
    found = {key: value for key, value in vars(module).items() if isinstance(value, tl.constexpr)}
    assert {key for key, value in found.items() if not isinstance(value, Constant)} == set()
    assert all(copy.deepcopy(value) is value for value in found.values())


def test_a_constant_is_compared_with_others_as_any():
    one, same, other = Constant(1.5), Constant(1.5), Constant(2)
    assert (one != one) is False  # what Triton asks at a launch
    assert one != other
    assert one == same
    assert repr(one) == repr(tl.constexpr(1.5))  # a part of the key of Triton's cache
