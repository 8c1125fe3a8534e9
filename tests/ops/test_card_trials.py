"""A card that measures itself, on a fake card under a fake clock: what is timed, what is kept, what runs afterwards."""

import logging
from types import SimpleNamespace

import pytest
import torch
from fake_cards import FAST, KEY, LARGE, SLOW, SMALL, UNKEPT, WGRAD, WIDE, FakeCard, Model, train, trained

import fp8engine as fe
from fp8engine import environment
from fp8engine.kernels import tuning
from fp8engine.kernels.tuning import Config
from fp8engine.numerics.cast import Cast
from fp8engine.ops import card_trials, choice_file, device, matmul, triton_backend
from fp8engine.ops.card_trials import BUDGET, CardRunner, CardTrials
from fp8engine.ops.casts import cast_transpose
from fp8engine.ops.choice_file import Choice, Job
from fp8engine.ops.reference import Epilogue

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fp8engine"


def config_of(found: Choice | None) -> Config:
    assert found is not None
    assert isinstance(found.config, Config)
    return found.config


def test_the_fastest_of_three_and_cublas_runs_from_the_second_step_on():
    card = FakeCard({None: 400e-6, FAST: 380e-6, SLOW: 700e-6, WIDE: 500e-6})
    trials = trained(card, LARGE)
    assert [config for _, config in card.tried[:-1]] == [None, FAST, SLOW, WIDE]
    assert card.tried[-1] == "forgotten"  # the memory
    found = trials.look(LARGE)
    assert found is not None
    assert (found.backend, config_of(found)) == ("triton", FAST)
    assert str(found).startswith("measured on this card: cublas 400 us, triton 128x256x128")
    assert trained(FakeCard({None: 300e-6}), SMALL).look(SMALL).backend == "cublas"  # type: ignore[union-attr]


def test_it_measures_once_says_so_once_and_keeps_it(caplog, cache):
    with caplog.at_level(logging.WARNING):
        trials = trained(card := FakeCard({None: 400e-6, FAST: 380e-6}), LARGE)
        train(trials, LARGE, SMALL, model=trials.model, steps=3)  # type: ignore[attr-defined]
    assert trials.look(SMALL) is None  # a later shape follows the rule, and is not waited for
    assert not trials.wanted
    assert len(card.tried) == 5
    (line,) = [record.getMessage() for record in caplog.records]
    (file,) = cache.iterdir()
    for part in ("measured 1 of 1 matmul shapes", "FP8ENGINE_MEASURE=0 switches it off", str(file)):
        assert part in line
    again = CardTrials(card := FakeCard({}), KEY, lambda: 0.0)
    assert again.look(LARGE) == trials.look(LARGE)
    train(again, LARGE)
    assert not card.tried
    assert len(caplog.records) == 1


def test_two_seconds_in_all_the_most_work_first():
    card = FakeCard({FAST: 1e-4}, costs=0.6)
    trials = trained(card, SMALL, LARGE, WGRAD)
    assert card.clock - 100.0 <= BUDGET
    assert [job for job, _ in card.tried[:-1]] == [WGRAD] * 3  # twice LARGE's work; a fourth trial might pass the limit
    assert trials.look(WGRAD) is not None
    assert trials.look(LARGE) is None
    trained(card := FakeCard({}, costs=1.5), LARGE, WGRAD, key=UNKEPT)
    assert card.tried == [(WGRAD, None), "forgotten"]


def test_a_trial_that_fails_is_left_out_and_the_rest_goes_on():
    errors = {None: 4e-4, FAST: torch.OutOfMemoryError("CUDA out of memory\nTried"), SLOW: RuntimeError("ptxas")}
    trials = trained(FakeCard(errors | {WIDE: 3e-4}), LARGE)
    found = trials.look(LARGE)
    assert found is not None
    assert config_of(found) == WIDE
    assert "ptxas" in trials.failed[LARGE]
    nothing = FakeCard(dict.fromkeys([None, FAST, SLOW, WIDE], RuntimeError("no card after all")))
    trials = trained(nothing, LARGE, key=UNKEPT)
    assert trials.look(LARGE) is None
    nothing.tried.clear()
    train(trials, LARGE)
    assert nothing.tried == []


def test_where_cublas_cannot_ours_are_compared_with_each_other():
    found = trained(FakeCard({None: RuntimeError("no blocks"), FAST: 2e-4, SLOW: 1e-4}), WGRAD).look(WGRAD)
    assert found is not None
    assert config_of(found) == SLOW
    scaled = FakeCard({None: torch.OutOfMemoryError("by chance"), FAST: 1e-4})
    assert trained(scaled, LARGE, key={**KEY, "driver": "2"}).look(LARGE) is None  # nothing to hold ours against


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[: len(text) // 2], "not a measurement of this card"),
        (lambda text: text.replace('"cublas": 400.0', '"cublas": 40.0'), "checksum"),
        (lambda text: text.replace("580.95.05", "581.00.00"), "another card, driver or version"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "of another card, driver or version: {'format': 2"),
        (lambda text: "[]", "TypeError"),
        (lambda text: "\ufffd{", "not a measurement"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_by_name_and_measured_anew(damage, reason, caplog, cache):
    trained(FakeCard({None: 400e-6, FAST: 380e-6}), LARGE)
    (file,) = cache.iterdir()
    whole = file.read_text()
    file.write_text(damage(whole))
    caplog.clear()
    card = FakeCard({None: 400e-6, FAST: 380e-6})
    trained(card, LARGE)
    assert str(file) in caplog.records[0].getMessage()
    assert reason in caplog.records[0].getMessage()
    assert len(card.tried) == 5
    assert file.read_text() == whole


def test_a_row_of_a_version_that_knows_more_is_refused_and_every_part_of_the_key_counts(caplog):
    choice_file.write(KEY, {LARGE: Choice(None, {"cublas": 1.0})})
    assert choice_file.read(KEY)
    assert not any(choice_file.read({**KEY, part: "another"}) for part in KEY)
    later = SimpleNamespace(_asdict=lambda: FAST._asdict() | {"clusters": 2})
    file = choice_file.write(KEY, {LARGE: Choice(later, {"cublas": 1.0})})
    assert choice_file.read(KEY) == {}
    assert str(file) in caplog.text
    assert "unexpected keyword argument 'clusters'" in caplog.text


def test_choices_are_kept_with_a_driver_version_alone(monkeypatch, tmp_path, caplog, cache):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "NVIDIA H100")
    monkeypatch.setattr(device, "capability", lambda where: (9, 0))
    monkeypatch.setattr(device, "processors", lambda where: 132)
    monkeypatch.setattr(choice_file, "DRIVER", tmp_path / "none")
    assert choice_file.key_of(CUDA)["driver"] is None
    told = tmp_path / "version"
    told.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\nGCC version: 12\n")
    monkeypatch.setattr(choice_file, "DRIVER", told)
    key = choice_file.key_of(CUDA)
    assert key["driver"] == "580.95.05"
    assert len(key["kernels"]) == 64
    trials = trained(FakeCard({FAST: 1e-4}), LARGE, key=UNKEPT)  # measured, and not kept
    assert trials.look(LARGE) is not None
    assert "not kept: this system does not tell its driver's version" in caplog.records[-1].getMessage()
    assert not cache.exists()
    cache.write_text("a file, where the folder should be")
    assert trained(FakeCard({FAST: 1e-4}), LARGE).look(LARGE) is not None
    assert "not kept" in caplog.records[-1].getMessage()


@pytest.fixture
def hopper(pretended, monkeypatch):
    """A pretended H100 in this process that nobody has measured, whose trials are given."""
    table = {
        operation: {
            arch: {name: row._replace(ratio=None) for name, row in rows.items()} for arch, rows in cards.items()
        }
        for operation, cards in tuning.table().items()
    }

    def pretend(trials):
        pretended((9, 0))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(card_trials, "trials_of", lambda where: None if where.type == "cpu" else trials)
        monkeypatch.setattr(tuning, "table", lambda: table)
        monkeypatch.setattr(tuning, "pick", tuning.pick.__wrapped__)  # what is kept is of the committed table

    return pretend


def test_the_choice_is_followed_and_told(hopper, monkeypatch):
    trials = trained(FakeCard({None: 400e-6, FAST: 380e-6}), LARGE)
    hopper(trials)
    shape = LARGE.m, LARGE.n, LARGE.k
    assert matmul.choose(CUDA, False, shape, "fast", "tensor") == "triton"
    assert matmul.choose(CUDA, False, shape, "fast", "row") == "cublas"  # another kind was not measured
    assert matmul.choose(CUDA, False, (8192, 4096, 4090), "fast", "tensor") == "cublas"  # no descriptors: one kernel
    assert matmul.choose(CUDA, False, shape[:2]) == "cublas"
    with fe.backend("reference"):
        assert matmul.choose(CUDA, False, shape, "fast", "tensor") == "reference"
    assert "380 us" in matmul.why_chosen(CUDA, shape, "fast", "tensor")
    assert "not measured" in matmul.why_chosen(CUDA, shape, "promoted", "tensor")
    monkeypatch.setattr(triton_backend, "measured", lambda *rest: 0.9)  # a committed row counts before it
    assert matmul.choose(CUDA, False, shape, "fast", "tensor") == "cublas"
    assert "0.90 times" in matmul.why_chosen(CUDA, shape, "fast", "tensor")


def test_nothing_is_measured_in_a_capture_a_graph_or_under_a_backend_that_was_asked_for(hopper, monkeypatch):
    trials = CardTrials(card := FakeCard({}), KEY, lambda: 0.0)
    hopper(trials)
    model = Model()
    card_trials.step_begins(CUDA, model, False)
    trials.look(LARGE)
    with fe.backend("cublas"):
        card_trials.step_begins(CUDA, model, True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    card_trials.step_begins(CUDA, model, True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    card_trials.step_begins(CUDA, model, True)
    card_trials.step_begins(torch.device("cpu"), model, True)
    assert not trials.done
    assert not card.tried
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    card_trials.step_begins(CUDA, model, True)  # eager code, outside of all that
    assert LARGE in trials.choices
    # Torch without CUDA raises where it is asked: `make gpu-pack` walks the whole plan on a card made of meta tensors.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("a card was asked"))
    began: list[bool] = []
    monkeypatch.setattr(trials, "step_begins", lambda model, came: began.append(came))
    card_trials.step_begins(torch.device("meta"), Model(), True)
    assert began == [True]


def test_the_setting_switches_it_off(pretended, monkeypatch):
    where = pretended((9, 0))
    monkeypatch.setenv(environment.MEASURE, "0")
    card_trials.trials_of.cache_clear()
    assert card_trials.trials_of(where) is card_trials.trials_of(torch.device("cpu")) is None
    card_trials.trials_of.cache_clear()


def test_a_configuration_reaches_the_kernel_where_descriptors_can_describe_the_operands(monkeypatch):
    seen = []
    monkeypatch.setattr(triton_backend, "_launch", lambda first, kernel, *given: seen.append(given[4]))
    monkeypatch.setattr(triton_backend, "_kernel", lambda module, name: lambda x: x.stride(0) % 16 == 0)
    monkeypatch.setattr(triton_backend, "unsupported", lambda a, b: None)
    monkeypatch.setattr(triton_backend, "_addressable", lambda x: x)
    for kind, k in (("tensor", 64), ("block", 256), ("tensor", 60)):
        a, b = card_trials.operands(Job("", kind, 32, 48, k), torch.device("cpu"))
        triton_backend.matmul(a, b, Epilogue(), True, FAST)
    assert seen == [FAST, FAST, None]


KINDS = {"tensor": ((), ()), "row": ((4, 1), (130, 1)), "block": ((4, 2), (2, 2)), "block by block": ((4, 2), (130, 2))}


@pytest.mark.parametrize("kind", KINDS)
def test_operands_have_scales_of_their_kind(kind: str):
    """The random numbers of training are left alone: rank 0 alone draws, and ranks are to drop the same values."""
    before = torch.get_rng_state()
    a, b = card_trials.operands(Job("", kind, 4, 130, 256), torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(a.data.float(), b.data[:4].float())
    assert (tuple(a.scale.shape), tuple(b.scale.shape)) == KINDS[kind]
    assert card_trials.kind_of(a, b) == kind
    # As casts lay them in memory: those of wgrad's operands, transposes, the other way round, or Gluon refuses them.
    _, made = cast_transpose(torch.randn(256, 130), Cast.parse("e4m3 1x128"))
    assert b.scale.stride() == made.scale.stride() if kind == "block by block" else b.scale.is_contiguous()


def test_only_blocks_of_128_are_measured():
    for groups in [((1, 64), (64, 64)), ((-1, -1), (128, 128)), ((2, 128), (1, 128))]:
        assert card_trials.kind_of(*(SimpleNamespace(rows=rows, cols=cols) for rows, cols in groups)) is None


def test_the_model_names_three_committed_configurations(monkeypatch):
    monkeypatch.setattr(device, "capability", lambda where: (9, 0))
    monkeypatch.setattr(device, "name", lambda where: "NVIDIA H100")
    monkeypatch.setattr(device, "processors", lambda where: 132)
    committed = {row[:3] for row in tuning.table()["matmul_fp8"]["sm_90"].values() if row.descriptors}
    for job in (LARGE, SMALL, WGRAD):
        found = CardRunner(CUDA).configs(job)
        assert len(set(found)) == len(found) >= 2  # the block matmul has two by descriptors
        assert job.operation != "matmul_fp8" or {one[:3] for one in found} <= committed
    assert CardRunner(CUDA).configs(LARGE)[0].block_n == 256
    assert CardRunner(CUDA).configs(SMALL)[0].block_m == 64
