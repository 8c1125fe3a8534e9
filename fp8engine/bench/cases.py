"""Shapes and operands of the matmuls, and the error of a result against float64.

    y[M, N] = sum_k a[m, k] b[n, k]      a, b random normal: zeros cost less power, and so run at higher clocks

Shapes are named lists or written out, joined by semicolons: "llm", "square;4096,4096,7168".

The error is taken in two ways, relative to the root mean square, and the larger one counts:

    rows    some rows spread over M, every element
    probe   y v against a (b^T v) for random signs v, in stripes of 32 rows: a tile of zeros anywhere shows as
            sqrt(BLOCK_N / N), 0.13 for one tile of 128 among 7168 columns

The exact product is of the operands after quantisation: the format's own error is no error of a matmul.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from fp8engine.errors import ShapeError, UnknownName
from fp8engine.numerics.cast import Cast
from fp8engine.ops import casts
from fp8engine.ops.reference import Operand, decode
from fp8engine.ops.reference.matmul import folded

ROWS = 64  # checked element by element
STRIPE = 32  # rows of the probe judged together
CHUNK = 1 << 26  # elements taken to float64 at once: half a gigabyte


class Shape(NamedTuple):
    """M tokens, N outputs, K inputs."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Operations of the matmul."""
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


# Tokens of one step (batch times sequence) by a layer's weight.  Source of the sizes: each model's config.json.
LLM = (
    Shape(4096, 4096, 4096),  # Llama 3 8B: q, o
    Shape(16384, 1024, 4096),  # Llama 3 8B: k, v
    Shape(8192, 14336, 4096),  # Llama 3 8B, Mixtral 8x7B: up
    Shape(8192, 28672, 4096),  # Llama 3 8B: gate and up in one
    Shape(8192, 4096, 14336),  # Llama 3 8B, Mixtral 8x7B: down
    Shape(16384, 4096, 14336),  # the same, longer
    Shape(8192, 8192, 8192),  # Llama 3 70B: q, o
    Shape(8192, 1024, 8192),  # Llama 3 70B: k, v
    Shape(4096, 28672, 8192),  # Llama 3 70B: up
    Shape(4096, 8192, 28672),  # Llama 3 70B: down
    Shape(8192, 4096, 7168),  # DeepSeek-V3: gate and up of an expert in one
    Shape(16384, 7168, 4096),  # its input gradient
)
# Fewer tokens: the shape classes "medium" and "small" of kernels/tuning.py, which none of the above is in.
FEW_TOKENS = (
    Shape(512, 4096, 4096),
    Shape(1024, 2048, 8192),
    Shape(256, 4096, 4096),
    Shape(128, 8192, 8192),
    Shape(1024, 1024, 4096),
)
SQUARE = tuple(Shape(n, n, n) for n in (1024, 2048, 4096, 8192))
LISTS = {
    "llm": LLM,
    "tune": LLM + FEW_TOKENS,
    "square": SQUARE,
    "small": (Shape(256, 512, 512), Shape(512, 512, 512), Shape(1024, 1024, 1024)),  # what a CPU does in a moment
}


def parse(text: str) -> list[Shape]:
    """The shapes meant by names and triples.  Raises UnknownName or ShapeError.

    >>> parse("64,128,256;small")[0]
    Shape(m=64, n=128, k=256)
    """
    shapes: dict[Shape, None] = {}
    for word in filter(None, map(str.strip, text.split(";"))):
        if word not in LISTS and "," not in word:
            raise UnknownName("list of shapes", word, [*LISTS, "M,N,K"])
        shapes |= dict.fromkeys(LISTS[word] if word in LISTS else [Shape(*sizes(word, "M,N,K", "three"))])
    if not shapes:
        raise ShapeError(f"no shapes in {text!r}; want M,N,K or one of {', '.join(LISTS)}, joined by semicolons")
    return list(shapes)


def sizes(word: str, names: str, count: str) -> list[int]:
    """The whole numbers of a shape like names; count: how many, in words.  Raises ShapeError."""
    parts = [part.strip() for part in word.split(",")]
    whole = all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts)
    if not whole or len(parts) != len(names.split(",")):
        raise ShapeError(f"shape {word!r} is not {names}, {count} whole numbers from 1 on")
    return [int(part) for part in parts]


# Kind of operands -> how (a, b) are quantised, or the dtype that they are rounded to.
KINDS: dict[str, tuple[Cast, Cast] | torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "tensor": (Cast.parse("e4m3"), Cast.parse("e4m3")),
    "row": (Cast.parse("e4m3 1x-1"), Cast.parse("e4m3 1x-1")),
    "block": (Cast.parse("e4m3 1x128"), Cast.parse("e4m3 128x128")),
    "block by block": (Cast.parse("e4m3 1x128"), Cast.parse("e4m3 1x128")),  # the weight's gradient
}


class Pair(NamedTuple):
    """Both operands of a matmul, contiguous along K.  Unscaled ones carry a scale of 1."""

    a: Operand
    b: Operand


class Operands:
    """Random normal operands of one shape, in each kind made when it is first asked for."""

    def __init__(self, shape: Shape, where: torch.device, seed: int = 0):
        generator = torch.Generator(where).manual_seed(seed)
        self._ab = [torch.randn(rows, shape.k, generator=generator, device=where) for rows in shape[:2]]
        self._made: dict[str, Pair] = {}

    @torch.no_grad()
    def __getitem__(self, kind: str) -> Pair:
        """The operands in one of KINDS."""
        if kind not in self._made:
            how = KINDS[kind]
            if isinstance(how, torch.dtype):
                made = [Operand(x.to(how), torch.ones((), device=x.device)) for x in self._ab]
            else:
                made = [casts.quantize(x, cast) for x, cast in zip(self._ab, how, strict=True)]
            if kind == "block by block":  # scales contiguous along rows, as a transposing cast leaves them for wgrad
                made = [operand._replace(scale=operand.scale.t().contiguous().t()) for operand in made]
            self._made[kind] = Pair(*made)
        return self._made[kind]


def values(operand: Operand, first: int = 0, last: int | None = None) -> torch.Tensor:
    """Real values of rows first to last, in float64; `first` starts a group of the operand's scales.

    >>> values(Operand(torch.ones(2, 2).to(torch.float8_e4m3fn), torch.tensor(3.0)), 1).tolist()
    [[3.0, 3.0]]
    """
    data, scale = operand.data[first:last].contiguous(), operand.scale
    if data.itemsize == 1:
        data = decode(data, torch.float32)
    if operand.rows != -1:
        start = first // operand.rows
        scale = scale[start : start + -(-len(data) // operand.rows)]
    return folded(operand._replace(data=data, scale=scale), torch.float64)


@dataclass(frozen=True)
class Truth:
    """The product in float64, in parts.  rows_R: indices checked; exact_RN: those rows; signs_N, probe_M: y @ signs."""

    rows_R: torch.Tensor
    exact_RN: torch.Tensor
    signs_N: torch.Tensor
    probe_M: torch.Tensor

    @staticmethod
    def of(pair: Pair) -> Truth:
        """Of one pair of operands, computed in pieces that fit into memory."""
        (m, k), n, where = pair.a.data.shape, pair.b.data.shape[0], pair.a.data.device
        rows_R = torch.linspace(0, m - 1, min(m, ROWS), device=where).long()
        signs = torch.randint(0, 2, (n,), generator=torch.Generator(where).manual_seed(1), device=where)
        signs_N = signs.double() * 2 - 1
        a_RK = torch.cat([values(pair.a, row, row + 1) for row in rows_R.tolist()])
        exact, mixed_K = [], torch.zeros(k, dtype=torch.float64, device=where)
        for first, last in _chunks(n, k):
            b_NK = values(pair.b, first, last)
            exact.append(a_RK @ b_NK.t())
            mixed_K += b_NK.t() @ signs_N[first:last]
        probe_M = torch.cat([values(pair.a, first, last) @ mixed_K for first, last in _chunks(m, k)])
        return Truth(rows_R, torch.cat(exact, 1), signs_N, probe_M)

    def error(self, y_MN: torch.Tensor) -> float:
        """Relative error of a result; infinite for a wrong shape or anything that is not finite."""
        m, n = len(self.probe_M), len(self.signs_N)
        if y_MN.shape != (m, n):
            return math.inf
        rows = (y_MN[self.rows_R].double() - self.exact_RN).norm() / self.exact_RN.norm()
        probe_M = torch.cat([y_MN[first:last].double() @ self.signs_N for first, last in _chunks(m, n)])
        squares_M = (probe_M - self.probe_M).square()
        stripes = F.avg_pool1d(squares_M[None], STRIPE, ceil_mode=True)  # a short one counts by its own rows
        expected = self.exact_RN.square().mean() * n  # the probe's own square, but for luck
        found = torch.stack([rows, (stripes.max() / expected).sqrt()])
        return found.max().item() if found.isfinite().all() else math.inf


def _chunks(rows: int, columns: int) -> list[tuple[int, int]]:
    """(first, last) runs of rows of at most CHUNK elements, each starting at a multiple of 128."""
    step = max(CHUNK // columns // 128, 1) * 128
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def sqnr(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """sum wanted^2 over sum (found - wanted)^2, in dB, in FP64.

    >>> round(sqnr(torch.tensor([1.1]), torch.tensor([1.0])))
    20
    """
    exact = wanted.detach().double()
    noise = (found.detach().double() - exact).square().sum()
    return (10 * torch.log10(exact.square().sum() / noise.clamp(min=1e-300))).item()
