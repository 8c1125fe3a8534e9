"""What the emulated card refuses: bounds, alignment, unwritten memory, races, barriers that nobody completes, registers
that nobody gives.

Each wrong kernel stands beside the right one, which differs in the one instruction that is missing.
"""

import numpy as np
import pytest
from emulator.faults import Deadlock, Fault, Misaligned, OutOfBounds, Race, Unwritten
from ptx import execute, run, text

TWO_WARPS = 64
SEEDS = [None, 1, 2, 3]
MINE = "mad.wide.u32 %rd8, %r0, 4, %rd0;"  # the address of this thread's word of the first array
# Warp 0 writes its lane's word of shared memory, warp 1 reads the same word: what lies between orders them, or nothing.
HAND_OVER = """
and.b32 %r1, %r0, 31; shl.b32 %r2, %r1, 2; setp.lt.u32 %p1, %r0, 32;
{before}
@%p1 st.shared.b32 [%r2], %r1;
{between}
@!%p1 ld.shared.b32 %r3, [%r2];
mad.wide.u32 %rd8, %r1, 4, %rd0;
@!%p1 st.global.b32 [%rd8], %r3;
"""
WAIT = "$L{n}: mbarrier.try_wait.parity.shared.b64 %p{n}, [1024], {parity}; @!%p{n} bra $L{n};"
INIT = "setp.eq.u32 %p9, %r0, 0; @%p9 mbarrier.init.shared::cta.b64 [1024], {count}; bar.sync 0;"


def words(count: int = 64) -> np.ndarray:
    """Zeros."""
    return np.zeros(count, np.uint32)


def test_addresses_stay_inside_of_an_allocation():
    run(f"{MINE} st.global.b32 [%rd8], %r0;", [words(32)])
    with pytest.raises(OutOfBounds, match="4 bytes beyond"):
        run(f"{MINE} st.global.b32 [%rd8], %r0;", [words(31)])
    with pytest.raises(OutOfBounds, match="-4 bytes beyond"):
        run(f"{MINE} ld.global.b32 %r1, [%rd8+-4];", [words(32)])
    with pytest.raises(OutOfBounds, match="of 4096 bytes"):
        run("st.shared.b32 [4096], %r0;", [words()])
    with pytest.raises(OutOfBounds, match="shared address -4 of 4096 bytes"):
        run("ld.shared.b32 %r1, [global_smem+-4];", [words()])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_names_its_instruction_and_its_cta(seed: int | None):
    body = "mov.u32 %r1, %ctaid.x; setp.eq.u32 %p2, %r1, 2; @%p2 st.shared.b32 [4096], %r1;"
    with pytest.raises(OutOfBounds, match=r"\[@%p2 st\.shared\.b32 \[4096\], %r1; CTA 2\]$"):
        run(body, [words()], ctas=4, seed=seed)


def test_an_offset_that_overflows_32_bits_is_out_of_bounds():
    right = "mul.wide.u32 %rd7, %r0, {stride}; add.s64 %rd8, %rd0, %rd7;"
    wrong = "mul.lo.s32 %r1, %r0, {stride}; cvt.s64.s32 %rd7, %r1; add.s64 %rd8, %rd0, %rd7;"
    for addresses in (right, wrong):  # small strides: the same
        run(addresses.format(stride=4) + "ld.global.b32 %r2, [%rd8];", [words(32)])
    with pytest.raises(OutOfBounds):
        run(wrong.format(stride=1 << 28) + "ld.global.b32 %r2, [%rd8];", [words(32)])


def test_vectors_are_aligned_to_their_size():
    for shared in (False, True):
        space, base = ("shared", "[{}]") if shared else ("global", "[%rd0+{}]")
        store = f"st.{space}.v4.b32 {base}, " + "{{%r1, %r1, %r1, %r1}};"
        aligned = np.zeros(20, np.uint32)
        aligned = aligned[(-aligned.ctypes.data // 4) % 4 :][:16]
        run(f"setp.eq.u32 %p1, %r0, 0; @%p1 {store.format(16)}", [aligned])
        with pytest.raises(Misaligned, match="16 bytes a lane"):
            run(f"setp.eq.u32 %p1, %r0, 0; @%p1 {store.format(8)}", [aligned])


def test_a_read_of_shared_memory_that_nobody_wrote_is_named():
    run("shl.b32 %r1, %r0, 2; st.shared.b32 [%r1], %r0; ld.shared.b32 %r2, [%r1];", [words()])
    with pytest.raises(Unwritten, match="shared address 4 "):
        run("shl.b32 %r1, %r0, 2; st.shared.b32 [0], 1; ld.shared.b32 %r2, [%r1];", [words()])


@pytest.mark.parametrize("seed", SEEDS)
def test_warps_are_ordered_by_a_barrier_and_by_nothing_less(seed: int | None):
    found = words()
    run(HAND_OVER.format(before="", between="bar.sync 0;"), [found], threads=TWO_WARPS, seed=seed)
    assert found[:32].tolist() == list(range(32))
    for between in ("", "bar.warp.sync -1;", "fence.proxy.async.shared::cta;"):
        with pytest.raises((Race, Unwritten), match=r"not ordered|nobody wrote"):
            run(HAND_OVER.format(before="", between=between), [words()], threads=TWO_WARPS, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slot_is_written_again_only_after_it_was_read(seed: int | None):
    again = HAND_OVER + "{after} @%p1 st.shared.b32 [%r2], 7;"
    between = {"before": "", "between": "bar.sync 0;"}
    run(again.format(**between, after="bar.sync 0;"), [words()], threads=TWO_WARPS, seed=seed)
    with pytest.raises(Race, match=r"this (write|read) is not ordered after the last (read|write)"):
        run(again.format(**between, after=""), [words()], threads=TWO_WARPS, seed=seed)


def test_a_barrier_of_some_warps_orders_only_those():
    right, wrong = "bar.sync 1, 64;", "@%p1 bar.sync 1, 32; @!%p1 bar.sync 2, 32;"
    run(HAND_OVER.format(before="", between=right), [words()], threads=TWO_WARPS)
    with pytest.raises((Race, Unwritten)):
        run(HAND_OVER.format(before="", between=wrong), [words()], threads=TWO_WARPS)


def test_ctas_are_not_ordered_but_by_atomics():
    plain = "mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r0, 0; @%p1 st.global.b32 [%rd0], %r1;"
    run(plain, [words()], ctas=1)
    with pytest.raises(Race, match="by CTA 1 is not ordered after the last write, by CTA 0, warp 0"):
        run(plain, [words()], ctas=2)
    found = words()
    run("mov.u32 %r1, %ctaid.x; atom.global.gpu.relaxed.add.u32 %r2, [%rd0], %r1;", [found], ctas=3)
    assert found[0] == 32 * (1 + 2)


def test_what_a_cta_has_read_another_may_not_write_unordered():
    """Also where several warps, or several CTAs, have read a byte."""
    reads = "mov.u32 %r1, %ctaid.x; setp.lt.u32 %p1, %r1, {readers}; @%p1 ld.global.b32 %r2, [%rd0]; {barrier}"
    write = (
        "setp.eq.u32 %p2, %r1, {writer}; setp.eq.u32 %p3, %r0, 0; and.pred %p2, %p2, %p3; @%p2 st.global.b32 [%rd0], 1;"
    )
    alone = reads.format(readers=1, barrier="bar.sync 0;") + write.format(writer=0)
    run(alone, [words()], threads=TWO_WARPS)
    with pytest.raises(Race, match="this write by CTA 0 is not ordered after the last read, by several warps"):
        run(reads.format(readers=1, barrier="") + write.format(writer=0), [words()], threads=TWO_WARPS)
    for readers in (1, 2):
        both = reads.format(readers=readers, barrier="bar.sync 0;") + write.format(writer=2)
        for threads in (32, TWO_WARPS):
            with pytest.raises(Race, match="this write by CTA 2 is not ordered after the last read"):
                run(both, [words()], threads=threads, ctas=3)


TICKET = """
mov.u32 %r1, %ctaid.x; mov.u32 %r9, %nctaid.x; sub.s32 %r9, %r9, 1; setp.eq.u32 %p1, %r0, 0;
mad.wide.u32 %rd8, %r1, 4, %rd0;
@%p1 st.global.b32 [%rd8], %r1;
mov.b32 %r2, 0;
@%p1 atom.global.gpu.{sem}.add.u32 %r2, [%rd1], 1;
setp.eq.s32 %p2, %r2, %r9; and.pred %p2, %p2, %p1;
add.s32 %r4, %r1, 1; and.b32 %r4, %r4, %r9; mad.wide.u32 %rd9, %r4, 4, %rd0;
@%p2 ld.global.b32 %r3, [%rd9];
@%p2 st.global.b32 [%rd0], %r9;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_cta_may_read_what_the_others_released(seed: int | None):
    found = words()
    run(TICKET.format(sem="acq_rel"), [found, words()], ctas=4, seed=seed)  # the next CTA's word, of four
    assert found[0] == 3
    with pytest.raises(Race):
        run(TICKET.format(sem="relaxed"), [words(), words()], ctas=4, seed=seed)


LARGEST = """
mov.u32 %r1, %ctaid.x; mov.u32 %r9, %nctaid.x; sub.s32 %r9, %r9, 1; setp.eq.u32 %p1, %r0, 0;
@%p1 atom.global.gpu.relaxed.max.u32 %r3, [%rd0], %r1;
mov.b32 %r2, 0;
@%p1 atom.global.gpu.{sem}.add.u32 %r2, [%rd1], 1;
setp.eq.s32 %p2, %r2, %r9; and.pred %p2, %p2, %p1;
@%p2 atom.global.gpu.acq_rel.max.u32 %r4, [%rd0], 0;
@%p2 st.global.b32 [%rd2], %r4;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_an_atomic_that_reads_is_ordered_by_the_counter_of_those_who_are_done(seed: int | None):
    """As kernels/scaling.py's `finish`: the last CTA reads the maximum of all by a maximum with 0."""
    found = words()
    run(LARGEST.format(sem="acq_rel"), [words(), words(), found], ctas=4, seed=seed)
    assert found[0] == 3
    with pytest.raises(Race, match=r"an atomic of CTA . reads what CTA"):
        run(LARGEST.format(sem="relaxed"), [words(), words(), words()], ctas=4, seed=seed)


def test_lanes_that_disagree_about_one_address_are_a_race():
    run("st.shared.b32 [0], 5; st.global.b32 [%rd0], 5;", [words()])
    for store in ("st.shared.b32 [0], %r0;", "st.global.b32 [%rd0], %r0;"):
        with pytest.raises(Race, match="two lanes write different values"):
            run(store, [words()])


@pytest.mark.parametrize("seed", SEEDS)
def test_an_mbarrier_hands_over_and_waits_for_its_phase(seed: int | None):
    """Warp 0 arrives after each of two writes; warp 1 waits for each, and gives the slot back by a second barrier."""
    arrive = "@%p1 mbarrier.arrive.shared::cta.b64 _, [1024];"
    wait = WAIT.format(n=3, parity=0)
    between = "{arrive} @%p1 bra $READ; {wait} $READ:"
    init = INIT.format(count=32)
    found = words()
    right = between.format(arrive=arrive, wait=wait)
    run(HAND_OVER.format(before=init, between=right), [found], threads=TWO_WARPS, seed=seed)
    assert found[:32].tolist() == list(range(32))
    wrong_phase = between.format(arrive=arrive, wait=WAIT.format(n=3, parity=1))  # returns at once: the phase before
    with pytest.raises((Race, Unwritten, Deadlock)):  # a hang, where the phase is over before warp 1 comes
        run(HAND_OVER.format(before=init, between=wrong_phase), [words()], threads=TWO_WARPS, seed=seed)
    with pytest.raises(Deadlock, match=r"warps \[1\] wait for \('mbarrier', 1024, 0\)"):
        run(HAND_OVER.format(before=init, between=between.format(arrive="", wait=wait)), [words()], threads=TWO_WARPS)
    with pytest.raises(Fault, match="more arrivals"):
        run(INIT.format(count=31) + "mbarrier.arrive.shared::cta.b64 _, [1024], 33;", [words()])
    with pytest.raises(Fault, match=r"nobody wrote|no mbarrier"):
        run("mbarrier.arrive.shared::cta.b64 _, [1024];", [words()])


@pytest.mark.parametrize("seed", SEEDS)
def test_an_mbarrier_is_initialised_before_other_warps_use_it(seed: int | None):
    """For the warps of its own CTA a barrier is enough, and a fence is not."""
    init = "setp.eq.u32 %p9, %r0, 0; @%p9 mbarrier.init.shared::cta.b64 [1024], 64;"
    arrival = init + "{} mbarrier.arrive.shared::cta.b64 _, [1024];"
    run(arrival.format("bar.sync 0;"), [words()], threads=TWO_WARPS, seed=seed)
    for between in ("", "fence.mbarrier_init.release.cluster;", "fence.proxy.async.shared::cta;", "bar.warp.sync -1;"):
        with pytest.raises((Race, Unwritten), match=r"not ordered after the last write|nobody wrote it"):
            run(arrival.format(between), [words()], threads=TWO_WARPS, seed=seed)


def test_a_barrier_that_a_warp_never_reaches_is_a_deadlock():
    with pytest.raises(Deadlock, match=r"wait for .'barrier', 0"):
        run("setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 0, 64;", [words()], threads=TWO_WARPS)


@pytest.mark.parametrize("seed", SEEDS)
def test_cp_async_is_there_after_its_wait(seed: int | None):
    copy = f"{MINE} shl.b32 %r2, %r0, 2; cp.async.ca.shared.global [%r2], [%rd8], 0x4; cp.async.commit_group;"
    store = "ld.shared.b32 %r3, [%r2]; mad.wide.u32 %rd9, %r0, 4, %rd1; st.global.b32 [%rd9], %r3;"
    source, found = np.arange(64, dtype=np.uint32), words()
    run(f"{copy} cp.async.wait_group 0; {store}", [source, found], threads=TWO_WARPS, seed=seed)
    assert np.array_equal(found, source)
    for wait in ("", "cp.async.wait_group 1;"):
        with pytest.raises(Race, match="not ordered"):
            run(f"{copy} {wait} {store}", [source, words()], threads=TWO_WARPS, seed=seed)


def test_an_endless_loop_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("emulator.scheduler.MOST_STEPS", 1000)
    with pytest.raises(Deadlock, match="endless loop"):
        run("$A: bra.uni $A;", [words()])


# Registers that warps give and take.
BRANCH = """setp.lt.u32 %p1, %r0, 128; @%p1 bra $FIRST;
setmaxnreg.dec.sync.aligned.u32 LEAVES; bra $END;
$FIRST: setmaxnreg.inc.sync.aligned.u32 TAKES; mad.wide.u32 %rd9, %r0, 4, %rd0; st.global.b32 [%rd9], 7;
$END:"""


def taken(leaves: int, takes: int, seed: int | None, most: int = 128) -> np.ndarray:
    """Two warpgroups that begin with 128 registers a thread; what the first, which takes more, has written."""
    found = words(256)
    body = BRANCH.replace("LEAVES", str(leaves)).replace("TAKES", str(takes))
    execute(text(body, [found], 256, f".maxnreg {most}" if most else ""), [found], seed=seed)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_warps_wait_for_registers_that_others_give(seed: int | None):
    assert taken(40, 216, seed).tolist() == [7] * 128 + [0] * 128


@pytest.mark.parametrize("seed", SEEDS)
def test_more_than_the_others_leave_is_a_deadlock(seed: int | None):
    with pytest.raises(Deadlock, match=r"wait for \('registers', 224, None\)"):
        taken(40, 224, seed)


@pytest.mark.parametrize(
    ("leaves", "takes", "most", "words"),
    [
        (136, 128, 128, r"setmaxnreg.dec to 136"),
        (40, 120, 128, r"setmaxnreg.inc to 120"),
        (44, 128, 128, "multiples of 8"),
        (16, 128, 128, "from 24 to 256"),
        (40, 128, 0, "without .maxnreg"),
        (40, 128, 264, "launches no such CTA"),
    ],
)
def test_setmaxnreg_without_a_defined_effect_is_refused(leaves: int, takes: int, most: int, words: str):
    with pytest.raises(Fault, match=words):
        taken(leaves, takes, None, most)
