"""The short part of the interpreter's run."""

import pytest
from parts import LACKS


def test_the_short_part_lacks_nothing(request: pytest.FixtureRequest):
    """Each file of this room is a kernel, or a family of them, and has a case in it."""
    assert request.config.stash.get(LACKS, []) == [], "mark a case of each `short`"
