"""Registers and operands: how an instruction reads and writes the values of all lanes of a CTA at once.

A register is an array [threads] of unsigned integers of its width; a predicate is an array of booleans.  A lane that an
instruction's mask leaves out keeps its value.  What LLVM leaves unwritten because it does not matter reads as POISON.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from emulator.faults import UnknownInstruction
from emulator.numbers import TYPES, UNSIGNED, Array, size_of

if TYPE_CHECKING:
    from emulator.cta import Cta
    from emulator.reader import Program

POISON = 0xDEADBEEFDEADBEEF
ADDRESS = re.compile(r"^\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+))?\s*\]$")
SHARED = "global_smem"  # Triton's name of the CTA's dynamic shared memory, which begins at 0
SPECIAL = re.compile(r"^%(tid|ntid|n?ctaid)\.[xyz]$|^%(laneid|warpid)$")
Reader = Callable[["Cta"], Array]
Writer = Callable[["Cta", "Mask", Array], None]


class Mask(NamedTuple):
    """Which lanes of the CTA execute.  whole: all of them, so that a register is replaced and not merged."""

    lanes: Array
    whole: bool


def width(program: Program, name: str) -> int:
    """Bytes of a register, as declared."""
    prefix = re.match(r"%?[a-z_]+", name)
    for declared in (name, prefix[0] if prefix else name):
        if declared in program.widths:
            return program.widths[declared]
    raise UnknownInstruction(f"register {name} is not declared")


def reader(program: Program, operand: str, kind: str) -> Reader:
    """What reads an operand as a PTX type: [threads], or [1] where all lanes have the same."""
    dtype = np.dtype(np.uint16 if kind == "bf16" else TYPES[kind])
    if SPECIAL.match(operand):
        return lambda cta: cta.special[operand].astype(dtype)
    if not operand.startswith("%") and operand not in program.widths:
        value = _constant(operand, dtype)
        return lambda cta: value
    size = width(program, operand)
    if dtype == np.bool_:
        return lambda cta: cta.register(operand, size)
    if dtype.itemsize == size:
        return lambda cta: cta.register(operand, size).view(dtype)
    narrow = UNSIGNED[dtype.itemsize]
    return lambda cta: cta.register(operand, size).astype(narrow).view(dtype)


def writer(program: Program, operand: str) -> Writer:
    """What writes a register's masked lanes from an array of its size; smaller integers are extended by their sign."""
    if operand == "_":
        return lambda cta, mask, value: None
    size = width(program, operand)
    stored = np.bool_ if size == 1 else UNSIGNED[size]
    fragment = operand in program.fragments

    def write(cta: Cta, mask: Mask, value: Array) -> None:
        value = np.asarray(value)
        if value.dtype != np.bool_ or size != 1:
            value = value.view(f"u{size}") if value.dtype.itemsize == size else value.astype(stored)
        if cta.in_flight:
            cta.check_settled(operand)
        if fragment:
            cta.note_fragment(operand, mask)
        registers = cta.registers
        if mask.whole and value.shape == (cta.threads,):
            registers[operand] = value
        else:
            old = registers.get(operand)
            if old is None:
                old = np.full(cta.threads, POISON & (1 << 8 * size) - 1).astype(stored)
            registers[operand] = np.where(mask.lanes, value, old)

    return write


def pointer(program: Program, operand: str) -> Reader:
    """What reads the addresses of `[register + offset]`, as int64."""
    found = ADDRESS.match(operand)
    if found is None:
        raise UnknownInstruction(f"address {operand}")
    offset = int(found[2] or "0", 0)
    if found[1] == SHARED or found[1].isdigit():
        place = np.array([offset if found[1] == SHARED else int(found[1]) + offset])
        return lambda cta: place
    size = width(program, found[1])
    return lambda cta: cta.register(found[1], size).astype(np.int64) + offset


def several(operand: str) -> list[str]:
    """The operands of a vector in braces; one alone is a vector of itself."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


def _constant(operand: str, dtype: np.dtype) -> Array:
    if operand.startswith(SHARED):
        return np.array([int(operand.partition("+")[2] or "0", 0)], dtype)
    if dtype == np.bool_:
        return np.array([int(operand, 0) != 0])
    if operand.startswith(("0f", "0d")):
        bits = np.array([int(operand[2:], 16)], np.uint32 if operand[1] == "f" else np.uint64)
        return bits.view(dtype)
    value = int(operand.rstrip("U"), 0)
    return np.array([value & (1 << 8 * dtype.itemsize) - 1], UNSIGNED[dtype.itemsize]).view(dtype)


def parameter_bits(value: float | int, kind: str) -> Array:
    """A launch's argument as ld.param reads it."""
    size = size_of(kind)
    if isinstance(value, float):
        (value,) = struct.unpack("<I", struct.pack("<f", value))
    return np.array([value & (1 << 8 * size) - 1], UNSIGNED[size])
