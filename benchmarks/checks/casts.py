"""Checks of the kernels bound by memory: casts, the update of scales, norms, activations, sums of columns.

Casts and the update of scales agree with the reference bit for bit.  Norms and activations sum in another order and
take other approximations of exp, erf and tanh, each within a few ulps of FP32 (2^-23): so their FP32 results may differ
by 2^-18 of the whole, and one in 2^8 or fewer roundings to 16 bits or FP8 falls on the other side.  A flip moves a code
by 2^-2 (E5M2), 2^-3 (E4M3) or 2^-7 (BF16) of itself at most; flips of one element in 2^8 make a sixteenth of that of
the whole.  Rounding twice, through BF16 to E4M3, would flip one in 16.  Each check returns what was wrong, or None.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from benchmarks.checks.operands import differs
from fp8engine.numerics.cast import Cast
from fp8engine.ops import norm_act, reference
from fp8engine.ops import scale_update as update
from fp8engine.ops.backends import backend
from fp8engine.ops.casts import cast_transpose, quantize
from fp8engine.ops.reference import Norm, Operand, Slot, Store
from fp8engine.ops.reference.act_quantize import ActGradients
from fp8engine.ops.reference.activations import ACTIVATIONS
from fp8engine.ops.reference.operand import COUNTERS

CASTS, MORE_CASTS = ((3, 7), (130, 129)), ((1, 1), (0, 32), (4099, 2053), (8192, 4096), (1024, 20000))
# Not 1x1: the gradient of a norm of one element is what is left of two equal numbers.
SHAPES, MORE_SHAPES = ((3, 7), (5, 256)), ((1, 3), (4099, 2053), (8192, 4096), (64, 16384))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STORES = {
    "16 bits": (None, False),
    "per tensor, transposed": (Cast.parse("e4m3"), True),
    "predicted": (Cast.parse("e5m2 delayed"), False),
    "per row": (Cast.parse("e4m3 1x-1 p2"), False),
    "1x128": (Cast.parse("e4m3 1x128 p2"), False),
}
APART = {E5M2: 2.0**-6, E4M3: 2.0**-7, torch.bfloat16: 2.0**-11, torch.float32: 2.0**-18}


def checks(where: torch.device, more: bool = False) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """(name, check) of everything that can be checked there.  more: larger shapes as well, for a card."""
    for shape in CASTS + (MORE_CASTS if more else ()):
        yield f"casts {shape[0]}x{shape[1]}, bit for bit", lambda shape=shape: casts(where, shape)
    yield "scale update, bit for bit", lambda: scale_update(where)
    for shape in SHAPES + (MORE_SHAPES if more else ()):
        name = f"{shape[0]}x{shape[1]}"
        yield f"norms {name}, forward and backward", lambda shape=shape: norms(where, shape)
        yield f"activations {name}, forward and backward", lambda shape=shape: activations(where, shape)
        yield f"sums of columns {name}", lambda shape=shape: column_sums(where, shape)


def casts(where: torch.device, shape: tuple[int, int]) -> str | None:
    """Codes, scales and tables of every granularity, dtype and way of scaling, with and without what is not finite."""
    groups = ("", " delayed", " 1x-1", " -1x1", " 1x128", " 128x128")
    for dtype, bad in itertools.product((torch.bfloat16, torch.float32), (False, True)):
        x = (torch.randn(shape, device=where) * torch.exp2(torch.randint(-9, 10, shape, device=where))).to(dtype)
        if bad and x.numel():
            x.view(-1)[:: max(x.numel() // 3, 1)] = float("inf")
        for group, format in itertools.product(groups, ("e4m3", "e5m2")):
            how = Cast.parse(f"{format}{group}" + " p2" * (format == "e4m3"))
            for predicted in (0.0, 2.0**-6, 2.0**6) if how.delayed else (0.0,):
                if wrong := compare_casts(where, x, how, predicted):
                    return f"{how} of {dtype}, predicted {predicted}, not finite {bad}, {wrong}"
    for how in (Cast.parse("e4m3"), Cast.parse("e5m2")):
        if wrong := compare_casts(where, near_ties(torch.randn(shape, device=where), how), how):
            return f"{how} of values whose products with s are near ties, {wrong}"
    return None


def near_ties(x: torch.Tensor, how: Cast) -> torch.Tensor:
    """x [M, K] in FP32 moved so that x * s, rounded to FP32, is half-way between two codes, or next to that.

    There the exact product, which an fma would round, and the rounded one differ in the code that is nearest.
    """
    if not x.numel():
        return x
    s = how.format.max / x.abs().max()
    codes = (x * s).to(how.dtype).view(torch.uint8)
    middle = (codes.view(how.dtype).float() + (codes + 1).view(how.dtype).float()) / 2
    return torch.where(middle.abs() < how.format.max, middle / s, x)  # NaN is not less: the largest stays


def compare_casts(where: torch.device, x: torch.Tensor, how: Cast, predicted: float = 0.0) -> str | None:
    """One cast, alone and with its transpose.  predicted: the scale that delayed scaling knows, 0 for none."""
    both = (cast_results(where, name, x, how, predicted) for name in ("triton", "reference"))
    for name, ours, twins in zip(CAST, *both, strict=True):
        if wrong := differs(ours, twins):
            return f"{name}: {wrong}"
    return None


CAST = ("codes", "scales", "codes of the transpose", "scale of the transpose", "live", "counts")


def cast_results(where: torch.device, name: str, x: torch.Tensor, how: Cast, predicted: float) -> list[torch.Tensor]:
    """What a backend makes of x, in the order of CAST.  predicted: the scale's prediction, where `how` is delayed.

    By groups flushed elements are counted in the first call and not in the second and third: two ways through a kernel.
    """
    live = torch.tensor([[0.0, -1.0], [0.0, predicted]], device=where)
    slot = Slot(live, torch.zeros(len(COUNTERS), 2, dtype=torch.int64, device=where), 1)
    with backend(name), torch.no_grad():
        first, transposed = cast_transpose(x, how, slot)
        standalone = quantize(x, how, slot)
        again, transposed_again = (None, None) if how.per_tensor else cast_transpose(x, how, slot)
    plain = [each for each in (first, standalone, again) if each is not None]
    turned = [each for each in (transposed, transposed_again) if each is not None]
    data = torch.cat([each.data.contiguous().view(torch.uint8) for each in plain])
    # On a CPU the reference counts flushed elements on some calls only, of tensors too: "sampled" and "underflowed".
    every = where.type == "cuda" or not how.per_tensor
    counts = slot.counts_CS if every else slot.counts_CS[[0, 1, 3, 5, 6]]
    return [
        _one_nan(data, how),
        torch.cat([each.scale.reshape(-1) for each in plain]),
        _one_nan(torch.cat([each.data.view(torch.uint8) for each in turned]), how),
        torch.cat([each.scale.reshape(-1) for each in turned]),
        live,
        counts,
    ]


def _one_nan(codes: torch.Tensor, how: Cast) -> torch.Tensor:
    """The codes with every NaN, which has several codes, as one of them."""
    return torch.where(codes.view(how.dtype).float().isnan(), 0x7F, codes)


def scale_update(where: torch.device) -> str | None:
    """Windows, live values and factors of 3,000 slots, some of which did not run, against the twin."""
    history = torch.rand(16, 3000).mul_(torch.randint(0, 2, (16, 3000)))
    live = torch.stack([torch.where(torch.rand(3000) < 0.3, -1.0, torch.rand(3000) * 500), torch.rand(3000)])
    live[0, 1::4].abs_()  # each weight ran: the amax of none is entered again
    rules = torch.stack(
        [torch.tensor([448.0, 57344.0, 0.0]), torch.tensor([1.0, 5.0, 16.0]), torch.tensor([0.0, 1.0, 1.0])]
    )
    rules = rules.repeat(1, 1000)
    ours, twins = ([table.clone().to(where) for table in (history, live, rules)] for _ in "ab")
    counts, of_ranks, entered = (torch.zeros(size, dtype=torch.int64, device=where) for size in ((1, 3000), 1, 1))
    with backend("triton"):
        gradients = update.GradientCasts(counts, entered, waits=False)
        update.scale_update(ours[0], ours[1], ours[2], "", of_ranks, gradients)
    reference.scale_update(*twins)
    for name, found, wanted in zip(("history", "live"), ours, twins, strict=False):
        if wrong := differs(found, wanted):
            return f"{name}: {wrong}"
    return None


def norms(where: torch.device, shape: tuple[int, int]) -> str | None:
    """Both kinds with every kind of codes, what backward needs of them, and backward."""
    for norm, dtype in itertools.product(
        (Norm("rms"), Norm("layer", zero_centered=True)), (torch.bfloat16, torch.float32)
    ):
        x, dy = (torch.randn(shape, device=where).to(dtype) for _ in range(2))
        weight = torch.randn(shape[1], device=where).to(dtype)
        bias = torch.randn(shape[1], device=where).to(dtype) if norm.kind == "layer" else None
        rows = reference.norm_quantize(x, weight, bias, norm)[3]
        forward = lambda of, to: of.norm_quantize(x, weight, bias, norm, to)  # noqa: B023, E731 - called at once
        for name, store in STORES.items():
            if wrong := compared(where, forward, *store):
                return f"{norm}, {dtype}, {name}, forward: {wrong}"
        backward = lambda of, to: of.norm_quantize_backward(dy, x, weight, rows, norm)  # noqa: B023, E731
        if wrong := compared(where, backward, None, False):
            return f"{norm}, {dtype}, backward: {wrong}"
    return None


def activations(where: torch.device, shape: tuple[int, int]) -> str | None:
    """Every kind, plain and gated, with every kind of codes; of a gate and an up that are two matrices too."""
    m, n = shape
    for (kind, of_kind), dtype in itertools.product(ACTIVATIONS.items(), (torch.bfloat16, torch.float32)):
        x = torch.randn(m, 2 * n if of_kind.gated else n, device=where).to(dtype)
        dy = torch.randn(m, n, device=where).to(dtype)
        forward = lambda of, to: of.act_quantize(x, kind, to)  # noqa: B023, E731 - called at once
        backward = lambda of, to: of.act_quantize_backward(dy, x, kind, to)  # noqa: B023, E731
        for run, (name, store) in itertools.product((forward, backward), STORES.items()):
            if wrong := compared(where, run, *store):
                return f"{kind}, {dtype}, {name}, {'forward' if run is forward else 'backward'}: {wrong}"
        if of_kind.gated:
            halves = x[:, :n], x[:, n:]
            apart = lambda of, to: of.act_quantize_backward(dy, halves[0], kind, to, halves[1])  # noqa: B023, E731
            if wrong := compared(where, apart, None, False):
                return f"{kind}, {dtype}, two halves, backward: {wrong}"
    return None


def column_sums(where: torch.device, shape: tuple[int, int]) -> str | None:
    """Against float64: FP32 sums of M terms, in any order, stay within M 2^-24 of the sum of magnitudes."""
    for (rows, cols), dtype in itertools.product(((-1, -1), (1, -1), (1, 128)), (torch.bfloat16, torch.float32)):
        x = torch.randn(shape, device=where).to(dtype)
        with backend("triton"), torch.no_grad():
            *_, sums_K = cast_transpose(x, Cast.parse(f"e4m3 {rows}x{cols}"), sums=True)
        error, bound = (sums_K.double() - x.double().sum(0)).abs(), shape[0] * 2.0**-24 * x.double().abs().sum(0)
        if (error > bound).any():
            return f"{rows}x{cols}, {dtype}: {(error / bound).max():.1f} times the bound"
    return None


def compared(where: torch.device, run, how: Cast | None, transposed: bool) -> str | None:
    """How the results of run(functions, store) on our kernels differ from the reference's, or None.

    Its codes, scales and tables differ from those of a cast of its own result in no bit.
    """
    if how is not None and (wrong := _not_cached(where, run, how, transposed)):
        return wrong
    found, wanted = (_results(where, run, how, transposed, name) for name in ("triton", "reference"))
    for place, ((ours, limit), (twins, _)) in enumerate(zip(found, wanted, strict=True)):
        if wrong := _apart(ours, twins, limit):
            return f"result {place}: {wrong}"
    return None


def _not_cached(where: torch.device, run, how: Cast, transposed: bool) -> str | None:
    """How the codes that our kernels make beside a result differ from a cast's of that result, or None."""
    made, cast = _slot(where, how), _slot(where, how)
    with backend("triton"), torch.no_grad():
        y, q, q_t, *_ = run(norm_act, Store(how, transposed, made))
        wanted = cast_transpose(y, how, cast) if transposed else (quantize(y, how, cast),)
    for name, ours, other in zip(("codes", "codes of the transpose"), (q, q_t), wanted, strict=False):
        if wrong := differs(ours.data.view(torch.uint8), other.data.view(torch.uint8)):
            return f"{name} beside the result and a cast's of it: {wrong}"
        if wrong := differs(ours.scale, other.scale):
            return f"scale of {name} beside the result and a cast's of it: {wrong}"
    for name, ours, other in zip(("live", "counts"), made[:2], cast[:2], strict=True):
        if wrong := differs(ours, other):
            return f"{name}, of codes beside the result and of a cast of it: {wrong}"
    return None


def _slot(where: torch.device, how: Cast) -> Slot:
    live = torch.tensor([[0.0, -1.0], [0.0, 2.0**6 if how.delayed else 0.0]], device=where)
    return Slot(live, torch.zeros(len(COUNTERS), 2, dtype=torch.int64, device=where), 1)


def _results(where, run, how: Cast | None, transposed: bool, name: str) -> list[tuple[torch.Tensor, float]]:
    """A backend's results, each with how far apart two of them may be."""
    slot = None if how is None else _slot(where, how)
    with backend(name), torch.no_grad():
        parts = run(norm_act, Store(how, transposed, slot))
    results = []
    for part in parts:
        if isinstance(part, Operand):
            results.append((part.data.float() * _spread(part), APART[part.data.dtype]))
        elif isinstance(part, torch.Tensor):
            # The sums of dx are of what was rounded, flips and all.
            of_sums = isinstance(parts, ActGradients) and part is parts.dbias_K
            results.append((part, APART[parts[0].dtype if of_sums else part.dtype]))
    return results + ([] if slot is None else [(slot.live_2S[:, 1], APART[torch.float32])])


def _spread(operand: Operand) -> torch.Tensor:
    """The scale of every element."""
    if operand.scale.dim() == 0:
        return operand.scale
    m, k = operand.data.shape
    rows, cols = (m if operand.rows == -1 else operand.rows), (k if operand.cols == -1 else operand.cols)
    return operand.scale.repeat_interleave(rows, 0)[:m].repeat_interleave(cols, 1)[:, :k]


def _apart(found: torch.Tensor, wanted: torch.Tensor, limit: float) -> str | None:
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"{found.dtype} {list(found.shape)}, want {wanted.dtype} {list(wanted.shape)}"
    if not wanted.numel():
        return None
    difference = float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))
    return None if difference <= limit else f"{difference:.2e} of the whole apart"
