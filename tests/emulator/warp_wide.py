"""Instructions in which the lanes of a warp exchange values: shfl, vote, redux, elect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from emulator.arithmetic import Execute, rule, unknown
from emulator.faults import Fault
from emulator.order import WARP
from emulator.reader import Instruction, Program
from emulator.registers import Mask, reader, writer

if TYPE_CHECKING:
    from emulator.cta import Cta

WHOLE = ("-1", "0xffffffff", "4294967295")  # the mask of all lanes of a warp
REDUCTIONS = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "or": np.bitwise_or,
    "and": np.bitwise_and,
    "xor": np.bitwise_xor,
}


@rule("shfl")
def _shfl(program: Program, ins: Instruction) -> Execute:
    how = ins.opcode[2]
    if int(ins.operands[3], 0) != WARP - 1 or "|" in ins.operands[0] or ins.operands[4] not in WHOLE:
        raise unknown(ins)
    write, value = writer(program, ins.operands[0]), reader(program, ins.operands[1], "b32")
    by = reader(program, ins.operands[2], "u32")

    def execute(cta: Cta, mask: Mask) -> None:
        lane = np.arange(cta.threads)
        other = by(cta).astype(np.int64) % WARP
        source = lane ^ other if how == "bfly" else lane // WARP * WARP + other
        if not mask.lanes[source[mask.lanes]].all():
            raise Fault("shfl reads from a lane that does not execute it")
        write(cta, mask, np.broadcast_to(value(cta), cta.threads)[source])

    return execute


@rule("vote")
def _vote(program: Program, ins: Instruction) -> Execute:
    how = ins.opcode[2]
    if ins.operands[2] not in WHOLE:
        raise unknown(ins)
    negated, name = ins.operands[1].startswith("!"), ins.operands[1].lstrip("!")
    write, read = writer(program, ins.operands[0]), reader(program, name, "pred")

    def execute(cta: Cta, mask: Mask) -> None:
        votes = np.broadcast_to(read(cta), cta.threads) ^ negated
        taking = mask.lanes.reshape(-1, WARP)
        yes = votes.reshape(-1, WARP) & taking
        if how == "ballot":
            bits = (yes.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1).astype(np.uint32)
            write(cta, mask, np.repeat(bits, WARP))
        else:
            write(cta, mask, np.repeat(yes.any(1) if how == "any" else (yes == taking).all(1), WARP))

    return execute


@rule("redux")
def _redux(program: Program, ins: Instruction) -> Execute:
    reduce, lanes = REDUCTIONS[ins.opcode[2]], reader(program, ins.operands[2], "b32")
    write, read = writer(program, ins.operands[0]), reader(program, ins.operands[1], ins.type)

    def execute(cta: Cta, mask: Mask) -> None:
        taking = mask.lanes.reshape(-1, WARP)
        if (taking.any(1) != taking.all(1)).any():
            raise Fault("redux by a part of a warp")
        if (np.broadcast_to(lanes(cta), cta.threads)[mask.lanes].astype(np.uint32) != np.uint32(0xFFFFFFFF)).any():
            raise Fault("redux of a part of a warp")
        values = np.broadcast_to(read(cta), cta.threads).reshape(-1, WARP)
        write(cta, mask, np.repeat(reduce.reduce(values, axis=1).astype(values.dtype), WARP))

    return execute


@rule("elect")
def _elect(program: Program, ins: Instruction) -> Execute:
    """One lane of those that execute; which one is not documented: here the first."""
    lane, leader = ins.operands[0].split("|")
    if ins.operands[1] not in WHOLE:
        raise unknown(ins)
    writes = writer(program, lane), writer(program, leader)

    def execute(cta: Cta, mask: Mask) -> None:
        first = np.repeat(mask.lanes.reshape(-1, WARP).argmax(1), WARP)
        writes[0](cta, mask, first.astype(np.uint32))
        writes[1](cta, mask, np.arange(cta.threads) % WARP == first)

    return execute
