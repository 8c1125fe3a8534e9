"""The rows of `bench gemm`: no ratio for a wrong result, right means, and which rows a card has."""

import dataclasses
import itertools
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from ticks import Ticks

from benchmarks.card.gluon import gluon_variants
from benchmarks.gemm import TARGETS, summary
from fp8engine.bench import gemm as matmuls
from fp8engine.bench import harness
from fp8engine.bench.cases import LLM, Shape
from fp8engine.bench.gemm import BASE, FAST, PROMOTED, Variant, gemm, variants
from fp8engine.bench.harness import Limits, Timer, line, machine
from fp8engine.ops import device, reference, scaled_mm

CPU, SHAPE, LIMITS = torch.device("cpu"), Shape(96, 64, 128), Limits(1e9, 1e9)
CARD, H100, A100, V100 = torch.device("cuda"), (9, 0), (8, 0), (7, 0)
TIMES = {"seconds", "spread", "tflops", "of_16_bit_rate", "peer", "over_peer", "over_16_bits"}
OURS = [f"triton fp8 {kind} {way}" for kind in ("tensor", "row") for way in ("fast", "promoted")]
OURS += ["triton fp8 block", "triton fp8 block by block"]


def right(pair):
    return reference.matmul_fp8(pair.a, pair.b)


def lost_tile(pair):
    y = right(pair)
    y[32:64, 32:] = 0
    return y


RIGHT, PLAIN = Variant("tensor", right, roundings=2), Variant("bf16", matmuls._plain)


def measured(ways: dict[str, Variant], right: int, shape: Shape = SHAPE) -> dict[str, dict]:
    """Rows by name.  right: how many of the ways are timed."""
    result = gemm([shape], CPU, ways, Timer(Ticks(right), 3), LIMITS)
    return {row["name"]: row for row in result["rows"]}


@pytest.mark.parametrize(
    "broken",
    [lost_tile, lambda pair: right(pair) * 1.02, lambda pair: right(pair) * math.nan, lambda pair: right(pair).t()],
)
def test_a_wrong_result_has_an_error_and_no_time_or_ratio(broken):
    called = []
    wrong = Variant("tensor", lambda pair: called.append(0) or broken(pair), peer="ok")
    rows = measured({BASE: PLAIN, "ok": RIGHT, "bad": wrong}, 2)
    bad, ok = rows["bad"], rows["ok"]
    assert (bad["correct"], ok["correct"]) == (False, True)
    assert TIMES.isdisjoint(bad)
    assert ok.keys() >= TIMES
    assert bad["error"] is None or bad["error"] > bad["tolerance"]
    assert len(called) <= matmuls.SETS  # checked, never timed


def test_a_result_that_is_wrong_on_other_operands_is_wrong():
    seen = []

    def stale(pair):  # as a descriptor kept under the wrong address would do
        seen.append(pair)
        return right(seen[0])

    assert measured({"stale": Variant("tensor", stale, roundings=2)}, 0)["stale"]["correct"] is False


def test_ratios_are_the_others_time_over_ours():
    ways = {BASE: PLAIN, "slow": RIGHT, "ours": dataclasses.replace(RIGHT, peer="slow")}
    rows, flops = measured(ways, 3), 2 * 96 * 64 * 128
    assert [rows[name]["seconds"] for name in ways] == [1.0, 2.0, 3.0]
    wanted = {"over_peer": 2 / 3, "over_16_bits": 1 / 3, "tflops": flops / 3 / 1e12, "of_16_bit_rate": flops / 3 / 1e9}
    assert {name: rows["ours"][name] for name in wanted} == pytest.approx(wanted)
    assert rows["slow"]["over_peer"] is None


def test_what_is_wrong_or_cannot_run_gives_no_ratio_and_the_rest_goes_on():
    def refuse(pair):
        raise LookupError("matmul_block has no configuration for sm_89\nand more")

    ways = {
        "torch": Variant("tensor", lost_tile),
        "none": Variant("block", refuse),
        "ours": dataclasses.replace(RIGHT, peer="torch"),
    }
    rows = measured(ways, 1)
    none, ours = rows["none"], rows["ours"]
    assert (none["correct"], none["why"]) == (None, "LookupError: matmul_block has no configuration for sm_89")
    assert TIMES.isdisjoint(none)
    assert (ours["correct"], ours["seconds"], ours["over_peer"], ours["over_16_bits"]) == (True, 1.0, None, None)
    del ways["ours"]  # nothing is timed where nothing is right
    assert matmuls.measured(SHAPE, CPU, ways, Timer(Ticks(1), 3), LIMITS)[0]["correct"] is False


def test_operands_take_turns_while_timing():
    seen = []
    measured({"ok": Variant("tensor", lambda pair: seen.append(pair.a.data.data_ptr()) or right(pair), roundings=2)}, 1)
    timed = seen[matmuls.SETS :]
    assert len(set(timed)) == matmuls.SETS
    assert all(one != next_ for one, next_ in itertools.pairwise(timed))


def test_tolerances_grow_with_k_only_where_sums_are_truncated():
    fast, promoted = Variant("row", right, FAST), Variant("row", right, PROMOTED)
    assert fast.tolerance(4096) == fast.tolerance(64) == pytest.approx(2 * (1.35e-3 + 2**-9))
    assert fast.tolerance(28672) == pytest.approx(2 * (7 * 1.35e-3 + 2**-9))
    assert promoted.tolerance(28672) == promoted.tolerance(64) < fast.tolerance(64)


def row(name: str, over: float | None, correct: bool | None = True, tflops: float = 1.0) -> dict:
    made = {"name": name, "shape": [1, 2, 3], "correct": correct}
    return made | ({"over_peer": over, "tflops": tflops} if correct else {})


def test_the_summary_is_a_geometric_mean_and_the_least_and_none_where_a_shape_is_wrong():
    fast, by_rows, promoted = "triton fp8 tensor fast", "triton fp8 row fast", "triton fp8 row promoted"
    rows = [row(fast, 0.5), row(fast, 2.0), row(fast, 1.0, tflops=9.0), row("torch 16 bits", 7.0, tflops=99.0)]
    llm = row(by_rows, 4.0) | {"shape": list(LLM[0])}  # the targets are for these
    found = summary([*rows, row(by_rows, 1.0), llm, row(promoted, 2.0), row(promoted, None, correct=False)])
    tensor, of_rows, wrong = (found[name] for name in (fast, by_rows, promoted))
    means = [tensor["geometric_mean"], of_rows["geometric_mean"], of_rows["llm"]["geometric_mean"]]
    assert means == pytest.approx([1.0, 2.0, 4.0])
    assert (tensor["minimum"], tensor["shapes"], tensor["note"]) == (0.5, 3, None)
    assert tensor["llm"]["note"] == "not measured"
    assert (of_rows["shapes"], of_rows["llm"]["shapes"]) == (2, 1)
    assert (wrong["geometric_mean"], wrong["minimum"], wrong["note"]) == (None, None, "wrong at 1 of 2 shapes")
    assert found["best_tflops"] == {"name": fast, "shape": [1, 2, 3], "tflops": 9.0}
    found = summary([row("torch 16 bits", None), row("triton fp8 row fast", None, correct=None)])  # without a card
    assert found.pop("best_tflops") is None
    assert {one["note"] for one in found.values()} == {"not measured"}


def test_a_line_has_numbers_only_for_what_is_right():
    right, bad = measured({BASE: PLAIN, "bad": Variant("tensor", lost_tile)}, 1).values()
    assert "1.00x torch 16 bits" in line(right)
    assert "96x64x128" in line(right)
    assert "WRONG, error " in line(bad)
    assert "WRONG: not finite" in line(bad | {"error": None, "why": "not finite"})
    assert "cannot run: why [here]" in line(bad | {"correct": None, "why": "why [here]"})


def test_cards_without_fp8_have_16_bit_rows_and_emulation_and_a_cpu_never_counts_the_interpreter():
    for capability, kind in ((V100, "fp16"), (A100, "bf16")):
        found = variants("cuda", capability, triton=True)
        assert found[BASE].kind == kind
        assert ("triton 16 bits" in found) == (capability == A100)
        fp8 = {name: way.emulated for name, way in found.items() if "fp8" in name}
        assert fp8 == {f"reference fp8 {kind}": True for kind in ("tensor", "row", "block")}
    found = variants("cpu", (0, 0), triton=True)
    assert not any(name.startswith("triton") for name in found)
    assert all(way.emulated for name, way in found.items() if "fp8" in name)
    assert found["reference fp8 row"].peer == "torch fp8 row"


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("capability", [(8, 9), H100, (10, 0)])
def test_cards_with_fp8_have_torchs_rows_and_ours_where_there_is_triton(capability, triton: bool):
    found = variants("cuda", capability, triton)
    assert not any(way.emulated for way in found.values())
    assert {f"torch fp8 {kind}{fast}" for kind in ("tensor", "row") for fast in ("", " fast")} <= set(found)
    assert [name for name in found if name.startswith("triton fp8")] == (OURS if triton else [])
    blocks = {name for name in found if name.startswith("torch fp8 block")}
    assert blocks == ({"torch fp8 block", "torch fp8 block by block"} if capability == H100 else set())


def test_a_cards_rows_are_what_they_are_called(monkeypatch: pytest.MonkeyPatch):
    called = []

    def fp8(a, b, epilogue, promoted):
        called.append(("fp8", a.cols, b.rows, promoted))
        return reference.matmul_fp8(a, b, out=epilogue.out)

    def fp16(a_MK, b_NK, epilogue):
        called.append(("fp16", a_MK.dtype, epilogue.out))
        return a_MK @ b_NK.t()

    monkeypatch.setitem(sys.modules, "fp8engine.kernels.matmul", SimpleNamespace(matmul_fp8=fp8, matmul_fp16=fp16))
    monkeypatch.setattr(scaled_mm, "matmul", lambda a, b, fast: reference.matmul_fp8(a, b))
    ways = variants("cuda", H100, triton=True)
    rows = measured(ways, len(ways))
    assert {row["correct"] for row in rows.values()} == {True}
    assert list(dict.fromkeys(called)) == [
        ("fp16", torch.bfloat16, torch.bfloat16),
        ("fp8", -1, -1, False),
        ("fp8", -1, -1, True),
        ("fp8", -1, 1, False),
        ("fp8", -1, 1, True),
        ("fp8", 128, 128, True),
        ("fp8", 128, 1, True),
    ]
    peers = {name: row["peer"] for name, row in rows.items() if row["peer"]}
    assert peers == {
        "triton 16 bits": BASE,
        "triton fp8 tensor fast": "torch fp8 tensor fast",
        "triton fp8 tensor promoted": "torch fp8 tensor",
        "triton fp8 row fast": "torch fp8 row fast",
        "triton fp8 row promoted": "torch fp8 row",
        "triton fp8 block": "torch fp8 block",
        "triton fp8 block by block": "torch fp8 block by block",
    }
    found = summary(list(rows.values()))
    assert all(one["geometric_mean"] for name, one in found.items() if name != "best_tflops")
    assert set(TARGETS) <= set(ways)
    assert set(matmuls.OURS) == {name for name in ways if name.startswith("triton")}


@pytest.mark.parametrize(
    ("where", "capability", "triton", "told"),
    [
        (CPU, (0, 0), False, "CPU: FP8 emulated; the Triton kernels are not run"),
        (CARD, H100, True, "Triton's kernels beside torch's"),
        (CARD, H100, False, "torch's matmuls alone"),
        (CARD, A100, True, "16-bit rows measured, FP8 emulated"),
    ],
)
def test_a_result_says_what_it_is(where, capability, triton: bool, told: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "capability", lambda where: capability)
    monkeypatch.setattr(device, "name", lambda where: "a card")
    assert told in matmuls._what(where, variants(where.type, capability, triton))


def test_the_machine_is_named(monkeypatch: pytest.MonkeyPatch):
    assert harness._output("no-such-program-here") is None
    assert harness._output(sys.executable, "-c", "raise SystemExit(1)") is None
    assert harness._output(sys.executable, "-c", "print('570.1'); print('570.1')") == "570.1"
    assert harness.version("no-such-package") is None
    found = machine(CPU)
    assert [found[key] for key in ("torch", "card", "driver", "capability")] == [torch.__version__, None, None, None]
    assert found["cpu"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "NVIDIA H100")
    monkeypatch.setattr(device, "capability", lambda where: H100)
    monkeypatch.setattr(harness, "_output", lambda *command: command[0])
    found = machine(CARD)
    told = [found[key] for key in ("card", "capability", "driver", "commit")]
    assert told == ["NVIDIA H100", "sm_90", "nvidia-smi", "git"]


def test_the_warp_specialised_kernel_is_held_against_triton_and_torch():
    found = gluon_variants()
    ours = [name for name in found if name.startswith("gluon")]
    assert sorted(ours) == ["gluon fp8 block", "gluon fp8 block by block", "gluon fp8 tensor"]
    assert all(way.peer is None or way.peer in found for way in found.values())
    assert {way.sums for name, way in found.items() if "triton" in name or "gluon" in name} == {PROMOTED}
