"""Equal blocks compiled one by one share graphs: nothing that differs from layer to layer is a constant of a graph.

Dynamo's limit is 8 graphs a function; under fullgraph=True the ninth is an error, so that 9 blocks prove the claim.
"""

import copy
from typing import Any, cast

import pytest
import tiny_models as tiny
import torch
from support import FP8_RECIPES, converted, same, state_of, tables
from torch import nn
from torch._dynamo.utils import counters

import fp8engine as fe
from fp8engine.scaling.sample import StepSamples

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    # Dynamo reads .grad of a block's input, and torch warns of that.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

BLOCKS, MOST = 9, 3  # graphs: one of sampled steps, one of others; one is to spare


class Block(nn.Module):
    """Two layers that read one input, and an MLP."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        x = x + self.q(x) + self.k(x)
        return x + self.down(torch.relu(self.up(x)))


def blocks(recipe: Any) -> Any:
    """So many of them, with the same weights every time."""
    torch.manual_seed(0)
    return converted(nn.Sequential(*(Block() for _ in range(BLOCKS))), recipe)


def compiled_by_block(eager: nn.Module, blocks_of) -> nn.Module:
    compiled = copy.deepcopy(eager)
    for block in blocks_of(compiled):
        block.compile(backend="aot_eager", fullgraph=True)
    return compiled


def steps_alike(eager: Any, compiled: Any, loss, steps: int) -> None:
    """Losses, gradients and the scaling tables of both are equal, bit for bit, at every step."""
    for step in range(steps):
        found = []
        for model in (eager, compiled):
            made, parameters = loss(model, step), list(model.parameters())
            grads = torch.autograd.grad(made, parameters)
            found.append([made, *grads, *tables(model)[:2]])
            with torch.no_grad():
                for p, grad in zip(parameters, grads, strict=True):
                    p -= 0.01 * grad
        assert same(*found)
    assert counters["stats"]["unique_graphs"] <= MOST


def batch_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(torch.randn(16, 32, generator=torch.Generator().manual_seed(step))).square().mean()


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_equal_blocks_are_one_graph_and_compute_what_eager_code_computes(recipe: str):
    eager = blocks(recipe)
    steps_alike(eager, compiled_by_block(eager, lambda model: model), batch_loss, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_blocks_that_fully_shard_gathers_as_codes_are_one_graph(recipe: str, group):
    model: Any = blocks(recipe)
    fe.distributed.fsdp(model, blocks=list(model))
    assert fe.inspect(model).layers[0]["gather"] == "FP8 codes"
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    for step in range(2):
        batch_loss(model, step).backward()
    assert counters["stats"]["unique_graphs"] <= MOST


def test_a_sampled_step_of_equal_blocks_is_one_graph_and_samples_what_eager_code_samples():
    eager = blocks(fe.auto(interval=2))
    compiled = compiled_by_block(eager, lambda model: model)
    steps_alike(eager, compiled, batch_loss, steps=1)
    samples, wanted = (cast(StepSamples, state_of(model).samples) for model in (compiled, eager))
    assert wanted.slots_SL[: 3 * 4 * BLOCKS].ne(0).any(1).all(), "every operand was described"
    assert torch.equal(samples.slots_SL, wanted.slots_SL)
    assert same(samples.parts, wanted.parts)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["auto", "current", pytest.param("delayed", marks=pytest.mark.slow)])
def test_fused_blocks_of_a_llama_are_one_graph(recipe: str):
    torch.manual_seed(0)
    eager = converted(tiny.llama(num_hidden_layers=BLOCKS, use_cache=False), recipe)
    compiled = compiled_by_block(eager, lambda model: model.model.layers)
    ids = tiny.tokens()
    # `auto` decides at its second step, and a decision compiles its layer again.
    steps_alike(eager, compiled, lambda model, _: tiny.loss_of(model, ids), steps=1 if recipe == "auto" else 2)
    assert fe.inspect(eager).layers[0]["fused"].startswith("fused: ")
