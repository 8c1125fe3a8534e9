"""The contracts of tests/ops/test_contracts.py on our kernels: each operation's kernel is its twin."""

import pytest
from contracts import NOTHING
from operations import CASES, OPERATIONS, calls
from ops.test_contracts import PRODUCERS, codes_are_a_cache, is_its_twin
from parts import LACKS

import fp8engine as fe


@pytest.fixture(autouse=True)
def kernels():
    with fe.backend("triton"):
        yield


@pytest.mark.few(10)
@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_gives_what_the_twin_gives(name: str):
    for form in OPERATIONS[name].forms:
        is_its_twin([*calls(name, form, NOTHING)][:6], on_kernels=True)


@pytest.mark.few(26)
@pytest.mark.parametrize(("name", "form"), CASES)
def test_it_is_its_twin_straight_and_through_the_dispatcher(name: str, form: str):
    """All ways where bits are equal; else a few: how near values are is asked beside each kernel, in float64."""
    asked = [*calls(name, form)]
    is_its_twin(asked if OPERATIONS[name].exact else asked[:: -(-len(asked) // 4)], on_kernels=True)


@pytest.mark.few(10)
@pytest.mark.parametrize(("name", "form"), PRODUCERS)
def test_codes_are_a_cache(name: str, form: str):
    """Of each activation a few of the ways to store, which with all activations are all of them."""
    codes_are_a_cache([*calls(name, form)][PRODUCERS.index((name, form)) % 5 :: 5])


def test_the_short_part_lacks_nothing(request: pytest.FixtureRequest):
    """Each file of this room is a kernel, or a family of them, and has a case in it."""
    assert request.config.stash.get(LACKS, []) == [], "mark a case of each `short`"
