"""What the emulated card raises where a card would fail, hang or give results that depend on luck."""

from __future__ import annotations


class Fault(Exception):
    """A kernel did what no card promises to carry out.  The message names the instruction and the CTA."""


class UnknownInstruction(Fault):
    """The emulator has no rule for an instruction: it never guesses."""


class Misaligned(Fault):
    """An address is no multiple of the access's size."""


class OutOfBounds(Fault):
    """An access outside of every allocation of the launch, or of the CTA's shared memory."""


class Unwritten(Fault):
    """A read of memory that nobody wrote."""


class Race(Fault):
    """Two accesses of one byte, one of them a write, that no barrier orders."""


class Deadlock(Fault):
    """Every thread waits, and nothing that is under way can wake one."""


class TensorMapError(Fault):
    """A tensor map that the CUDA driver would refuse to encode, or a box where TMA cannot put it."""
