"""Instructions that compute on registers alone: each rule turns one instruction's text into what executes it.

Approximations (ex2.approx, div.full, rcp, sqrt, tanh, lg2, rsqrt) are rounded to the nearest FP32 number; a card's may
differ by the units in the last place that the PTX ISA gives for each, and tests leave room for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from emulator import numbers
from emulator.faults import UnknownInstruction
from emulator.numbers import TYPES, UNSIGNED, Array, size_of
from emulator.reader import Instruction, Program
from emulator.registers import Mask, parameter_bits, reader, several, writer

if TYPE_CHECKING:
    from emulator.cta import Cta

Execute = Callable[["Cta", Mask], None]
Rule = Callable[[Program, Instruction], Execute]
RULES: dict[str, Rule] = {}
FLOATS = ("f32", "f16", "bf16", "f64")
COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
INTEGER = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
FLOAT = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": numbers.larger,
    "min": numbers.smaller,
}
UNARY = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for instructions of these names."""

    def keep(made: Rule) -> Rule:
        for name in names:
            RULES[name] = made
        return made

    return keep


def computed(program: Program, ins: Instruction, compute: Callable, *kinds: str) -> Execute:
    """What reads operands 1, 2, ... as these types, computes, and writes operand 0."""
    reads = [reader(program, operand, kind) for operand, kind in zip(ins.operands[1:], kinds, strict=True)]
    write = writer(program, ins.operands[0])

    def execute(cta: Cta, mask: Mask) -> None:
        write(cta, mask, compute(*[read(cta) for read in reads]))

    return execute


def unknown(ins: Instruction) -> UnknownInstruction:
    """The error for operands that a rule was not written for."""
    return UnknownInstruction(f"{ins.text}: the emulated card has no rule for these operands")


@rule("mov")
def _mov(program: Program, ins: Instruction) -> Execute:
    to, what = ins.operands
    if to[0] == "{":
        return _unpacked(program, ins)
    if what[0] == "{":
        return _packed(program, ins)
    if what in program.parameters:  # the address of a tensor map, which is passed by value
        place = program.parameters.index(what)
        write = writer(program, to)
        return lambda cta, mask: write(cta, mask, np.array([cta.launch.map_address(place)], np.uint64))
    kind = "pred" if ins.type == "pred" else f"b{8 * size_of(ins.type)}"
    return computed(program, ins, lambda x: x, kind)


def _unpacked(program: Program, ins: Instruction) -> Execute:
    parts = several(ins.operands[0])
    read, writes = reader(program, ins.operands[1], ins.type), [writer(program, part) for part in parts]
    small = UNSIGNED[size_of(ins.type) // len(parts)]

    def execute(cta: Cta, mask: Mask) -> None:
        pieces = np.ascontiguousarray(np.broadcast_to(read(cta), cta.threads)).view(small).reshape(-1, len(parts))
        for place, write in enumerate(writes):
            write(cta, mask, pieces[:, place].copy())

    return execute


def _packed(program: Program, ins: Instruction) -> Execute:
    parts = several(ins.operands[1])
    small = f"b{8 * size_of(ins.type) // len(parts)}"
    reads, write = [reader(program, part, small) for part in parts], writer(program, ins.operands[0])

    def execute(cta: Cta, mask: Mask) -> None:
        pieces = np.stack([np.broadcast_to(read(cta), cta.threads) for read in reads], 1)
        write(cta, mask, np.ascontiguousarray(pieces).view(TYPES[ins.type]).ravel())

    return execute


@rule("cvta")
def _cvta(program: Program, ins: Instruction) -> Execute:
    return computed(program, ins, lambda x: x, "b64")


@rule("add", "sub", "mul", "div", "min", "max", "rem", "and", "or", "xor")
def _binary(program: Program, ins: Instruction) -> Execute:
    name, kind = ins.opcode[0], ins.type
    if kind == "f32":
        return computed(program, ins, _flushing(ins, FLOAT[name]), "f32", "f32")
    if kind == "bf16x2" and name == "mul":
        return computed(program, ins, _halves_multiplied, "b32", "b32")
    if kind in ("f16x2", "bf16x2"):
        return computed(program, ins, partial(_in_halves, kind, FLOAT[name]), "b32", "b32")
    if "relu" in ins.opcode:  # PTX ISA, integer max: "clamps negative result to 0"
        return computed(program, ins, lambda a, b: np.maximum(INTEGER[name](a, b), 0), kind, kind)
    if name in INTEGER:
        return computed(program, ins, INTEGER[name], kind, kind)
    if name == "mul":
        return _product(program, ins)
    return computed(program, ins, partial(_quotient, name == "rem"), kind, kind)


def _in_halves(kind: str, compute: Callable, a: Array, b: Array) -> Array:
    """Both 16-bit halves of 32 bits, in FP32: 24 bits are enough for one rounding, but for tiny BF16 products."""
    of, to = (_from_f16, numbers.to_f16) if kind == "f16x2" else (numbers.from_bf16, numbers.to_bf16)
    low, high = (
        to(compute(*[of((x >> np.uint32(shift)).astype(np.uint16)) for x in (a, b)])).astype(np.uint32)
        for shift in (0, 16)
    )
    return high << np.uint32(16) | low


def _from_f16(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


def _flushing(ins: Instruction, compute: Callable) -> Callable:
    """compute, in FP32, with subnormal operands and results flushed where the instruction says .ftz."""
    if "ftz" not in ins.opcode:
        return compute
    return lambda *values: numbers.flush(compute(*[numbers.flush(value) for value in values]))


def _halves_multiplied(a: Array, b: Array) -> Array:
    """Products of two BF16 numbers each, rounded once: FP32 in between is rounded to odd, which leaves no tie."""
    halves = [np.ascontiguousarray(x).view(np.uint16) for x in (a, b)]
    exact = np.multiply(*[numbers.from_bf16(half).astype(np.float64) for half in halves])
    nearest = exact.astype(np.float32)
    inexact, beyond = nearest != exact, np.abs(nearest) > np.abs(exact)
    odd = (nearest.view(np.uint32) - (inexact & beyond)).astype(np.uint32) | inexact
    found = np.where(np.isfinite(nearest) & np.isfinite(exact), odd.astype(np.uint32).view(np.float32), nearest)
    return numbers.to_bf16(found).view(np.uint32)


def _product(program: Program, ins: Instruction) -> Execute:
    how, kind = ins.opcode[1], ins.type
    wide = _wider(kind)
    if how == "lo":
        return computed(program, ins, np.multiply, kind, kind)
    if how == "wide":
        return computed(program, ins, lambda a, b: a.astype(wide) * b.astype(wide), kind, kind)
    return computed(program, ins, lambda a, b: (a.astype(wide) * b.astype(wide) >> 32).astype(TYPES[kind]), kind, kind)


def _wider(kind: str) -> type:
    return TYPES[f"{kind[0]}{min(16 * size_of(kind), 64)}"]


def _quotient(remainder: bool, a: Array, b: Array) -> Array:
    """Integer division toward zero; a division by zero gives an unspecified value, here that of a division by one."""
    by = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return a % by if remainder else a // by
    wide, wide_by = a.astype(np.int64), by.astype(np.int64)
    size = np.abs(wide) // np.abs(wide_by)
    quotient = np.where((wide < 0) != (wide_by < 0), -size, size)
    return (wide - quotient * wide_by if remainder else quotient).astype(a.dtype)


@rule("mad", "fma")
def _mad(program: Program, ins: Instruction) -> Execute:
    kind = ins.type
    if kind == "f32":
        return computed(program, ins, _flushing(ins, numbers.fused), "f32", "f32", "f32")
    if ins.opcode[1] == "wide":
        wide = _wider(kind)
        result = f"{kind[0]}{16 * size_of(kind)}"
        return computed(program, ins, lambda a, b, c: a.astype(wide) * b.astype(wide) + c, kind, kind, result)
    return computed(program, ins, lambda a, b, c: a * b + c, kind, kind, kind)


@rule("shl", "shr")
def _shift(program: Program, ins: Instruction) -> Execute:
    kind = ins.type
    bits, dtype = 8 * size_of(kind), np.dtype(TYPES[kind])

    def left(a: Array, by: Array) -> Array:
        return np.where(by >= bits, 0, a.astype(np.uint64) << np.minimum(by, 63)).astype(dtype)

    def right(a: Array, by: Array) -> Array:
        if dtype.kind == "i":
            return (a.astype(np.int64) >> np.minimum(by, 63).astype(np.int64)).astype(dtype)
        return np.where(by >= bits, 0, a.astype(np.uint64) >> np.minimum(by, 63)).astype(dtype)

    compute = left if ins.opcode[0] == "shl" else right
    return computed(program, ins, lambda a, by: compute(a, by.astype(np.uint64)), kind, "u32")


@rule("shf")
def _funnel_shift(program: Program, ins: Instruction) -> Execute:
    """32 bits of the pair (b, a), b above a, from its top or its bottom on; wrap: by a number modulo 32."""
    left = ins.opcode[1] == "l"

    def compute(a: Array, b: Array, by: Array) -> Array:
        pair = b.astype(np.uint64) << np.uint64(32) | a
        by = (by & np.uint32(31)).astype(np.uint64)
        return (pair << by >> np.uint64(32) if left else pair >> by).astype(np.uint32)

    return computed(program, ins, compute, "b32", "b32", "u32")


@rule("not", "neg", "abs")
def _sign(program: Program, ins: Instruction) -> Execute:
    name, kind = ins.opcode[0], ins.type
    if name == "not":
        return computed(program, ins, np.logical_not if kind == "pred" else np.invert, kind)
    if kind in ("bf16x2", "f16x2") or kind == "f32":
        sign = np.uint32(0x80008000 if kind != "f32" else 0x80000000)
        bits = (lambda x: x ^ sign) if name == "neg" else (lambda x: x & ~sign)
        if kind == "f32" and "ftz" in ins.opcode:
            return computed(program, ins, lambda x: bits(numbers.flush(x).view(np.uint32)), "f32")
        return computed(program, ins, bits, "b32")
    if kind in ("bf16", "f16"):
        return computed(program, ins, lambda x: x ^ 0x8000 if name == "neg" else x & 0x7FFF, "b16")
    return computed(program, ins, np.negative if name == "neg" else np.abs, kind)


@rule(*UNARY)
def _unary(program: Program, ins: Instruction) -> Execute:
    exact = UNARY[ins.opcode[0]]
    return computed(program, ins, _flushing(ins, lambda x: exact(x.astype(np.float64)).astype(np.float32)), "f32")


@rule("selp")
def _selp(program: Program, ins: Instruction) -> Execute:
    kind = f"b{8 * size_of(ins.type)}"
    return computed(program, ins, lambda a, b, which: np.where(which, a, b), kind, kind, "pred")


@rule("setp")
def _setp(program: Program, ins: Instruction) -> Execute:
    compare, kind = ins.opcode[1], ins.type
    compute = partial(_compared, ins, compare, kind.removesuffix("x2"))
    if not kind.endswith("x2"):
        return computed(program, ins, compute, kind, kind)
    halves = (
        partial(np.ndarray.view, dtype=np.uint16) if kind == "bf16x2" else partial(np.ndarray.view, dtype=np.float16)
    )
    reads = [reader(program, operand, "b32") for operand in ins.operands[1:]]
    writes = [writer(program, name) for name in ins.operands[0].split("|")]  # of the low halves, and of the high ones

    def execute(cta: Cta, mask: Mask) -> None:
        pairs = [halves(np.ascontiguousarray(read(cta))).reshape(-1, 2) for read in reads]
        for half, write in enumerate(writes):
            write(cta, mask, compute(*[pair[:, half] for pair in pairs]))

    return execute


def _compared(ins: Instruction, compare: str, kind: str, a: Array, b: Array) -> Array:
    """The predicate of a comparison; one that ends in u holds for NaNs as well (PTX ISA, 9.7.3.1)."""
    unordered = kind in FLOATS and compare.endswith("u") and compare[:-1] in COMPARISONS
    base = compare[:-1] if unordered else compare
    if kind == "bf16":
        a, b = numbers.from_bf16(a), numbers.from_bf16(b)
    if "ftz" in ins.opcode:
        a, b = numbers.flush(a), numbers.flush(b)
    if kind not in FLOATS:
        return COMPARISONS[base](a, b)
    nan = np.isnan(a) | np.isnan(b)
    if base in ("nan", "num"):
        return nan if base == "nan" else ~nan
    return COMPARISONS[base](a, b) | nan if unordered else COMPARISONS[base](a, b) & ~nan


@rule("popc")
def _popc(program: Program, ins: Instruction) -> Execute:
    return computed(program, ins, lambda x: np.bitwise_count(x).astype(np.uint32), ins.type)


@rule("bfe")
def _bfe(program: Program, ins: Instruction) -> Execute:

    def compute(x: Array, first: Array, count: Array) -> Array:
        if (count < 1).any() or (count > 32).any():
            raise unknown(ins)
        field = x >> first & (np.uint64(1) << count) - np.uint64(1)
        top = np.uint64(1) << count - np.uint64(1)
        return (((field ^ top) - top) if ins.type == "s32" else field).astype(np.uint32)

    return computed(program, ins, lambda *of: compute(*[each.astype(np.uint64) for each in of]), "u32", "u32", "u32")


@rule("bfi")
def _bfi(program: Program, ins: Instruction) -> Execute:

    def compute(field: Array, into: Array, first: Array, count: Array) -> Array:
        mask = (np.uint64(1) << np.minimum(count, 32)) - np.uint64(1) << np.minimum(first, 32)
        return (into & ~mask | field << np.minimum(first, 32) & mask).astype(np.uint32)

    return computed(program, ins, lambda *of: compute(*[each.astype(np.uint64) for each in of]), *["u32"] * 4)


@rule("prmt")
def _prmt(program: Program, ins: Instruction) -> Execute:

    def compute(a: Array, b: Array, selector: Array) -> Array:
        pair = b.astype(np.uint64) << np.uint64(32) | a
        found = np.zeros(1, np.uint32)
        for byte in range(4):
            which = selector >> np.uint32(4 * byte) & np.uint32(15)
            value = (pair >> (which & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & np.uint32(255)
            sign = np.where(value & np.uint32(128), np.uint32(255), np.uint32(0))
            found = found | np.where(which & np.uint32(8), sign, value).astype(np.uint32) << np.uint32(8 * byte)
        return found

    return computed(program, ins, compute, "b32", "b32", "b32")


def parameter(program: Program, ins: Instruction) -> Execute:
    """ld.param."""
    place = program.parameters.index(ins.operands[1].strip("[] "))
    write, kind = writer(program, ins.operands[0]), ins.type

    def execute(cta: Cta, mask: Mask) -> None:
        bits = parameter_bits(cta.launch.arguments[place], kind)
        signed = bits.view(TYPES[kind]) if kind.startswith("s") else bits
        write(cta, mask, signed)

    return execute
