"""What ran in which precision: counted by hand on small blocks, and against what autocast is known to do."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8engine.amp.autocast import autocast
from fp8engine.amp.lists import OpLists
from fp8engine.amp.opstats import op_stats


def test_each_operator_counts_in_the_precision_it_ran_in():
    x, low = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.float16)
    with op_stats() as stats:
        _ = x.exp(), low.exp(), low.exp(), x.double().sin(), x.bfloat16() + 1, low > 0
    ops = {"exp": {"FP32": 1, "FP16": 2}, "sin": {"float64": 1}, "add": {"BF16": 1}}
    casts = [{"from": "FP32", "to": dtype, "calls": 1, "elements": 16} for dtype in ("float64", "BF16")]
    assert stats.to_dict() == {
        "ops": ops | {"gt": {"FP16": 1}},  # a comparison counts as its inputs
        "upcast": {"exp": 0, "sin": 1, "add": 0, "gt": 0},
        "casts": casts,
    }
    assert stats.total("FP16") == 3


def test_views_allocations_and_integers_are_not_counted():
    with op_stats() as stats:
        x = torch.zeros(4, 4)
        _ = x.t().reshape(2, 8).expand(3, 2, 8), x[0], x.detach(), torch.arange(4) + 1, torch.arange(4).float()
    assert (stats.ops, stats.casts) == ({}, {})


def test_an_operator_that_took_a_widened_tensor_is_upcast():
    low, wide = torch.ones(4, 4, dtype=torch.float16), torch.ones(4, 4)
    with op_stats() as stats:
        widened = low.float()
        _ = widened.t().exp(), wide.exp(), widened + wide, wide.half().sin()
    assert dict(stats.upcast) == {"exp": 1, "add": 1, "sin": 0}
    assert stats.casts == {("FP16", "FP32"): [1, 16], ("FP32", "FP16"): [1, 16]}


def test_a_copy_casts_what_it_reads_and_copies_keep_a_widened_tensor_known():
    low, wide = torch.ones(4, 4, dtype=torch.float16), torch.ones(4, 4)
    with op_stats() as stats:
        widened = torch.empty(4, 4).copy_(low)
        _ = widened.clone().exp(), wide.clone().sin(), torch.empty(4, 4).copy_(torch.ones(4, dtype=torch.int64)).cos()
        low.copy_(wide)
        wide.copy_(wide.neg())
    assert stats.casts == {("FP16", "FP32"): [1, 16], ("FP32", "FP16"): [1, 16]}
    assert dict(stats.upcast) == {"exp": 1, "sin": 0, "cos": 0, "neg": 0}


def test_a_training_step_under_autocast_and_the_lists():
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 8)

    def step(lists: OpLists):
        with op_stats() as stats:
            with autocast("cpu", dtype=torch.bfloat16, lists=lists):
                loss = F.mse_loss(net(x), torch.zeros(4, 2))
            loss.backward()
        return stats

    plain, moved = step(OpLists()), step(OpLists(black=["linear"]))
    assert plain.ops["addmm"] == {"BF16": 2}
    assert plain.ops["mm"] == {"BF16": 3}  # two weight gradients, one input gradient: x needs none
    assert (plain.ops["tanh"], plain.ops["mse_loss"], plain.upcast["mse_loss"]) == ({"BF16": 1}, {"FP32": 1}, 1)
    assert (moved.ops["addmm"], moved.ops["mm"]) == ({"FP32": 2}, {"FP32": 3})
    assert moved.total("BF16") == 0


def test_nested_blocks_both_count_and_an_error_ends_the_counting():
    x = torch.ones(4)
    with op_stats() as outer:
        with pytest.raises(ZeroDivisionError), op_stats() as inner:
            _ = x.exp(), 1 / 0
        x.exp()
    x.exp()
    assert inner.ops["exp"].total() == 1
    assert outer.ops["exp"].total() == 2


def test_the_table_says_it_all_and_to_dict_is_json():
    low = torch.ones(4, 4, dtype=torch.float16)
    with op_stats() as stats:
        _ = low.float().exp(), low.exp(), low.double().exp()
    text = stats.table()
    row = next(line for line in text.splitlines() if " exp " in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["exp", "1", "", "1", "1", "2"]
    assert "cast FP16 -> FP32: 1 times, 16 elements" in text
    assert "cast FP16 -> float64: 1 times, 16 elements" in text
    assert str(stats) == text
    assert json.loads(json.dumps(stats.to_dict())) == stats.to_dict()
