"""The scheduler of a CTA: it runs the warps in an order of its choice.

Lanes with one program counter are a group.  A group runs until it must wait, until its lanes branch apart, or until it
comes to where other lanes of its warps are.  Without a seed the group that is furthest behind goes first, and what is
asynchronous happens at once.  With one, warps are split off and picked at random, and copies finish at random times:
what a kernel computes may not depend on either.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from emulator import accesses, conversions, forms, tensor_cores, warp_wide  # noqa: F401  they register their rules
from emulator.arithmetic import RULES
from emulator.barriers import Named
from emulator.cta import Cta
from emulator.faults import Deadlock, Fault, UnknownInstruction
from emulator.numbers import Array
from emulator.order import WARP, WARPGROUP
from emulator.reader import Instruction, Program
from emulator.registers import Mask, Reader, pointer, reader

# Instructions that a warp executes as a whole (.sync).
TOGETHER = ("shfl", "vote", "redux", "elect", "ldmatrix", "stmatrix", "wgmma", "mma")
MOST_STEPS = 4_000_000
READY, MEETING = ("ready",), ("meeting",)
SPLIT, LATER = 0.4, 0.3  # of a seeded schedule: how often a group is split, and a copy is finished, at a turn


@dataclass(frozen=True)
class Step:
    """An instruction, ready to execute.  kind: "plain", or what the scheduler does with it."""

    kind: str
    instruction: Instruction
    execute: Callable[..., None]
    guard: Reader | None
    operands: tuple[Reader, ...] = ()
    together: bool = False


@dataclass(eq=False)
class Group:
    """Lanes that stand at one instruction.

    waiting: READY, MEETING (of a warp), or the barrier or the number of registers that is waited for.
    """

    lanes: Array
    pc: int
    waiting: tuple = READY

    def warps(self) -> Array:
        """The numbers of its warps."""
        return np.flatnonzero(self.lanes.reshape(-1, WARP).any(1))


def prepare(program: Program) -> list[Step]:
    """Every instruction's rule, applied.  Raises UnknownInstruction with the text of one that has none."""
    return [_prepare(program, ins) for ins in program.instructions]


def _prepare(program: Program, ins: Instruction) -> Step:
    guard = reader(program, ins.guard, "pred") if ins.guard else None
    forms.check(ins)
    name = ins.opcode[0]
    try:
        if name == "bra":
            return Step("branch", ins, _nothing, guard)
        if name == "brx":
            return Step("table", ins, _nothing, guard, (reader(program, ins.operands[0], "u32"),))
        if name in ("ret", "exit"):
            return Step("end", ins, _nothing, guard)
        if name in ("bar", "barrier") and ins.opcode[1] == "warp":
            return Step("plain", ins, _nothing, guard, together=True)
        if name in ("bar", "barrier"):
            return Step("barrier", ins, _nothing, guard, tuple(reader(program, each, "u32") for each in ins.operands))
        if name == "setmaxnreg":
            return Step("registers", ins, _nothing, guard, together=True)
        if name == "mbarrier" and ins.opcode[1] in ("try_wait", "test_wait"):
            if guard:
                raise UnknownInstruction(f"{ins.text}: a wait under a predicate")
            operands = pointer(program, ins.operands[1]), reader(program, ins.operands[2], "u32")
            return Step("wait", ins, accesses.writer(program, ins.operands[0]), guard, operands)
        return Step("plain", ins, RULES[name](program, ins), guard, together=name in TOGETHER)
    except (KeyError, IndexError, ValueError) as error:
        raise UnknownInstruction(f"{ins.text}: {type(error).__name__}: {error}") from error


def _nothing(cta: Cta, mask: Mask) -> None:
    """What an instruction computes that only the scheduler acts on."""


class Scheduler:
    """Runs a CTA to its end.  `run` raises the first fault, with the instruction's text."""

    def __init__(self, cta: Cta, steps: list[Step]):
        self.cta, self.steps, self.random = cta, steps, cta.random
        self.threads = cta.threads
        self.groups = [Group(np.ones(cta.threads, bool), 0)]
        self.done = np.zeros(cta.threads, bool)
        self.executed = 0

    def run(self) -> None:
        """Execute all threads to their end."""
        while self.groups:
            if group := self._next():
                self._execute(group)
            elif self.cta.under_way:
                self.cta.finish(self._any(self.cta.under_way))
            else:
                raise Deadlock(self._who_waits())
            if self.random and self.cta.under_way and self.random.random() < LATER:
                self.cta.finish(self._any(self.cta.under_way))
            self._wake()
        for copy in list(self.cta.under_way):
            self.cta.finish(copy)

    def _any(self, of: list):
        return self.random.choice(of) if self.random else of[0]

    def _next(self) -> Group | None:
        """A group that can go on, taken from the list; lanes at the same instruction have become one."""
        ready: dict[int, Group] = {}
        for group in [each for each in self.groups if each.waiting == READY]:
            self.groups.remove(group)
            if group.pc in ready:
                ready[group.pc].lanes |= group.lanes
            else:
                ready[group.pc] = group
        if not ready:
            return None
        if self.random is None:
            chosen = ready.pop(min(ready))
        else:
            lanes = self.random.choice(list(ready.values())).lanes
            warp = int(self.random.choice(np.flatnonzero(lanes.reshape(-1, WARP).any(1)).tolist()))
            within = slice(WARP * warp, WARP * warp + WARP)
            chosen = ready.pop(min(pc for pc, group in ready.items() if group.lanes[within].any()))
            chosen, rest = self._split(chosen, warp, self.random)
            self.groups += rest
        self.groups += ready.values()
        return chosen

    def _split(self, group: Group, warp: int, by: random.Random) -> tuple[Group, list[Group]]:
        """At random: the group, or some of its warps with that one, and the others."""
        warps = group.warps().tolist()
        meets = self.steps[group.pc].instruction.opcode[0] == "wgmma"  # all warps of a warpgroup
        if len(warps) == 1 or meets or by.random() > SPLIT:
            return group, []
        some = {warp, *(each for each in warps if by.random() < 0.5)}
        lanes = group.lanes & np.repeat(np.isin(np.arange(self.threads // WARP), list(some)), WARP)
        rest = group.lanes & ~lanes
        return Group(lanes, group.pc), [Group(rest, group.pc)] if rest.any() else []

    def _execute(self, group: Group) -> None:
        """Run a group until it waits, branches apart, ends, or reaches other ready lanes (of its warps, if seeded)."""
        mask = Mask(group.lanes, bool(group.lanes.all()))
        stop, steps, pc = self._stop(group), self.steps, group.pc
        self.cta.active = group.lanes
        begun = False  # it executes one instruction, wherever the others are
        while not begun or pc < stop:
            begun = True
            step = steps[pc]
            try:
                if step.together:
                    whole = self._meet(group.lanes, pc)
                    if whole is None:
                        return
                    if whole is not group.lanes:
                        group.lanes, mask = whole, Mask(whole, bool(whole.all()))
                        self.cta.active = whole
                self.executed += 1
                taken = mask if step.guard is None else self._guarded(step.guard, step.instruction.negated, mask)
                if step.kind == "plain":
                    if taken is not None:
                        step.execute(self.cta, taken)
                    pc += 1
                    continue
                pc = self._flow(step, group, mask, taken, pc)
            except Fault as fault:
                where = f"{step.instruction.text[:200]}; CTA {self.cta.number}"
                raise type(fault)(f"{fault} [{where}]") from None
            if pc < 0:
                return
            if self.executed > MOST_STEPS:
                raise Deadlock(f"more than {MOST_STEPS} instructions executed: an endless loop?")
        self.groups.append(Group(group.lanes, pc))

    def _stop(self, group: Group) -> int:
        """Where other lanes stand that the group is to join: the least of their program counters."""
        others = [each for each in self.groups if each.waiting == READY]
        if self.random is not None:
            own = group.lanes.reshape(-1, WARP).any(1)
            others = [each for each in others if (each.lanes.reshape(-1, WARP).any(1) & own).any()]
        return min((each.pc for each in others), default=len(self.steps) + 1)

    def _guarded(self, guard: Reader, negated: bool, mask: Mask) -> Mask | None:
        """The lanes whose predicate lets them execute; None where there are none."""
        predicate = np.broadcast_to(guard(self.cta), self.threads)
        lanes = mask.lanes & (~predicate if negated else predicate)
        count = int(np.count_nonzero(lanes))
        return Mask(lanes, count == self.threads) if count else None

    def _meet(self, lanes: Array, pc: int) -> Array | None:
        """The lanes whose whole warps (all that have not ended) are here; the others wait here.  None: nobody."""
        for group in [each for each in self.groups if each.waiting == MEETING and each.pc == pc]:
            self.groups.remove(group)
            lanes = lanes | group.lanes
        here = np.repeat((lanes | self.done).reshape(-1, WARP).all(1), WARP)
        if self.steps[pc].instruction.opcode[0] == "wgmma":
            size = WARPGROUP
            here = np.repeat((lanes | self.done).reshape(-1, size).all(1), size)
        if (rest := lanes & ~here).any():
            self.groups.append(Group(rest, pc, MEETING))
            lanes = lanes & here
        return lanes if lanes.any() else None

    def _flow(self, step: Step, group: Group, mask: Mask, taken: Mask | None, pc: int) -> int:
        """What the scheduler does with an instruction: the next pc, or -1 where the group is put back or has ended."""
        if step.kind == "wait":
            return self._wait(step, mask, pc)
        if taken is None:
            return pc + 1
        rest = mask.lanes & ~taken.lanes
        if step.kind == "barrier":
            return self._barrier(step, taken, rest, pc)
        if step.kind == "registers":
            return self._deal(step.instruction, taken, rest, pc)
        if step.kind == "end":
            self.done |= taken.lanes
            if self.done.all():
                self.cta.end()
            targets = {}
        elif step.kind == "branch":
            targets = {step.instruction.targets[0]: taken.lanes}
        else:
            chosen = np.broadcast_to(step.operands[0](self.cta), self.threads)
            targets = {}
            for which in np.unique(chosen[taken.lanes]):
                target = step.instruction.targets[which]  # a table may name a label twice
                targets[target] = targets.get(target, False) | (taken.lanes & (chosen == which))
        if len(targets) == 1 and not rest.any():
            return next(iter(targets))
        if rest.any():
            targets[pc + 1] = targets[pc + 1] | rest if pc + 1 in targets else rest
        self.groups += [Group(lanes, target) for target, lanes in targets.items()]
        return -1

    def _barrier(self, step: Step, taken: Mask, rest: Array, pc: int) -> int:
        numbers = [np.broadcast_to(read(self.cta), self.threads)[taken.lanes] for read in step.operands]
        if any((each != each[0]).any() for each in numbers):
            raise UnknownInstruction("a barrier whose number differs between lanes")
        name, waits = int(numbers[0][0]), "sync" in step.instruction.opcode
        expected = int(numbers[1][0]) if len(numbers) > 1 else None
        barrier = self.cta.named.setdefault(name, Named(self.cta.order, self.threads))
        barrier.arrive(taken.lanes, Group(taken.lanes, pc).warps())
        if waits:
            self.groups.append(Group(taken.lanes.copy(), pc + 1, ("barrier", name, expected)))
        self._let_go(name, expected)
        return self._part(rest, pc) if waits else pc + 1

    def _deal(self, ins: Instruction, taken: Mask, rest: Array, pc: int) -> int:
        """setmaxnreg: warps that ask for more registers than are free wait for them."""
        count, warps = int(ins.operands[0]), Group(taken.lanes, pc).warps()
        if ins.opcode[1] == "dec":
            self.cta.pool.give(warps, count)
            return pc + 1
        served = np.repeat(np.isin(np.arange(self.threads // WARP), self.cta.pool.take(warps, count)), WARP)
        if (waits := taken.lanes & ~served).any():
            self.groups.append(Group(waits, pc, ("registers", count, None)))
        return self._part(rest | (taken.lanes & served), pc)

    def _part(self, lanes: Array, pc: int) -> int:
        """These lanes of the group go on behind the instruction."""
        if lanes.any():
            self.groups.append(Group(lanes, pc + 1))
        return -1

    def _let_go(self, name: int, expected: int | None) -> None:
        """Those who wait at a named barrier go on, if as many have come.  expected: None for all not done."""
        count = self.threads - int(self.done.sum()) if expected is None else expected
        if self.cta.named[name].complete(count):
            for group in self.groups:
                if group.waiting[:2] == ("barrier", name):
                    group.waiting = READY

    def _wait(self, step: Step, mask: Mask, pc: int) -> int:
        """mbarrier.try_wait: goes on when the phase is over, and until then is not tried again."""
        address, parity = (np.broadcast_to(read(self.cta), self.threads)[mask.lanes] for read in step.operands)
        if (address != address[0]).any() or (parity != parity[0]).any():
            raise UnknownInstruction("lanes of a group wait for different mbarriers")
        warps = Group(mask.lanes, pc).warps()
        barrier = self.cta.mbarriers.at(int(address[0]), int(warps[0]))
        if not barrier.over(int(parity[0])):
            self.groups.append(Group(mask.lanes, pc, ("mbarrier", int(address[0]), int(parity[0]))))
            return -1
        self.cta.order.acquire(warps, barrier.past)
        step.execute(self.cta, mask, np.ones(1, bool))
        return pc + 1

    def _wake(self) -> None:
        """Groups whose mbarrier's phase is over, and whose named barrier is complete because threads ended, go on."""
        for group in self.groups:
            if group.waiting in (READY, MEETING):
                continue
            kind, name, detail = group.waiting
            if kind == "mbarrier":
                barrier = self.cta.mbarriers.known.get(name)
                if barrier is None:
                    raise Fault(f"the mbarrier at {name} is invalidated while threads wait for it")
                if barrier.over(detail):
                    group.waiting = READY
            elif kind == "registers":
                if self.cta.pool.serves(group.warps(), name):
                    group.waiting = READY
            elif detail is None and self.cta.named[name].lanes.any():
                self._let_go(name, None)

    def _who_waits(self) -> str:
        lines = []
        for group in self.groups:
            text = self.steps[min(group.pc, len(self.steps) - 1)].instruction.text[:100]
            lines.append(f"warps {group.warps().tolist()} wait for {group.waiting} at {text!r}")
        return f"deadlock in CTA {self.cta.number}: " + "; ".join(lines)
