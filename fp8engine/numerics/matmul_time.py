"""Predicted time of a matmul on a Hopper card, from what its machine code and its shape say.  Nothing here is measured.

    y[M, N] = sum_k a[m, k] b[n, k]         tiles of BM x BN, shared among the card's multiprocessors

    pass        BM BN BK / (multiply-adds a clock)                      clocks that the Tensor Cores need
    L2          (BM + BN) BK bytes / L2_OF_PROCESSOR into each multiprocessor; of all that load at once / L2_OF_CARD,
                where an operand with a single tile along M or N is asked for by all of them together and counts nothing
    main loop   ceil(K / BK / parts) max(pass / (ceiling LOOP), L2)
    tile        main loop + exposed clocks: LATENCY until the first tiles arrive, BM BN out_bytes / STORE to write y
    compute     ceil(tiles parts / multiprocessors) tile / clock
    memory      (a + b + y, and a and b again where a wave's share of them does not fit into L2) / (MEMORY bandwidth)
    time        START + FILL + (compute^BLEND + memory^BLEND)^(1 / BLEND); and where parts of K are added by a second
                launch, START and their bytes through L2 again

In a short burst the clock is the card's highest.  A card that multiplies without pause reaches its power limit, and its
clock falls until it draws no more.  Per multiprocessor, with u the share of time in which its Tensor Cores multiply
(not while a kernel starts, nor in a last wave that has no tile for it):

    clock = min(BURST data sheet's, CLOCK (watts / (WATTS activity))^SLOPE)
    activity = u (BF16: 1, FP8: ACTIVITY) + (1 - u) RESTING

`python -m benchmarks.fit` fitted all parameters but START, WATTS, BURST, L2_OF_PROCESSOR and SHORTEST_PART to half of
the matmuls of benchmarks/published.json; `python -m benchmarks.published` prints the error on the others.  What limits
its truth: the values of the operands alone move the clock by up to 15 % (H. He, "Strangely, matrix multiplications on
GPUs run faster when given predictable data", thonking.ai, 2024), and two tables of one kernel differ by up to 50 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fp8engine.numerics.cards import Card, multiply_adds

LOOP = 0.806  # share of its static ceiling that a main loop reaches: barriers, latency of shared memory
LATENCY = 1420.0  # clocks from the first load of a tile until its products begin
STORE = 16.6  # bytes a clock that a multiprocessor writes of y, its epilogue included
MEMORY = 0.906  # share of the data sheet's bandwidth that a kernel reaches
START = 1.8e-6  # seconds from any kernel's start until all multiprocessors work, and for the last to end: an estimate
FILL = 2.3e-6  # seconds more of a matmul: its first tiles' way from memory, its last tile's way to it
BLEND = 3.34  # compute and memory hinder each other where both are near the limit
CLOCK, WATTS = 1.604e9, 4.55  # Hz at these watts a multiprocessor, multiplying BF16 without pause
SLOPE = 0.548  # of the clock's logarithm over the power's: 1/3 where voltage follows the clock, 1 where it does not
ACTIVITY = 1.188  # power of a clock with products in FP8, relative to BF16's
RESTING = 0.2  # the same without products
BURST = 1.08  # highest clock over the data sheet's rates: 1980 of 1830 MHz (SXM), 1755 of 1620 (PCIe)
L2_OF_CARD = 5220.0  # bytes a clock; the rows say no more than 4,700 to 7,500 (benchmarks/README.md)
L2_OF_PROCESSOR = 64.0  # bytes a clock of one load port
TILE_SHARE = 0.503  # of L2 that a wave's operands can keep
SHORTEST_PART = 512  # values of K


@dataclass(frozen=True)
class Kernel:
    """A matmul kernel as the model sees it.

    ceiling: share of the Tensor Cores' rate that its main loop allows (benchmarks/codegen.py, column "ceiling").
    group_m: rows of tiles visited together.  programs: that run on a multiprocessor at once.  bits: of an operand.
    overlapped: the next tile's first loads do not wait for this tile's epilogue.  split: most parts that K is cut into,
    where a multiprocessor is free for each and a part is at least SHORTEST_PART long.
    cluster: programs that share the loads of one operand (TMA multicast).
    """

    block_m: int
    block_n: int
    block_k: int = 128
    ceiling: float = 1.0
    group_m: int = 8
    programs: int = 1
    bits: int = 8
    overlapped: bool = False
    split: int = 1
    cluster: int = 1


# Share of the Tensor Cores' rate that a main loop allows, by kernel and by what it does with its sums.  Ours: tiles of
# 128x128 with a plain epilogue in machine_code/baselines/; others cost up to 11 points (tests/bench/test_predicted.py
# holds these against it, `python -m benchmarks.predicted` says where they are old).  cuBLASLt's loops are not public:
# those that scale or promote are taken for DeepGEMM's, fitted with the parameters.
LIBRARY = 0.849
CEILINGS = {
    "triton": {"fast": 1.0, "promoted": 0.71, "block": 0.64, "block by block": 0.61},
    "gluon": {"promoted": 0.92, "block": 0.91, "block by block": 0.89},
    "pointers": {"fast": 0.22, "promoted": 0.18, "block": 0.13, "block by block": 0.13},
}
# Share of that ceiling times LOOP that our main loops reach on an H200: 2,147 measurements of configurations and shapes
# (`python -m benchmarks.sweep benchmarks/results/nvidia-h200/2026-11-26-sweep.jsonl --reached`), fitted to half of the
# shapes.  On the others the mean error of Gluon's kernels fell from 5 to 45 % to 2 to 11 %.
REACHED = {
    "triton": {"fast": 1.0, "promoted": 0.84, "block": 0.63, "block by block": 0.40},
    "gluon": {"promoted": 0.84, "block": 0.80, "block by block": 0.64},
    "pointers": dict.fromkeys(("fast", "promoted", "block", "block by block"), 1.0),  # not measured
}
TILES = ((128, 256), (256, 128), (192, 128), (128, 192), (128, 160), (128, 128), (64, 128))  # of a library


@dataclass(frozen=True)
class Prediction:
    """Predicted time of one matmul: `seconds`, and what it is made of, in seconds too.

    clock: Hz.  limit: "memory", "Tensor Cores" or "L2".  loop, exposed: clocks of one tile.
    """

    seconds: float
    compute: float
    memory: float
    clock: float
    limit: str
    loop: float
    exposed: float


def predict(
    card: Card, kernel: Kernel, shape: tuple[int, int, int], *, out_bytes: int = 2, sustained: bool = True
) -> Prediction:
    """The Prediction of one matmul of shape M, N, K.  sustained: the card has multiplied for longer than a moment.

    >>> from fp8engine.numerics.cards import H100_SXM
    >>> found = predict(H100_SXM, Kernel(128, 256), (8192, 8192, 8192))
    >>> found.limit, round(found.seconds * 1e6, -1)
    ('Tensor Cores', 830.0)
    """
    m, n, k = shape
    tiles = math.ceil(m / kernel.block_m) * math.ceil(n / kernel.block_n)
    kernel = replace(kernel, split=max(1, min(kernel.split, card.processors // tiles, k // SHORTEST_PART)))
    loop, tensor, by_l2 = _loop(card, kernel, shape)
    exposed = _exposed(kernel, out_bytes)
    if kernel.programs > 1 and tiles * kernel.split > card.processors:
        exposed /= kernel.programs  # another program multiplies meanwhile
    clocks = math.ceil(tiles * kernel.split / card.processors) * (loop + exposed)
    clock = BURST * card.clock
    if sustained:
        lasting = card.processors * (clocks + (START + FILL) * clock)
        clock = sustained_clock(card, kernel.bits, tiles * kernel.split * tensor / lasting)
    compute = clocks / clock
    memory = _bytes(card, kernel, shape, out_bytes) / (MEMORY * card.memory)
    limit = "memory" if memory > compute else "L2" if by_l2 else "Tensor Cores"
    seconds = START + FILL + (compute**BLEND + memory**BLEND) ** (1 / BLEND)
    if kernel.split > 1:  # FP32 sums, written and read
        seconds += START + 8 * m * n * kernel.split / (L2_OF_CARD * clock)
    return Prediction(seconds, compute, memory, clock, limit, loop, exposed)


def library(card: Card, sums: str, bits: int, shape: tuple[int, int, int], *, sustained: bool = True) -> Prediction:
    """The Prediction of cuBLASLt: the best of its tiles, loads shared by two programs.  sums: as in CEILINGS.

    >>> from fp8engine.numerics.cards import H100_SXM
    >>> round(library(H100_SXM, "fast", 16, (8192, 8192, 8192)).seconds * 1e6, -1)
    1480.0
    """
    tiles = TILES if sums == "fast" else TILES[-2:]  # FP32 sums twice in registers leave room for 128x128
    ceiling = 1.0 if sums == "fast" else LIBRARY
    kernels = (Kernel(m, n, 1024 // bits, ceiling, bits=bits, overlapped=True, cluster=2) for m, n in tiles)
    return min((predict(card, one, shape, sustained=sustained) for one in kernels), key=lambda found: found.seconds)


def sustained_clock(card: Card, bits: int, busy: float) -> float:
    """Hz at which a card ends that multiplies without pause.  busy: share of clocks in which Tensor Cores multiply.

    >>> from fp8engine.numerics.cards import H100_PCIE
    >>> round(sustained_clock(H100_PCIE, 16, 0.9) / 1e9, 2)
    1.2
    """
    activity = busy * (ACTIVITY if bits == 8 else 1.0) + (1 - busy) * RESTING
    watts = (card.watts - card.idle_watts) / card.processors
    return min(BURST * card.clock, CLOCK * (watts / (WATTS * activity)) ** SLOPE)


def _loop(card: Card, kernel: Kernel, shape: tuple[int, int, int]) -> tuple[float, float, bool]:
    """(clocks of a tile's main loop, those that its products take, whether L2 is the limit)."""
    m, n, k = shape
    along_m, along_n = math.ceil(m / kernel.block_m), math.ceil(n / kernel.block_n)
    passes = math.ceil(math.ceil(k / kernel.block_k) / kernel.split)
    tensor = kernel.block_m * kernel.block_n * kernel.block_k / multiply_adds(kernel.bits)
    ceiling = min(1.0, kernel.ceiling * kernel.programs) if kernel.programs > 1 else kernel.ceiling
    asked = (0 if along_m == 1 else kernel.block_m, 0 if along_n == 1 else kernel.block_n)
    of_card = (sum(asked) - max(asked) * (1 - 1 / kernel.cluster)) * min(
        along_m * along_n * kernel.split, card.processors
    )
    row = kernel.block_k * kernel.bits / 8
    from_l2 = row * max((kernel.block_m + kernel.block_n) / L2_OF_PROCESSOR, of_card / L2_OF_CARD)
    return passes * max(tensor / (ceiling * LOOP), from_l2), passes * tensor, from_l2 > tensor / (ceiling * LOOP)


def _exposed(kernel: Kernel, out_bytes: int) -> float:
    store = kernel.block_m * kernel.block_n * (4 if kernel.split > 1 else out_bytes) / STORE
    return store if kernel.overlapped else LATENCY + store


def _bytes(card: Card, kernel: Kernel, shape: tuple[int, int, int], out_bytes: int) -> float:
    """Bytes from and to memory."""
    m, n, k = shape
    a, b, y = m * k * kernel.bits / 8, n * k * kernel.bits / 8, m * n * out_bytes
    if a + b <= TILE_SHARE * card.l2:
        return a + b + y
    # Of the larger sizes a wave reads a rectangle of tiles, group_m high; the rows of a stay while it walks along n.
    high = min(kernel.group_m, math.ceil(m / kernel.block_m))
    again = max(math.ceil(m / (high * kernel.block_m)), 1)
    kept = min(1.0, TILE_SHARE * card.l2 / b)
    return a + b * (1 + (again - 1) * (1 - kept)) + y
