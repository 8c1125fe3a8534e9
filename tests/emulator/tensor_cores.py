"""Tensor Core instructions: fragments, matrix descriptors, products.

FP8 products are added as Hopper and Ada add them (accumulator.py).  Of FP16 and BF16 the sum over K is exact here
(float64) and added to the FP32 accumulator with one rounding; in which order a card adds those is not documented: what
is compared bit for bit multiplies small integers, whose sums are exact in any.

Layouts: PTX ISA, 9.7.14 (mma.m16n8k16, m16n8k32, ldmatrix, stmatrix) and 9.7.15 (wgmma, matrix descriptor).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from emulator import accumulator, numbers
from emulator.arithmetic import Execute, rule, unknown
from emulator.faults import Fault, Misaligned
from emulator.numbers import Array
from emulator.order import WARP, WARPGROUP
from emulator.reader import Instruction, Program
from emulator.registers import Mask, pointer, reader, several, writer
from emulator.tma import SPANS, swizzled

if TYPE_CHECKING:
    from emulator.cta import Cta

ROWS = 64  # of a wgmma
SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
LANE = np.arange(WARP)
SWIZZLES = {0: 0, 1: 3, 2: 2, 3: 1}  # of a matrix descriptor's bits 62 and 63: SPANS' number


def decode(kind: str) -> Callable[[Array], Array]:
    """What makes float64 numbers of bytes [rows, bytes]."""
    if kind in ("e4m3", "e5m2"):
        return lambda data: numbers.values_of(kind)[data].astype(np.float64)
    if kind == "bf16":
        return lambda data: numbers.from_bf16(np.ascontiguousarray(data).view(np.uint16)).astype(np.float64)
    if kind == "f16":
        return lambda data: np.ascontiguousarray(data).view(np.float16).astype(np.float64)
    raise Fault(f"operands of type {kind}")


def sum_of(program: Program, kinds: tuple[str, str]) -> Callable[[Array, Array, Array], Array]:
    """What adds a @ b^T to c, FP32 [..., R, C], of operands of these kinds."""
    if kinds[0] in accumulator.SMALLEST:
        return lambda a, b, c: accumulator.add(a, b, c, kinds, program.architecture)
    return lambda a, b, c: (c.astype(np.float64) + a @ b.swapaxes(-1, -2)).astype(np.float32)


@rule("wgmma")
def _wgmma(program: Program, ins: Instruction) -> Execute:
    what = ins.opcode[1]
    if what == "fence":
        return lambda cta, mask: cta.fence_fragments(_groups(mask))
    if what == "commit_group":
        return _commit
    if what == "wait_group":
        pending = int(ins.operands[0])
        return lambda cta, mask: _wait(cta, mask, pending)
    return _mma_async(program, ins)


def _groups(mask: Mask) -> list[int]:
    """The warpgroups that execute; each as a whole."""
    lanes = mask.lanes.reshape(-1, WARPGROUP)
    if (lanes.any(1) != lanes.all(1)).any():
        raise Fault("a wgmma instruction is executed by a part of a warpgroup")
    return np.flatnonzero(lanes.any(1)).tolist()


def _commit(cta: Cta, mask: Mask) -> None:
    for group in _groups(mask):
        cta.products[group].append([])


def _wait(cta: Cta, mask: Mask, pending: int) -> None:
    """Until at most so many of the warpgroup's committed groups are unfinished."""
    for group in _groups(mask):
        queue = cta.products[group]
        warps = np.arange(4 * group, 4 * group + 4)
        while len(queue) - 1 > pending:
            for registers, column, epoch in queue.pop(0):
                cta.order.finished(warps, column, epoch)
                for name in registers:
                    cta.settle(name, group)


def _mma_async(program: Program, ins: Instruction) -> Execute:
    n, k = map(int, SHAPE.match(ins.opcode[4]).groups()[1:])  # pyright: ignore[reportOptionalMemberAccess]
    kinds = ins.opcode[6], ins.opcode[7]
    itemsize = 1 if kinds[0] in ("e4m3", "e5m2") else 2
    sums = several(ins.operands[0])
    if len(sums) != n // 2 or list(ins.operands[4:6]) != ["1", "1"]:
        raise unknown(ins)
    from_registers = ins.operands[1][0] == "{"
    turned = [word == "1" for word in ins.operands[6:8]]
    turn_a, turn_b = (False, bool(turned and turned[0])) if from_registers else (turned or [False, False])
    reads_a = [reader(program, part, "b32") for part in several(ins.operands[1])] if from_registers else []
    read_a = None if from_registers else reader(program, ins.operands[1], "b64")
    read_b, read_keep = reader(program, ins.operands[2], "b64"), reader(program, ins.operands[3], "pred")
    reads_sum, writes = [reader(program, name, "f32") for name in sums], [writer(program, name) for name in sums]
    values_a, values_b, added = decode(kinds[0]), decode(kinds[1]), sum_of(program, kinds)
    used = [*sums, *(several(ins.operands[1]) if from_registers else [])]
    place = np.arange(len(sums))[:, None]
    lane, warp = np.arange(WARPGROUP) % WARP, np.arange(WARPGROUP) // WARP
    row = 16 * warp + lane // 4 + 8 * (place % 4 // 2)  # [sums, 128]
    column = 8 * (place // 4) + lane % 4 * 2 + place % 2

    def execute(cta: Cta, mask: Mask) -> None:
        keeps = np.broadcast_to(read_keep(cta), cta.threads)
        totals = np.zeros((len(sums), cta.threads), np.float32)
        for group in _groups(mask):
            lanes = slice(WARPGROUP * group, WARPGROUP * (group + 1))
            cta.check_fenced(used, group)
            read = _Operands(cta, group)
            if read_a is None:
                a = _fragment([np.broadcast_to(each(cta), cta.threads)[lanes] for each in reads_a])
            else:
                a = read.matrix(read_a(cta)[lanes], ROWS, k, itemsize, turn_a)
            b = read.matrix(read_b(cta)[lanes], n, k, itemsize, turn_b)
            with np.errstate(all="ignore"):
                before = np.zeros((ROWS, n), np.float32)
                if keeps[lanes.start]:
                    with cta.using_sums():
                        held = [np.broadcast_to(each(cta), cta.threads)[lanes] for each in reads_sum]
                    before[row, column] = np.stack(held)
                totals[:, lanes] = added(values_a(a), values_b(b), before)[row, column]
            cta.products[group][-1].append((sums, read.column, read.epoch))
        with cta.using_sums():
            for write, total in zip(writes, totals, strict=True):
                write(cta, mask, total)
        for group in _groups(mask):
            cta.unsettle(sums, group)

    return execute


class _Operands:
    """Operands in shared memory, read by one warpgroup's wgmma as an agent of its own."""

    def __init__(self, cta: Cta, group: int):
        self.cta = cta
        self.warps = np.arange(4 * group, 4 * group + 4)
        self.column, self.epoch = cta.order.begin("wgmma", group)

    def matrix(self, descriptors: Array, rows: int, k: int, itemsize: int, turned: bool) -> Array:
        """Bytes [rows, k * itemsize] of the operand that the descriptor names.  turned: contiguous along its rows."""
        if (descriptors != descriptors[0]).any():
            raise Fault("the matrix descriptors differ inside of a warpgroup")
        bits = int(descriptors[0])
        start, leading, stride = ((bits >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        swizzle = SWIZZLES[bits >> 62]
        span = SPANS[swizzle]
        row = np.arange(rows)[:, None]
        if turned:
            along = np.arange(k)[None, :]
            across = span // itemsize
            linear = start + row % across * itemsize + row // across * leading + along % 8 * span + along // 8 * stride
            linear = (linear[:, :, None] + np.arange(itemsize)).reshape(rows, k * itemsize)
        else:
            byte = np.arange(k * itemsize)[None, :]
            inside = byte if swizzle else byte // 16 * leading + byte % 16
            linear = start + row // 8 * stride + row % 8 * span + inside
        index = self.cta.shared.locate(swizzled(linear, span))
        self.cta.shared.read_by_proxy(index, self.warps, self.column, self.epoch)
        return self.cta.shared.bytes[index]


def _fragment(registers: list[Array]) -> Array:
    """Bytes [64, 32] of A held in the registers of a warpgroup."""
    a = np.zeros((ROWS, 8 * len(registers)), np.uint8)
    lane, warp = np.arange(WARPGROUP) % WARP, np.arange(WARPGROUP) // WARP
    for place, register in enumerate(registers):
        row, byte = 16 * warp + lane // 4 + 8 * (place % 2), lane % 4 * 4 + 16 * (place // 2)
        a[row[:, None], byte[:, None] + np.arange(4)] = np.ascontiguousarray(register).view(np.uint8).reshape(-1, 4)
    return a


@rule("mma")
def _mma(program: Program, ins: Instruction) -> Execute:
    """mma.sync.m16n8k{16, 32}: a warp multiplies A [16, K] by B [K, 8], 4 bytes of K a register."""
    kinds = ins.opcode[6:]
    d, a, b, c = (several(operand) for operand in ins.operands)
    reads = [[reader(program, name, kind) for name in names] for names, kind in ((a, "b32"), (b, "b32"), (c, "f32"))]
    writes = [writer(program, name) for name in d]
    values_a, values_b, added = decode(kinds[1]), decode(kinds[2]), sum_of(program, (kinds[1], kinds[2]))

    def execute(cta: Cta, mask: Mask) -> None:
        warps = cta.threads // WARP
        got = [[np.broadcast_to(read(cta), cta.threads).reshape(warps, WARP) for read in some] for some in reads]
        whole_a, whole_b = np.zeros((warps, 16, 32), np.uint8), np.zeros((warps, 8, 32), np.uint8)
        byte = (LANE % 4 * 4)[:, None] + np.arange(4)
        for place, register in enumerate(got[0]):
            data = np.ascontiguousarray(register).view(np.uint8).reshape(warps, WARP, 4)
            whole_a[:, (LANE // 4 + 8 * (place % 2))[:, None], byte + 16 * (place // 2)] = data
        for place, register in enumerate(got[1]):
            data = np.ascontiguousarray(register).view(np.uint8).reshape(warps, WARP, 4)
            whole_b[:, (LANE // 4)[:, None], byte + 16 * place] = data
        with np.errstate(all="ignore"):
            before = np.zeros((warps, 16, 8), np.float32)
            places = [(slice(None), LANE // 4 + 8 * (i // 2), LANE % 4 * 2 + i % 2) for i in range(4)]
            for place, held in zip(places, got[2], strict=True):
                before[place] = held
            total = added(values_a(whole_a), values_b(whole_b), before)
            for place, write in zip(places, writes, strict=True):
                write(cta, mask, total[place].ravel())

    return execute


@rule("ldmatrix", "stmatrix")
def _matrix(program: Program, ins: Instruction) -> Execute:
    """Matrices of 8 rows of 16 bytes: lane 8 i + r holds the address of row r of matrix i (PTX ISA, ldmatrix)."""
    storing, turned = ins.opcode[0] == "stmatrix", "trans" in ins.opcode
    vector, address = (ins.operands[1], ins.operands[0]) if storing else ins.operands
    names, read_address = several(vector), pointer(program, address)
    reads, writes = [reader(program, name, "b32") for name in names], [writer(program, name) for name in names]

    def execute(cta: Cta, mask: Mask) -> None:
        rows = np.broadcast_to(read_address(cta), cta.threads).reshape(-1, WARP)
        held = [np.zeros(rows.shape, np.uint32) for _ in names]
        given = [np.broadcast_to(read(cta), cta.threads).reshape(-1, WARP) for read in reads] if storing else held
        for warp in np.flatnonzero(mask.lanes.reshape(-1, WARP).any(1)):
            for place in range(len(names)):
                address = rows[warp, 8 * place : 8 * place + 8]
                if (address % 16).any():
                    raise Misaligned(f"a matrix's row at shared address {int(address[address % 16 != 0][0])}")
                warps = np.full(8, warp)
                index = cta.shared.place(address, 16)
                if storing:
                    data = np.ascontiguousarray(given[place][warp]).view(np.uint16).reshape(8, 8)
                    data = np.ascontiguousarray(data.T if turned else data).view(np.uint8)
                    cta.shared.write(index, data, warps)
                else:
                    data = np.ascontiguousarray(cta.shared.read(index, warps)).view(np.uint16)
                    held[place][warp] = np.ascontiguousarray(data.T if turned else data).view(np.uint32).ravel()
        if not storing:
            for write, values in zip(writes, held, strict=True):
                write(cta, mask, values.ravel())

    return execute
