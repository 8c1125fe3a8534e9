"""Forms: every spelling of an instruction that the rules of this card honour, as the PTX ISA writes it.

A line names the words of one form in their order.  `a|b` is either word, `[a|b]` may be there, and `(a|b)` may be there
and has no effect here, for the reason behind the dashes; `*` stands for any characters.  Capitals are in TYPES.

`shared::cluster` is the CTA's own memory: Triton writes it without clusters too, and these are refused (reader.py).

An instruction in no form is an error that names the first word that has no place in one: what a rule was not written
for is never skipped.  A rule may still refuse operands.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import NamedTuple

from emulator.faults import UnknownInstruction
from emulator.reader import Instruction

TYPES = {
    "INT": "u16|s16|u32|s32|u64|s64",
    "WHOLE": "u8|s8|u16|s16|u32|s32|u64|s64",
    "BITS": "b16|b32|b64",
    "ANY": "b8|u8|s8|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64",
    "COMPARED": "eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan|lo|ls|hi|hs",
}
FORMS = """
mov ANY|pred
selp ANY
cvta [to] global|param u64
add|sub INT
add|sub|mul [rn] [ftz] f32
add|sub|mul f16x2|bf16x2
mul lo|wide INT
mul hi u32|s32
mad lo|wide INT
fma rn [ftz] f32
div|rem|min|max INT
min|max relu s32
div rn|full|approx [ftz] f32
min|max [ftz] f32
and|or|xor|not BITS|pred
neg|abs s16|s32|s64|f16|bf16|f16x2|bf16x2
neg|abs [ftz] f32
shl BITS
shr BITS|INT
shf l|r wrap b32
rcp|sqrt approx|rn [ftz] f32
ex2|lg2|rsqrt|sin|cos approx [ftz] f32
tanh approx f32
setp COMPARED [ftz] f32
setp COMPARED INT|BITS|f16|bf16|f16x2|bf16x2
popc b32|b64
bfe u32|s32
bfi|prmt b32

cvt WHOLE WHOLE
cvt rn f32|f16|bf16|f16x2|bf16x2 f32
cvt rn f32 WHOLE
cvt rz f16 f32
cvt f32 f16|bf16
cvt rzi [ftz] WHOLE f32
cvt rn satfinite e4m3x2|e5m2x2 f32|f16x2
cvt rn f16x2 e4m3x2|e5m2x2

shfl sync bfly|idx b32
vote sync any|all pred
vote sync ballot b32
redux sync add|min|max u32|s32
redux sync and|or|xor b32
elect sync

ld param ANY
ld global (ca|cg|cs|lu) (L1::*) (L2::*) [v2|v4] ANY -- caches
st global (wb|cg|cs|wt) (L1::*) (L2::*) [v2|v4] ANY -- caches
ld|st shared|shared::cta [v2|v4] ANY
atom|red global gpu|sys relaxed|acq_rel add u32|s32|u64|f32|f64
atom|red global gpu|sys relaxed|acq_rel min|max u32|s32|u64|s64
atom|red global gpu|sys relaxed|acq_rel and|or|xor|exch b32|b64
createpolicy fractional (L2::*) (L2::*) b64 -- caches
prefetch (global|param) (L1|L2|tensormap) -- caches
nanosleep u32
griddepcontrol (launch_dependents|wait) -- launches run one after the other

cp async ca|cg shared|shared::cta global (L2::64B|L2::128B|L2::256B) -- caches
cp async commit_group|wait_group
cp async bulk commit_group
cp async bulk wait_group [read]
cp async bulk tensor 2d global shared::cta [tile] bulk_group (L2::cache_hint) -- caches
cp async bulk tensor 2d shared::cta|shared::cluster global [tile] mbarrier::complete_tx::bytes (L2::cache_hint)
mbarrier init|inval shared|shared::cta b64
mbarrier arrive [expect_tx] [release] (cta|cluster) shared|shared::cta|shared::cluster b64 -- either holds in a CTA
mbarrier expect_tx [relaxed] (cta|cluster) shared|shared::cta|shared::cluster b64 -- the same
mbarrier try_wait|test_wait parity [acquire] (cta|cluster) shared|shared::cta b64 -- the same
fence proxy async [shared::cta|shared::cluster]
fence mbarrier_init release cluster
fence acq_rel|sc cta|cluster|gpu|sys
membar cta|gl|sys

ldmatrix|stmatrix sync aligned m8n8 x1|x2|x4 [trans] shared|shared::cta b16
mma sync aligned m16n8k16 row col f32 f16 f16 f32
mma sync aligned m16n8k16 row col f32 bf16 bf16 f32
mma sync aligned m16n8k32 row col f32 e4m3|e5m2 e4m3|e5m2 f32
wgmma fence|commit_group|wait_group sync aligned
wgmma mma_async sync aligned m64n*k16 f32 f16 f16
wgmma mma_async sync aligned m64n*k16 f32 bf16 bf16
wgmma mma_async sync aligned m64n*k32 f32 e4m3|e5m2 e4m3|e5m2

bra|ret [uni]
brx idx [uni]
exit
bar|barrier [cta] sync|arrive (aligned) -- races between the lanes of a warp are not judged
bar warp sync
setmaxnreg inc|dec sync aligned u32
"""


class Slot(NamedTuple):
    """One place of a form."""

    words: tuple[str, ...]
    optional: bool

    def takes(self, word: str) -> bool:
        """Whether a word may stand here."""
        return any(fnmatchcase(word, each) for each in self.words)


def _read(text: str) -> dict[str, list[list[Slot]]]:
    """The forms of each instruction's name."""
    found: dict[str, list[list[Slot]]] = {}
    for line in filter(None, text.splitlines()):
        names, *places = re.sub(r"\b[A-Z]{3,}\b", lambda name: TYPES[name[0]], line.partition(" -- ")[0]).split()
        slots = [Slot(tuple(place.strip("[]()").split("|")), place[0] in "[(") for place in places]
        for name in names.split("|"):
            found.setdefault(name, []).append(slots)
    return found


KNOWN = _read(FORMS)


def check(ins: Instruction) -> None:
    """Raise UnknownInstruction for a spelling in no form, with its first word that is out of place."""
    name, *words = ins.opcode
    placed, complete = max((_fits(slots, words) for slots in KNOWN.get(name, ())), default=(0, False))
    if placed < len(words) or not complete:
        what = name if name not in KNOWN else f".{words[placed]} of {name}" if words[placed:] else f"a shorter {name}"
        opcode = ".".join(ins.opcode)
        raise UnknownInstruction(f"{opcode}: the emulated card has no rule for {what} (tests/emulator/forms.py)")


def _fits(slots: list[Slot], words: list[str]) -> tuple[int, bool]:
    """How many of the words have a place in a form, and whether the form has all that it needs."""
    place = 0
    for slot in slots:
        if place < len(words) and slot.takes(words[place]):
            place += 1
        elif not slot.optional:
            return place, False
    return place, True
