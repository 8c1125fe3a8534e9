"""What a test of this room has a case of where it takes an argument of that name."""

import pytest


@pytest.fixture(params=["counters", "ops"])
def mode(request: pytest.FixtureRequest) -> str:
    """Of find_overflow."""
    return request.param


@pytest.fixture(params=["O1", "O2"])
def level(request: pytest.FixtureRequest) -> str:
    """Of decorate."""
    return request.param
