"""Launches to compile: every committed configuration of every matmul, and every kernel bound by memory in each form.

A matmul is launched with the epilogues that differ in registers or memory.  A kernel that moves a tensor has to move it
16 bytes a thread; a launch that only reduces what another left behind need not.

Triton compiles another kernel where 16 divides a size or an address.  Most launches are such, as most models' are; the
odd ones take more registers, and are here where they take the most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.machine_code import attention
from fp8engine.kernels.act_quantize import act_quantize, act_quantize_backward
from fp8engine.kernels.cast_transpose import cast_transpose
from fp8engine.kernels.matmul import matmul_fp8, matmul_fp16
from fp8engine.kernels.matmul_grouped import grouped_rows, grouped_sums
from fp8engine.kernels.norm_quantize import norm_quantize, norm_quantize_backward
from fp8engine.kernels.quantize import quantize, quantize_given
from fp8engine.kernels.quantize_experts import expert_sums, quantize_experts, transpose_experts
from fp8engine.kernels.scale_update import scale_update
from fp8engine.kernels.split_k import add_parts
from fp8engine.kernels.tuning import Config, plain, table
from fp8engine.numerics.cast import Cast
from fp8engine.ops.reference import Epilogue, Norm, Operand, RowStatistics, Slot, Store
from fp8engine.ops.reference.grouped import BLOCK, most_blocks

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
SIZE = 4096  # of a matmul
ODD = 50257  # GPT-2's vocabulary, which nothing divides
M, K, SLOTS = 8192, 4096, 64  # of a cast, and of the table that its slot is in
EXPERTS = 8
ACT_KINDS = ("gelu", "swiglu", "clamped_swiglu", "srelu", "qgelu", "sreglu", "qgeglu", "glu", "geglu_tanh")
CASTS = {
    "tensor": Cast.parse("e4m3"),
    "tensor predicted": Cast.parse("e5m2 delayed"),
    "row": Cast.parse("e4m3 1x-1 p2"),
    "1x128": Cast.parse("e4m3 1x128 p2"),
    "128x128": Cast.parse("e4m3 128x128 p2"),
}


@dataclass(frozen=True)
class Case:
    """One launcher under one configuration: `launch` calls it with meta tensors, and may start several kernels.

    config: a matmul's; None for a kernel bound by memory, whose accesses in `wide` (names of kernels) have to be 16
    bytes a thread.
    """

    name: str
    architecture: int
    config: Config | None
    fp8: bool
    launch: Callable[[], Any]
    wide: tuple[str, ...] = ()


def cases() -> Iterator[Case]:
    """The committed table, each configuration once, and Triton's where Gluon's cannot; kernels bound by memory."""
    seen = set()
    for operation, cards in table().items():
        for arch, configs in cards.items():
            every = [*configs.values(), *map(plain, configs.values())]
            for config in every:
                key = (operation, arch, config._replace(ratio=None))
                if key not in seen:
                    seen.add(key)
                    yield from _matmul(operation, int(arch.removeprefix("sm_")), config)
    yield from _grouped()
    for name, architectures, wide, launch in (*_memory(), *_odd(), *_of_experts(), *attention.launches()):
        for arch in architectures:
            yield Case(f"{name} sm_{arch}", arch, None, True, launch, wide)


def _matmul(operation: str, architecture: int, config: Config) -> Iterator[Case]:
    """One configuration at SIZE with every epilogue, and with rows of the result that nothing divides."""
    k = SIZE if config.descriptors or architecture < 90 else SIZE + 1
    aligned = "" if k == SIZE else " odd K"
    fp8 = operation != "matmul_fp16"
    most_registers = ("row", "gelu+amax") if architecture == 90 else ("gelu+amax",) if fp8 else ()
    for n in (SIZE,) if config.kernel == "gluon" else (SIZE, ODD):  # odd rows are Triton's kernel's
        for end, epilogue in _epilogues(fp8, n).items():
            name = f"{operation} {{}} sm_{architecture} {config}{aligned}{'' if n == SIZE else ' odd N'} {end}"
            if n == SIZE or end in most_registers:
                for form, launch in _forms(operation, (SIZE, n, k), end, epilogue, config):
                    yield Case(name.format(form), architecture, config, fp8, launch)
    if config.split_k > 1:
        name = f"{operation} {{}} sm_{architecture} {config}{aligned} split"
        for form, launch in _forms(operation, (config.block_m, config.block_n, k), "split", Epilogue(), config):
            yield Case(name.format(form), architecture, config, fp8, launch)


def _forms(
    operation: str, sizes: tuple[int, int, int], end: str, epilogue: Epilogue, config: Config
) -> Iterator[tuple[str, Callable]]:
    """(name, launch) of the layouts or scales that a matmul of sizes (M, N, K) has machine code of its own for."""
    m, n, k = sizes
    if operation == "matmul_fp16":
        if end != "row":  # scales of rows are FP8's
            yield "along K", partial(matmul_fp16, _matrix(m, k, False), _matrix(n, k, False), epilogue, config)
            if n != ODD:
                yield "across K", partial(matmul_fp16, _matrix(m, k, True), _matrix(n, k, True), epilogue, config)
    elif operation == "matmul_block":
        for rows in (1, 128) if n != ODD else (1,):
            # 1: wgrad, whose operands were quantised down their columns and transposed
            a, b = _operand(m, k, 1, 128, rows == 1), _operand(n, k, rows, 128, rows == 1)
            yield f"1x128 {rows}x128", partial(matmul_fp8, a, b, epilogue, True, config)
    else:
        rows = 1 if end == "row" else -1
        a, b, promoted = _operand(m, k, rows, -1), _operand(n, k, rows, -1), operation == "matmul_fp8_promoted"
        yield "row" if rows == 1 else "tensor", partial(matmul_fp8, a, b, epilogue, promoted, config)


def _epilogues(fp8: bool, n: int = SIZE) -> dict[str, Epilogue]:
    """plain; with a bias (and row scales, for FP8); everything at once; an FP32 result."""
    bias, one = _meta(n, dtype=BF16), _meta(1)
    counts = _meta(2, dtype=torch.int64)
    everything = Epilogue(bias, E4M3 if fp8 else torch.bfloat16, "gelu", one if fp8 else None, one, counts)
    return {
        "plain": Epilogue(),
        "row": Epilogue(bias),
        "gelu+amax": everything,
        "fp32": Epilogue(None, torch.float32),
    }


def _grouped() -> Iterator[Case]:
    """The matmuls of experts under Hopper's configurations and Ada's first: rows with a bias, sums in FP32."""
    seen = set()
    for operation in ("matmul_fp8", "matmul_fp8_promoted", "matmul_block"):
        for arch in ("sm_90", "sm_89"):
            committed = [
                (size, one) for size, config in table()[operation][arch].items() for one in (config, plain(config))
            ]
            for size, config in committed:
                config, hopper = config._replace(ratio=None, flatten=False, split_k=1), arch == "sm_90"
                if (operation, arch, config) in seen or not (hopper or size == "large"):
                    continue
                seen.add((operation, arch, config))
                unaligned, odd = (
                    hopper and not config.descriptors,
                    hopper and size == "large" and config == plain(config),
                )
                for n in (SIZE + 1,) if unaligned else (SIZE, SIZE + 1) if odd else (SIZE,):
                    yield from _grouped_under(config, operation, arch, n, SIZE + unaligned)


def _grouped_under(config: Config, operation: str, arch: str, n: int, k: int) -> Iterator[Case]:
    a, b, of_x, of_dy = _experts(operation == "matmul_block", n, k)
    given = _bounds(), Epilogue(_meta(EXPERTS, n, dtype=BF16)), operation != "matmul_fp8", config
    name, architecture = f"{operation} {arch} {config}{'' if n == SIZE else ' odd N'}", int(arch.removeprefix("sm_"))
    yield Case(f"grouped rows {name}", architecture, config, True, partial(grouped_rows, a, b, *given))
    if k == SIZE:
        given = _bounds(), Epilogue(None, torch.float32), *given[2:]
        yield Case(f"grouped sums {name}", architecture, config, True, partial(grouped_sums, of_dy, of_x, *given))


def _experts(in_blocks: bool, n: int, k: int) -> tuple[Operand, Operand, Operand, Operand]:
    """x, the weights; x^T [n, T] and dy^T [SIZE, T] in blocks."""
    t, wide = M, most_blocks(M, EXPERTS) * BLOCK
    if in_blocks:
        b = _operand(EXPERTS * -(-n // 128) * 128, k, 128, 128)
        b = b._replace(data=_meta(EXPERTS * n, k, dtype=E4M3))
        return _operand(t, k, 1, 128), b, _operand(n, wide, 1, 128, True), _operand(SIZE, wide, 1, 128, True)
    b = _operand(EXPERTS * n, k, 1, -1)
    of_x, of_dy = (Operand(_meta(size, wide, dtype=E4M3), _meta(EXPERTS, size), 1, -1) for size in (n, SIZE))
    return _operand(t, k, 1, -1), b, of_x, of_dy


def _of_experts() -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], Callable[[], Any]]]:
    """Casts whose groups begin anew at each expert, the transpose of codes, sums of rows."""
    hopper, fp8, bounds, wide = (90,), (90, 89), _bounds(), ("_expert_cast_kernel", "_expert_transpose_kernel")
    for name, group in {"column": "-1x1", "128x1": "128x1", "32x32": "32x32", "128x128": "128x128"}.items():
        how = Cast.parse(f"e4m3 {group} p2")
        for dtype in (BF16, torch.float32):
            word = str(dtype).removeprefix("torch.")
            x, transposed = _meta(M, K, dtype=dtype), how.rows != 128 or how.cols == 1
            form = f"quantize_experts {name} {word}"
            yield _form(form, fp8, wide, quantize_experts, x, how, bounds, _slot(), transposed)
        x = _meta(M - 1, K + 1, dtype=BF16)
        yield _form(f"quantize_experts {name} odd", hopper, (), quantize_experts, x, how, bounds, _slot(), transposed)
    yield _form("transpose_experts", fp8, wide, transpose_experts, _meta(M, K, dtype=E4M3), bounds)
    yield _form("transpose_experts odd", hopper, (), transpose_experts, _meta(M - 1, K + 1, dtype=E4M3), bounds)
    yield _form("expert_sums", fp8, (), expert_sums, _meta(M, K, dtype=BF16), bounds)


def _bounds() -> torch.Tensor:
    return _meta(2, EXPERTS + 1, dtype=torch.int32)


def _memory() -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], Callable[[], Any]]]:
    """(name, architectures, which of its kernels have to move 16 bytes a thread, launch) of each form."""
    hopper, fp8, every = (90,), (90, 89), (90, 89, 80)
    wide = ("_cast_kernel", "_short_kernel", "_line_cast_kernel")
    for name, how in CASTS.items():
        for dtype in (BF16, torch.float32):
            x = _meta(M, K, dtype=dtype)
            word = str(dtype).removeprefix("torch.")
            yield _form(f"quantize {name} {word}", fp8, wide, quantize, x, how, _slot())
        both = wide if name != "128x128" else ()
        yield _form(f"cast_transpose {name}", hopper, both, cast_transpose, _meta(M, K, dtype=BF16), how, _slot())
        x = _meta(M, K, dtype=BF16)
        yield _form(f"cast_transpose {name} sums", fp8, both, cast_transpose, x, how, _slot(), True)
    yield _form("quantize wide row", hopper, wide, quantize, _meta(M, 16384, dtype=BF16), CASTS["row"], _slot())
    yield _form("quantize column", hopper, (), quantize, _meta(M, K, dtype=BF16), Cast.parse("e4m3 -1x1 p2"), None)
    yield _form(
        "quantize_given", hopper, ("_given_kernel",), quantize_given, _meta(M, K, dtype=BF16), CASTS["tensor"], _meta()
    )
    for steps in (16, 1024):
        tables = _meta(steps, 10_000), _meta(2, 10_000), _meta(3, 10_000)
        yield _form(f"scale_update {steps} steps", every, ("_scale_update_kernel",), scale_update, *tables)
    part, scales = _meta(8, 64, SIZE), (_meta(64, 1), _meta(SIZE, 1))
    for end, epilogue in _epilogues(True).items():
        by_row = scales if end == "row" else (_meta(), _meta())
        yield _form(f"add_parts {end}", hopper, ("_add_parts_kernel",), add_parts, part, by_row, epilogue)
    stores = {
        "plain": Store(),
        "current": Store(CASTS["tensor"], False, _slot()),
        "predicted": Store(CASTS["tensor predicted"], False, _slot()),
        "predicted transposed": Store(CASTS["tensor predicted"], True, _slot()),
        "row": Store(CASTS["row"], False, _slot()),
        "1x128": Store(CASTS["1x128"], False, _slot()),
    }
    for name, to in stores.items():
        for kind in ACT_KINDS if name == "predicted" else ("gelu", "swiglu", "clamped_swiglu"):
            x = _meta(M, 2 * K if kind.endswith("glu") else K, dtype=BF16)
            yield _form(f"act {kind} {name}", hopper, (), act_quantize, x, kind, to)
            if name != "row":  # as plain: the row's codes are a cast's
                dy = _meta(M, K, dtype=BF16)
                yield _form(f"act backward {kind} {name}", hopper, (), act_quantize_backward, dy, x, kind, to)
        for kind, width in (("rms", 4096), ("layer", 4096), ("layer", 16384)) if not to.transposed else ():
            x, w = _meta(M, width, dtype=BF16), _meta(width, dtype=BF16)
            bias = w if kind == "layer" else None
            yield _form(f"norm {kind} {width} {name}", hopper, (), norm_quantize, x, w, bias, Norm(kind), to)
            if name == "plain":
                rows = RowStatistics(_meta(M), _meta(M) if kind == "layer" else None)
                backward = norm_quantize_backward, x, x, w, rows, Norm(kind)
                yield _form(f"norm backward {kind} {width}", hopper, (), *backward)
    half = _meta(M, K, dtype=BF16)
    for kind in ("swiglu", "clamped_swiglu"):
        to = stores["predicted transposed"]
        yield _form(f"act {kind} two halves predicted transposed", hopper, (), act_quantize, half, kind, to, half)
        backward = act_quantize_backward, half, half, kind, Store(), half
        yield _form(f"act backward {kind} two halves", hopper, (), *backward)


def _odd() -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], Callable[[], Any]]]:
    """Memory-bound kernels where nothing divides a size, so that each element has a load, an address and a mask."""
    hopper, m, k = (90,), M - 1, K + 1
    x = _meta(m, k, dtype=BF16)
    groups = CASTS | {"128x1": Cast.parse("e4m3 128x1 p2")}
    for name, cards in {"tensor predicted": hopper, "128x128": hopper, "128x1": (89,)}.items():
        yield _form(f"quantize {name} odd", cards, (), quantize, x, groups[name], _slot())
    for name in ("tensor predicted", "row", "1x128", "128x1", "128x128"):
        yield _form(f"cast_transpose {name} odd sums", hopper, (), cast_transpose, x, groups[name], _slot(), True)
    odd = _meta(8, 63, ODD), (_meta(63, 1), _meta(ODD, 1))
    yield _form("add_parts gelu+amax odd", hopper, (), add_parts, *odd, _epilogues(True, ODD)["gelu+amax"])
    yield _form("act relu plain odd", hopper, (), act_quantize, x, "relu", Store())
    wide = _meta(m, 2 * k, dtype=BF16)
    for kind, how, transposed in (("swiglu", "tensor predicted", False), ("geglu", "tensor predicted", True)):
        to = Store(CASTS[how], transposed, _slot())
        name = f"act backward {kind} {how}{' transposed' if transposed else ''} odd"
        yield _form(name, hopper, (), act_quantize_backward, x, wide, kind, to)
    narrow, w = _meta(m, K - 1, dtype=BF16), _meta(K - 1, dtype=BF16)
    for name in ("tensor predicted", "row"):
        to = Store(CASTS[name], False, _slot())
        yield _form(f"norm layer {K - 1} {name} odd", hopper, (), norm_quantize, narrow, w, w, Norm("layer"), to)
    backward = norm_quantize_backward, narrow, narrow, w, RowStatistics(_meta(m), _meta(m)), Norm("layer")
    yield _form(f"norm backward layer {K - 1} odd", hopper, (), *backward)
    wide, to = _meta(m, 4 * K, dtype=BF16), Store(CASTS["tensor"], False, _slot())
    yield _form(f"norm rms {4 * K} current", hopper, (), norm_quantize, wide, None, None, Norm("rms"), to)


def _form(name: str, architectures: tuple[int, ...], wide: tuple[str, ...], launcher: Callable, *arguments):
    return name, architectures, wide, partial(launcher, *arguments)


def _operand(size: int, k: int, rows: int, cols: int, transposed: bool = False) -> Operand:
    down, across = (1 if rows == -1 else -(-size // rows)), (1 if cols == -1 else -(-k // cols))
    scale = _meta(across, down).t() if transposed else _meta(down, across)
    scale = _meta() if rows == cols == -1 else scale
    return Operand(_meta(size, k, dtype=E4M3), scale, rows, cols)


def _matrix(size: int, k: int, transposed: bool) -> torch.Tensor:
    return _meta(k, size, dtype=BF16).t() if transposed else _meta(size, k, dtype=BF16)


def _slot() -> Slot:
    return Slot(_meta(2, SLOTS), _meta(7, SLOTS, dtype=torch.int64), 3)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
