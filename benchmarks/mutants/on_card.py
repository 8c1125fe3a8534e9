"""conftest.py of the interpreter's tests where they run on the emulated card: `trials` puts both into one folder."""

import pytest
import torch
from emulated.conftest import _unwritten
from emulator.card import emulated
from interpreted.conftest import assert_within_bound, few_programs, pytest_itemcollected  # noqa: F401  fixtures

SEED = 1  # warps in a random order, copies that arrive late


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """Every launch of a test runs on the card; results start as bytes that nobody has written."""
    with emulated(90, SEED) as there:
        monkeypatch.setattr(torch, "empty", _unwritten(there))
        yield there
