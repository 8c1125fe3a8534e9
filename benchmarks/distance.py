"""How far matmuls of language models are from a card's physical limit, predicted: `python -m benchmarks.distance`.

The physical limit of a matmul is the longer of two times: of its operations at the Tensor Cores' rate, at the clock
that the card sustains with that kernel, and of its operands and its result once over the data sheet's memory bandwidth.

    share = physical limit / predicted time            both of numerics/matmul_time.py; nothing is measured

A kernel that keeps the Tensor Cores busier draws more power, and its card's clock falls: of the time that is left, some
cannot be gained.  The last column has the share of the limit at the clock at which all multiply without pause.

MODELS has 12 weights of three models, each with four numbers of tokens: 48 layers, of which forward, dgrad and wgrad
are 144 matmuls.  Ours take the committed configuration that is predicted to be the fastest at each; blocks are 1x128 by
128x128, in wgrad 1x128 by 1x128.

`--write` puts the table, and those of ceilings (machine_code/tables.py), into kernels/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.machine_code import baselines, tables
from fp8engine.kernels.tuning import Config, plain, table
from fp8engine.numerics.cards import CARDS, H100_SXM, Card
from fp8engine.numerics.matmul_time import Prediction, library, predict, sustained_clock
from fp8engine.ops.predicted import kernel_of

ROOT = Path(__file__).parents[1]
START, END = "<!-- benchmarks.distance: {} -->", "<!-- end of benchmarks.distance -->"
PAGE = ROOT / "kernels" / "README.md"
MODELS = {  # outputs, inputs of weights; source: each model's config.json
    "Llama 3 8B": ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),  # q, o; k, v; gate, up; down
    "Llama 3 70B": ((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)),
    "DeepSeek-V3": ((7168, 16384), (24576, 1536), (2048, 7168), (7168, 2048)),  # o; second of q; of an expert
}
TOKENS = (2048, 4096, 8192, 16384)
KERNELS = ("cuBLASLt", "Triton", "Gluon")
SUMS = {  # the operation, its title, and the kernels that there are for it
    "fast": ("matmul_fp8", "one scale per tensor or row, fast", KERNELS[:2]),
    "promoted": ("matmul_fp8_promoted", "the same, promoted every 128 of K", KERNELS),
    "block": ("matmul_block", "blocks of 128", KERNELS),
}
DIRECTIONS = ("forward", "dgrad", "wgrad")


def main() -> None:
    """Print the table as Markdown, and write it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or " ").splitlines()[0])
    parser.add_argument("--card", default="h100-sxm", choices=CARDS)
    parser.add_argument("--write", action="store_true", help="write the page's tables anew, of an H100 SXM")
    asked = parser.parse_args()
    print("\n".join(markdown(CARDS[asked.card])))
    if asked.write:
        PAGE.write_text(written())


def written() -> str:
    """The page with its tables as they have to be."""
    kernels = baselines.load(baselines.path(baselines.DEVELOPED), baselines.DEVELOPED)["kernels"]
    made = {"ceilings": tables.used(kernels), "distance": markdown(H100_SXM)}
    made |= {"products": tables.products(kernels), "memory": tables.memory(kernels)}
    text = PAGE.read_text()
    for name, lines in made.items():
        start = text.index(START.format(name)) + len(START.format(name))
        text = "\n".join([text[:start], *lines, text[text.index(END, start) :]])
    return text


def shapes(direction: str) -> list[tuple[int, int, int]]:
    """M, N, K of the matmuls of one direction.

    >>> len(shapes("wgrad")), shapes("wgrad")[0], shapes("dgrad")[5]
    (48, (4096, 4096, 2048), (4096, 4096, 1024))
    """
    layers = [(tokens, n, k) for weights in MODELS.values() for n, k in weights for tokens in TOKENS]
    turned = {
        "forward": lambda m, n, k: (m, n, k),
        "dgrad": lambda m, n, k: (m, k, n),
        "wgrad": lambda m, n, k: (n, k, m),
    }
    return [turned[direction](*layer) for layer in layers]


def physical_limit(card: Card, shape: tuple[int, int, int], clock: float) -> float:
    """Seconds that no FP8 matmul of that shape, with a result of 16 bits, can be faster than.  clock: Hz.

    >>> from fp8engine.numerics.cards import H100_SXM
    >>> round(1e6 * physical_limit(H100_SXM, (8192, 8192, 8192), H100_SXM.clock))  # 2 * 8192^3 at 1979 TFLOP/s
    556
    >>> round(1e6 * physical_limit(H100_SXM, (128, 7168, 16384), H100_SXM.clock), 1)  # 2.1, 117.4, 1.8 MB at 3.35 TB/s
    36.2
    """
    m, n, k = shape
    return max(2 * m * n * k / (card.rate(8) * clock / card.clock), (m * k + n * k + 2 * m * n) / card.memory)


def predicted(card: Card, kernel: str, sums: str, shape: tuple[int, int, int]) -> Prediction:
    """The Prediction of one matmul.  sums: a key of CEILINGS."""
    if kernel == "cuBLASLt":
        return library(card, sums, 8, shape)
    operation = SUMS["block" if sums.startswith("block") else sums][0]
    found = (predict(card, kernel_of(operation, one, sums), shape) for one in configurations(kernel, operation))
    return min(found, key=lambda one: one.seconds)


def configurations(kernel: str, operation: str) -> list[Config]:
    """The committed ones of aligned sizes on Hopper."""
    rows = [row for name, row in table()[operation]["sm_90"].items() if name != "unaligned"]
    if kernel == "Triton":
        return [plain(row) for row in rows]
    return [row for row in rows if row.kernel == "gluon"]


def shares(card: Card, kernel: str, sums: str, direction: str, full_load: bool = False) -> list[float]:
    """Of the physical limit, of all matmuls of a direction.  full_load: at the clock of Tensor Cores without pause."""
    sums = "block by block" if sums == "block" and direction == "wgrad" else sums
    lowest = sustained_clock(card, 8, 1.0)
    found = [(shape, predicted(card, kernel, sums, shape)) for shape in shapes(direction)]
    return [physical_limit(card, shape, lowest if full_load else one.clock) / one.seconds for shape, one in found]


def markdown(card: Card) -> Iterator[str]:
    """Lines of the table: median and least."""
    yield f"| {card.title}, 48 layers | kernel | {' | '.join(DIRECTIONS)} | all | all, clock of full load |"
    yield f"| --- | --- |{' --- |' * (len(DIRECTIONS) + 2)}"
    for sums, (_, title, kernels) in SUMS.items():
        for kernel in kernels:
            each = [shares(card, kernel, sums, direction) for direction in DIRECTIONS]
            loaded = (shares(card, kernel, sums, direction, True) for direction in DIRECTIONS)
            every = [*each, *(list(itertools.chain(*found)) for found in (each, loaded))]
            cells = [f"{tables.percent(statistics.median(found))} ({tables.percent(min(found))})" for found in every]
            yield f"| {title} | {kernel} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
