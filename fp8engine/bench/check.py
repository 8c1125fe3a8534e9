"""Is everything right on this device?  Checks without pytest, so that a bare checkout on a borrowed card can run them.

Integers are the sharpest oracle: products and sums of small ones are exact in FP8, in FP32 and in Hopper's 13-bit fast
accumulation alike, so a kernel has to agree bit for bit whatever order it sums in; only then come random data, with
tolerances from measurements.  Each check returns what was wrong, or None.

The same checks run in Triton's interpreter, on smaller shapes (tests/interpreted): what a card is given works.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from fp8engine.bench import check_producers
from fp8engine.nn.linear import Linear
from fp8engine.numerics.formats import E4M3, E5M2, FP16, FP32, Format
from fp8engine.ops import reference, triton_backend
from fp8engine.ops import scale_update as update
from fp8engine.ops.backends import backend
from fp8engine.ops.casts import cast_transpose, quantize
from fp8engine.ops.reference import Epilogue, How, Operand, Slot
from fp8engine.ops.reference.operand import COUNTERS

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
CASTS, MORE_CASTS = ((3, 7), (130, 129)), ((1, 1), (0, 32), (4099, 2053), (8192, 4096), (1024, 20000))
# Relative error (Frobenius) over random data at K = 4096 of Hopper's fast accumulation, 1.35e-3, and of promotion every
# 128, 1.3e-4 (mmaemu, a bit-level model of the H100): KERNELS.md, "Oracles".  Twice that is a fault and not a rounding.
FAST_ERROR, PROMOTED_ERROR = 2.7e-3, 2.6e-4
OUTPUT_ERROR = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def checks(where: torch.device, more: bool = False) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """(name, check) of everything that can be checked there.  more: larger shapes as well, for a card."""
    shapes = SHAPES + MORE_SHAPES if more else SHAPES
    for format in (E4M3, E5M2):
        yield f"every 16-bit value rounded to {format}", lambda format=format: rounding(where, format)
    for shape in shapes:
        name = "x".join(map(str, shape))
        yield f"matmul_fp8 {name}, integers", lambda shape=shape: integers_fp8(where, shape)
        yield f"matmul_fp16 {name}, integers", lambda shape=shape: integers_fp16(where, shape)
        yield f"matmul_block {name}, integers", lambda shape=shape: integers_block(where, shape)
        yield f"epilogue {name}, integers", lambda shape=shape: epilogues(where, shape)
    for shape in CASTS + (MORE_CASTS if more else ()):
        yield f"casts {shape[0]}x{shape[1]}, bit for bit", lambda shape=shape: casts(where, shape)
    yield "scale update, bit for bit", lambda: scale_update(where)
    yield from check_producers.checks(where, more)
    yield "NaN and Inf reach the output", lambda: not_finite(where)
    yield "matmul_fp8, random data", lambda: accuracy(where, 4096 if more else 256)
    yield "two runs agree bit for bit", lambda: determinism(where)
    for recipe in ("current", "delayed", "rowwise", "rowwise_gw_hp", "blockwise"):
        yield f"Linear, {recipe}: triton against reference", lambda recipe=recipe: layer(where, recipe, more)


def rounding(where: torch.device, format: Format) -> str | None:
    """Every BF16 and FP16 value through a matmul by one, exact, and the epilogue's cast.

    Finite ones as I @ X; for what is not finite 0 * x is NaN, so each has a row to itself.
    """
    scale = torch.ones((), device=where)
    for dtype in (torch.bfloat16, torch.float16):
        values = torch.arange(65536, dtype=torch.int32, device=where).to(torch.uint16).view(dtype)
        finite = values.isfinite()
        x = torch.where(finite, values, 0).view(256, 256)
        special = torch.zeros(int((~finite).sum()), 16, dtype=dtype, device=where)
        special[:, 0] = values[~finite]
        one = torch.eye(256, dtype=dtype, device=where)
        end = Epilogue(None, format.dtype, scale=scale)
        q = torch.empty(65536, device=where)
        q[finite] = triton_backend.matmul_fp16(one, x.t(), end).float().view(-1)[finite]
        q[~finite] = triton_backend.matmul_fp16(special, one[:1, :16], end)[:, 0].float()
        wanted = reference.saturating_cast(values.float(), values.float(), format.dtype).float()
        wrong = (q != wanted) & ~(q.isnan() & wanted.isnan())  # as numbers: a sum has no negative zero
        if wrong.any():
            first = values[wrong][0].item()
            return f"{int(wrong.sum())} of 65536 {dtype} values, {first} the first: {q[wrong][0].item()}"
    return None


def integers_fp8(where: torch.device, shape: tuple[int, int, int]) -> str | None:
    """Every pair of formats, scales per tensor and per row, fast and promoted, every output: bit for bit."""
    for (first, second), by_row, fast in itertools.product(PAIRS, (False, True), (False, True)):
        a, b = _integers(where, shape[0], shape[2], first, by_row), _integers(where, shape[1], shape[2], second, by_row)
        bias_N = torch.randint(-3, 4, (shape[1],), device=where).bfloat16()
        for out, bias in itertools.product((torch.float32, torch.bfloat16), (None, bias_N)):
            found = triton_backend.matmul(a, b, Epilogue(bias, out), fast)
            if wrong := _differs(found, _exact(a, b, bias).to(out)):
                return f"{first} x {second}, by_row={by_row}, fast={fast}, {out}, bias={bias is not None}: {wrong}"
    return None


def integers_fp16(where: torch.device, shape: tuple[int, int, int]) -> str | None:
    """Both 16-bit dtypes in every layout, bit for bit."""
    m, n, k = shape
    for dtype, a_t, b_t in itertools.product((torch.bfloat16, torch.float16), (False, True), (False, True)):
        a, b = (
            torch.randint(-2, 3, (columns, rows) if turned else (rows, columns), device=where).to(dtype)
            for rows, columns, turned in ((m, k, a_t), (n, k, b_t))
        )
        a, b = a.t() if a_t else a, b.t() if b_t else b
        found = triton_backend.matmul_fp16(a, b, Epilogue(None, torch.float32))
        if wrong := _differs(found, (a.double() @ b.double().t()).float()):
            return f"{dtype}, a transposed {a_t}, b transposed {b_t}: {wrong}"
    return None


def integers_block(where: torch.device, shape: tuple[int, int, int]) -> str | None:
    """1x128 by 128x128 and by 1x128, power-of-two scales that differ from group to group, bit for bit."""
    m, n, k = shape
    for rows in (1, 128):
        a, b = _in_blocks(where, m, k, 1), _in_blocks(where, n, k, rows)
        found = triton_backend.matmul(a, b, Epilogue(None, torch.float32))
        if wrong := _differs(found, _exact(a, b, None)):
            return f"1x128 by {rows}x128: {wrong}"
    return None


def epilogues(where: torch.device, shape: tuple[int, int, int]) -> str | None:
    """An FP8 result under a given scale, amax and counts, as the twin has them: bit for bit."""
    a, b = (_integers(where, size, shape[2], E4M3, by_row=False) for size in shape[:2])
    bias_N = torch.randint(-3, 4, (shape[1],), device=where).float()
    for format, kind in itertools.product((E4M3, E5M2, FP16, FP32), ("none", "relu")):
        scale = torch.tensor(0.125, device=where) if format.is_fp8 else None
        ends = [
            Epilogue(bias_N, format.dtype, kind, scale, torch.full((1,), -1.0, device=where), _counts(where))
            for _ in range(2)
        ]
        found = triton_backend.matmul(a, b, ends[0])
        wanted = reference.finish(_exact(a, b, None), ends[1])
        if wrong := _differs(found.float(), wanted.float()):
            return f"{format}, {kind}: {wrong}"
        ours, twins = ([part.tolist() for part in end[4:] if part is not None] for end in ends)
        if ours != twins:
            return f"{format}, {kind}: amax and counts are {ours}, wanted {twins}"
    return None


def casts(where: torch.device, shape: tuple[int, int]) -> str | None:
    """Codes, scales and tables of every granularity, dtype and way of scaling, with and without what is not finite."""
    groups = ((-1, -1, False), (-1, -1, True), (1, -1, False), (-1, 1, False), (1, 128, False), (128, 128, False))
    for dtype, bad in itertools.product((torch.bfloat16, torch.float32), (False, True)):
        x = (torch.randn(shape, device=where) * torch.exp2(torch.randint(-9, 10, shape, device=where))).to(dtype)
        if bad and x.numel():
            x.view(-1)[:: max(x.numel() // 3, 1)] = float("inf")
        for (rows, cols, delayed), format in itertools.product(groups, (E4M3, E5M2)):
            how = How(format.dtype, rows, cols, format is E4M3, delayed)
            for predicted in (0.0, 2.0**-6, 2.0**6) if delayed else (0.0,):
                found = _cast(where, "triton", x, how, predicted)
                wanted = _cast(where, "reference", x, how, predicted)
                for name, ours, twins in zip(CAST, found, wanted, strict=True):
                    if wrong := _differs(ours, twins):
                        return f"{how} of {dtype}, predicted {predicted}, not finite {bad}, {name}: {wrong}"
    return None


CAST = ("codes", "scales", "codes of the transpose", "scale of the transpose", "live", "counts")


def _cast(where: torch.device, name: str, x: torch.Tensor, how: How, predicted: float) -> list[torch.Tensor]:
    live = torch.tensor([[0.0, -1.0], [0.0, predicted]], device=where)
    slot = Slot(live, torch.zeros(len(COUNTERS), 2, dtype=torch.int64, device=where), 1)
    with backend(name), torch.no_grad():
        first, turned = cast_transpose(x, how, slot)
        alone = quantize(x, how, slot)
    data = torch.cat([each.data.contiguous().view(torch.uint8) for each in (first, alone)])
    # On a CPU the reference looks for flushed elements on some calls only: rows "sampled" and "underflowed".
    counts = slot.counts_CS if where.type == "cuda" else slot.counts_CS[[0, 1, 3, 5, 6]]
    scales = torch.cat([first.scale.reshape(-1), alone.scale.reshape(-1)])
    return [_one_nan(data, how), scales, _one_nan(turned.data.view(torch.uint8), how), turned.scale, live, counts]


def _one_nan(codes: torch.Tensor, how: How) -> torch.Tensor:
    """NaN has several codes; here one."""
    return torch.where(codes.view(how.dtype).float().isnan(), 0x7F, codes)


def scale_update(where: torch.device) -> str | None:
    """Windows, live values and factors of 3,000 slots, some of which did not run, against the twin on the host."""
    history = torch.rand(16, 3000).mul_(torch.randint(0, 2, (16, 3000)))
    live = torch.stack([torch.where(torch.rand(3000) < 0.3, -1.0, torch.rand(3000) * 500), torch.rand(3000)])
    rules = torch.stack(
        [torch.tensor([448.0, 57344.0, 0.0]), torch.tensor([1.0, 5.0, 16.0]), torch.tensor([0.0, 1.0, 1.0])]
    )
    rules = rules.repeat(1, 1000)
    ours = [table.clone().to(where) for table in (history, live, rules)]
    with backend("triton"):
        update.scale_update(ours[0], ours[1], ours[2])
    reference.scale_update(history, live, rules)
    for name, found, wanted in zip(("history", "live"), ours, (history, live), strict=False):
        if wrong := _differs(found.cpu(), wanted):
            return f"{name}: {wrong}"
    return None


def not_finite(where: torch.device) -> str | None:
    """A NaN in a row of a makes that row of y NaN, in 16 bits and in FP8, and is counted; no other row is touched."""
    a, b = _integers(where, 70, 96, E5M2, by_row=False), _integers(where, 40, 96, E4M3, by_row=False)
    a.data.view(torch.uint8)[3, 5] = 0x7F  # NaN
    for out, scale in ((torch.bfloat16, None), (E5M2.dtype, torch.ones((), device=where))):
        counts = _counts(where)
        end = Epilogue(None, out, "none", scale, torch.full((1,), -1.0, device=where), counts)
        bad = triton_backend.matmul(a, b, end).float().isfinite().logical_not()
        if not bad[3].all() or int(bad.sum()) != 40 or int(counts[1]) != 40:
            return f"{out}: {int(bad.sum())} not finite, {int(counts[1])} counted; wanted the 40 of row 3"
    return None


def accuracy(where: torch.device, k: int) -> str | None:
    """Random normal data against float64: within twice the measured error of each accumulation."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(256, k, generator=generator).to(where) for _ in range(2))
    a, b = (Operand(*reference.quantize(each, How(E4M3.dtype, -1, -1))) for each in (x, w))
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
    a, b = (Operand(*reference.quantize(torch.randn(300, 500, device=where), How(E4M3.dtype, -1, -1))) for _ in "ab")
    once, twice = (triton_backend.matmul(a, b, Epilogue(), fast=True) for _ in range(2))
    return None if torch.equal(once, twice) else "two runs differ"


def layer(where: torch.device, recipe: str, more: bool) -> str | None:
    """A Linear's output and gradients on our kernels, against the same layer emulated.

    Both multiply the same FP8 values; they differ by accumulation (FAST_ERROR) and by roundings to BF16, one in ours
    and two in the emulation.
    """
    m, n, k = (512, 1024, 768) if more else (48, 80, 64)
    results = []
    for name in ("triton", "reference"):
        torch.manual_seed(0)
        made = Linear(k, n, recipe=recipe, device=where, dtype=torch.bfloat16)
        x = torch.randn(m, k, device=where, dtype=torch.bfloat16).requires_grad_()
        with backend(name):
            y = made(x)
            y.backward(torch.randn(m, n, device=where, dtype=torch.bfloat16))
        bias = made.bias.grad if made.bias is not None else None
        results.append((y.detach(), x.grad, made.weight.grad, bias))
    limit = FAST_ERROR + 3 * OUTPUT_ERROR[torch.bfloat16]
    for name, ours, emulated in zip(("y", "dx", "dw", "db"), *results, strict=True):
        error = ((ours.double() - emulated.double()).norm() / emulated.double().norm()).item()
        if not error <= limit:
            return f"{name}: relative difference {error:.2e}, limit {limit:.2e}"
    return None


def _integers(where: torch.device, rows: int, k: int, format: Format, by_row: bool) -> Operand:
    """Values -1, 0, 1 under scales that are powers of two: sums of up to 2^12 of them fit into 13 bits."""
    codes = torch.randint(-1, 2, (rows, k), device=where).to(torch.float32).to(format.dtype)
    if not by_row:
        return Operand(codes, torch.tensor(0.5, device=where))
    return Operand(codes, torch.exp2(torch.randint(-3, 4, (rows, 1), device=where).float()), 1, -1)


def _in_blocks(where: torch.device, rows: int, k: int, size: int) -> Operand:
    codes = torch.randint(-1, 2, (rows, k), device=where).to(torch.float32).to(E4M3.dtype)
    groups = (-(-rows // size), -(-k // 128))
    return Operand(codes, torch.exp2(torch.randint(-2, 3, groups, device=where).float()), size, 128, True)


def _exact(a: Operand, b: Operand, bias_N: torch.Tensor | None) -> torch.Tensor:
    """The product in float64 (exact), as FP32."""
    y_MN = _real(a) @ _real(b).t()
    return (y_MN if bias_N is None else y_MN + bias_N.double()).float()


def _real(operand: Operand) -> torch.Tensor:
    m, k = operand.data.shape
    scale = operand.scale.double()
    if operand.scaled_along_k:
        scale = scale.repeat_interleave(operand.rows, 0)[:m].repeat_interleave(operand.cols, 1)[:, :k]
    return operand.data.double() * scale


def _differs(found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.dtype} {list(found.shape)}, wanted {wanted.dtype} {list(wanted.shape)}"
    wrong = found != wanted
    if not wrong.any():
        return None
    place = [int(index) for index in wrong.nonzero()[0]]
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements, {place} the first: {found[*place]}, wanted {wanted[*place]}"
    )


def _counts(where: torch.device) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64, device=where)
