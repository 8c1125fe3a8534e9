"""The host's side of a launch: which operands TMA can read, descriptors kept without keeping memory, grids, pieces."""

import gc
import weakref
from typing import Any

import pytest
import torch

from fp8engine.kernels import launch
from fp8engine.kernels.tuning import Config
from fp8engine.ops.reference import Epilogue

E4M3 = torch.float8_e4m3fn
CPU = torch.device("cpu")


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


def test_a_descriptor_is_kept_and_keeps_no_memory():
    x = codes(64, 32)
    first = launch.descriptor(x, (16, 32))
    assert launch.descriptor(x, (16, 32)) is first
    assert launch.descriptor(x.view(64, 32), (16, 32)) is first  # an address and a shape, whoever asks
    for other in (
        launch.descriptor(x, (32, 32)),
        launch.descriptor(x[:32], (16, 32)),
        launch.descriptor(x[16:], (16, 32)),
        launch.descriptor(x.view(torch.float8_e5m2), (16, 32)),
        launch.descriptor(x[::2], (16, 32)),
    ):
        assert other is not first
    assert (first.base.data_ptr(), first.shape, first.strides) == (x.data_ptr(), [64, 32], [32, 1])
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_a_slice_of_wider_rows_is_described_with_its_own_stride():
    wide = codes(64, 96)
    made = launch.descriptor(wide[:, 16:48], (16, 32))
    assert (made.base.data_ptr(), made.shape, made.strides) == (wide.data_ptr() + 16, [64, 32], [96, 1])


def test_a_transposed_operand_is_described_as_it_lies():
    x = codes(32, 64).t()
    made: Any = launch.reader(x, "transposed", 16, 8)
    assert (made.shape, made.strides, made.block_shape) == ([32, 64], [64, 1], [8, 16])
    assert launch.reader(x, "pointer", 16, 8) is x


@pytest.mark.parametrize(("m", "n", "grid"), [(1, 1, 1), (64, 128, 1), (65, 128, 2), (64, 385, 4), (10_000, 10_000, 4)])
def test_a_grid_is_a_program_a_tile_and_no_more_than_there_are_processors(m, n, grid):
    assert launch.persistent_grid(m, n, Config(64, 128, 64), CPU) == (grid,)


def test_a_grid_has_as_many_programs_a_multiprocessor_as_fit_and_one_a_share_of_a_tile():
    config = Config(64, 128, 64)
    assert launch.persistent_grid(10_000, 10_000, config, CPU, 2) == (2 * launch.PRETEND_PROCESSORS,)
    assert launch.persistent_grid(64, 6 * 128, config, CPU, 2) == (6,)
    assert launch.persistent_grid(64, 128, config, CPU, 1, 3) == (3,)


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
    assert [launch.parts(config, plain, whole) for config in (wide, tile, tile._replace(descriptors=False))] == [
        2,
        2,
        1,
    ]
    half, full = torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
    assert [launch.stages(wide, y) for y in (half, full)] == [4, 3]
    assert [launch.stages(tile, y) for y in (half, full)] == [4, 4]


@pytest.mark.parametrize(
    ("columns", "descriptors", "pieces"),
    [
        (4096, True, 2),
        (4104, True, 2),
        (4104, False, 8),
        (4112, False, 2),
        (50257, True, 8),
        (50257, False, 8),
        (1, True, 8),
    ],
)
def test_rows_that_are_written_element_by_element_are_written_in_small_pieces(columns, descriptors, pieces):
    wide, y_MN = Config(128, 256, 128, warps=8, parts=2), torch.empty(64, columns, dtype=torch.bfloat16, device="meta")
    assert launch.parts(wide._replace(descriptors=descriptors), Epilogue(), y_MN) == pieces
    few = Config(64, 64, 32, warps=4, parts=1, descriptors=descriptors)  # 32 sums a thread
    assert launch.parts(few, Epilogue(), y_MN) == (2 if pieces == 8 else 1)


def test_offsets_in_a_tile_fit_into_32_bits():
    assert launch.addressable(torch.empty(2, (1 << 23) - 1, device="meta"))
    assert not launch.addressable(torch.empty(2, 1 << 23, device="meta"))
    assert not launch.addressable(torch.empty(2, 1 << 23, device="meta").t())
