"""Main loops as benchmarks/machine_code/sass.py reads them from machine code, and what their clocks add up to."""

import pytest

from benchmarks.machine_code import sass


def test_the_main_loop_is_the_innermost_with_a_product():
    text = """
.L_x_0:
        /*0000*/                   IADD3 R1, R1, 1, RZ ;
.L_x_1:
        /*0010*/              @!P1 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0030*/               @P0 BRA `(.L_x_1) ;
        /*0040*/                   STG.E.128 [R2], R4 ;
        /*0050*/               @P2 BRA `(.L_x_0) ;
.L_x_2:
        /*0060*/                   BRA `(.L_x_2) ;
"""
    loop = sass.main_loop(text)
    assert (loop.length, loop.products, loop.shapes) == (3, 1, ("HGMMA.64x128x16",))
    assert sass.main_loop("").length == 0


def test_a_pass_leaves_out_what_it_can_jump_over_and_keeps_what_it_cannot():
    text = """
.L_x_1:
        /*0000*/               @P0 BRA `(.L_x_2) ;
        /*0010*/                   IMAD R1, R2, R3, R4 ;
.L_x_2:
        /*0020*/                   UTMALDG.2D [UR4], [UR6] ;
        /*0030*/                   BRA `(.L_x_3) ;
.L_x_3:
        /*0040*/               @P3 BRA `(.L_x_4) ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
.L_x_4:
        /*0060*/               @P1 BRA `(.L_x_5) ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   STG.E.128 [R2], R4 ;
.L_x_5:
        /*0090*/               @P2 BRA `(.L_x_1) ;
        /*00a0*/                   EXIT ;
.L_x_6:
        /*00b0*/               @P4 BRA `(.L_x_6) ;
        /*00c0*/                   BRA `(.L_x_3) ;
"""
    loop = sass.main_loop(text)
    # Left out: the IMAD, and the epilogue.  A product is never jumped over, and the last BRA closes no loop.
    assert (loop.length, loop.kinds["IMAD"], loop.kinds["STG"], loop.kinds["HGMMA"]) == (7, 0, 0, 1)
    assert loop.ahead
    moved = text.replace("STG.E.128", "NOP").replace("IMAD R1", "STG.E R1")
    assert not sass.main_loop(moved).ahead  # stored before the loads are issued


def test_of_two_partitions_with_a_loop_for_the_rest_the_longer_main_loop_counts():
    product, jump = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24", "BRA `(.L_x_{})"
    loops = [(product, product), (product,), (product, product, "FADD R1, R2, R3"), (product,)]
    lines = []
    for place, body in enumerate(loops):
        lines += [f".L_x_{place}:", *(f"        /*0000*/    {text} ;" for text in (*body, jump.format(place)))]
    # A retry of a wait behind the program's end jumps into the middle of the first loop: it is no loop.
    lines.insert(2, ".L_x_9:")
    lines.append("        /*0000*/    BRA `(.L_x_9) ;")
    loop = sass.main_loop("\n".join(lines))
    assert (loop.length, loop.products, loop.kinds["FADD"]) == (4, 2, 1)


def pass_of(*instructions: str) -> sass.Loop:
    """The main loop of these instructions."""
    lines = [f"        /*0000*/        {text} ;" for text in (*instructions, "BRA `(.L_x_1)")]
    return sass.main_loop("\n".join([".L_x_1:", *lines]))


FIRST = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR12], RZ, !UPT"
LAST = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR12], R24, gsb0"
DRAINED, ONE_LEFT = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
BARRIER, WARPS_WAIT = "BAR.SYNC.DEFER_BLOCKING 0x0", "QMMA.16832.F32.E4M3.E4M3 R8, R4, R6, R8"
SCALED = ("FFMA R88, R24, R4, R88",) * 60


@pytest.mark.parametrize(
    ("instructions", "exposed"),
    [
        ((FIRST, LAST, DRAINED, BARRIER, *SCALED), 63),  # the wait, the barrier, the scaling and the turn
        ((FIRST, LAST, ONE_LEFT, BARRIER, *SCALED), 0),  # the product before is done, this one goes on
        ((FIRST, LAST, *SCALED, DRAINED, BARRIER), 3),  # scaled while it multiplies
        ((FIRST, LAST, FIRST, LAST, ONE_LEFT, *SCALED, DRAINED, BARRIER, *SCALED), 63),  # half of it so
        ((*SCALED, FIRST, DRAINED, BARRIER, LAST), 0),  # a group that has begun is not waited for
        ((f"@P0 {BARRIER}", *SCALED, WARPS_WAIT), 0),  # mma.sync waits itself
    ],
)
def test_what_is_issued_with_no_product_in_flight(instructions, exposed):
    assert pass_of(*instructions).exposed == exposed


def test_clocks_add_up_where_a_barrier_holds_all_warps_at_the_same_place():
    loop = pass_of(FIRST, LAST, DRAINED, BARRIER, *SCALED)
    tensor = loop.tensor_cycles(8, 4096, 2048)
    assert (loop.length, tensor) == (65, 256.0)  # two of 64x128x32, of two warpgroups
    # 63 instructions of 8 warps on 4 schedulers take 126 clocks in which the Tensor Core does nothing.
    assert loop.ceiling(tensor, warps=8) == 256 / (256 + 126)
    for rest, ceiling in (
        ((DRAINED, *SCALED), 1.0),  # no barrier: one warpgroup multiplies while the other scales
        ((DRAINED, *SCALED * 3), 256 / 368),  # 184 instructions to issue
        ((ONE_LEFT, BARRIER, *SCALED), 1.0),
    ):
        assert pass_of(FIRST, LAST, *rest).ceiling(tensor, warps=8) == ceiling


WIDE = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24"


@pytest.mark.parametrize(
    ("products", "warps", "clocks"),
    [
        (["QGMMA.64x256x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24"] * 2, 8, 2 * 2 * 64 * 256 * 32 / 4096),  # of a warpgroup
        ([WIDE] * 2, 4, 2 * 64 * 128 * 16 / 2048),
        ([WARPS_WAIT] * 2, 8, 2 * 8 * 16 * 8 * 32 / 4096),  # of a warp
        (["HMMA.16816.F32.BF16 R8, R4, R6, R8"] * 2, 4, 2 * 4 * 16 * 8 * 16 / 2048),
        (["UTCQMMA gdesc[UR4], gdesc[UR6], tmem[UR8]"] * 2, 4, 0),  # whose size no suffix says
        (["FFMA R8, R4, R6, R8"] * 2, 4, 0),
        # Attention's, which add up: FP8 at 4096 multiply-adds a clock, 16 bits at 2048.
        (["QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24", WIDE, WIDE], 8, 2 * (64 * 64 * 32 / 4096 + 2 * 64)),
    ],
)
def test_clocks_of_the_products_of_a_pass(products, warps, clocks):
    assert pass_of(*products).tensor_cycles(warps, 4096, 2048) == clocks


def test_bytes_of_a_pass_are_those_that_16_byte_loads_bring():
    loop = pass_of(
        "LDGSTS.E.BYPASS.128 [R6], desc[UR36][R14.64], P1",
        "@!P0 LDGSTS.E [R31+0xe000], desc[UR36][R12.64], P1",  # a scale
        "LDG.E.128 R8, desc[UR36][R6.64]",
        LAST,
    )
    assert loop.loaded == 32


@pytest.mark.parametrize(
    ("uses", "found"),
    [
        ("mov.b32 \t%r9, {%rs1, %rs2};", 0),  # stored in words
        ("st.shared.v2.b8 [%r6], {%rs1, %rs5};\nshr.u16 %rs17, %rs1, 8;", 0),  # taken apart
        ("mov.b32 \t%r9, {%rs1, %rs2};\nshr.u16 %rs17, %rs1, 8;", 1),  # both: wrong on an H200
        ("mov.b32 \t%r9, {%rs1, %rs2};\ncvt.rn.f16x2.e4m3x2 %r168, %rs2;", 1),
        ("mov.b32 \t%r9, {%rs1, %rs2};\nshr.u16 %rs17, %rs11, 8;", 0),  # of another register
    ],
)
def test_codes_that_ptxas_gets_wrong_are_seen_in_ptx(uses: str, found: int):
    made = "cvt.rn.satfinite.e4m3x2.f32  %rs1, %r2, %r3; \ncvt.rn.satfinite.e5m2x2.f32  %rs2, %r4, %r5; \n"
    assert sass.taken_apart(made + uses) == found
