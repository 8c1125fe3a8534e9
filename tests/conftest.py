"""What holds for every test: the same random numbers in any order, one thread per worker, no clock in the verdict."""

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("hypothesis"):  # a GPU machine may lack it, and its tests do not need it
    from hypothesis import settings

    settings.register_profile("desk", deadline=None)
    settings.register_profile("ci", deadline=None, derandomize=True)
    settings.load_profile("ci" if os.environ.get("CI") else "desk")

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Start each test from the same random state, whichever ran before; returns the seed."""
    torch.manual_seed(0)
    return 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked gpu runs where there is one."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
