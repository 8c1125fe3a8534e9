"""Models of transformers whose layers are no nn.Linear of their own: Conv1D, a tied head, experts in one parameter.

Every family's numbers, checkpoints and generations: tests/hf.
"""

from typing import Any

import pytest
import tiny_models as tiny
import torch
from support import converted
from torch import nn
from transformers.pytorch_utils import Conv1D

import fp8engine as fe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def report(model: nn.Module) -> dict[str, Any]:
    """The rows by layer, after a training step."""
    tiny.loss_of(model, tiny.tokens()).backward()
    return {row["name"]: row for row in fe.inspect(model).layers}


def test_gpt2_conv1d_is_the_linear_of_its_transposed_weight():
    conv, linear = Conv1D(24, 16), nn.Linear(16, 24)
    nn.init.normal_(conv.bias)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    found, x = [], torch.randn(2, 5, 16)
    for layer in (conv, linear):
        leaf = x.clone().requires_grad_()
        y = converted(nn.Sequential(layer), "rowwise")(leaf)
        y.square().sum().backward()
        found.append([y, leaf.grad, layer.bias.grad, layer.weight.grad])
    found[0][3] = found[0][3].t()
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))
    assert isinstance(conv, Conv1D)
    assert conv.weight.shape == (16, 24)
    assert repr(conv) == "Conv1D(nf=24, nx=16, recipe=rowwise (E4M3xE4M3, grad E4M3))"


def test_gpt2_tie_is_kept_and_the_head_left_unless_named():
    model = converted(tiny.gpt2())
    rows = report(model)
    assert rows.pop("lm_head")["reason"].startswith("output head")
    assert {row["kind"] for row in rows.values()} == {"Float8Conv1D"}
    model = converted(tiny.gpt2(), overrides={"lm_head": "rowwise"})
    assert isinstance(model.get_output_embeddings(), fe.Linear)
    head = report(model)["lm_head"]
    assert (head["recipe"], head["ran"]) == ("rowwise", True)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_mixtral_experts_run_in_fp8_and_are_listed_with_their_share():
    model = converted(tiny.mixtral())
    experts = [row for name, row in report(model).items() if "experts" in name]
    assert len(experts) == 2 * 2, "gate_up_proj and down_proj of two layers"
    for row in experts:
        assert len(row["shape"]) == 3
        assert (row["recipe"], row["experts"]) == ("current", [1, 2])
        assert f"1 of 2 a token, {row['flops_share']:.1%} of the model's linear FLOPs" in row["reason"]
    assert sum(row["flops_share"] for row in experts) > 0.5
    assert fe.inspect(model).totals["fp8_flops_share"] > 0.85, "all but the head and the routers"
