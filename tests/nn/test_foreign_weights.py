"""Weights and inputs of other tensor classes in a converted layer: refused by name, with what to do instead."""

import copy
from typing import Any

import pytest
import torch
from support import FP8_RECIPES, converted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

import fp8engine as fe


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


@pytest.fixture
def mesh(group):
    """One process is enough for a DTensor."""
    return init_device_mesh("cpu", (1,))


@pytest.mark.parametrize("recipe", ["current", "auto"])
@pytest.mark.parametrize("how", [Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Float8WeightOnlyConfig])
def test_a_weight_that_torchao_quantised_after_convert_is_refused_by_name(recipe: str, how):
    model = converted(net(), recipe)
    quantize_(model, how(), lambda module, name: name == "2")
    message = r"^2: its weight became a \w+ after fe\.convert.*call quantize_ before fe\.convert"
    with pytest.raises(fe.errors.UnsupportedDtype, match=message):
        model(torch.randn(4, 32))


def test_quantised_before_convert_it_is_left_alone():
    """The remedy that the message names."""
    model, x = net(), torch.randn(4, 32)
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: name == "2")
    kept = copy.deepcopy(model[2])
    converted(model, "current")
    assert [isinstance(layer, fe.Linear) for layer in model] == [True, False, False]
    h = torch.randn(4, 64)
    assert torch.equal(model[2](h), kept(h))
    assert model(x).shape == (4, 32)


def test_a_weight_of_integers_is_refused_with_a_remedy():
    layer = fe.Linear(32, 32, recipe="current")
    layer.weight = nn.Parameter(torch.zeros(32, 32, dtype=torch.uint8), requires_grad=False)  # as bitsandbytes has it
    with pytest.raises(fe.errors.UnsupportedDtype, match=r"Linear: weight is torch\.uint8.*before fe\.convert"):
        layer(torch.randn(4, 32))


@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "auto"])
def test_parallelize_module_is_refused_by_name(recipe: str, mesh):
    model = parallelize_module(converted(net(), recipe), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with pytest.raises(fe.errors.ParallelError, match=r"^0: its input is a DTensor.*overrides=\{'0': 'bf16'\}"):
        model(torch.randn(4, 32))


def test_a_sharded_weight_is_refused_by_name_where_the_input_is_plain(mesh):
    module: Any
    for module, name in (
        (converted(net(), "current")[0], "0"),
        (fe.LayerNormLinear(32, 64, recipe="current"), "linear"),
    ):
        layer = getattr(module, "linear", module)
        placed = distribute_tensor(layer.weight.detach(), mesh, [Shard(0)])
        layer.weight = nn.Parameter(placed)
        with pytest.raises(fe.errors.ParallelError, match=f"^{name}: its weight is a DTensor.*fully_shard"):
            module(torch.randn(4, 32))


def test_the_remedy_runs_and_gives_what_the_plain_layers_give(mesh):
    model, x = converted(net(), "current", overrides={"*": "bf16"}), torch.randn(4, 32)
    wanted = model(x)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(model(x), wanted)


class Tagged(torch.Tensor):
    """A subclass without storage of its own making, as torchvision's images are."""


def test_other_subclasses_of_tensors_compute_as_they_did():
    layer, x = fe.Linear(32, 32, recipe="current"), torch.randn(4, 32)
    wanted = layer(x)
    assert torch.equal(layer(x.as_subclass(Tagged)).as_subclass(torch.Tensor), wanted)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tagged))
    assert torch.equal(layer(x), wanted)
