"""Fuzzer of checkpoints: a run resumed from any operation of a random program is the uninterrupted one, bit for bit.

The uninterrupted run is saved after every operation.  From each of these checkpoints a fresh model, converted again,
does the rest of the program.  After every operation of it both are compared: losses, parameters, gradients, scales,
histories, counters and the decisions of `auto`.

    pytest tests/nightly --seeds 500        `make nightly`
"""

from __future__ import annotations

from typing import Any

import pytest
from saved_programs import RECIPES, Run, Setting, differences

# torch says it of its RMSNorm, of an input that autocast has made.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
LENGTH = 6  # operations of a program; comparing takes the square of it


def check(setting: Setting, program: list[str]) -> int:
    """Resume a program from each of its places; how many runs were compared."""
    straight = Run(setting)
    losses, saved, states = [], [straight.save()], [straight.state()]
    for operation in program:
        losses.append(straight.do(operation))
        saved.append(straight.save())
        states.append(straight.state())
    for place in range(len(program)):
        run = Run.resumed(setting, saved[place])
        for at in range(place, len(program)):
            where = f"{setting}: saved after {program[:place]}, then {program[place : at + 1]}"
            assert repr(run.do(program[at])) == repr(losses[at]), where
            assert not (found := differences(states[at + 1], run.state())), f"{where}: {found[:3]}"
    return len(program)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_resumed_from_any_place_is_the_uninterrupted_one(recipe: str, pytestconfig: pytest.Config):
    seeds: Any = pytestconfig.getoption("--seeds")
    compared = 0
    for seed in range(max(seeds // len(RECIPES), 1)):
        setting = Setting.of(seed, recipe)
        compared += check(setting, setting.program(LENGTH))
    assert compared >= LENGTH


CASES = {
    "weights written after an evaluation": ["forget", "evaluate", "write", "accumulate"],
    "a microbatch before and after": ["microbatch", "microbatch", "step", "accumulate", "train"],
    "a weight frozen in training": ["train", "freeze", "train", "train", "evaluate", "train"],
}


@pytest.mark.parametrize("recipe", ["auto", "delayed"])
@pytest.mark.parametrize("case", CASES)
def test_a_program_resumed_from_any_place_is_the_uninterrupted_one(case: str, recipe: str):
    check(Setting.of(2, recipe), CASES[case])
