"""Kernels compiled without a card, and what counts as a fault or a loss in their machine code."""

import dataclasses
import importlib
import json
import re

import pytest

from benchmarks.machine_code import baselines, judge, launches, offline, sass
from fp8engine.errors import VersionError
from fp8engine.kernels.tuning import Config, pick, table

BASELINE = json.loads(baselines.path(baselines.DEVELOPED).read_text())["kernels"]
CASES = {case.name: case for case in launches.cases()}
OPERAND = launches._operand(launches.SIZE, launches.SIZE, -1, -1)
MATMUL = importlib.import_module("fp8engine.kernels.matmul")


def test_the_default_kernel_is_hopper_code():
    config = table()["matmul_fp8"]["sm_90"]["large"]
    (default,) = judge.compile_case(CASES[f"matmul_fp8 tensor sm_90 {config} plain"])
    assert judge.failures(default) == []
    assert (default.shape, default.products, default.spills) == ("QGMMA.64x256x32", 4, 0)
    assert default.loop <= 115  # flattened: 90 and the places of the next tile's loads
    assert default.shared <= 232_448
    # 128x256x128 multiply-adds at 4096 a clock; 48 KiB of operands in that time.
    assert (default.tensor_cycles, default.bytes_per_clock) == (1024.0, 48.0)
    assert default.issue_cycles == default.loop * 2  # 8 warps on 4 schedulers
    assert default.issue_cycles < default.tensor_cycles
    assert default.ceiling == 100
    assert any("bulk.tensor" in access for access in default.accesses)


@pytest.mark.parametrize("flatten", [True, False])
def test_a_flattened_loop_loads_the_next_tile_before_it_stores_one(flatten: bool):
    with offline.caught(90) as caught:
        MATMUL.matmul_fp8(OPERAND, OPERAND, launches.Epilogue(), False, Config(64, 128, 128, warps=4, flatten=flatten))
    loop = sass.main_loop(caught[0].compile().sass)
    assert (loop.products, loop.ahead) == (4, flatten)
    assert loop.length < 110  # a pass without the epilogue


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["matmul_block 1x128 1x128", "matmul_fp8_promoted tensor"])
def test_a_card_of_sm_120_gets_what_it_can_run(operation: str):
    """Hopper's configurations ask for 131,096 bytes there; a program may have 101,376."""
    config = pick(operation.split()[0], (12, 0), 8192, 8192)
    case = dataclasses.replace(CASES[f"{operation} sm_89 {config} plain"], architecture=120)
    (row,) = judge.compile_case(case)
    assert row.spills <= (16 if "block" in operation else 0)  # in 254 registers; no card of sm_120 has timed it
    assert [why for why in judge.failures(row) if why != judge.spilled(row.spills)] == []
    assert row.shape.startswith("QMMA.")
    with offline.caught(120) as launches:
        case.launch()
    # What is promoted is added in FP32 outside of the Tensor Core: else its sum has about 13 bits.
    assert re.search(r"(add|fma)(\.rn)?\.f32", launches[0].compile().ptx)


BLOCK = f"matmul_block {{}} sm_90 {pick('matmul_block', (10, 0), 8192, 8192)} plain"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "architecture", "shape"),
    [
        ("quantize row bfloat16 sm_90", 100, ""),
        ("quantize row bfloat16 sm_90", 120, ""),
        ("cast_transpose 1x128 sums sm_90", 100, ""),
        ("cast_transpose 1x128 sums sm_90", 120, ""),
        (BLOCK.format("1x128 1x128"), 100, "UTCQMMA"),  # tcgen05
        (BLOCK.format("1x128 128x128"), 100, "UTCQMMA"),
    ],
)
def test_casts_and_block_matmuls_are_sound_on_cards_that_are_newer(name: str, architecture: int, shape: str):
    rows = judge.compile_case(dataclasses.replace(CASES[name], architecture=architecture))
    assert [(judge.failures(row), row.shape) for row in rows] == [([], shape)] * len(rows) != []


def test_every_configuration_has_cases_and_every_case_a_baseline_without_a_spill():
    for operation, cards in table().items():
        for arch, rows in cards.items():
            for config in rows.values():
                named = [name for name in CASES if operation.removesuffix("_promoted") in name and arch in name]
                assert [name for name in named if str(config) in name]
    assert {name.partition(": ")[0] for name in BASELINE} == set(CASES)
    assert {name: row["spills"] for name, row in BASELINE.items() if row["spills"]} == {}


def test_the_launch_that_is_compiled_is_the_launchers_own():
    config = table()["matmul_fp8"]["sm_90"]["medium"]
    with offline.caught(90) as launches:
        CASES[f"matmul_fp8 row sm_90 {config} row"].launch()
    (launch,) = launches
    assert launch.name == "_matmul_kernel"
    # amax_ptr is None: no statistics were asked for
    found = [launch.signature[name] for name in ("a", "bias", "amax_ptr")]
    assert found == ["tensordesc<fp8e4nv[128, 128]>", "*bf16", "constexpr"]
    assert (launch.options["num_warps"], launch.options["num_stages"]) == (config.warps, config.stages)
    constants = {launch.kernel.arg_names[index[0]]: value for index, value in launch.constants.items()}
    assert (constants["ROWS_A"], constants["BLOCK_N"], constants["SUMS"]) == (1, 128, "kept")


def test_nothing_is_launched_and_the_driver_is_put_back():
    from triton.runtime import driver

    before = driver._active
    with pytest.raises(ZeroDivisionError), offline.caught(80):
        raise ZeroDivisionError
    assert driver._active is before
    with offline.caught(80):
        assert driver._active is not before
    assert driver._active is before


def test_interpreted_kernels_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offline.knobs.runtime, "interpret", True)
    with pytest.raises(VersionError, match="TRITON_INTERPRET=1 interprets kernels"), offline.caught(90):
        pytest.fail("entered")


def test_a_spill_is_found_by_the_compiler_itself(monkeypatch: pytest.MonkeyPatch):
    # 128 sums a thread and an erf in one piece do not fit into 255 registers: why `launch.parts` cuts a tile in four.
    config, end = Config(128, 128, 128, warps=4, parts=1), launches._epilogues(fp8=True)["gelu+amax"]
    assert MATMUL.parts(config, end, launches._meta(64, 4096, dtype=launches.BF16)) == 4
    monkeypatch.setattr(MATMUL, "parts", lambda config, epilogue, y_MN: config.parts)
    case = launches.Case("", 90, config, True, lambda: MATMUL.matmul_fp8(OPERAND, OPERAND, end, False, config))
    (row,) = judge.compile_case(case)
    assert row.spills > 0
    assert judge.failures(row) == [f"{row.spills} bytes spilled"]


def test_a_launcher_of_several_kernels_has_a_row_for_each():
    rows = judge.compile_case(CASES["quantize tensor predicted bfloat16 sm_90"])
    assert [row.name.partition(": ")[2] for row in rows] == ["1 _measure_kernel", "2 _cast_kernel"]
    assert [judge.failures(row) for row in rows] == [[], []]
    assert (rows[1].matmul, rows[1].wide, rows[1].loop, rows[1].tensor_cycles) == (False, True, 0, 0.0)


GOOD = judge.Row(
    "k", 200, 0, 200_000, 1, 90, 4, "QGMMA.64x256x32", 1024.0, 180.0, 100, 48.0,
    ("ld.global.v4.b32",), (), False, 90, True,
)  # fmt: skip
NARROW = {"matmul": False, "wide": False, "shape": "", "accesses": ("ld.global.v4.b32", "st.global.b8")}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"spills": 8}, ["8 bytes spilled"]),
        ({"shared": 232_449}, ["232449 bytes of shared memory; a program may have 232448"]),
        ({"serialized": True, "notes": ("C7510",)}, ["wait for each other (C7510)"]),
        ({"apart": 8}, ["8 pairs of FP8 codes are stored in words and taken apart as well"]),
        ({"shape": "HGMMA.64x256x16"}, ["no QGMMA in the main loop (HGMMA.64x256x16)"]),
        ({"shape": ""}, ["no QGMMA in the main loop (no Tensor Core instruction at all)"]),
        ({"fp8": False, "shape": "HGMMA.64x256x16"}, []),
        ({"architecture": 80, "fp8": False, "shared": 166_000, "shape": "HMMA.16816"}, []),
        ({"architecture": 80, "fp8": False, "shared": 170_000, "shape": "HMMA.16816"}, ["a program may have 166912"]),
        ({"spills": 4, "shape": "FFMA"}, ["4 bytes spilled", "no QGMMA"]),
        (NARROW | {"wide": True}, ["no st.global.v4: the tensor moves in narrower pieces"]),
        (NARROW, []),
    ],
)
def test_what_no_kernel_may_have(change, words):
    found = judge.failures(dataclasses.replace(GOOD, **change))
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"loop": 99}, []),  # a tenth: scheduling
        ({"loop": 100}, ["main loop of 100 instructions, was 90"]),
        ({"ceiling": 99}, ["at most 99 % of the Tensor Core's rate, was 100 %"]),
        ({"programs": 0}, ["0 programs a multiprocessor, were 1"]),
        ({"programs": 2, "loop": 50}, []),  # a gain is no loss
        ({"shape": "QGMMA.64x128x32"}, ["QGMMA.64x128x32, was QGMMA.64x256x32"]),
        ({"accesses": ("ld.global.b32",)}, ["no more ld.global.v4.b32"]),
    ],
)
def test_what_counts_as_a_loss(change, words):
    before = judge.baseline_of([GOOD])["k"]
    assert judge.losses(dataclasses.replace(GOOD, **change), before) == words


def test_how_many_programs_fit():
    for shared, registers, warps, fit in (
        (229_408, 168, 4, 1),
        (114_720, 96, 4, 2),  # two rings of 112 KiB
        (20_000, 255, 8, 1),  # 65,536 registers hold one program of 8 warps at 255
        (20_000, 32, 8, 8),  # 64 warps
        (0, 16, 1, 32),  # no more than 32 programs, however small
    ):
        made = offline.Compiled("", "", shared, warps, registers, 0, ())
        assert judge.programs(made, judge.CARDS[90]) == fit


@pytest.mark.parametrize(("name", "least"), [("promoted", 90), ("block 1x128 128x128", 90), ("block 1x128 1x128", 80)])
def test_two_consumers_reach_what_they_are_for(name: str, least: int):
    wanted = (f"{name} ", " 128x128x128 ", "gluon")
    cases = [case for case in BASELINE if all(word in case for word in wanted) and "odd" not in case]
    assert sum(not case.startswith("grouped") for case in cases) == 4
    assert min(BASELINE[case]["ceiling"] for case in cases) >= least
