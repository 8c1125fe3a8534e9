"""Generation and experts measured without a card: what runs is right, the rest says why, what is wrong has no time."""

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import experts, generate
from benchmarks.networks import NETWORKS, Size
from fp8engine.bench.cases import sqnr
from fp8engine.bench.harness import Timer, line
from fp8engine.bench.timing import WallClock

CASE = generate.Case(Size(32, 64, 4, 2, 2, 64), 2, 5, 4)
CPU = torch.device("cpu")


def model() -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS["llama"](CASE.size).eval()


def test_read_piece_by_piece_is_read_at_once():
    """FP32, summed in another order: 2^-24 a sum of 64, some 120 dB; a wrong position or mask leaves under 20."""
    net, text = model(), torch.randint(64, (2, 9))
    with torch.inference_mode():
        assert sqnr(generate.piecewise(net, text, 5), net(text)) > 100


def test_each_token_is_the_most_likely_after_those_before():
    net, prompt = model(), torch.randint(64, (2, 5))
    text = prompt
    for _ in range(4):
        with torch.inference_mode():
            text = torch.cat([text, net(text)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(generate.write(net, prompt, 4), text[:, 5:])


def test_a_right_variant_is_timed_and_a_wrong_one_is_not():
    rows = generate.generate([CASE], CPU, timer=Timer(WallClock(), 2))["rows"]
    assert [(row["name"], row["correct"]) for row in rows] == [(name, True) for name in generate.variants()]
    by_name = {row["name"]: row for row in rows}
    assert by_name["served current"]["weights"] < 0.75 * by_name["bf16"]["weights"]  # all but the head in a byte
    assert all(row["tokens_per_s"] == pytest.approx(2 * 4 / row["seconds"]) for row in rows)
    assert "x bf16" in line(rows[1])

    def broken(net: Any) -> nn.Module:
        with torch.no_grad():
            net.blocks[0].mlp.down_proj.weight.mul_(-1)
        return net

    ways = {"bf16": lambda net: net, "broken": broken}
    right, wrong = generate.generate([CASE], CPU, ways, Timer(WallClock(), 1))["rows"]
    assert ("seconds" in right, "seconds" in wrong) == (True, False)
    assert "WRONG" in line(wrong)


def test_every_way_to_multiply_experts_is_right_or_says_why():
    case = experts.Case(64, 40, 48, 32, 4)
    assert case.sizes() == [40, 8, 8, 8]
    rows = {row["name"]: row for row in experts.compare(case, CPU, Timer.of(CPU, 1, 1))}
    assert len(rows) == 7
    for name, row in rows.items():
        if "ours" in name:
            assert "no Triton kernels for cpu" in row["why"]
        else:
            assert row["correct"], name
            assert "x bf16" in line(row)
    for case in experts.CASES:
        assert (sum(case.sizes()), len(case.sizes()), min(case.sizes()) >= 0) == (case.rows, case.experts, True)
