"""Instructions that access memory: loads, stores, atomics, cp.async, TMA, mbarriers, fences."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from emulator import arithmetic, tma
from emulator.arithmetic import Execute, rule, unknown
from emulator.faults import UnknownInstruction
from emulator.numbers import TYPES, UNSIGNED, Array, size_of
from emulator.order import WARP
from emulator.reader import Instruction, Program
from emulator.registers import Mask, pointer, reader, several, writer

if TYPE_CHECKING:
    from emulator.cta import Cta

BOX = re.compile(r"\[\s*(%\w+)\s*,\s*\{(.*)\}\s*\]")
ATOMICS: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "or": np.bitwise_or,
    "and": np.bitwise_and,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
}


def _lanes(mask: Mask) -> tuple[Array, Array]:
    """(the lanes that execute, the warp of each)."""
    lanes = np.flatnonzero(mask.lanes)
    return lanes, lanes // WARP


@rule("ld")
def _load(program: Program, ins: Instruction) -> Execute:
    space = ins.opcode[1]
    if space == "param":
        return arithmetic.parameter(program, ins)
    names, size = several(ins.operands[0]), size_of(ins.type)
    address, writes = pointer(program, ins.operands[1]), [writer(program, name) for name in names]
    dtype = TYPES[ins.type] if ins.type.startswith("s") else UNSIGNED[size]
    whole = size * len(names)

    def execute(cta: Cta, mask: Mask) -> None:
        lanes, warps = _lanes(mask)
        addresses = np.broadcast_to(address(cta), cta.threads)[lanes]
        if space == "global":
            data = cta.memory.load(addresses, whole, warps, cta.order)
        else:
            data = cta.shared.read(cta.shared.place(addresses, whole), warps)
        parts = np.zeros((cta.threads, len(names)), dtype)
        parts[lanes] = np.ascontiguousarray(data).view(dtype)
        for place, write in enumerate(writes):
            write(cta, mask, parts[:, place].copy())

    return execute


@rule("st")
def _store(program: Program, ins: Instruction) -> Execute:
    space, size = ins.opcode[1], size_of(ins.type)
    address = pointer(program, ins.operands[0])
    reads = [reader(program, name, f"b{8 * size}") for name in several(ins.operands[1])]

    def execute(cta: Cta, mask: Mask) -> None:
        lanes, warps = _lanes(mask)
        addresses = np.broadcast_to(address(cta), cta.threads)[lanes]
        values = np.stack([np.broadcast_to(read(cta), cta.threads)[lanes] for read in reads], 1)
        data = np.ascontiguousarray(values).view(np.uint8)
        if space == "global":
            cta.memory.store(addresses, data, warps, cta.order)
        else:
            index = cta.shared.place(addresses, data.shape[1])
            cta.shared.write(index, data, warps)

    return execute


def _reads(ins: Instruction, register: str) -> bool:
    """Whether an instruction reads a register: as its guard, or in an operand that is not the first."""
    stores = ins.opcode[0] in ("st", "red")
    parts = [part for operand in ins.operands[0 if stores else 1 :] for part in several(operand)]
    return register == ins.guard or any(register == part.strip("[] ").partition("+")[0] for part in parts)


@rule("atom", "red")
def _atomic(program: Program, ins: Instruction) -> Execute:
    """One lane after the other, in the order of the lanes.

    One that leaves what it finds, and whose result is used, is a read: it has to be ordered after the last write.
    """
    name, kind = ins.opcode[-2:]
    gives = ins.opcode[0] == "atom"
    to, place, what = ins.operands if gives else ("_", *ins.operands)
    address, read, write = pointer(program, place), reader(program, what, kind), writer(program, to)
    ordered, dtype = "acq_rel" in ins.opcode, TYPES[kind]
    used = to != "_" and any(_reads(each, to) for each in program.instructions)

    def execute(cta: Cta, mask: Mask) -> None:
        addresses, values = (np.broadcast_to(each(cta), cta.threads) for each in (address, read))
        before = np.zeros(cta.threads, dtype)
        for lane in np.flatnonzero(mask.lanes).tolist():
            where = int(addresses[lane])
            allocation, index = cta.memory.atomic(where, size_of(kind), lane // WARP, cta.order, ordered)
            cell = allocation.bytes[index[0]].view(dtype)
            before[lane] = cell[0]
            after = ATOMICS[name](cell, values[lane : lane + 1]).astype(dtype)
            if used and after[0] == cell[0]:
                cta.memory.judge_atomic_read(where, lane // WARP, cta.order)
            allocation.bytes[index[0]] = after.view(np.uint8)
        write(cta, mask, before)

    return execute


@rule("cp")
def _copy(program: Program, ins: Instruction) -> Execute:
    words = ins.opcode
    if words[:3] == ("cp", "async", "bulk"):
        if "tensor" in words:
            return _bulk(program, ins)
        if words[3] == "commit_group":
            return lambda cta, mask: cta.commit_stores(_lanes(mask)[1])
        pending = int(ins.operands[0])
        return lambda cta, mask: cta.wait_stores(np.unique(_lanes(mask)[1]), pending)
    if words[2] in ("ca", "cg"):
        return _copy_async(program, ins)
    if words[2] == "commit_group":
        return lambda cta, mask: cta.commit_copies(np.unique(_lanes(mask)[1]))
    pending = int(ins.operands[0])
    return lambda cta, mask: cta.wait_copies(np.unique(_lanes(mask)[1]), pending)


def _copy_async(program: Program, ins: Instruction) -> Execute:
    """cp.async of sm_80: 4 to 16 bytes a lane, those beyond the source's size as zeros."""
    target, source = pointer(program, ins.operands[0]), pointer(program, ins.operands[1])
    size = int(ins.operands[2], 0)
    given = reader(program, ins.operands[3], "u32") if len(ins.operands) > 3 else None

    def execute(cta: Cta, mask: Mask) -> None:
        lanes, warps = _lanes(mask)
        to, of = (np.broadcast_to(each(cta), cta.threads)[lanes] for each in (target, source))
        sizes = np.full(len(lanes), size) if given is None else np.broadcast_to(given(cta), cta.threads)[lanes]
        if not np.isin(sizes, (0, size)).all():
            raise UnknownInstruction("cp.async of a part of its bytes")
        data, some = np.zeros((len(lanes), size), np.uint8), sizes > 0
        if some.any():
            data[some] = cta.memory.load(of[some], size, warps[some], cta.order)
        cta.copy(cta.shared.place(to, size), data, warps)

    return execute


def _bulk(program: Program, ins: Instruction) -> Execute:
    loading = "mbarrier::complete_tx::bytes" in ".".join(ins.opcode)
    box = BOX.match(ins.operands[1 if loading else 0])
    if box is None:
        raise unknown(ins)
    of_map = reader(program, box[1], "b64")
    corner = [reader(program, part.strip(), "s32") for part in box[2].split(",")]
    place = pointer(program, ins.operands[0 if loading else 1])
    more = [pointer(program, ins.operands[2])] if loading else []

    def execute(cta: Cta, mask: Mask) -> None:
        for lane in np.flatnonzero(mask.lanes).tolist():
            at = [int(np.broadcast_to(read(cta), cta.threads)[lane]) for read in (of_map, *corner, place, *more)]
            tensor_map, (x, y, base, *rest) = cta.launch.map_at(at[0]), at[1:]
            if rest:
                tma.begin_load(cta, lane, tensor_map, (x, y), base, rest[0])
            else:
                tma.begin_store(cta, lane, tensor_map, (x, y), base)

    return execute


@rule("mbarrier")
def _mbarrier(program: Program, ins: Instruction) -> Execute:
    """All but the wait, which is the scheduler's (cta.py)."""
    what = ins.opcode[1]
    place = next(operand for operand in ins.operands if operand.startswith("["))
    address = pointer(program, place)
    rest = ins.operands[ins.operands.index(place) + 1 :]
    number = reader(program, rest[0], "u32") if rest else None
    announces = "expect_tx" in ins.opcode

    def execute(cta: Cta, mask: Mask) -> None:
        for lane in np.flatnonzero(mask.lanes).tolist():
            where, warp = int(np.broadcast_to(address(cta), cta.threads)[lane]), lane // WARP
            value = 1 if number is None else int(np.broadcast_to(number(cta), cta.threads)[lane])
            if what == "init":
                cta.mbarriers.init(where, value, warp)
            elif what == "inval":
                cta.mbarriers.invalidate(where, warp)
            else:
                barrier = cta.mbarriers.at(where, warp)
                if announces:
                    barrier.expect(value)
                if what == "arrive":
                    barrier.arrive(1 if announces else value, cta.order.release(np.array([warp])))

    return execute


@rule("fence", "membar")
def _fence(program: Program, ins: Instruction) -> Execute:
    if ins.opcode[1] == "proxy":
        return lambda cta, mask: cta.order.fence_proxy(np.unique(_lanes(mask)[1]))
    return lambda cta, mask: None  # between warps barriers are asked for here, and between CTAs atomics


@rule("createpolicy")
def _policy(program: Program, ins: Instruction) -> Execute:
    """A hint for the cache, which the emulated card has not."""
    write = writer(program, ins.operands[0])
    return lambda cta, mask: write(cta, mask, np.zeros(1, np.uint64))


@rule("griddepcontrol", "prefetch", "nanosleep")
def _no_effect(program: Program, ins: Instruction) -> Execute:
    return lambda cta, mask: None
