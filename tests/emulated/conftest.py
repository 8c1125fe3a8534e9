"""Kernels on the emulated card (tests/emulator): compiled by Triton for a GPU, executed from their PTX on the CPU.

`make test` runs a thin set: every committed configuration of every kernel once, but two alone of grouped matmuls; ten
seeds of schedules are dealt over the cases.  `make emulated` (--whole) runs each case under all ten, and the cases that
are marked `whole`, which nothing else collects.  The last lines count what ran.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from emulator.card import Card, emulated

from fp8engine.ops import triton_backend

SEEDS = range(10)
RAN = "emulated launch"  # property of a test's report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """In the whole set every test that uses a card runs under every seed."""
    if "schedule" in metafunc.fixturenames and metafunc.config.getoption("--whole"):
        metafunc.parametrize("schedule", SEEDS, ids=lambda seed: f"seed {seed}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases marked `whole` are a part of the whole set alone."""
    if not config.getoption("--whole"):
        left_out = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter) -> None:
    """How many kernels, configurations, CTAs and seeds ran without a fault or a race."""
    ran = [
        value
        for report in terminalreporter.stats.get("passed", ())
        for name, value in report.user_properties
        if name == RAN
    ]
    if ran:
        kernels, launches, seeds = ({each[place] for each in ran} for place in (0, 1, 2))
        ctas, instructions = (sum(each[place] for each in ran) for place in (3, 4))
        terminalreporter.write_line(
            f"emulated card: {len(kernels)} kernels, {len(launches)} compiled programs, {len(ran)} launches of {ctas} "
            f"CTAs, {instructions} instructions, {len(seeds)} seeds; 0 faults, 0 races"
        )


@pytest.fixture
def schedule(request: pytest.FixtureRequest) -> int:
    """The seed of this test's schedules: one of ten, by the test's name."""
    return SEEDS[zlib.crc32(request.node.name.encode()) % len(SEEDS)]


@pytest.fixture
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether the whole set runs."""
    return bool(request.config.getoption("--whole"))


@pytest.fixture
def card(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, schedule: int
) -> Iterator[Callable[[int], Card]]:
    """Starts an emulated card of an architecture, which launchers and the backend "triton" use until the test ends.

    Results start as bytes that nobody has written.
    """
    started: list[Card] = []
    with ExitStack() as stack:

        def start(architecture: int = 90) -> Card:
            there = stack.enter_context(emulated(architecture, schedule))
            monkeypatch.setattr(triton_backend, "no_card", lambda where, oldest=None: None)
            monkeypatch.setattr(torch, "empty", _unwritten(there))
            started.append(there)
            return there

        yield start
    for done in (done for there in started for done in there.done):
        what = (done.kernel, done.program, schedule, done.ctas, done.instructions)
        request.node.user_properties.append((RAN, what))


def _unwritten(there: Card) -> Callable[..., torch.Tensor]:
    plain = torch.empty

    def empty(*size, dtype=None, device=None, **options):
        y = plain(*size, dtype=dtype, device=device, **options)
        if y.device.type != "cpu" or type(y) is not torch.Tensor:
            return y
        return there.empty(y.nbytes).view(y.dtype).view(y.shape)

    return empty
