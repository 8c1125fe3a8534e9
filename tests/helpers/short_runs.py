"""Runs of the demo that measure less beside the training, for the tests that train with it."""

from collections.abc import Iterator

import pytest

from fp8engine.demo import config, session


@pytest.fixture(autouse=True, scope="module")
def short() -> Iterator[None]:
    """Fewer windows of the validation text, and a shorter sample."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "VALIDATION_WINDOWS", 64)
        patch.setattr(session, "LENGTH", 10)
        yield
