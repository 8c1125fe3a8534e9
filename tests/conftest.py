"""What holds for every test: the same random numbers in any order, one thread per worker, no clock in the verdict."""

import importlib.util
import itertools
import os

import pytest
import torch
from parts import PARTS, divide

if importlib.util.find_spec("hypothesis"):  # a GPU machine may lack it, and its tests do not need it
    from hypothesis import settings

    settings.register_profile("desk", deadline=None)
    settings.register_profile("ci", deadline=None, derandomize=True)
    settings.load_profile("ci" if os.environ.get("CI") else "desk")

# Kernels are interpreted in a process of their own (`make test` starts it), a card's tests are collected on a card, and
# torchtitan's where it is installed.
collect_ignore = [
    *([] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]),
    *([] if torch.cuda.is_available() else ["gpu"]),
    *([] if importlib.util.find_spec("torchtitan") else ["integrations"]),  # `make titan` has it
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make emulated` gives --whole, `make test` and `make test-all` give --part."""
    parser.addoption("--whole", action="store_true", help="tests/emulated: every case under every seed, and more cases")
    parser.addoption(
        "--seeds", type=int, default=16, help="tests/nightly: how many random programs; `make nightly` gives more"
    )
    parser.addoption("--part", choices=PARTS, help="of all tests: a few cases of each function, or all other cases")


@pytest.hookimpl(trylast=True)  # after the rooms have left out what they leave out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The part that is asked for."""
    if config.getoption("--part"):
        divide(config, items)


if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Start each test from the same random state, whichever ran before; returns the seed."""
    torch.manual_seed(0)
    return 0


@pytest.fixture(autouse=True)
def row_scales_on_a_cpu():
    """torch 2.11 has no scaled matmul with row scales on a CPU: a product in plain torch stands in for it there.

    With a MonkeyPatch of its own: the test's is undone when the test has asked for it to be, and not later.
    """
    from fp8engine.ops import device  # not above: some tests watch what the import of fp8engine does

    if device.cpu_scales_rows():
        yield
        return
    real = torch._scaled_mm

    def scaled_mm(a, b, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False):
        if scale_a.dim() == 0 or a.device.type != "cpu":
            return real(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
        y_MN = a.float() @ b.float() * scale_a * scale_b
        return (y_MN if bias is None else y_MN + bias.float()).to(out_dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", scaled_mm)
        patch.setattr(device, "cpu_scales_rows", lambda: True)
        yield


@pytest.fixture
def fresh():
    """No graph of another test, no count of one."""
    from torch._dynamo.utils import counters  # not above: it takes a second, and few tests compile

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """(operation, shape) of every cast."""
    from fp8engine.ops import reference, twins

    seen = []
    for module, name in itertools.product((reference, twins), ("quantize", "cast_transpose")):
        real = getattr(module, name)

        def spy(x_MK, how, *rest, name=name, real=real):
            seen.append((name, tuple(x_MK.shape)))
            return real(x_MK, how, *rest)

        monkeypatch.setattr(module, name, spy)
    return seen


@pytest.fixture
def group():
    """A process group of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
