"""cvt: conversions between types, each for all lanes at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from emulator import numbers
from emulator.arithmetic import FLOATS, Execute, computed, rule, unknown
from emulator.numbers import TYPES, Array
from emulator.reader import Instruction, Program


@rule("cvt")
def _cvt(program: Program, ins: Instruction) -> Execute:
    to, of = ins.opcode[-2:]
    pairs: dict[tuple[str, str], Callable] = {
        ("e4m3x2", "f32"): lambda high, low: numbers.to_fp8(high, "e4m3") << 8 | numbers.to_fp8(low, "e4m3"),
        ("e5m2x2", "f32"): lambda high, low: numbers.to_fp8(high, "e5m2") << 8 | numbers.to_fp8(low, "e5m2"),
        ("bf16x2", "f32"): lambda high, low: _two(numbers.to_bf16(high), numbers.to_bf16(low)),
        ("f16x2", "f32"): lambda high, low: _two(numbers.to_f16(high), numbers.to_f16(low)),
    }
    if (to, of) in pairs:
        return computed(program, ins, pairs[to, of], "f32", "f32")
    if of == "f16x2" and to in ("e4m3x2", "e5m2x2"):
        return computed(program, ins, partial(_halves_to_fp8, to[:4]), "b32")
    if of in ("e4m3x2", "e5m2x2") and to == "f16x2":
        return computed(program, ins, partial(_fp8_to_halves, of[:4]), "b16")
    single: dict[tuple[str, str], Callable] = {
        ("bf16", "f32"): numbers.to_bf16,
        ("f16", "f32"): partial(numbers.to_f16, toward_zero="rz" in ins.opcode),
        ("f32", "bf16"): numbers.from_bf16,
        ("f32", "f16"): lambda x: x.astype(np.float32),
    }
    if (to, of) in single:
        return computed(program, ins, single[to, of], of)
    if to == "f32" and of not in FLOATS:
        return computed(program, ins, lambda x: x.astype(np.float32), of)
    if of == "f32" and to not in FLOATS and "rzi" in ins.opcode:
        limits = np.iinfo(TYPES[to])
        return computed(
            program,
            ins,
            lambda x: (
                np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0).clip(limits.min, limits.max).astype(TYPES[to])
            ),
            of,
        )
    if to not in FLOATS and of not in FLOATS and to in TYPES and of in TYPES:
        return _integers(program, ins)
    raise unknown(ins)


def _integers(program: Program, ins: Instruction) -> Execute:
    """Between integers: extended by the source's sign, or cut; then to the destination register's width by its own."""
    to, of = ins.opcode[-2:]
    return computed(program, ins, lambda x: x.astype(TYPES[to]), of)


def _two(high: Array, low: Array) -> Array:
    return high.astype(np.uint32) << np.uint32(16) | low


def _halves(pair: Array) -> tuple[Array, Array]:
    """(high, low) FP16 numbers of 32 bits."""
    high, low = (pair >> np.uint32(16)).astype(np.uint16), pair.astype(np.uint16)
    return high.view(np.float16), low.view(np.float16)


def _halves_to_fp8(kind: str, pair: Array) -> Array:
    high, low = (numbers.to_fp8(half.astype(np.float32), kind) for half in _halves(pair))
    return high << 8 | low


def _fp8_to_halves(kind: str, pair: Array) -> Array:
    values = numbers.values_of(kind)
    high, low = values[pair >> np.uint16(8)], values[pair & np.uint16(255)]
    return _two(numbers.to_f16(high), numbers.to_f16(low))
