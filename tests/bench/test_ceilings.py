"""Ceilings: what a kernel moves and has on its way by its machine code, the least of three shares, and their tables.

Numbers of the card: an H200 has 132 multiprocessors of 1.83 GHz and 4.8 TB/s, which is 19.87 bytes a clock and
multiprocessor, and with 0.8 us of latency 29,091 bytes on their way.
"""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import triton

from benchmarks import codegen, distance
from benchmarks.machine_code import baselines, ceilings, judge, launches, offline, tables, traffic
from fp8engine.numerics import memory_time
from fp8engine.numerics.cards import CARDS, H100_SXM, H200
from fp8engine.numerics.matmul_time import L2_OF_CARD, L2_OF_PROCESSOR, LATENCY

KERNELS = json.loads(baselines.path(baselines.DEVELOPED).read_text())["kernels"]
CASES = {case.name: case for case in launches.cases()}


def of(name: str, card=H100_SXM, **changed) -> ceilings.Shares:
    """The ceilings of a kernel of the baseline, or of one that differs so."""
    found = ceilings.of(name, KERNELS[name] | changed, card)
    assert found is not None
    return found


def sass_of(*lines: str) -> str:
    """Machine code of these instructions and labels."""
    return "\n".join(line if line.endswith(":") else f"        /*0010*/    {line} ;" for line in lines)


LOAD, SECOND = "LDG.E.128 R4, desc[UR4][R2.64]", "LDG.E.128 R8, desc[UR4][R2.64+0x1000]"
STORE = "STG.E.128 desc[UR4][R2.64], R4"
THIRD = ("LDG.E.128 R12, desc[UR4][R2.64]", "LDG.E.128 R16, desc[UR4][R2.64]")


def test_a_pass_is_the_shortest_of_the_ways_that_move_the_most():
    """Two arms: one loads, casts and stores in 3 + 2 instructions; the other measures, and is shorter."""
    before, slow = "LDG.E R30, desc[UR4][R2.64]", "CALL.REL.NOINC `(slow)"  # jumped over on the shorter way
    first = (LOAD, "@P0 BRA `(.L_x_2)", "FADD R4, R5, R6", "@P1 BRA `(.L_x_4)", slow, ".L_x_4:", STORE)
    other = ("BRA `(.L_x_3)", ".L_x_2:", "FADD R20, R5, R6", ".L_x_3:", "@P0 BRA `(.L_x_1)", "EXIT")
    text = sass_of(before, ".L_x_1:", *first, *other)
    # LDG, BRA, FADD, BRA, STG, BRA, BRA: neither the slow path nor the other arm.
    assert traffic.of(text) == traffic.Traffic(loaded=16, stored=16, instructions=7, in_flight=16)


def test_a_shorter_way_that_is_laid_behind_a_longer_one_counts():
    add = "FADD R20, R5, R6"
    ways = ("@P1 BRA `(.L_x_1)", add, add, add, "BRA `(.L_x_2)", ".L_x_1:", add, ".L_x_2:")
    assert traffic.of(sass_of(LOAD, *ways, STORE, "EXIT")).instructions == 5  # LDG, BRA, FADD, STG, EXIT


def test_loops_after_each_other_that_load_the_same_are_one_pass():
    first = (".L_x_1:", LOAD, "FADD R4, R5, R6", STORE, "@P0 BRA `(.L_x_1)")
    second = (".L_x_2:", LOAD, STORE, "@P0 BRA `(.L_x_2)")
    outer = (".L_x_0:", *first, *second, "@P1 BRA `(.L_x_0)", "EXIT", "BRA `(.L_x_0)")
    found = traffic.of(sass_of(*outer))
    assert found == traffic.Traffic(loaded=16, stored=32, instructions=7, in_flight=16)
    less = traffic.of(sass_of(*outer).replace(LOAD, "LDG.E R4, desc[UR4][R2.64]", 1))
    assert less == traffic.Traffic(loaded=16, stored=16, instructions=3, in_flight=16)  # the second loop loads more


def test_a_kernel_without_a_loop_is_one_pass_and_a_retry_behind_its_end_no_loop():
    text = sass_of(LOAD, SECOND, "FADD R4, R5, R9", STORE, "EXIT", ".L_x_1:", LOAD, "BRA `(.L_x_1)")
    assert traffic.of(text) == traffic.Traffic(loaded=32, stored=16, instructions=5, in_flight=32)


@pytest.mark.parametrize(
    ("body", "bytes_of_a_thread"),
    [
        ((LOAD, SECOND, "FADD R1, R4, R8"), 32),
        ((LOAD, "FADD R1, R7, R7", SECOND), 16),  # the last of its four registers
        ((LOAD, SECOND, "FADD R1, R8, R8", *THIRD), 32),  # waits for the first too: else 48
        ((LOAD, "LDG.E.128 R12, desc[UR4][R4.64]"), 16),  # an address that is loaded itself
        ((LOAD, "LDG.E R20, desc[UR4][R2.64]"), 16),  # a scale beside the tensor
        (("LDG.E.U16 R20, desc[UR4][R2.64]", "@P1 LDG.E.U16 R21, desc[UR4][R2.64+0x2]"), 4),
        ((), 0),
    ],
)
def test_bytes_on_their_way(body, bytes_of_a_thread):
    assert traffic.in_flight(body) == bytes_of_a_thread


def test_what_is_loaded_beyond_a_tile_is_no_tensor():
    """64x64 in BF16 by 8 warps are 64 64 2 / 256 = 32 bytes a thread; 64 bytes of scales come as wide as the tensor."""
    text = sass_of(LOAD, SECOND, *[LOAD.replace("R4,", f"R{place},") for place in range(40, 56, 4)], "EXIT")
    kernel = SimpleNamespace(arg_names=["x"])
    launch = SimpleNamespace(kernel=kernel, signature={"x": "*bf16"}, by_name={"BLOCK_M": 64, "BLOCK_K": 64})
    made = offline.Compiled("", text, 0, 8, 32, 0, ())
    assert traffic.of(text)[::3] == (96, 96)
    assert traffic.of_launch(launch, made)[::3] == (32, 32)  # pyright: ignore[reportArgumentType]
    launch.by_name["BLOCK_N"] = 64  # two operands
    assert traffic.of_launch(launch, made)[::3] == (96, 96)  # pyright: ignore[reportArgumentType]


def test_a_cast_is_held_against_bandwidth_and_latency():
    """Delayed with the transpose: three programs of 4 warps and 64 bytes a thread on their way are 24,576 bytes."""
    name = "cast_transpose tensor predicted sm_90: 1 _measure_kernel"
    row = KERNELS[name]
    assert (row["resident"], row["in_flight"]) == (3, 3 * 128 * 64)
    found = of(name, H200)
    assert found.loads == pytest.approx(24576 / 29091, rel=1e-3)  # 84 % of the bandwidth
    assert found.issue == pytest.approx(row["bytes_per_clock"] / 19.87, rel=1e-3)
    assert (found.of, found.l2) == ("memory", 1.0)
    assert found.least < 0.85
    slower = of(name)
    assert slower.loads == pytest.approx(min(1.0, 24576 / (29091 * 3.35 / 4.8)), rel=1e-3)


def test_a_promoted_matmul_asks_more_of_l2_than_comes():
    """128x128 in FP8: (1/128 + 1/128) 4096 = 64 bytes a clock; a card gives L2_OF_CARD / 132."""
    name = tables.PRODUCTS["Gluon promoted, 1 + 4 + 4 warps"]
    found = of(name)
    assert (found.of, found.issue, found.loads) == ("Tensor Cores", 0.92, 1.0)
    assert found.l2 == pytest.approx(min(L2_OF_PROCESSOR, L2_OF_CARD / 132) / 64)
    assert (found.least, found.limit) == (found.l2, "L2")


def test_attention_is_held_against_the_products_that_its_result_needs():
    """Of 64 queries by 64 keys and 128 columns: two products in FP8, of 64 64 128 / 4096 = 128 clocks each."""
    name = "attention 128 full sm_90"
    row = KERNELS[name]
    assert row["tensor_cycles"] == 2 * 128
    assert row["bytes_per_clock"] == 2 * 64 * 128 / 256  # of keys and of values: 64
    found = of(name)
    assert found.issue == pytest.approx(min(2 * row["ceiling"] / 100, 256 / row["busy_cycles"]))
    assert (found.limit, row["resident"]) == ("issue", 2)
    assert row["busy_cycles"] == row["loop"] > 64 * 64 / 16  # 4 warps on 4 schedulers; the exponentials take less
    # Backward one product in FP8 and three in 16 bits: 128 + 3 256 clocks.
    name = "attention_backward 128 full sm_90: 2 _by_keys_kernel"
    assert KERNELS[name]["tensor_cycles"] == 896
    # Both warpgroups multiply all 64x64 of s and of dP, 2 (128 + 256) + 2 256 clocks, of which 896 are needed.
    found = of(name)
    assert found.issue <= 896 / 1280


def test_two_programs_fill_each_others_gaps_until_the_issue_slots_are_full():
    name = "attention 128 full sm_90"
    gaps = {"ceiling": 30, "tensor_cycles": 256.0, "busy_cycles": 300.0}
    for resident, share in ((1, 0.30), (2, 0.60), (3, 256 / 300)):
        assert of(name, **gaps, resident=resident).issue == pytest.approx(share)
    loads = of(name, **gaps, shared=1000, in_flight=0, resident=1).loads
    assert loads == 1000 / (KERNELS[name]["bytes_per_clock"] * LATENCY)


def test_cards_but_hopper_have_issue_slots_alone_and_rows_of_before_nothing():
    name = "attention 128 causal sm_89"
    found = of(name)
    assert (found.l2, found.loads, found.least) == (None, None, found.issue)
    assert ceilings.of("quantize row bfloat16 sm_89", KERNELS["quantize row bfloat16 sm_89"], H200) is None
    assert ceilings.of(name, {"ceiling": 90}, H100_SXM) is None
    assert ceilings.line(None).split() == ["-"] * 6


def test_every_hopper_kernel_of_the_baseline_has_its_three_ceilings(capsys, monkeypatch):
    monkeypatch.setattr(triton, "__version__", baselines.DEVELOPED)  # of the file: nothing is compiled here
    assert codegen.main(["--ceilings", "--baseline", str(baselines.path(baselines.DEVELOPED))]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[-6:] == ["of", "issue", "L2", "loads", "least", "limit"]
    printed = {line[: max(map(len, KERNELS))].strip() for line in lines if "sm_90" in line}
    assert printed == {name for name in KERNELS if "sm_90" in name}
    assert all(0 < of(name, H200).least <= 1 for name in printed)


TRAFFIC = judge.Row(
    "k", 60, 0, 64, 4, 0, 0, "", 0.0, 1000.0, 0, 12.0, (), (), False, 90, True,
    matmul=False, resident=4, in_flight=32768,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"in_flight": 32767}, ["32767 bytes on their way to a multiprocessor, were 32768"]),
        ({"bytes_per_clock": 11.0}, []),  # a tenth: scheduling
        ({"bytes_per_clock": 10.8}, ["issues 10.8 bytes a clock at most, were 12.0"]),
        ({"in_flight": 65536, "bytes_per_clock": 20.0}, []),  # a gain is no loss
    ],
)
def test_less_on_its_way_or_more_instructions_are_losses(change, words):
    before, now = judge.baseline_of([TRAFFIC])["k"], dataclasses.replace(TRAFFIC, **change)
    assert judge.losses(now, before) == words
    old = {field: before[field] for field in ("programs", "loop", "ceiling", "shape")}
    assert judge.losses(now, old | {"accesses": ()}) == []  # a baseline of before


def test_attention_with_a_lower_ceiling_is_a_loss():
    name = "attention 128 full sm_90"
    (row,) = judge.compile_case(CASES[name])
    assert judge.losses(row, KERNELS[name]) == []
    (told,) = judge.losses(dataclasses.replace(row, ceiling=row.ceiling - 1), KERNELS[name])
    assert told == f"at most {row.ceiling - 1} % of the Tensor Core's rate, was {row.ceiling} %"


def test_a_launch_says_how_many_programs_it_starts():
    """On 4 pretended multiprocessors: a cast per tensor 4 on each, a matmul 1; attention one for 64 rows of a head."""
    for name, programs in {
        "quantize tensor bfloat16 sm_90": 4 * 4,
        tables.PRODUCTS["FP8 fast 128x256x128, 8 warps"]: 4,
        "attention 128 full sm_90": 4096 // 64 * 2 * 16,
    }.items():
        first, *_ = judge.launched(CASES[name]).values()
        assert first.programs == programs


# How a kernel of memory_time.KERNELS is named in the baseline: of several that share a name, the least counts.
CASTS = {
    "measure": ("quantize tensor bfloat16 sm_90: 1 _measure_kernel", "cast_transpose tensor sm_90: 1 _measure_kernel"),
    "cast": ("quantize tensor bfloat16 sm_90: 2 _cast_kernel",),
    "cast transposed": ("cast_transpose tensor sm_90: 2 _cast_kernel",),
    "measure predicted": ("quantize tensor predicted bfloat16 sm_90: 1 _measure_kernel",),
    "measure predicted transposed": ("cast_transpose tensor predicted sm_90: 1 _measure_kernel",),
    "line_amax": ("cast_transpose row sm_90: 1 _line_amax_kernel", "quantize column sm_90: 1 _line_amax_kernel"),
    "line_cast": ("quantize column sm_90: 2 _line_cast_kernel",),
    "line_cast transposed": ("cast_transpose row sm_90: 2 _line_cast_kernel",),
    "short": ("quantize row bfloat16 sm_90", "quantize 1x128 bfloat16 sm_90", "quantize 128x128 bfloat16 sm_90"),
    "short transposed": ("cast_transpose 1x128 sm_90", "cast_transpose 128x128 sm_90"),
    "column_sums": ("cast_transpose 1x128 sums sm_90: 2 _column_sums_kernel",),
}


def test_the_shares_of_casts_are_those_of_the_machine_code():
    assert set(memory_time.KERNELS) == set(CASTS)
    for kernel, names in CASTS.items():
        for card in CARDS.values():
            found = [ceilings.of(name, KERNELS[name], card) for name in names]
            least = min(min(one.issue, one.loads or 0) for one in found if one is not None)
            assert memory_time.share(kernel, card) == pytest.approx(least, abs=0.005), (kernel, card.name)
    assert memory_time.share("another", H200) == 1.0


def test_the_documents_say_what_the_model_and_the_baseline_say():
    assert distance.written() == distance.PAGE.read_text()


def test_the_distance_is_of_48_layers_and_144_matmuls():
    assert [len(distance.shapes(direction)) for direction in distance.DIRECTIONS] == [48] * 3
    assert sorted(distance.shapes("wgrad")) == sorted((n, k, m) for m, n, k in distance.shapes("forward"))
    for sums, (_, _, kernels) in distance.SUMS.items():
        for kernel in kernels:
            assert all(0.1 < share < 1 for share in distance.shares(H100_SXM, kernel, sums, "forward"))
    block, fast = (distance.shares(H100_SXM, "Triton", sums, "wgrad") for sums in ("block", "fast"))
    assert sum(block) < sum(fast)  # 64 bytes a clock from L2 instead of 48
