"""The three parts of the tests: each case is in one of them, and the short one says what it lacks."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parts import KERNELS, LACKS, MOST, PARTS, divide, short


def case(name: str, *marks: str, file: str = "tests/nn/test_x.py", **params) -> Any:
    """A case of a test as pytest collects it."""
    return SimpleNamespace(
        path=Path(file),
        name=name,
        originalname=name.partition("[")[0],
        nodeid=f"{file}::{name}",
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda mark: SimpleNamespace(args=(3,)) if mark in marks else None,
    )


def config(part: str) -> Any:
    """What pytest was asked for."""
    return SimpleNamespace(
        stash=pytest.Stash(),
        getoption=lambda name: part,
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )


CASES = [
    *(case(f"test_many[{i}]") for i in range(9)),
    case("test_one"),
    case("test_long", "slow"),
    case("test_wanted", "slow", "short"),
    case("test_product[0]", "slow"),
    case("test_product[1]", "slow", "nightly"),
    *(case(f"test_costly[{i}]", "slow", "few") for i in range(6)),
]


def test_few_cases_of_each_function_and_of_slow_ones_those_that_are_marked():
    kept = short(CASES)
    numbers = sorted(int(name[name.index("[") + 1]) for name in kept if "many" in name)
    assert len(numbers) == MOST
    assert numbers[1] - numbers[0] in (4, 5), "half of the nine cases apart"
    assert {name.partition("::")[2] for name in kept if "many" not in name} == {"test_one", "test_wanted"}


@pytest.mark.parametrize("room", KERNELS)
def test_of_the_emulated_card_and_the_interpreter_one_case(room: str):
    assert len(short([case(f"test_many[{i}]", file=f"tests/{room}/test_x.py") for i in range(9)])) == 1


def test_functions_of_one_name_in_two_files_are_two():
    cases = [case("test_same", file="tests/nn/test_x.py"), case("test_same", file="tests/nn/test_y.py")]
    assert short(cases) == {each.nodeid for each in cases}


def test_each_case_is_in_one_part():
    parts = {}
    for part in PARTS:
        items = list(CASES)
        divide(config(part), items)
        parts[part] = [item.nodeid for item in items]
    assert sorted(itertools.chain(*parts.values())) == sorted(item.nodeid for item in CASES)
    assert "tests/nn/test_x.py::test_product[0]" in parts["rest"]
    assert "tests/nn/test_x.py::test_product[1]" in parts["nightly"]
    costly = [[i for i in range(6) if f"tests/nn/test_x.py::test_costly[{i}]" in parts[part]] for part in PARTS]
    assert costly in ([[], [0, 2, 4], [1, 3, 5]], [[], [1, 3, 5], [0, 2, 4]]), "three, spread over the parameter"


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (case("test_a", "slow", file="tests/export/test_a.py"), "room export"),
        (case("test_a", "slow", recipe="blockwise"), "recipe blockwise"),
        (case("test_a", "slow", file="tests/emulated/test_a.py"), "file emulated/test_a.py"),
    ],
)
def test_what_the_short_part_lacks_is_noted(lost: Any, said: str):
    short_part, rest = config("short"), config("rest")
    for each in (short_part, rest):
        divide(each, [*CASES, lost])
    assert said in short_part.stash[LACKS]
    assert rest.stash[LACKS] == []


def test_the_short_part_lacks_nothing(request: pytest.FixtureRequest):
    """Of the tests that this run has collected; where it asks for all of them there is nothing to lack."""
    assert request.config.stash.get(LACKS, []) == [], "mark a case of each `short`"
