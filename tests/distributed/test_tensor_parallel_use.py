"""A divided model in ordinary use: Hugging Face's models, fused or not, reports, checkpoints, copies, torch.compile."""

import copy
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import converted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fp8engine as fe
from benchmarks.distributed.processes import run

RANKS, BATCH, T, WIDTH = 2, 2, 8, 32
Colwise, Rowwise = fe.distributed.Colwise, fe.distributed.Rowwise
LLAMA = {
    "model.layers.*.self_attn.[qkv]_proj": Colwise(),
    "model.layers.*.mlp.gate_proj": Colwise(),
    "model.layers.*.mlp.up_proj": Colwise(),
    "model.layers.*.self_attn.o_proj": Rowwise(),
    "model.layers.*.mlp.down_proj": Rowwise(),
}
FLIPS = 2e-4  # of a module in FP32: test_tensor_parallel_modules.py


def whole(t: Any) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def llama(fuse: bool, mesh=None) -> dict:
    """Loss and gradients of a Llama of two blocks; how its layers ran."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=2, vocab_size=64))
    converted(model, dataclasses.replace(fe.rowwise(), output=fe.FP32), fuse=fuse)
    if mesh is not None:
        fe.distributed.tensor_parallel(model, mesh, LLAMA)
    ids = torch.arange(BATCH * T).view(BATCH, T)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    fused = {layer["name"]: layer["fused"] for layer in fe.inspect(model).layers}
    return {"loss": loss.detach(), "fused": fused} | {n: whole(p.grad) for n, p in model.named_parameters()}


def pair(recipe: str = "current") -> nn.Module:
    torch.manual_seed(0)
    return converted(nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)), recipe)


def divided(mesh, recipe: str = "current") -> nn.Module:
    tokens = Shard(0)
    plan = {"0": Colwise(input_layouts=tokens), "2": Rowwise(output_layouts=tokens)}
    return fe.distributed.tensor_parallel(pair(recipe), mesh, plan)


def gradients(model, x: torch.Tensor) -> dict:
    model.zero_grad()
    model(x).square().sum().backward()
    return {name.removeprefix("_orig_mod."): whole(p.grad) for name, p in model.named_parameters()}


def work(rank: int, ranks: int, folder: str) -> dict:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[Any, Any] = {"llama": {fuse: llama(fuse, mesh) for fuse in (False, True)}}
    torch.manual_seed(rank)
    x = torch.randn(T, WIDTH)
    for recipe in ("current", "rowwise_gw_hp"):
        gradients(model := divided(mesh, recipe), x)
        found["divided", recipe] = [layer["divided"] for layer in fe.inspect(model).layers]
    model = divided(mesh)
    found["gradients"] = gradients(model, x)
    found["copied"] = gradients(copy.deepcopy(model), x)
    found["compiled"] = gradients(torch.compile(divided(mesh), backend="aot_eager"), x)
    model.zero_grad()
    for _ in range(2):
        model(x).square().sum().backward()
    found["accumulated"] = {name: whole(p.grad) for name, p in model.named_parameters()}
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
    pytest.importorskip("transformers")
    return run(work, RANKS, str(saved), fresh=True)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fuse", [False, True])
def test_a_model_of_hugging_face(fuse: bool, found: list[dict]):
    reference = llama(fuse)
    fused = reference.pop("fused")
    for rank in found:
        ours = dict(rank["llama"][fuse])
        assert ours.pop("fused") == fused
        assert error(ours["loss"], reference["loss"]) < FLIPS
        assert {name: e for name in reference if (e := error(ours[name], reference[name])) > FLIPS} == {}


def test_a_report_says_how_a_layer_is_divided(found: list[dict]):
    assert found[0]["divided", "current"] == [
        "columns over 2 ranks; its input is gathered as FP8 codes, per tensor",
        "rows over 2 ranks; its gradient is gathered as FP8 codes, per tensor",
    ]
    assert found[0]["divided", "rowwise_gw_hp"][0].endswith("its input is gathered in 16 bits, which its wgrad reads")


@pytest.mark.parametrize("how", ["copied", "compiled"])
def test_other_forms_of_the_model_compute_the_same(how: str, found: list[dict]):
    for name, value in found[0]["gradients"].items():
        assert torch.equal(found[0][how][name], value), name


def test_gradients_accumulate(found: list[dict]):
    for name, value in found[0]["gradients"].items():
        assert torch.equal(found[0]["accumulated"][name], 2 * value), name


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
