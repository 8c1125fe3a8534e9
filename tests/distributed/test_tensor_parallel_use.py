"""A divided model in ordinary use: reports, checkpoints, copies, torch.compile."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import error, gradients
from support import converted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fp8engine as fe
from benchmarks.distributed.processes import run

RANKS, T, WIDTH = 2, 8, 32


def pair(recipe: str = "current") -> nn.Module:
    torch.manual_seed(0)
    return converted(nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)), recipe)


def divided(mesh, recipe: str = "current") -> nn.Module:
    tokens = Shard(0)
    plan = {
        "0": fe.distributed.Colwise(input_layouts=tokens),
        "2": fe.distributed.Rowwise(output_layouts=tokens),
    }
    return fe.distributed.tensor_parallel(pair(recipe), mesh, plan)


def stepped(model, x: torch.Tensor) -> dict[str, Any]:
    model.zero_grad()
    model(x).square().sum().backward()
    return gradients(model)


def work(rank: int, ranks: int, folder: str) -> dict:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[Any, Any] = {}
    torch.manual_seed(rank)
    x = torch.randn(T, WIDTH)
    for recipe in ("current", "rowwise_gw_hp"):
        stepped(model := divided(mesh, recipe), x)
        found["divided", recipe] = [layer["divided"] for layer in fe.inspect(model).layers]
    model = divided(mesh)
    found["gradients"] = stepped(model, x)
    found["copied"] = stepped(copy.deepcopy(model), x)
    found["compiled"] = stepped(torch.compile(divided(mesh), backend="aot_eager"), x)
    model.zero_grad()
    for _ in range(2):
        model(x).square().sum().backward()
    found["accumulated"] = gradients(model)
    model.requires_grad_(False)
    found["frozen dx"] = gradients_of_input(model, x)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    return found


def gradients_of_input(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("divided")


@pytest.fixture(scope="module")
def found(saved: Path) -> list[dict]:
    return run(work, RANKS, str(saved), fresh=True)


pytestmark = pytest.mark.slow


def test_a_report_says_how_a_layer_is_divided(found: list[dict]):
    assert found[0]["divided", "current"] == [
        "columns over 2 ranks; its input is gathered as FP8 codes, per tensor",
        "rows over 2 ranks; its gradient is gathered as FP8 codes, per tensor",
    ]
    assert found[0]["divided", "rowwise_gw_hp"][0].endswith("its input is gathered in 16 bits, which its wgrad reads")


@pytest.mark.parametrize(("how", "times"), [("copied", 1), ("compiled", 1), ("accumulated", 2)])
def test_other_forms_of_a_step_compute_the_same(how: str, times: int, found: list[dict]):
    for name, value in found[0]["gradients"].items():
        assert torch.equal(found[0][how][name], times * value), name


def test_a_frozen_model_passes_gradients_on(found: list[dict]):
    x = torch.cat([torch.randn(T, WIDTH, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)])
    dx = gradients_of_input(pair().requires_grad_(False), x)
    ours = torch.cat([rank["frozen dx"] for rank in found])
    assert error(ours, dx) < 3 * 2.0**-9  # this CPU's BF16 products, as in test_tensor_parallel.py


def test_a_checkpoint_loads_into_one_process(saved: Path, found: list[dict]):
    model = pair()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it loads in a single process
        dcp.load(state, checkpoint_id=str(saved), no_dist=True)
    assert all(torch.equal(value, state[name]) for name, value in pair().state_dict().items())
