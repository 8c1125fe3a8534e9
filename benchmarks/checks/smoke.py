"""Twenty short checks: each kernel of a dense layer, with as few compiled kernels as show that it works; half a minute.

Each is a thin slice of a check beside it in this folder, on one shape.  Integers first, which have to agree bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.checks import layers
from benchmarks.checks.casts import STORES, compare_casts, compared, scale_update
from benchmarks.checks.matmuls import determinism
from benchmarks.checks.operands import counts, differs, exact, in_blocks, integers
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import E4M3
from fp8engine.ops import reference, triton_backend
from fp8engine.ops.backends import backend
from fp8engine.ops.casts import cast_transpose
from fp8engine.ops.reference import Epilogue, Norm

M, N, K = 384, 512, 768  # several tiles in each direction and several steps of the pipeline
HOWS = {
    "per tensor": Cast.parse("e4m3"),
    "per tensor, predicted": Cast.parse("e5m2 delayed"),
    "per row": Cast.parse("e4m3 1x-1 p2"),
    "1x128": Cast.parse("e4m3 1x128 p2"),
    "128x128": Cast.parse("e4m3 128x128 p2"),
}
Check = Callable[[], str | None]


def checks(where: torch.device) -> Iterator[tuple[str, Check]]:
    """(name, check), the most telling first."""
    for by_row, fast in ((False, True), (False, False), (True, True), (True, False)):
        name = f"matmul_fp8, scales per {'row' if by_row else 'tensor'}, {'fast' if fast else 'promoted'}"
        yield name, partial(fp8, where, by_row, fast)
    for rows in (128, 1):
        yield f"matmul_block, 1x128 by {rows}x128", partial(blocks, where, rows)
    yield "matmul_fp16", partial(fp16, where)
    yield "matmul_fp8 to FP8, with bias, ReLU and amax", partial(epilogue, where)
    for name, how in HOWS.items():
        yield f"cast {name}, with its transpose", partial(compare_casts, where, random(where), how)
    yield "sums of columns", partial(column_sums, where)
    yield "update of scales", partial(scale_update, where)
    yield "norm, forward and backward, to FP8", partial(norm, where)
    yield "activation, forward and backward, to FP8", partial(activation, where)
    yield "two runs agree bit for bit", partial(determinism, where)
    for recipe in ("current", "blockwise"):
        yield f"Linear, {recipe}: triton against reference", partial(layers.emulated, where, recipe, True)


def random(where: torch.device) -> torch.Tensor:
    """BF16 values over many octaves."""
    return (torch.randn(M, K, device=where) * torch.exp2(torch.randint(-9, 10, (M, K), device=where))).bfloat16()


def fp8(where: torch.device, by_row: bool, fast: bool) -> str | None:
    """Integers, whose sums are exact in any order."""
    a, b = (integers(where, rows, K, E4M3, by_row) for rows in (M, N))
    found = triton_backend.matmul(a, b, Epilogue(None, torch.bfloat16), fast)
    return differs(found, exact(a, b, None).bfloat16())


def blocks(where: torch.device, rows: int) -> str | None:
    """The same in blocks."""
    a, b = in_blocks(where, M, K, 1), in_blocks(where, N, K, rows)
    return differs(triton_backend.matmul(a, b, Epilogue(None, torch.bfloat16)), exact(a, b, None).bfloat16())


def fp16(where: torch.device) -> str | None:
    """The same of BF16 tensors."""
    a, b = (torch.randint(-2, 3, (rows, K), device=where).bfloat16() for rows in (M, N))
    found = triton_backend.matmul_fp16(a, b, Epilogue(None, torch.bfloat16))
    return differs(found, (a.double() @ b.double().t()).bfloat16())


def epilogue(where: torch.device) -> str | None:
    """An FP8 result under a given scale, its amax and its counts, as the twin has them."""
    a, b = (integers(where, rows, K, E4M3, by_row=False) for rows in (M, N))
    bias_N, scale = torch.randint(-3, 4, (N,), device=where).float(), torch.tensor(0.125, device=where)
    ends = [
        Epilogue(bias_N, E4M3.dtype, "relu", scale, torch.full((1,), -1.0, device=where), counts(where)) for _ in "ab"
    ]
    found = triton_backend.matmul(a, b, ends[0])
    wanted = reference.finish(exact(a, b, None), ends[1])
    return (
        differs(found.float(), wanted.float())
        or differs(ends[0].amax, ends[1].amax)
        or differs(ends[0].counts, ends[1].counts)
    )


def column_sums(where: torch.device) -> str | None:
    """Against float64, within M 2^-24 of the sum of magnitudes."""
    x = random(where)
    with backend("triton"), torch.no_grad():
        *_, sums_K = cast_transpose(x, HOWS["per tensor"], sums=True)
    error, bound = (sums_K.double() - x.double().sum(0)).abs(), M * 2.0**-24 * x.double().abs().sum(0)
    return f"{(error / bound).max():.1f} times the bound" if (error > bound).any() else None


def norm(where: torch.device) -> str | None:
    """RMSNorm, scales per row."""
    x, dy = random(where), torch.randn(M, K, device=where).bfloat16()
    weight, kind = torch.randn(K, device=where).bfloat16(), Norm("rms")
    rows = reference.norm_quantize(x, weight, None, kind)[3]
    return compared(where, lambda of, to: of.norm_quantize(x, weight, None, kind, to), *STORES["per row"]) or compared(
        where, lambda of, to: of.norm_quantize_backward(dy, x, weight, rows, kind), None, False
    )


def activation(where: torch.device) -> str | None:
    """SwiGLU, scales per tensor, with the transpose."""
    x, dy = torch.randn(M, 2 * K, device=where).bfloat16(), torch.randn(M, K, device=where).bfloat16()
    to = STORES["per tensor, transposed"]
    return compared(where, lambda of, to: of.act_quantize(x, "swiglu", to), *to) or compared(
        where, lambda of, to: of.act_quantize_backward(dy, x, "swiglu", to), *to
    )
