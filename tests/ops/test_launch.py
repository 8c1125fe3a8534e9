"""The host's side of a launch: which operands TMA can read, descriptors kept without keeping memory, grids, pieces.

At the end: the kernels' constants, which Triton compares at every launch.
"""

import copy
import gc
import importlib
import pkgutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

from fp8engine.kernels import gluon_ring, launch
from fp8engine.kernels.constant import Constant
from fp8engine.kernels.tuning import Config
from fp8engine.ops.reference import Epilogue

E4M3 = torch.float8_e4m3fn
CPU = torch.device("cpu")
KERNELS = Path(launch.__file__).parent


def codes(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize(
    ("x", "way"),
    [
        (codes(64, 32), "descriptor"),
        (codes(32, 64).t(), "transposed"),
        (codes(64, 40), "pointer"),  # rows of 40 bytes: not a multiple of 16
        (codes(64, 40, dtype=torch.bfloat16), "descriptor"),  # 80 bytes
        (codes(64, 44, dtype=torch.bfloat16), "pointer"),
        (codes(44, 64, dtype=torch.bfloat16).t(), "transposed"),
        (codes(64, 96)[:, :32], "descriptor"),  # a slice of wider rows
        (codes(64, 96)[:, 16:48], "descriptor"),
        (codes(64, 96)[:, 8:40], "pointer"),  # begins at an address that is no multiple of 16
        (codes(128, 32)[::2], "descriptor"),
        (codes(64, 64)[:, ::2], "pointer"),
        (codes(1, 32).expand(64, 32), "pointer"),  # rows on top of each other
        (codes(0, 32), "pointer"),
        (codes(64, 0), "pointer"),
    ],
    ids=lambda value: str(tuple(value.stride())) if isinstance(value, torch.Tensor) else value,
)
def test_how_an_operand_can_be_read(x: torch.Tensor, way: str):
    assert launch.load_of(x) == way
    assert launch.describable(x) is (way == "descriptor")


@pytest.mark.parametrize("descriptor", [launch.descriptor, gluon_ring.descriptor], ids=["Triton", "Gluon"])
def test_a_descriptor_is_kept_and_keeps_no_memory(descriptor):
    x = codes(64, 32)
    first = descriptor(x, (16, 32))
    assert descriptor(x, (16, 32)) is first
    assert descriptor(x.view(64, 32), (16, 32)) is first  # an address and a shape, whoever asks
    for other, box in (
        (x, (32, 32)),
        (x[:32], (16, 32)),
        (x[16:], (16, 32)),
        (x.view(torch.float8_e5m2), (16, 32)),
        (x[::2], (16, 32)),
    ):
        assert descriptor(other, box) is not first
    assert (first.base.data_ptr(), first.shape, first.strides) == (x.data_ptr(), [64, 32], [32, 1])
    if descriptor is gluon_ring.descriptor:
        assert (first.layout.swizzle_byte_width, first.layout.element_bitwidth) == (32, 8)
    del other
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_an_operand_is_described_as_it_lies():
    """A slice of wider rows with its own stride, a transposed one turned."""
    wide, turned = codes(64, 96), codes(32, 64).t()
    made = launch.descriptor(wide[:, 16:48], (16, 32))
    assert (made.base.data_ptr(), made.shape, made.strides) == (wide.data_ptr() + 16, [64, 32], [96, 1])
    made: Any = launch.reader(turned, "transposed", 16, 8)
    assert (made.shape, made.strides, made.block_shape) == ([32, 64], [64, 1], [8, 16])
    assert launch.reader(turned, "pointer", 16, 8) is turned


def test_a_grid_is_a_program_a_tile_and_no_more_than_fit_on_the_processors(monkeypatch: pytest.MonkeyPatch):
    config, where = Config(64, 128, 64), torch.device("cuda", 0)
    for m, n, grid in ((1, 1, 1), (64, 128, 1), (65, 128, 2), (64, 385, 4), (10_000, 10_000, 4)):
        assert launch.persistent_grid(m, n, config, CPU) == (grid,)
    monkeypatch.setattr(launch, "processors", lambda where: 132)
    assert launch.persistent_grid(10_000, 10_000, config, where, 2) == (264,)
    assert launch.persistent_grid(64, 150 * 128, config, where, 2) == (150,)
    assert launch.persistent_grid(64, 128, config, where, 1, 3) == (3,)  # one a share of a tile
    assert launch.persistent_grid(10_000, 10_000, config, CPU, 2) == (132,)  # without a card


def test_pieces_and_stages():
    plain, rich, counted = Epilogue(), Epilogue(activation="gelu"), Epilogue(counts=torch.zeros(2, dtype=torch.int64))
    wide, tile, narrow = Config(128, 256, 128, warps=8, parts=2), Config(128, 128, 128), Config(128, 128, 128, warps=4)
    for config, end, cut in [
        (wide, plain, 2),
        (wide, rich, 4),
        (wide, counted, 4),
        (tile, plain, 1),
        (tile, rich, 1),  # 64 sums a thread
        (narrow, plain, 1),
        (narrow, rich, 4),  # 128
    ]:
        assert launch.parts(config, end, torch.empty(64, 4096, dtype=torch.bfloat16)) == cut
    whole = torch.empty(64, 4096)  # FP32: a piece takes the shared memory of a 16-bit tile
    configs = (wide, tile, tile._replace(descriptors=False))
    assert [launch.parts(config, plain, whole) for config in configs] == [2, 2, 1]
    half, full = torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
    assert [launch.stages(wide, y) for y in (half, full)] == [4, 3]
    assert [launch.stages(tile, y) for y in (half, full)] == [4, 4]


def test_rows_that_are_written_element_by_element_are_written_in_small_pieces():
    wide, few = Config(128, 256, 128, warps=8, parts=2), Config(64, 64, 32, warps=4, parts=1)  # few: 32 sums a thread
    for columns, by_tma, by_pointer in ((4096, 2, 2), (4104, 2, 8), (4112, 2, 2), (50257, 8, 8), (1, 8, 8)):
        y_MN = torch.empty(64, columns, dtype=torch.bfloat16, device="meta")
        for descriptors, pieces in ((True, by_tma), (False, by_pointer)):
            assert launch.parts(wide._replace(descriptors=descriptors), Epilogue(), y_MN) == pieces
            in_few = launch.parts(few._replace(descriptors=descriptors), Epilogue(), y_MN)
            assert in_few == (2 if pieces == 8 else 1)


def test_offsets_in_a_tile_fit_into_32_bits():
    assert launch.addressable(torch.empty(2, (1 << 23) - 1, device="meta"))
    assert not launch.addressable(torch.empty(2, 1 << 23, device="meta"))
    assert not launch.addressable(torch.empty(2, 1 << 23, device="meta").t())


@pytest.mark.parametrize("name", [name for _, name, _ in pkgutil.iter_modules([str(KERNELS)])])
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
