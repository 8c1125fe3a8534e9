"""Checks of the Triton matmuls: every format, layout, scaling and epilogue, against float64 and the reference.

Integers come first, whose sums are exact in any order (operands.py): bit for bit.  Then random data, with tolerances
from measurements.  Each check returns what was wrong, or None.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from benchmarks.checks.operands import counts, differs, exact, in_blocks, integers, uneven
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import E4M3, E5M2, FP16, FP32, Format
from fp8engine.ops import device, reference, triton_backend
from fp8engine.ops.reference import Epilogue, Operand

GLUON = ("promoted", "128x128", "1x128")  # what is multiplied by the warp-specialised kernel
GLUON_SHAPES = ((4, 16, 16), (64, 64, 128), (132, 272, 144), (1024, 2048, 4096), (4100, 1040, 2064))
PAIRS = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
SHAPES = (
    (1, 1, 1),
    (3, 5, 7),
    (16, 16, 16),
    (64, 0, 32),
    (64, 32, 0),
    (130, 257, 129),
    (128, 512, 256),
)
MORE_SHAPES = (
    (257, 1024, 640),
    (1, 4096, 4096),
    (8192, 1, 4096),
    (4099, 1031, 2053),
    (1024, 50257, 768),
    (2048, 4096, 14336),
)
# Relative error (Frobenius) over random data at K = 4096 of Hopper's fast accumulation, 1.35e-3, and of promotion every
# 128, 1.3e-4 (mmaemu, a bit-level model of the H100): KERNELS.md, "Oracles".  Twice that is a fault and not a rounding.
FAST_ERROR, PROMOTED_ERROR = 2.7e-3, 2.6e-4
OUTPUT_ERROR = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def checks(where: torch.device, more: bool = False) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """(name, check) of everything that can be checked there.  more: larger shapes as well, for a card."""
    for format in (E4M3, E5M2):
        yield f"every 16-bit value rounded to {format}", lambda format=format: rounding(where, format)
    for shape in SHAPES + (MORE_SHAPES if more else ()):
        name = "x".join(map(str, shape))
        yield f"matmul_fp8 {name}, integers", lambda shape=shape: integers_fp8(where, shape)
        yield f"matmul_fp16 {name}, integers", lambda shape=shape: integers_fp16(where, shape)
        yield f"matmul_block {name}, integers", lambda shape=shape: integers_block(where, shape)
        yield f"epilogue {name}, integers", lambda shape=shape: epilogues(where, shape)
    yield "NaN and Inf reach the output", lambda: not_finite(where)
    yield "matmul_fp8, random data", lambda: accuracy(where, 4096 if more else 256)
    yield "two runs agree bit for bit", lambda: determinism(where)


def card_checks(where: torch.device) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """(name, check) of what only a CUDA device with FP8 Tensor Cores can show."""
    yield "a matmul is one launch", lambda: launches(where)
    if device.capability(where) == (9, 0):
        for way in GLUON:
            yield f"matmul_gluon, {way}: equals its twin bit for bit", lambda way=way: gluon(where, way)


def rounding(where: torch.device, format: Format) -> str | None:
    """Every BF16 and FP16 value through a matmul by one, exact, and the epilogue's cast.

    Finite ones as I @ X; for what is not finite 0 * x is NaN, so each has a row to itself.
    """
    scale = torch.ones((), device=where)
    for dtype, mantissa_bits in ((torch.bfloat16, 7), (torch.float16, 10)):
        values = torch.arange(65536, dtype=torch.int32, device=where).to(torch.uint16).view(dtype)
        x = torch.where(values.isfinite(), values, 0).view(256, 256)
        # The exponent is all ones in the last 2^mantissa_bits codes of either sign.
        ends = [slice(last - (1 << mantissa_bits), last) for last in (32768, 65536)]
        special = torch.zeros(2 << mantissa_bits, 16, dtype=dtype, device=where)
        special[:, 0] = torch.cat([values[codes] for codes in ends])
        one = torch.eye(256, dtype=dtype, device=where)
        end = Epilogue(None, format.dtype, scale=scale)
        q = triton_backend.matmul_fp16(one, x.t(), end).float().view(-1)
        last = triton_backend.matmul_fp16(special, one[:1, :16], end)[:, 0].float()
        for codes, part in zip(ends, last.chunk(2), strict=True):
            q[codes] = part
        wanted = reference.saturating_cast(values.float(), values.float(), format.dtype).float()
        wrong = (q != wanted) & ~(q.isnan() & wanted.isnan())  # as numbers: a sum has no negative zero
        if wrong.any():
            first = values[wrong][0].item()
            return f"{int(wrong.sum())} of 65536 {dtype} values, {first} the first: {q[wrong][0].item()}"
    return None


def integers_fp8(where: torch.device, shape: tuple[int, int, int]) -> str | None:
    """Every pair of formats, scales per tensor and per row, fast and promoted, every output: bit for bit."""
    for (first, second), by_row, fast in itertools.product(PAIRS, (False, True), (False, True)):
        a, b = integers(where, shape[0], shape[2], first, by_row), integers(where, shape[1], shape[2], second, by_row)
        bias_N = torch.randint(-3, 4, (shape[1],), device=where).bfloat16()
        for out, bias in itertools.product((torch.float32, torch.bfloat16), (None, bias_N)):
            found = triton_backend.matmul(a, b, Epilogue(bias, out), fast)
            if wrong := differs(found, exact(a, b, bias).to(out)):
                return f"{first} x {second}, by_row={by_row}, fast={fast}, {out}, bias={bias is not None}: {wrong}"
    return None


def integers_fp16(where: torch.device, shape: tuple[int, int, int]) -> str | None:
    """Both 16-bit dtypes in every layout, bit for bit."""
    m, n, k = shape
    for dtype, a_t, b_t in itertools.product((torch.bfloat16, torch.float16), (False, True), (False, True)):
        a, b = (
            torch.randint(-2, 3, (columns, rows) if transposed else (rows, columns), device=where).to(dtype)
            for rows, columns, transposed in ((m, k, a_t), (n, k, b_t))
        )
        a, b = a.t() if a_t else a, b.t() if b_t else b
        found = triton_backend.matmul_fp16(a, b, Epilogue(None, torch.float32))
        if wrong := differs(found, (a.double() @ b.double().t()).float()):
            return f"{dtype}, a transposed {a_t}, b transposed {b_t}: {wrong}"
    return None


def integers_block(where: torch.device, shape: tuple[int, int, int]) -> str | None:
    """1x128 by 128x128 and by 1x128, power-of-two scales that differ from group to group, bit for bit."""
    m, n, k = shape
    for rows in (1, 128):
        a, b = in_blocks(where, m, k, 1), in_blocks(where, n, k, rows)
        found = triton_backend.matmul(a, b, Epilogue(None, torch.float32))
        if wrong := differs(found, exact(a, b, None)):
            return f"1x128 by {rows}x128: {wrong}"
    return None


def epilogues(where: torch.device, shape: tuple[int, int, int]) -> str | None:
    """An FP8 result under a given scale, amax and counts, as the twin has them: bit for bit."""
    a, b = (integers(where, size, shape[2], E4M3, by_row=False) for size in shape[:2])
    bias_N = torch.randint(-3, 4, (shape[1],), device=where).float()
    for format, kind in itertools.product((E4M3, E5M2, FP16, FP32), ("none", "relu")):
        scale = torch.tensor(0.125, device=where) if format.is_fp8 else None
        ends = [
            Epilogue(bias_N, format.dtype, kind, scale, torch.full((1,), -1.0, device=where), counts(where))
            for _ in range(2)
        ]
        found = triton_backend.matmul(a, b, ends[0])
        wanted = reference.finish(exact(a, b, None), ends[1])
        if wrong := differs(found.float(), wanted.float()):
            return f"{format}, {kind}: {wrong}"
        for name, ours, twins in zip(("amax", "counts"), ends[0][4:6], ends[1][4:6], strict=True):
            if wrong := differs(ours, twins):
                return f"{format}, {kind}, {name}: {wrong}"
    return None


def not_finite(where: torch.device) -> str | None:
    """A NaN in a row of a makes that row of y NaN, in 16 bits and in FP8, and is counted; no other row is touched."""
    a, b = integers(where, 70, 96, E5M2, by_row=False), integers(where, 40, 96, E4M3, by_row=False)
    a.data.view(torch.uint8)[3, 5] = 0x7F  # NaN
    found = []
    for out, scale in ((torch.bfloat16, None), (E5M2.dtype, torch.ones((), device=where))):
        counted = counts(where)
        end = Epilogue(None, out, "none", scale, torch.full((1,), -1.0, device=where), counted)
        found.append((out, counted, triton_backend.matmul(a, b, end).float().isfinite().logical_not()))
    for out, counted, bad in found:
        if not bad[3].all() or int(bad.sum()) != 40 or int(counted[1]) != 40:
            return f"{out}: {int(bad.sum())} not finite, {int(counted[1])} counted; wanted the 40 of row 3"
    return None


def accuracy(where: torch.device, k: int) -> str | None:
    """Random normal data against float64: within twice the measured error of each accumulation."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(256, k, generator=generator).to(where) for _ in range(2))
    a, b = (Operand(*reference.quantize(each, Cast.parse("e4m3"))) for each in (x, w))
    wanted = (a.data.double() * a.scale) @ (b.data.double() * b.scale).t()
    for fast, limit in ((True, FAST_ERROR), (False, PROMOTED_ERROR)):
        for out, rounding_error in OUTPUT_ERROR.items():
            found = triton_backend.matmul(a, b, Epilogue(None, out), fast).double()
            error = ((found - wanted).norm() / wanted.norm()).item()
            if not error <= limit + rounding_error:
                return f"fast={fast}, {out}: relative error {error:.2e}, limit {limit + rounding_error:.2e}"
    return None


def determinism(where: torch.device) -> str | None:
    """The same operands twice."""
    a, b = (Operand(*reference.quantize(torch.randn(300, 500, device=where), Cast.parse("e4m3"))) for _ in "ab")
    once, twice = (triton_backend.matmul(a, b, Epilogue(), fast=True) for _ in range(2))
    return None if torch.equal(once, twice) else "two runs differ"


def launches(where: torch.device) -> str | None:
    """Kernels that one matmul of operands contiguous along K starts."""
    a, b = (integers(where, 256, 512, E4M3, by_row=False) for _ in "ab")
    end = Epilogue()
    triton_backend.matmul(a, b, end)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        triton_backend.matmul(a, b, end)
        torch.cuda.synchronize(where)
    names = [event.name for event in (profile.events() or ()) if event.device_type == torch.autograd.DeviceType.CUDA]
    return None if len(names) == 1 else f"{len(names)}: {names}"


def gluon(where: torch.device, way: str) -> str | None:
    """The warp-specialised kernel against the Triton one, which takes its sums in the same order: bit for bit.

    Integers, and scales that are no powers of two where they are added in FP32.
    """
    from fp8engine.kernels.matmul import matmul_fp8
    from fp8engine.kernels.matmul_gluon import matmul_gluon, unsupported
    from fp8engine.kernels.tuning import Config

    tile = Config(128, 128, 128)
    config = tile._replace(stages=5, parts=2, kernel="gluon")
    for m, n, k in GLUON_SHAPES:
        for by_row in (False, True):
            end = Epilogue(torch.randint(-3, 4, (n,), device=where).bfloat16() if by_row else None)
            if way == "promoted":
                a, b = (integers(where, rows, k, E4M3, by_row) for rows in (m, n))
            else:
                a, b = uneven(in_blocks(where, m, k, 1)), uneven(in_blocks(where, n, k, 1 if way == "1x128" else 128))
            if reason := unsupported(a, b, end, config):
                return f"{m}x{n}x{k}: {reason}"
            found, wanted = matmul_gluon(a, b, end, config), matmul_fp8(a, b, end, promoted=True, config=tile)
            if not torch.equal(found, wanted):
                return f"{m}x{n}x{k}, by_row={by_row}: {int((found != wanted).sum())} of {wanted.numel()} differ"
    return None
