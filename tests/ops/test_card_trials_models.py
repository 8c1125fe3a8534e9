"""Which models a card measures itself for, and for how long: several of a process, with a slow compiler, on ranks."""

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from fake_cards import FAST, KEY, LARGE, SLOW, SMALL, UNKEPT, WGRAD, WIDE, FakeCard, Model, train, trained
from torch import nn

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine import _torch
from fp8engine.ops import card_trials
from fp8engine.ops.card_trials import BUDGET, PAUSE, CardTrials
from fp8engine.ops.choice_file import Job
from fp8engine.scaling import table


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


# The twelve matmuls of a Llama-8B's layer; "o" is square, so that its forward and its dgrad are one shape.
TOKENS, LAYERS = 8192, {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LLAMA_8B = [
    job
    for n, k in LAYERS.values()
    for job in (
        Job("matmul_fp8", "tensor", TOKENS, n, k),
        Job("matmul_fp8", "tensor", TOKENS, k, n),
        Job("matmul_fp8_promoted", "tensor", n, k, TOKENS),
    )
]
SHAPES = set(LLAMA_8B)


def test_compiling_does_not_count_and_all_of_a_llama_is_reached_with_an_empty_cache(caplog):
    assert (len(LLAMA_8B), len(SHAPES)) == (12, 11)
    card = FakeCard({FAST: 1e-4}, costs=0.01, compiles=0.6)  # two operations of three configurations: 3.6 s
    with caplog.at_level(logging.WARNING):
        trials = trained(card, *LLAMA_8B)
    assert all(trials.look(job) for job in LLAMA_8B)
    assert card.timing <= BUDGET < card.clock - 100.0 < PAUSE
    assert "measured 11 of 11 matmul shapes on this card in 4.0 s, compiling included" in caplog.text
    assert "steps that follow" not in caplog.text


def test_a_step_waits_for_a_slow_compiler_no_longer_than_it_must_and_the_next_ones_go_on(caplog):
    card = FakeCard({FAST: 1e-4}, costs=0.01, compiles=4.0)  # 24 s in all
    with caplog.at_level(logging.WARNING):
        trials = trained(card, *LLAMA_8B)
        first, waited = len(trials.choices), card.clock - 100.0
        assert 0 < first < 11
        assert waited < PAUSE + 3 * 4.0  # one shape begins within it
        train(trials, *LLAMA_8B, model=trials.model, steps=4)  # type: ignore[attr-defined]
    assert trials.choices.keys() == SHAPES
    assert trials.failed == {}
    assert len(card.tried) - card.tried.count("forgotten") == 11 * 4  # each once
    assert card.timing <= BUDGET
    told = [record.getMessage() for record in caplog.records]
    assert f"measured {first} of 11 matmul shapes" in told[0]
    assert f"; {11 - first} are left to the steps that follow; kept in" in told[0]
    assert "left" not in told[-1]


def test_a_budget_is_a_models_and_goes_on_over_its_steps():
    card = FakeCard({FAST: 1e-4}, costs=0.1, compiles=PAUSE)  # each shape of a new operation takes a step
    jobs = [LARGE, Job("matmul_fp8_promoted", "tensor", *LARGE[2:]), WGRAD, *LLAMA_8B]
    trials = CardTrials(card, UNKEPT, card.now)
    train(trials, *jobs, steps=5)
    assert card.timing == pytest.approx(BUDGET)
    assert len(trials.choices) == 5
    tried, measured = len(card.tried), set(trials.choices)
    train(trials, *jobs, steps=4)  # another model has seconds of its own, for what is left of them
    assert card.timing == pytest.approx(2 * BUDGET)
    assert len(trials.choices) == 10
    assert not {job for job, _ in (each for each in card.tried[tried:] if each != "forgotten")} & measured


def test_every_model_of_a_process_is_measured_each_shape_once():
    trials = trained(card := FakeCard({None: 400e-6, FAST: 380e-6}), LARGE)
    card.tried.clear()
    train(trials, LARGE, SMALL)
    assert card.tried == [*((SMALL, config) for config in (None, FAST, SLOW, WIDE)), "forgotten"]
    card.tried.clear()
    train(trials, LARGE, SMALL)  # nothing new: nothing is timed, written or said
    assert card.tried == []
    assert len(trials.done) == 1, "models that are gone are forgotten"


def test_two_models_that_train_in_turns_are_noted_whole():
    """A GAN's: the second begins before the first's trials, which take what was noted by then, and goes on after.

    A forward without a backward, an evaluation that records gradients, does not end a first step.
    """
    trials, generator, critic = CardTrials(card := FakeCard({FAST: 1e-4}), UNKEPT, lambda: 0.0), Model(), Model()
    for model, job in ((generator, LARGE), (generator, LARGE), (critic, SMALL)):
        trials.step_begins(model, False)
        trials.look(job)
    assert card.tried == []
    trials.step_begins(generator, True)
    assert trials.choices.keys() == {LARGE, SMALL}
    trials.look(WGRAD)  # of the critic's first backward
    trials.step_begins(generator, True)
    assert WGRAD not in trials.choices
    trials.step_begins(critic, True)
    assert trials.choices.keys() == {LARGE, SMALL, WGRAD}
    assert len(card.tried) == 3 * (4 + 1)


def test_steps_of_other_lengths_are_not_measured_after_the_trials():
    trials = trained(card := FakeCard({FAST: 1e-4}), LARGE, key=UNKEPT)
    train(trials, *(SMALL._replace(m=16 * m) for m in range(1, 99)), model=trials.model)  # type: ignore[attr-defined]
    assert not trials.wanted
    card.tried.clear()
    train(trials, WGRAD)
    assert {job for job, _ in card.tried[:-1]} == {WGRAD}


def test_models_that_train_in_threads_are_measured_one_after_the_other():
    card, inside, most = FakeCard({FAST: 1e-4}), [0], [0]
    ready = card.ready

    def slow(job, config):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return ready(job, config)

    card.ready = slow  # type: ignore[method-assign]
    trials, jobs = CardTrials(card, UNKEPT, lambda: 0.0), [SMALL._replace(m=16 * i) for i in range(1, 5)]
    with ThreadPoolExecutor(4) as pool:
        for made in [pool.submit(train, trials, job) for job in jobs]:
            made.result()
    assert most == [1]
    assert trials.choices.keys() == set(jobs)


def _rank(rank: int, ranks: int, folder: str) -> dict:
    """A rank on a fake card of its own speed: rank 1's, under another driver, finds cuBLASLt faster; at last it is
    another card.
    """
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{rank}"
    found = {}
    for case, second in (("alike", {**KEY, "driver": "570.86.15"}), ("apart", {**KEY, "card": "NVIDIA H200"})):
        card_trials.STORE_KEY = case
        card = FakeCard({None: (1e-3, 1e-6)[rank], FAST: 5e-4})
        trials = CardTrials(card, second if rank else KEY, card.now)
        trials.step_begins(model := Model(), False)
        before = trials.look(LARGE)
        trials.step_begins(model, True)
        found[case] = {"before": before, "after": trials.look(LARGE), "tried": len(card.tried)}
    return found


@pytest.mark.slow
def test_rank_0_decides_for_all_that_have_its_card(tmp_path):
    first, second = run(_rank, 2, str(tmp_path))
    assert first["alike"]["before"] is second["alike"]["before"] is None
    assert first["alike"]["after"] == second["alike"]["after"]
    assert first["alike"]["after"].backend == "triton"
    assert (first["alike"]["tried"], second["alike"]["tried"]) == (5, 0)
    assert len(list((tmp_path / "0" / "fp8engine").iterdir())) == 1
    assert not (tmp_path / "1").exists()
    # In the next run rank 0 has its choices from the file, and publishes these; another card follows the rule.
    assert first["apart"] == {"before": None, "after": first["alike"]["after"], "tried": 0}
    assert second["apart"] == {"before": None, "after": None, "tried": 0}


LATER = SMALL._replace(m=640)


def _rounds(rank: int, ranks: int, folder: str) -> dict:
    """A rank whose models are not rank 0's: rank 1 has one more before, and its second begins before rank 0's."""
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{rank}"
    card = FakeCard({None: (1e-3, 1e-6)[rank], FAST: 5e-4})
    trials = CardTrials(card, KEY, card.now)
    found = {}
    train(trials, LARGE)
    found["first"] = trials.look(LARGE)
    if rank:
        train(trials, LARGE, WGRAD)  # rank 0 has no such shape
        found["alone"] = trials.look(WGRAD)
    model = train(trials, LATER)
    found["ahead"] = trials.look(LATER)
    if rank:
        _torch.default_store().set("seen", "")
        _torch.default_store().wait(["measured"], timedelta(seconds=60))
        trials.step_begins(model, True)
    found["later"] = trials.look(LATER)
    found["open"] = len(trials.noting)
    card.clock += 31.0
    for each in list(trials.noting):
        trials.step_begins(each, True)
    found["over"] = len(trials.noting)
    return found | {"tried": len(card.tried)}


def _rank_0_waits(rank: int, ranks: int, folder: str) -> dict:
    """The same, rank 0's second model after rank 1 has looked for it in vain."""
    decide = CardTrials._decide

    def late(trials):
        if LATER in trials.wanted:
            _torch.default_store().wait(["seen"], timedelta(seconds=60))
        over = decide(trials)
        if LATER in trials.wanted:
            _torch.default_store().set("measured", "")
        return over

    if rank == 0:
        CardTrials._decide = late  # type: ignore[method-assign]
    return _rounds(rank, ranks, folder)


def test_ranks_that_have_other_models_take_what_rank_0_has_measured_by_shape(tmp_path):
    first, second = run(_rank_0_waits, 2, str(tmp_path))
    assert first["first"] == second["first"] is not None
    assert second["alone"] is second["ahead"] is None  # and it did not wait
    assert second["later"] == first["later"] is not None
    assert second["later"].backend == "triton"
    assert (first["tried"], second["tried"]) == (2 * 5, 0)
    assert second["open"] == 1  # the model with a shape of its own
    assert first["over"] == second["over"] == 0


@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
def test_the_first_forward_of_each_converted_model_begins_its_notes_and_the_second_its_trials(monkeypatch):
    told = []
    monkeypatch.setattr(table, "step_begins", lambda where, model, came: told.append((where, model, came)))
    for _ in range(2):
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        fe.convert(model, "current")
        layer: Any = model[0]
        state = layer.numerics.state
        model(torch.ones(4, 32)).sum().backward()
        assert told == []  # on a CPU nothing is asked
        state._host = None  # as on a card
        state.backward_seen = False
        with torch.no_grad():
            model(torch.ones(4, 32))
        assert told == []  # an evaluation is no step
        for _ in range(3):
            model(torch.ones(4, 32)).sum().backward()
        assert told == [(state.device, state, came) for came in (False, True, True)]
        told.clear()
