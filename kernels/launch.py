"""Host side of the launchers: descriptors, grids, the checks before a launch, what casts are told of a slot.

A descriptor (CUDA's tensor map) is an address, a shape, strides and a box: it is kept under these, not made anew on
every call.  Nothing here waits for the card.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8engine.kernels.limits import describable

# How an operand's tile is read.
POINTER = "pointer"
DESCRIPTOR = "descriptor"  # K contiguous: box [BLOCK_ROWS, BLOCK_K]
TRANSPOSED = "transposed"  # rows contiguous: box [BLOCK_K, BLOCK_ROWS], turned in shared memory

THREADS = 32  # of a warp
MOST_STRIDE = 1 << 23  # tiles are up to 256 wide: offsets inside one stay below 2^31
MULTIPLE = 16  # what Triton tells its compiler about a size: whether this divides it
PIECE = 16  # sums a thread: with 32 beside 64 or 128 that wait for their turn, `make codegen` sees spills
PRETEND_PROCESSORS = 4  # grid of a persistent kernel where there is no card: small, so that its outer loop loops

_DTYPES = {
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


class Address:
    """What a descriptor asks of a tensor, without keeping its memory alive."""

    def __init__(self, address: int, dtype: torch.dtype):
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


@functools.lru_cache(maxsize=4096)
def _descriptor(address: int, dtype: torch.dtype, shape: tuple, strides: tuple, block: tuple) -> TensorDescriptor:
    return TensorDescriptor(Address(address, dtype), list(shape), list(strides), list(block))


def descriptor(x: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """x as a tensor descriptor with that box.  Kept per address, shape and strides: it is nothing but these."""
    if interpreted():  # the interpreter copies the tensor itself
        return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))
    return _descriptor(x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), block)


def addressable(x: torch.Tensor) -> bool:
    """Whether offsets inside any tile of the matrix x fit into 32 bits."""
    return max(x.stride()) < MOST_STRIDE


def load_of(x: torch.Tensor) -> str:
    """How a descriptor kernel can read the matrix x: DESCRIPTOR, TRANSPOSED, or POINTER where it cannot."""
    if describable(x):
        return DESCRIPTOR
    return TRANSPOSED if describable(x.t()) else POINTER


def reader(x: torch.Tensor, load: str, rows: int, columns: int) -> TensorDescriptor | torch.Tensor:
    """What a kernel is given to read tiles of rows x columns of x in that way."""
    if load == DESCRIPTOR:
        return descriptor(x, (rows, columns))
    return descriptor(x.t(), (columns, rows)) if load == TRANSPOSED else x


def writable(y_MN: torch.Tensor, config) -> bool:
    """Whether a kernel of that configuration writes y by descriptor."""
    return config.descriptors and describable(y_MN)


def stages(config, y_MN: torch.Tensor) -> int:
    """Pipeline stages: one less for an FP32 result, whose tile takes twice the shared memory of a 16-bit one."""
    return config.stages - 1 if y_MN.dtype == torch.float32 and config.block_n > 128 else config.stages


def parts(config, epilogue, y_MN: torch.Tensor) -> int:
    """Into how many pieces a tile is cut for the epilogue.

    Four where it needs registers beside 128 sums a thread; two beside 64 where y is written by pointers (in one piece
    Triton 3.9 spills).  PIECE sums a thread where y is written by pointers and its width is not known to be a multiple
    of 16: every element then has a store, an address and a mask of its own.
    Two at least for an FP32 result by descriptor: a piece then takes the shared memory of a 16-bit tile.
    """
    sums = config.block_m * config.block_n // (THREADS * config.warps)
    rich = epilogue.activation != "none" or epilogue.amax is not None or epilogue.counts is not None
    described = writable(y_MN, config)
    if not described and y_MN.shape[1] % MULTIPLE:
        return max(config.parts, sums // PIECE)
    least = 2 if described and y_MN.dtype == torch.float32 else 1
    if rich and sums >= 128:
        return 4
    if rich and sums >= 64 and not described:  # by descriptor each piece would wait for the one before
        return max(config.parts, 2)
    return max(config.parts, least)


def writer(y_MN: torch.Tensor, by_descriptor: bool, rows: int, columns: int) -> TensorDescriptor | torch.Tensor:
    """What a kernel is given to write pieces of rows x columns of y."""
    return descriptor(y_MN, (rows, columns)) if by_descriptor else y_MN


def told(slot) -> tuple:
    """What a launch is told of a slot, or of none: (live, counts), (index, their strides), (COUNT, RECORD)."""
    if slot is None:
        return (None, None), (0, 0, 0), (False, False)
    live, counts = slot.live_2S, slot.counts_CS
    return (live, counts), (slot.place, live.stride(0), counts.stride(0)), (slot.count, slot.record)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Triton's name for an output's dtype."""
    return _DTYPES[dtype]


def persistent_grid(m: int, n: int, config, where: torch.device, programs: int = 1, shares: int = 1) -> tuple[int]:
    """`programs` programs a multiprocessor, or one per tile and share of K where there are fewer of these.

    Without a card one a multiprocessor, so that programs have several tiles of a small result as well.
    """
    tiles = math.ceil(m / config.block_m) * math.ceil(n / config.block_n)
    return (min(tiles * shares, processors(where) * (programs if where.type == "cuda" else 1)),)


@functools.cache
def processors(where: torch.device) -> int:
    """Multiprocessors of a card; a few where there is none."""
    if where.type != "cuda":
        return PRETEND_PROCESSORS
    return torch.cuda.get_device_properties(where).multi_processor_count


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1, on any machine)."""
    return bool(triton.knobs.runtime.interpret)
