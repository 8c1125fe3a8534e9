"""The benchmark of experts, where there is no card: what can run is right, what cannot says why."""

import torch

from benchmarks import experts
from fp8engine.bench.harness import Timer, line


def test_every_way_is_right_or_says_why():
    timer = Timer.of(torch.device("cpu"), 1, 1)
    case = experts.Case(64, 40, 48, 32, 4)
    assert case.sizes() == [40, 8, 8, 8]
    rows = {row["name"]: row for row in experts.compare(case, torch.device("cpu"), timer)}
    assert len(rows) == 7
    for name, row in rows.items():
        if "ours" in name:
            assert "no Triton kernels for cpu" in row["why"]
        else:
            assert row["correct"], name
            assert "x bf16" in line(row)


def test_the_cases_divide_all_their_rows():
    for case in experts.CASES:
        assert sum(case.sizes()) == case.rows
        assert len(case.sizes()) == case.experts
        assert min(case.sizes()) >= 0
