"""A Llama of two blocks under fe.distributed.fsdp beside fully_shard's own gather: which recipes are equal bit for bit.

Those of ROW_CODES cast a weight's columns from the codes of its rows.  An element that is subnormal in one of the two
casts is rounded otherwise: 3e-3 of the elements at most (docs/distributed.md), by half a subnormal step, which is 4e-6
of the row's amax, and 2e-5 of its rms.  So dgrad is apart by 2e-5 * sqrt(3e-3) = 1e-6.  Where dy is cast, one element
in 16e6 / 1e6 = 6e4 (a step of 2^-4, moved by 1e-6) is rounded to its neighbour: sqrt(1.6e-5) * 2^-4 = 2.5e-4 a layer,
and 1e-3 after 14 layers.  Losses of later steps are then apart, more with each step.
"""

import warnings
from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8engine as fe
from benchmarks.distributed import fsdp
from benchmarks.distributed.processes import run

EXACT, ROW_CODES = ("current", "delayed", "blockwise", "auto"), ("rowwise", "rowwise_gw_hp")
STEPS, TOKENS = 4, 32
NEAR = 1e-2  # ten times the estimate above
BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


def train(recipe: str, ours: bool, rank: int, sharding: dict) -> dict[str, Any]:
    """Losses, gradients of the first step, and weights after the last."""
    torch.manual_seed(0)
    model: Any = fe.convert(tiny.llama(hidden_size=64, intermediate_size=160, num_key_value_heads=2), recipe)
    if ours:
        fe.distributed.fsdp(model, **sharding)
    else:
        for block in (*model.model.layers, model):
            fully_shard(block, **sharding)
        fe.distributed.reduce_amax(model)
        fsdp.decide_between_steps(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses, gradients = [], []
    for step in range(STEPS):
        seed = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(tiny.VOCABULARY, (4, TOKENS), generator=seed)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        if not ours:
            fe.weights_changed(model)
    weights = [parameter.full_tensor() for parameter in model.parameters()]
    return {"losses": losses, "gradients": gradients, "weights": weights}


def compare(rank: int, ranks: int) -> dict[str, list[dict]]:
    warnings.simplefilter("ignore")
    cases = [(recipe, BF16) for recipe in (*EXACT, *ROW_CODES)] + [("rowwise_gw_hp in fp32", {})]
    return {name: [train(name.split()[0], ours, rank, how) for ours in (False, True)] for name, how in cases}


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[dict]]]:
    return run(compare, 2)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", EXACT)
def test_equal_bit_for_bit(recipe: str, found: list[dict]):
    for rank in found:
        plain, ours = rank[recipe]
        assert plain["losses"] == ours["losses"]
        assert len(set(ours["losses"])) == STEPS
        assert all(map(torch.equal, plain["weights"], ours["weights"]))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*ROW_CODES, "rowwise_gw_hp in fp32"])
def test_row_codes_give_the_same_forward_and_nearly_the_same_gradients(recipe: str, found: list[dict]):
    for rank in found:
        plain, ours = rank[recipe]
        assert plain["losses"][0] == ours["losses"][0]
        for a, b in zip(plain["gradients"], ours["gradients"], strict=True):
            assert (a - b).norm() <= NEAR * a.norm()
