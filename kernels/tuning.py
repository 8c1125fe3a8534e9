"""The tuning table of the matmuls: committed configurations, read by `pick`, rewritten by `python -m benchmarks.tune`.

    tuning.json   {operation: {architecture: {shape class: configuration}}}

The shape classes follow from how many tiles there are to share among the multiprocessors of a card:

    large      at least 96 tiles of 128x256: the widest tile, the least traffic from L2
    medium     at least 96 tiles of 128x128
    small      fewer: narrow tiles, so that most multiprocessors have one
    unaligned  operands that no tensor descriptor can describe, any size

A card gets the rows of the newest architecture that is not newer than itself, and of these a configuration that fits
into its shared memory: of the shape's class, else of a smaller one, else of an older architecture.  On Hopper a large
result is taken for a medium one where its last round of wide tiles would leave most multiprocessors idle (`_traffic`).

A configuration carries `ratio`: torch's time over this kernel's, measured on the card that `source` names; null where
nobody has measured it.  Whoever chooses between this kernel and torch's takes ours from 1.0 on, and never on a null.
"""

import functools
import json
import math
import pathlib
from typing import Any, NamedTuple

import torch

TABLE = pathlib.Path(__file__).with_name("tuning.json")
WIDE_TILE, TILE, NARROW_TILE = (128, 256), (128, 128), (64, 128)
PROCESSORS = 132  # of an H100 or H200
ENOUGH_TILES = 96  # of these: fewer would idle more of them than narrow tiles cost
UNALIGNED = "unaligned"
CLASSES = ("large", "medium", "small", UNALIGNED)
ARCHITECTURES = (90, 89, 80)
# sm_120 and sm_121 are newer than Hopper, and multiply as Ada does: mma.sync, 101,376 bytes of shared memory a program.
AS_ADA = 12
# Bytes of shared memory that a program may have, by capability.  Source: CUDA C++ programming guide, technical
# specifications per compute capability.  A card that is not listed is taken for one of those with the least.
SHARED_MEMORY = {
    **dict.fromkeys([(8, 6), (8, 9), (12, 0), (12, 1)], 101_376),
    **dict.fromkeys([(8, 0), (8, 7)], 166_912),
    **dict.fromkeys([(9, 0), (10, 0), (10, 3), (11, 0)], 232_448),
}
BARRIERS = 1024  # bytes beside the tiles: barriers, scales of one step, alignment
RESERVED = 1024  # bytes that the system takes of every program; a multiprocessor has so many more than one may have
REGISTERS, MOST_REGISTERS = 65_536, 32 * 256  # of a multiprocessor; the most that a warp takes, in steps of 256
SCALE = 4  # bytes: Gluon's matmul in blocks keeps the scales of a tile's rows and columns beside each stage


class Config(NamedTuple):
    """Tile sizes, rows of tiles visited together, warps and pipeline stages of one kernel.

    parts: into how many columns of sub-tiles the epilogue cuts a tile.  descriptors: read and written by TMA.
    kernel: "triton" or "gluon".
    flatten: the loops over tiles and over K are one, so that the next tile's first loads are issued before a tile's
    epilogue instead of after it.  A pass gets longer, which costs more than that where instructions bound it.
    split_k: into how many parts K may be cut, each summed by a program of its own (split_k.py).
    A row of a file that lacks fields has their defaults.
    ratio: torch's time over this kernel's, or None.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    warps: int = 8
    stages: int = 4
    parts: int = 1
    descriptors: bool = True
    kernel: str = "triton"
    flatten: bool = False
    split_k: int = 1
    ratio: float | None = None

    def __str__(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        how = ("tma" if self.descriptors else "ptr") if self.kernel == "triton" else self.kernel
        more = (" flat" if self.flatten else "") + (f" k/{self.split_k}" if self.split_k > 1 else "")
        return f"{tile} g{self.group_m} w{self.warps} s{self.stages} p{self.parts} {how}{more}"


def shape_class(m: int, n: int, aligned: bool = True) -> str:
    """The class of an M x N result.

    >>> shape_class(8192, 8192), shape_class(1024, 2048), shape_class(3, 4096), shape_class(8192, 50257, aligned=False)
    ('large', 'medium', 'small', 'unaligned')
    """
    if not aligned:
        return UNALIGNED
    for name, (tile_m, tile_n) in (("large", WIDE_TILE), ("medium", TILE)):
        if math.ceil(m / tile_m) * math.ceil(n / tile_n) >= ENOUGH_TILES:
            return name
    return "small"


def shared_memory(operation: str, config: Config) -> int:
    """Bytes of shared memory that a program takes at most, whatever its epilogue (tests: never less than compiled).

    With descriptors, all stages of both operands and a piece of the result, of 16 bits or, with `launch.stages` and
    `launch.parts`, FP32.
    Without, the operands' memory is used again for the result.

    >>> shared_memory("matmul_fp8", Config(128, 256, 128, stages=4, parts=2))
    230400
    """
    width = 2 if operation == "matmul_fp16" else 1
    stage = (config.block_m + config.block_n) * (config.block_k * width + (SCALE if config.kernel == "gluon" else 0))
    elements = config.block_m * config.block_n // config.parts
    if not config.descriptors:
        return max(config.stages * stage, 4 * elements) + BARRIERS
    fewer = config.stages - 1 if config.block_n > 128 else config.stages
    halves = config.block_m * config.block_n // max(config.parts, 2)  # `launch.parts` of an FP32 result
    return max(config.stages * stage + 2 * elements, fewer * stage + 4 * halves) + BARRIERS


@functools.lru_cache(maxsize=4096)
def programs(operation: str, config: Config, where: torch.device) -> int:
    """How many programs of a configuration a multiprocessor surely holds, whatever their epilogue: at least 1.

    By shared memory, and by registers as if each thread had all that it can have (tests: never more than compiled).

    >>> small, large = Config(64, 128, 128, warps=4), Config(128, 256, 128, parts=2)
    >>> [programs("matmul_fp8", config, torch.device("cpu")) for config in (small, large)]
    [2, 1]
    """
    limit = SHARED_MEMORY.get(capability(where), min(SHARED_MEMORY.values()))
    by_shared_memory = (limit + RESERVED) // (shared_memory(operation, config) + RESERVED)
    return max(1, min(by_shared_memory, REGISTERS // (MOST_REGISTERS * config.warps)))


@functools.lru_cache(maxsize=4096)
def pick(operation: str, capability: tuple[int, int], m: int, n: int, aligned: bool = True) -> Config:
    """The configuration for an M x N result on a card: the same answer every time.

    A card of capability 12.x gets sm_89's.
    operation: a key of the table.  capability: (major, minor).  aligned: whether descriptors can be used.
    Raises LookupError for an operation or a card older than any in the table, or if no configuration fits into its
    shared memory.

    >>> pick("matmul_fp8", (9, 0), 8192, 8192).block_n
    256
    """
    architecture = 10 * capability[0] + capability[1]
    newest = 89 if capability[0] == AS_ADA else architecture
    rows = table()[operation]
    known = [arch for arch in ARCHITECTURES if f"sm_{arch}" in rows and arch <= newest]
    if not known:
        raise LookupError(f"{operation} has no configuration for sm_{architecture}")
    wanted, limit = shape_class(m, n, aligned), SHARED_MEMORY.get(capability, min(SHARED_MEMORY.values()))
    if wanted == "large" and known[0] == 90:
        wanted = min(("large", "medium"), key=lambda name: _traffic(rows["sm_90"][name], m, n))
    classes = [wanted] if wanted == UNALIGNED else CLASSES[CLASSES.index(wanted) : -1]
    candidates = [rows[f"sm_{arch}"][name] for arch in known for name in classes]
    if architecture != 90:  # both are for Hopper: Triton fails on a loop made one that counts, where it has tcgen05
        candidates = [plain(one)._replace(flatten=False) for one in candidates]
    for config in candidates:
        if shared_memory(operation, config) <= limit:
            return config
    needs, least = min((shared_memory(operation, config), config) for config in candidates)
    raise LookupError(
        f"{operation} needs at least {needs} bytes of shared memory (as {least}), and a program on sm_{architecture} "
        f"may have {limit}: use fe.backend('cublas') or fe.backend('reference'), or add a smaller configuration to "
        f"kernels/{TABLE.name}"
    )


def _traffic(config: Config, m: int, n: int) -> int:
    """Bytes that the busiest multiprocessor of an H100 asks of L2 for each byte along K: rows and columns of its tiles.

    By the timing model (numerics/matmul_time.py) L2 is what tiles of these sizes wait for.
    """
    tiles = math.ceil(m / config.block_m) * math.ceil(n / config.block_n)
    return math.ceil(tiles / PROCESSORS) * (config.block_m + config.block_n)


def plain(config: Config) -> Config:
    """The configuration of the plain Triton kernel that does what Gluon's cannot."""
    return config._replace(kernel="triton") if config.kernel == "gluon" else config


@functools.cache
def table() -> dict[str, dict[str, dict[str, Config]]]:
    """The committed table."""
    return parse(json.loads(TABLE.read_text()))


def parse(content: dict[str, Any]) -> dict[str, dict[str, dict[str, Config]]]:
    """A table from its JSON form."""
    return {
        operation: {arch: {name: Config(**row) for name, row in rows.items()} for arch, rows in cards.items()}
        for operation, cards in content["operations"].items()
    }


@functools.cache
def capability(where: torch.device) -> tuple[int, int]:
    """(major, minor) of a card; Hopper's where there is none, as in the interpreter."""
    return torch.cuda.get_device_capability(where) if where.type == "cuda" else (9, 0)
