"""Linear layers divided over 2 ranks compute what one process computes, and what they gather crosses as FP8.

The reference of each case is the same converted model in this process.  Casts are the same bit for bit (scales per
tensor are joined; rows and blocks of x and dy are whole on a rank), so dW, whose sums no rank divides, is the same up
to FP32's order of summation.  y and dx are sums over ranks of numbers rounded to 16 bits first: two roundings of
2^-9 relative, and one of the sum, where one process rounds once.
"""

import copy
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import error, exact, gradients, whole
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
BF16, TOKENS = torch.bfloat16, Shard(1)


class GatedMLP(nn.Module):
    """Two layers that read one tensor, and one that reads their product."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(K, F), nn.Linear(K, F), nn.Linear(F, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def data(dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH, T, K).to(dtype), torch.randn(BATCH, T, K).to(dtype)


def made(recipe, dtype: torch.dtype = BF16) -> nn.Module:
    torch.manual_seed(0)
    model = GatedMLP().to(dtype)
    if recipe == "one in 16 bits":  # as auto decides between two steps
        converted(model, "rowwise")
        cast(fe.Linear, model.up).numerics.adopt(fe.high_precision(fe.BF16))
        return model
    return model if recipe is None else converted(model, recipe)


def divided(mesh, recipe, layout: Any = TOKENS, dtype: torch.dtype = BF16) -> nn.Module:
    """The model over ranks; layout: of tokens before and after it.  Without a recipe torch's own styles divide it."""
    ours = recipe is not None
    column, row = (fe.distributed.Colwise, fe.distributed.Rowwise) if ours else (ColwiseParallel, RowwiseParallel)
    of_tokens = column(input_layouts=layout)
    plan = {"gate": of_tokens, "up": of_tokens, "down": row(output_layouts=layout)}
    return (fe.distributed.tensor_parallel if ours else parallelize_module)(made(recipe, dtype), mesh, plan)


def ran(model: nn.Module, x: torch.Tensor, dy: torch.Tensor, times: int = 1) -> dict[str, Any]:
    """y and dx of a step, of which the forward and backward come that often."""
    model.zero_grad()
    for _ in range(times):
        x = x.detach().clone().requires_grad_()
        y = model(x)
        y.backward(dy)
    return {"y": y.detach(), "dx": x.grad}


def step(model: nn.Module, x: torch.Tensor, dy: torch.Tensor, times: int = 1) -> dict[str, Any]:
    """The same, and the whole gradients."""
    return ran(model, x, dy, times) | gradients(model)


def mine(mesh, layout: Any, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of x and dy."""
    x, dy = data(dtype)
    if isinstance(layout, Shard):
        x, dy = (t.chunk(RANKS, layout.dim)[mesh.get_rank()].contiguous() for t in (x, dy))
    return x, dy


def measured(mesh, recipe, layout: Any = TOKENS, dtype: torch.dtype = BF16) -> tuple[dict, dict, dict]:
    """(what `step` gives with all tokens, the same of a second step, bytes and calls of its collectives)."""
    model, given = divided(mesh, recipe, layout, dtype), mine(mesh, layout, dtype)
    steps = []
    for _ in range(2):
        with Traffic() as traffic:
            found = ran(model, *given)
        for name in ("y", "dx"):
            found[name] = whole(DTensor.from_local(found[name], mesh, [layout], run_check=False))
        steps.append(found | gradients(model))
    return *steps, traffic.to_dict()


def used(mesh, folder: str) -> dict[str, Any]:
    """A divided model copied, compiled, accumulating and frozen; what its report says, and its checkpoint."""
    model, given = divided(mesh, "current"), mine(mesh, TOKENS)
    found: dict[str, Any] = {"copied": step(copy.deepcopy(model), *given)}
    found["compiled"] = step(cast(nn.Module, torch.compile(divided(mesh, "current"), backend="aot_eager")), *given)
    found["accumulated"] = step(model, *given, times=2)
    found["report"] = [layer["divided"] for layer in fe.inspect(model).layers]
    in_16_bits = divided(mesh, "rowwise_gw_hp")
    step(in_16_bits, *given)
    found["report of 16 bits"] = [layer["divided"] for layer in fe.inspect(in_16_bits).layers]
    dcp.save(model.state_dict(), checkpoint_id=folder)
    found["frozen"] = step(model.requires_grad_(False), *given)["dx"]
    return found


def work(rank: int, ranks: int, folder: str) -> dict:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[Any, Any] = {"used": used(mesh, folder)}
    for recipe in (*RECIPES, None):
        for layout in (TOKENS, Replicate()):
            found[recipe, str(layout)] = measured(mesh, recipe, layout)
    for recipe in ("current", "rowwise"):
        for dtype in (torch.float32, torch.float16):
            found[recipe, dtype] = measured(mesh, exact(recipe), dtype=dtype)
    found["one in 16 bits"] = measured(mesh, "one in 16 bits")
    return found | {each.name: measured(mesh, each) for each in EXACT}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("divided")


@pytest.fixture(scope="module")
def found(saved: Path) -> list[dict]:
    return run(work, RANKS, str(saved), fresh=True)


def check(ours: dict, reference: dict, of_sums: float = SUMS, of_gradients: float = 1e-5) -> None:
    for name, value in reference.items():
        most = of_sums if name in ("y", "dx") else of_gradients
        assert error(ours[name], value) <= most, name


pytestmark = pytest.mark.slow


@pytest.mark.short
@pytest.mark.parametrize("layout", ["S(1)", "R"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_of_one_process(recipe: str, layout: str, found: list[dict]):
    """And a second step, in which nothing is new, is the first."""
    reference = step(made(recipe), *data())
    for rank in found:
        first, again, _ = rank[recipe, layout]
        check(first, reference)
        if recipe in ("current", "rowwise"):
            assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_other_dtypes(recipe: str, dtype: torch.dtype, found: list[dict]):
    # FP16 rounds by 2^-12; FP32's order of summation moves a sum of 666 numbers by a few 2^-24.
    most = {torch.float16: 3 * 2.0**-12, torch.float32: 1e-6}[dtype]
    check(found[0][recipe, dtype][0], step(made(exact(recipe), dtype), *data(dtype)), most)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_gathered_crosses_as_codes(recipe: str, found: list[dict]):
    ours, torchs = found[0][recipe, "S(1)"][2], found[0][None, "S(1)"][2]
    bf16 = (RANKS - 1) * BATCH * T // RANKS * K * 2  # of one gather: x, or dy
    assert torchs["all-gather bfloat16"] == {"bytes": 3 * bf16, "calls": 3}  # torch gathers x for gate and for up
    if recipe == "rowwise_gw_hp":
        assert ours["all-gather bfloat16"] == {"bytes": 2 * bf16, "calls": 2}
        assert "all-gather uint8" not in ours
    else:
        # Bytes a row: 129 columns are 2, or 5 blocks.
        scales = {"rowwise": 1, "blockwise": 2, "mxfp8": 5}.get(recipe, 0)
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
    ours, _, traffic = found[0][recipe.name]
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
    ours, _, traffic = found[0]["one in 16 bits"]
    bf16 = BATCH * T // RANKS * K * 2
    assert traffic["all-gather bfloat16"] == {"bytes": bf16, "calls": 1}  # x for up
    assert traffic["all-gather uint8"]["calls"] == 2  # x for gate, dy for down
    # A rank's half of up is another matmul of BF16, which a CPU may add in another order: K numbers in FP32, 2^-17 of
    # the sum, and one result in 2^9 is rounded to the other neighbour, 2^-8 away.  One cast in 2^5 of those then takes
    # another code, 2^-3 away: sqrt(2^-9 2^-5 2^-6) in norms.
    check(ours, step(made("one in 16 bits"), *data()), of_gradients=2.0**-10)


def test_a_report_says_how_a_layer_is_divided(found: list[dict]):
    columns, rows = "columns over 2 ranks; its input is gathered", "rows over 2 ranks; its gradient is gathered"
    codes = "as FP8 codes, per tensor"
    assert found[0]["used"]["report"] == [f"{columns} {codes}", f"{columns} {codes}", f"{rows} {codes}"]
    assert found[0]["used"]["report of 16 bits"][0] == f"{columns} in 16 bits, which its wgrad reads"


@pytest.mark.parametrize(("how", "times"), [("copied", 1), ("compiled", 1), ("accumulated", 2)])
def test_other_forms_of_a_step_compute_the_same(how: str, times: int, found: list[dict]):
    for rank in found:
        once = rank["current", "S(1)"][0]
        for name, _ in made("current").named_parameters():
            assert torch.equal(rank["used"][how][name], times * once[name]), name


def test_a_frozen_model_passes_gradients_on(found: list[dict]):
    dx = step(made("current").requires_grad_(False), *data())["dx"]
    assert error(torch.cat([rank["used"]["frozen"] for rank in found], 1), dx) < SUMS


def test_a_checkpoint_loads_into_one_process(saved: Path, found: list[dict]):
    model = made("current")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it loads in a single process
        dcp.load(state, checkpoint_id=str(saved), no_dist=True)
    assert all(torch.equal(value, state[name]) for name, value in made("current").state_dict().items())
