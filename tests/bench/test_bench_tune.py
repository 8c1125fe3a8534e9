"""The tuner: what it tries, what it refuses to keep, what it writes; on times that are given."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import tune, tuning_table
from fp8engine.bench.cases import Operands, Shape, parse
from fp8engine.bench.gemm import PROMOTED, Variant
from fp8engine.bench.timing import WallClock
from fp8engine.errors import BackendError, UnknownName
from fp8engine.kernels import tuning
from fp8engine.kernels.tuning import CLASSES, Config
from fp8engine.ops import reference

CPU, SHAPES = torch.device("cpu"), [Shape(64, 64, 64), Shape(128, 64, 64)]
BASE = Config(128, 128, 128)
FAST, UNEVEN = BASE._replace(stages=3), BASE._replace(stages=5)
ABOUT = {"card": "H100", "driver": "1", "capability": "sm_90", "torch": "2", "triton": "3", "date": "d", "commit": "c"}


def committed() -> dict:
    return json.loads(tuning.TABLE.read_text())


def given(results: dict[Config, list]):
    """A trial that finds these results, one a shape; 0.5 for other configurations."""
    return lambda shape, configs: [results.get(one, [0.5, 0.5])[SHAPES.index(shape)] for one in configs]


@pytest.mark.parametrize(
    ("results", "best"),
    [
        # The best geometric mean; of it the least ratio, rounded down: not 1.101, not the mean.
        ({BASE: [1.0, 1.0], FAST: [1.2, 1.10096], UNEVEN: [1.9, 0.6]}, FAST._replace(ratio=1.1)),
        ({BASE: [0.99999, 1.3]}, BASE._replace(ratio=0.999)),  # just below one, and not rounded up to it
        ({BASE: [1.0, 1.0], FAST: [9.0, "wrong"]}, BASE._replace(ratio=1.0)),  # fast at the first, wrong at the second
        ({BASE: ["no", "no"], FAST: ["no", "no"], UNEVEN: ["no", "no"]}, None),
    ],
)
def test_the_best_geometric_mean_of_what_is_right_at_every_shape_wins(results: dict[Config, list], best: Config | None):
    found, tried = tune.search(BASE, [lambda base: [FAST, UNEVEN]], SHAPES, given(results))
    assert found == best
    assert [one.config for one in tried] == [BASE, FAST, UNEVEN]


def test_each_step_starts_from_the_best_so_far():
    wide, seen = BASE._replace(block_n=256), []
    steps = [lambda base: [wide], lambda base: (seen.append(base), [base._replace(group_m=4)])[1]]
    best, tried = tune.search(BASE, steps, SHAPES, given({BASE: [1.0, 1.0], wide: [1.5, 1.5]}))
    assert seen == [wide]
    assert best == wide._replace(ratio=1.5)
    assert tried[-1].config == wide._replace(group_m=4)


def test_what_fails_at_one_shape_is_out_and_is_not_run_again():
    runs = []

    def run(shape, configs):
        runs.append((shape, list(configs)))
        return ["wrong result: relative error 1.0" if one == FAST else 1.0 for one in configs]

    best, tried = tune.search(BASE, [lambda base: [FAST]], SHAPES, run)
    assert best == BASE._replace(ratio=1.0)
    assert runs == [(SHAPES[0], [BASE, FAST]), (SHAPES[1], [BASE])]
    assert (tried[1].why, tried[1].mean) == ("64x64x64: wrong result: relative error 1.0", 0.0)


def test_candidates_come_in_the_order_of_their_predicted_times():
    times = {BASE: 2.0, FAST: 3.0, UNEVEN: 1.0}
    order = tune.Order(lambda config, shape: times[config] * shape.m)
    _, tried = tune.search(BASE, [lambda base: [FAST, UNEVEN]], SHAPES, given({BASE: [1.0, 1.0]}), order)
    assert [one.config for one in tried] == [BASE, UNEVEN, FAST]  # what the step began with is measured in any case
    assert order.mean(UNEVEN, SHAPES) == pytest.approx((64 * 128) ** 0.5)


def test_when_the_time_is_up_what_was_predicted_to_be_slow_is_left_and_says_so():
    many = [BASE._replace(group_m=rows) for rows in range(10, 30)]
    left = iter([1.0, -1.0])  # one more batch, then the time is up
    order = tune.Order(lambda config, shape: 100.0 - config.group_m, lambda: next(left))
    best, tried = tune.search(BASE, [lambda base: many], SHAPES, given({BASE: [1.0, 1.0]}), order)
    untried = [one.config for one in tried if one.why == tune.NOT_TRIED]
    assert len(untried) == 1 + len(many) - 2 * tune.BATCH
    assert max(one.group_m for one in untried) < min(one.config.group_m for one in tried[1 : 2 * tune.BATCH])
    assert best == BASE._replace(ratio=1.0)
    assert "not tried" in tune._told(best, tried, order, SHAPES)


def test_a_trial_times_only_what_is_right():
    calls = {3: 0, 4: 0, 5: 0}

    def ours(pair, config):
        calls[config.stages] += 1
        if config.stages == 5:
            raise RuntimeError("out of resource: shared memory\nand more")
        y = reference.matmul_fp8(pair.a, pair.b)
        return torch.zeros_like(y) if config.stages == 3 else y

    wrong, right, fails = (BASE._replace(stages=stages) for stages in (3, 4, 5))
    check = Variant("tensor", lambda pair: reference.matmul_fp8(pair.a, pair.b), PROMOTED, roundings=2)
    job = tune.Job(check, ours, CPU, WallClock())
    first, second, third = tune.trial(job, Shape(64, 48, 32), [wrong, right, fails])
    assert str(first).startswith("wrong result: relative error 1.")
    assert isinstance(second, float)
    assert second > 0
    assert third == "RuntimeError: out of resource: shared memory"
    assert calls[3] <= 2 < tune.TURNS < calls[4]
    assert calls[5] == 1


def test_the_grid_holds_what_can_be_faster_and_nothing_that_must_spill():
    tiles, pipeline, order, means = (
        step(BASE) for step in tune.steps("matmul_fp8_promoted", "large", tma=True, gluon=True)
    )
    assert {(c.block_m, c.block_n, c.warps) for c in tiles} >= {(128, 256, 8), (64, 128, 4), (128, 128, 4)}
    assert (128, 256, 4) not in {(c.block_m, c.block_n, c.warps) for c in tiles}
    assert {c.block_k for c in tiles} == {64, 128}
    assert all(c.parts == (2 if c.block_n == 256 else 1) for c in tiles)
    assert {(c.stages, c.parts) for c in pipeline} == {(s, p) for s in (3, 4, 5) for p in (1, 2, 4)}
    assert {(c.group_m, c.flatten) for c in order} == {(rows, flat) for rows in (4, 8, 16) for flat in (False, True)}
    assert [(c.descriptors, c.kernel) for c in means] == [(True, "triton"), (False, "triton"), *[(True, "gluon")] * 2]
    assert means[2:] == [BASE._replace(parts=2, kernel="gluon", stages=stages) for stages in (4, 5)]
    assert len(tiles) + len(pipeline) + len(order) + len(means) < 50  # each is compiled


@pytest.mark.parametrize("operation", tune.OPERATIONS)
@pytest.mark.parametrize("name", ["small", "unaligned"])
def test_where_tiles_are_few_the_cuts_of_k_are_tried(operation: str, name: str):
    """In Triton's kernels, which alone cut K; before Gluon's, so that they meet the best of these."""
    gluon = BASE._replace(kernel="gluon", parts=2)
    _, _, _, cuts, means = tune.steps(operation, name, tma=True, gluon=True)
    found = cuts(gluon)
    assert [(c.split_k, c.kernel) for c in found] == [(parts, "triton") for parts in (1, 2, 4, 8, 16, 32)]
    assert {c._replace(split_k=1) for c in found} == {BASE._replace(parts=2)}
    assert {c.split_k for c in means(found[3])} == {8}


def test_both_kernels_are_tried_whichever_the_table_has_blocks_keep_their_k_and_pointers_stay_pointers():
    gluon = BASE._replace(stages=5, parts=2, kernel="gluon")
    for operation in ("matmul_fp8_promoted", "matmul_block"):
        tiles, *_, means = (step(gluon) for step in tune.steps(operation, "large", tma=True, gluon=True))
        assert {c.kernel for c in tiles} == {"triton"}  # tiles that the Gluon kernel has not
        assert [c for c in means if c.kernel == "gluon"] == [gluon, gluon._replace(stages=4)]
        assert gluon._replace(kernel="triton") in means
    assert {c.block_k for c in tune.steps("matmul_block", "small", tma=True, gluon=False)[0](BASE)} == {128}
    pointers = BASE._replace(block_k=32, descriptors=False)
    grid = [c for step in tune.steps("matmul_fp16", "unaligned", tma=False, gluon=True) for c in step(pointers)]
    assert not any(c.descriptors or c.kernel == "gluon" for c in grid)
    assert {c.block_k for c in grid} == {32, 64}  # the committed one, too


def test_the_shapes_it_tunes_for_are_of_every_class():
    found = tune.classes(parse("tune"))
    assert set(found) == set(CLASSES)
    for shape in found["unaligned"]:  # neither in FP8 nor in 16 bits
        assert shape.k % 16
        assert shape.k * 2 % 16
    assert all(tuning.shape_class(s.m, s.n) == name for name in ("large", "medium", "small") for s in found[name])


def test_merging_replaces_these_rows_says_where_they_come_from_and_shows_the_changed_lines():
    content, old = committed(), tuning.TABLE.read_text()
    assert tuning_table.dump(content) == old, "byte for byte"
    row = BASE._replace(ratio=1.25)._asdict()
    new = tuning_table.merged(content, "sm_90", {("matmul_fp8", "large"): row}, ABOUT | {"threads": 3})
    assert content == committed()
    assert json.loads(tuning_table.dump(new)) == new
    assert new["source"] == content["source"] | {"matmul_fp8 sm_90 large": ABOUT}
    assert tuning.parse(new)["matmul_fp8"]["sm_90"]["large"] == BASE._replace(ratio=1.25)
    lines = tuning_table.difference(old, tuning_table.dump(new)).splitlines()
    assert lines[:2] == ["--- a/kernels/tuning.json", "+++ b/kernels/tuning.json"]
    assert sum(line.startswith("-") and "block_m" in line for line in lines) == 1
    assert tuning_table.difference(old, old) == ""
    new["operations"]["matmul_fp8"]["sm_90"]["large"] = content["operations"]["matmul_fp8"]["sm_90"]["large"]
    assert new["operations"] == content["operations"]


def test_operations_are_those_of_the_table_and_card():
    content = committed()
    assert tune.rows_for(content, None, "sm_90") == list(tune.OPERATIONS) == list(content["operations"])
    assert tune.rows_for(content, None, "sm_80") == ["matmul_fp16"]
    with pytest.raises(UnknownName, match="did you mean 'matmul_fp8'"):
        tune.rows_for(content, ["matmul_fp9"], "sm_90")
    with pytest.raises(BackendError, match=r"no row for sm_80; it has .*sm_90, sm_89"):
        tune.rows_for(content, ["matmul_fp8", "matmul_fp16"], "sm_80")
    with pytest.raises(BackendError, match="sm_100"):
        tune.rows_for(content, None, "sm_100")


def test_from_card_to_table(monkeypatch: pytest.MonkeyPatch):
    def trial(job, shape, configs):
        assert shape.k % 16 == 0 or not any(one.descriptors for one in configs)  # nothing can describe those
        return [1.0 + 0.1 * (one.group_m == 16) + 0.1 * (not one.descriptors) for one in configs]

    monkeypatch.setattr(tune, "trial", trial)
    monkeypatch.setattr(tune, "job_of", lambda operation, where, ticks: operation)
    monkeypatch.setattr(tune, "clock", lambda where: None)
    monkeypatch.setattr(tune, "machine", lambda where: ABOUT)
    for name, value in {"capability": (9, 0), "name": "NVIDIA H100 80GB HBM3", "processors": 132}.items():
        monkeypatch.setattr(tune.device, name, lambda where, value=value: value)
    monkeypatch.setattr(tune.triton_backend, "require", lambda: None)
    told = []
    new, tried = tune.tune(["matmul_fp8_promoted"], parse("tune"), torch.device("cuda"), told.append)
    rows, before = tuning.parse(new)["matmul_fp8_promoted"]["sm_90"], committed()
    assert {(row.group_m, row.descriptors, row.ratio) for row in rows.values()} == {(16, False, 1.2)}
    changed = {name for name, about in new["source"].items() if about != before["source"].get(name)}
    assert changed == {f"matmul_fp8_promoted sm_90 {name}" for name in CLASSES}
    assert ["measured ratio 1.2, predicted " in line for line in told] == [True] * len(CLASSES)
    assert {(one["class"], one["predicted_us"] > 0) for one in tried} == {(name, True) for name in CLASSES}
    assert any("gluon" in one["config"] for one in tried)
    assert json.dumps([new, tried], allow_nan=False)
    assert new["operations"]["matmul_fp16"] == before["operations"]["matmul_fp16"]


@pytest.mark.parametrize("operation", tune.OPERATIONS)
def test_a_job_launches_its_operation_under_the_candidate(operation: str, monkeypatch: pytest.MonkeyPatch):
    seen = []

    def launch(a, b, epilogue, *rest):
        seen.append(rest)
        return a @ b.t() if operation == "matmul_fp16" else reference.matmul_fp8(a, b)

    name = "matmul_fp16" if operation == "matmul_fp16" else "matmul_fp8"
    monkeypatch.setitem(sys.modules, "fp8engine.kernels.matmul", SimpleNamespace(**{name: launch}))
    job = tune.job_of(operation, CPU, WallClock())
    pair = Operands(Shape(40, 32, 48), CPU)[job.check.kind]
    ours, other = job.ours(pair, BASE), job.check.run(pair)
    assert seen == [(BASE,) if name == "matmul_fp16" else (operation != "matmul_fp8", BASE)]
    torch.testing.assert_close(ours, other, rtol=0.02, atol=0.2)


@pytest.mark.parametrize("options", [["--write"], []])
def test_only_write_writes_the_table(options: list[str], tmp_path, monkeypatch: pytest.MonkeyPatch, capsys):
    old, path = tuning.TABLE.read_text(), tmp_path / "tuning.json"
    path.write_text(old)
    table = json.loads(old)
    table["operations"]["matmul_fp8"]["sm_90"]["large"]["ratio"] = 1.125
    monkeypatch.setattr(tuning, "TABLE", path)
    monkeypatch.setattr(tune, "tune", lambda operation, *rest: (table, [{"operation": operation}]))

    def call(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", ["tune", *more, *options])
        tune.main()
        return capsys.readouterr().out

    printed = json.loads(call("--operation", "matmul_fp8", "--json"))
    assert printed["tried"] == [{"operation": ["matmul_fp8"]}]
    assert printed["written"] == (str(path) if options else None)
    assert '+    "large"' in printed["diff"]
    assert json.loads(path.read_text()) == (table if options else json.loads(old))
    assert call().rstrip("\n") == ("nothing changes" if options else printed["diff"].rstrip("\n"))


def test_the_script_refuses_in_one_line_without_a_card(monkeypatch: pytest.MonkeyPatch, capsys):
    with pytest.raises(BackendError, match="on a card"):
        tune.tune(None, SHAPES, CPU)
    monkeypatch.setattr(tune, "WHERE", CPU)
    monkeypatch.setattr(sys, "argv", ["tune"])
    with pytest.raises(SystemExit) as stopped:
        tune.main()
    assert stopped.value.code == 2
    assert "torch finds none" in capsys.readouterr().err
