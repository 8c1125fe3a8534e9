"""Linear layers divided over 2 ranks compute what one process computes, and what they gather crosses as FP8.

The reference of each case is the same converted model in this process.  Casts are the same bit for bit (scales per
tensor are joined; rows and blocks of x and dy are whole on a rank), so dW, whose sums no rank divides, is the same up
to FP32's order of summation.  y and dx are sums over ranks of numbers rounded to 16 bits first: two roundings of
2^-9 relative, and one of the sum, where one process rounds once.
"""

from typing import Any, cast

import pytest
import torch
from ranks import error, exact, whole
from support import converted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.distributed.tokens import wire_cast
from fp8engine.distributed.traffic import Traffic

RANKS, BATCH, T, K, F = 2, 3, 34, 129, 666  # each rank: 17 tokens of a sequence, 333 of the features
RECIPES = ("current", "delayed", "rowwise", "rowwise_gw_hp", "blockwise", "mxfp8", "auto")
SUMS = 3 * 2.0**-9  # BF16: three roundings of half an ulp each, of numbers as large as the sum
EXACT = (fe.rowwise(power_of_2=False), fe.blockwise(power_of_2=False))  # nothing of theirs may be cast twice


class GatedMLP(nn.Module):
    """Two layers that read one tensor, and one that reads their product."""

    def __init__(self, bias: bool = True):
        super().__init__()
        self.gate, self.up = nn.Linear(K, F, bias), nn.Linear(K, F, bias)
        self.down = nn.Linear(F, K, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def plan_of(tokens, column: Any = fe.distributed.Colwise, row: Any = fe.distributed.Rowwise) -> dict:
    """The MLP's plan; tokens: their layout before and after it."""
    return {
        "gate": column(input_layouts=tokens),
        "up": column(input_layouts=tokens),
        "down": row(output_layouts=tokens),
    }


def data(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH, T, K).to(dtype), torch.randn(BATCH, T, K).to(dtype)


def made(recipe, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = GatedMLP().to(dtype)
    if recipe == "one in 16 bits":  # as auto decides between two steps
        converted(model, "rowwise")
        cast(fe.Linear, model.up).numerics.adopt(fe.high_precision(fe.BF16))
        return model
    return model if recipe is None else converted(model, recipe)


def mine(x: torch.Tensor, layout, rank: int, ranks: int) -> torch.Tensor:
    return x.chunk(ranks, layout.dim)[rank].contiguous() if isinstance(layout, Shard) else x.clone()


def step(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict:
    """y, dx and gradients of one step."""
    x = x.requires_grad_()
    y = model(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def divided(rank: int, ranks: int, recipe, layout, dtype=torch.bfloat16, steps: int = 1) -> tuple[dict, dict]:
    """(what `step` gives with all tokens, bytes and calls of its collectives)."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = made(recipe, dtype)
    if recipe is None:
        parallelize_module(model, mesh, plan_of(layout, ColwiseParallel, RowwiseParallel))
    else:
        fe.distributed.tensor_parallel(model, mesh, plan_of(layout))
    x, dy = (mine(t, layout, rank, ranks) for t in data(dtype))
    for _ in range(steps):
        model.zero_grad()
        with Traffic() as traffic:
            found = step(model, x.detach(), dy)
    for name in ("y", "dx"):
        found[name] = DTensor.from_local(found[name], mesh, [layout], run_check=False)
    return {name: whole(value) for name, value in found.items()}, traffic.to_dict()


def work(rank: int, ranks: int) -> dict:
    found = {}
    for recipe in (*RECIPES, None):
        for layout in (Shard(1), Replicate()):
            found[recipe, str(layout)] = divided(rank, ranks, recipe, layout)
    for recipe in ("current", "rowwise"):
        for dtype in (torch.float32, torch.float16):
            found[recipe, dtype] = divided(rank, ranks, exact(recipe), Shard(1), dtype)
        found[recipe, "batch"] = divided(rank, ranks, recipe, Shard(1), steps=2)
    found["one in 16 bits"] = divided(rank, ranks, "one in 16 bits", Shard(1))
    return found | {each.name: divided(rank, ranks, each, Shard(1)) for each in EXACT}


@pytest.fixture(scope="module")
def found() -> list[dict]:
    """What each rank found."""
    return run(work, RANKS)


def check(ours: dict, reference: dict, of_sums: float = SUMS, of_gradients: float = 1e-5) -> None:
    for name, value in reference.items():
        most = of_sums if name in ("y", "dx") else of_gradients
        assert error(ours[name], value) <= most, name


pytestmark = pytest.mark.slow


@pytest.mark.short
@pytest.mark.parametrize("layout", ["S(1)", "R"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_of_one_process(recipe: str, layout: str, found: list[dict]):
    reference = step(made(recipe), *data())
    for rank in found:
        check(rank[recipe, layout][0], reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_other_dtypes(recipe: str, dtype: torch.dtype, found: list[dict]):
    # FP16 rounds by 2^-12; FP32's order of summation moves a sum of 666 numbers by a few 2^-24.
    most = {torch.float16: 3 * 2.0**-12, torch.float32: 1e-6}[dtype]
    check(found[0][recipe, dtype][0], step(made(exact(recipe), dtype), *data(dtype)), most)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_gathered_crosses_as_codes(recipe: str, found: list[dict]):
    ours, torchs = found[0][recipe, "S(1)"][1], found[0][None, "S(1)"][1]
    bf16 = (RANKS - 1) * BATCH * T // RANKS * K * 2  # of one gather: x, or dy
    assert torchs["all-gather bfloat16"] == {"bytes": 3 * bf16, "calls": 3}  # torch gathers x for gate and for up
    if recipe == "rowwise_gw_hp":
        assert ours["all-gather bfloat16"] == {"bytes": 2 * bf16, "calls": 2}
        assert "all-gather uint8" not in ours
    else:
        scales = {"rowwise": 1, "blockwise": 2, "mxfp8": 5}.get(
            recipe, 0
        )  # bytes a row: 129 columns are 2, or 5 blocks
        assert ours["all-gather uint8"] == {"bytes": 2 * (RANKS - 1) * BATCH * T // RANKS * (K + scales), "calls": 2}
        assert not any(kind.startswith("all-gather") and kind != "all-gather uint8" for kind in ours)
    # y and the sum of both layers' dx: one of each.
    assert ours["reduce-scatter bfloat16"] == {"bytes": 2 * bf16, "calls": 2}
    assert "all-reduce bfloat16" not in ours


def test_a_frozen_layer_gathers_codes_that_it_reads_as_they_are():
    for recipe, gathers_codes in zip(EXACT, (True, False), strict=True):  # blocks: autograd/ready.py refuses them
        x = wire_cast(recipe.forward[0], recipe.wgrad[1], second_reads=False)
        assert x == (recipe.forward[0] if gathers_codes else None)


@pytest.mark.parametrize("recipe", EXACT, ids=lambda recipe: recipe.name)
def test_scales_that_are_no_powers_of_two_keep_the_gather_in_16_bits(recipe: fe.Recipe, found: list[dict]):
    ours, traffic = found[0][recipe.name]
    assert "all-gather uint8" not in traffic
    assert traffic["all-gather bfloat16"]["calls"] == 2
    reference = step(made(recipe), *data())
    # A row of h that two ranks have halves of has two scales: its sums with w are rounded otherwise, as well.  A rank's
    # blocks begin at its first feature, the 334th of all, so that dh too is rounded otherwise, which dW of up reads:
    # two casts of 31.6 dB, 2.6 % each, on either side.
    if recipe.weight.granularity == fe.PerRow():
        check(ours, {name: value for name, value in reference.items() if name not in ("y", "dx")})
    assert all(error(ours[name], value) <= 0.06 for name, value in reference.items())


def test_a_layer_in_16_bits_gathers_16_bits(found: list[dict]):
    ours, traffic = found[0]["one in 16 bits"]
    bf16 = BATCH * T // RANKS * K * 2
    assert traffic["all-gather bfloat16"] == {"bytes": bf16, "calls": 1}  # x for up
    assert traffic["all-gather uint8"]["calls"] == 2  # x for gate, dy for down
    # A rank's half of up is another matmul of BF16, which a CPU may add in another order: K numbers in FP32, 2^-17 of
    # the sum, and one result in 2^9 is rounded to the other neighbour, 2^-8 away.  One cast in 2^5 of those then takes
    # another code, 2^-3 away: sqrt(2^-9 2^-5 2^-6) in norms.
    check(ours, step(made("one in 16 bits"), *data()), of_gradients=2.0**-10)


def test_a_second_step_is_the_first(found: list[dict]):
    for recipe in ("current", "rowwise"):
        first, again = found[0][recipe, "S(1)"][0], found[0][recipe, "batch"][0]
        assert all(torch.equal(first[name], again[name]) for name in first)
