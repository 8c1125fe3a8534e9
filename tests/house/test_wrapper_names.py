"""One name a layer: inspect, the scaling state and find_overflow agree, and get_submodule of the model finds it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import converted
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import fp8engine as fe
from fp8engine.scaling.table import ROLES

LAYERS = ["blocks.0.up", "blocks.1.module", "module.fc", "last"]


class Overflows(nn.Linear):
    """FP16 ends at 65504."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Too large for it."""
        return (super().forward(x).float() * 0 + 1e6).half().float()


class Net(nn.Module):
    """Parts that are called as a wrapper calls what it holds."""

    def __init__(self, kind: type[nn.Linear] = nn.Linear):
        super().__init__()
        block = [nn.ModuleDict({"up": nn.Linear(16, 16)}), nn.ModuleDict({"module": nn.Linear(16, 16)})]
        self.blocks, self.module, self.last = nn.ModuleList(block), Own(kind), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for block in self.blocks:
            for layer in block.children():
                x = layer(x)
        return self.last(self.module(x))


class Own(nn.Module):
    """A part with one layer."""

    def __init__(self, kind: type[nn.Linear]):
        super().__init__()
        self.fc = kind(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its own."""
        return self.fc(x)


class Holder(nn.Module):
    """Holds a model as DDP does, and is no wrapper that anybody knows."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hands it on."""
        return self.module(x)


class DeepSpeedEngine(Holder):
    """By its name: DeepSpeed is not installed for the tests."""


def with_part_wrapped(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wrapped(model: Any) -> Any:
        model.module = wrap(model.module)
        return model

    return wrapped


def checkpointed(model: Any) -> Any:
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, (nn.Linear, Own)))
    return model


def sharded(model: Any) -> Any:
    return fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: model,
    "DDP": DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "torch.compile": compiled,
    "torch.compile of DDP": lambda model: compiled(DistributedDataParallel(model)),
    "DDP of torch.compile": lambda model: DistributedDataParallel(compiled(model)),
    "FSDP": lambda model: FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD
    ),
    "fully_shard": sharded,
    "AveragedModel": AveragedModel,
    "DeepSpeed": DeepSpeedEngine,
    "checkpoint wrappers": checkpointed,
    "DDP of checkpoint wrappers": lambda model: DistributedDataParallel(checkpointed(model)),
    "a part under DDP": with_part_wrapped(DistributedDataParallel),
    "a part under torch.compile": with_part_wrapped(compiled),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_layers_name_is_the_models_own(wrapper: str):
    plain = Net()
    layers = {name: plain.get_submodule(name) for name in LAYERS}
    wrapped = WRAPPERS[wrapper](converted(plain))
    assert [layer["name"] for layer in fe.inspect(wrapped).layers] == LAYERS
    assert {name.rpartition(".")[0] for name in fe.scaling_state(wrapped)} == set(LAYERS)
    watch = fe.amp.find_overflow(wrapped)
    assert [layer.name for layer in watch.report().layers if layer.kind == "Linear"] == LAYERS
    if wrapper != "AveragedModel":  # which copies
        assert all(dict(watch._recorder.layers)[name] is layer for name, layer in layers.items())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name not in ("FSDP", "torch.compile of DDP")])
def test_the_guilty_layer_is_found_by_the_name_that_inspect_has(wrapper: str):
    wrapped = WRAPPERS[wrapper](converted(Net(Overflows), skip=lambda name, _: name == "module.fc"))
    names = [layer["name"] for layer in fe.inspect(wrapped).layers]
    with fe.amp.find_overflow(wrapped, mode="ops") as watch, torch.no_grad():
        wrapped(torch.ones(16, 16))
    found = watch.first()
    assert found is not None
    assert found.layer == "module.fc"
    assert found.layer in names


def test_a_module_that_is_no_wrapper_keeps_its_part_of_the_name():
    """Whatever it calls what it holds: get_submodule of the object that was given finds the layer."""
    wrapped = Holder(Net())
    fe_names = [layer["name"] for layer in fe.inspect(converted(wrapped)).layers]
    watched = [layer.name for layer in fe.amp.find_overflow(wrapped).report().layers if layer.kind == "Linear"]
    assert fe_names == watched == [f"module.{name}" for name in LAYERS]
    assert all(isinstance(wrapped.get_submodule(name), nn.Linear) for name in watched)
    for name in watched:
        fe.amp.pin_fp32(wrapped.get_submodule(name))
    inner = Holder(converted(nn.Sequential(nn.Linear(16, 16))))
    assert [layer["name"] for layer in fe.inspect(inner).layers] == ["module.0"]
    assert next(iter(fe.scaling_state(inner))) == "module.0.input"


def by_name(model: nn.Module) -> dict[str, Any]:
    return {layer["name"]: layer for layer in fe.inspect(model).layers}


@pytest.mark.usefixtures("group")
def test_names_and_reasons_are_those_from_before_wrapping():
    model = converted(nn.ModuleDict({name: nn.Linear(8, 8) for name in ("up", "sub_module", "lm_head")}))
    plain = fe.inspect(model).to_dict()
    ddp = DistributedDataParallel(model)
    for wrapped in (ddp, torch.compile(model), torch.compile(ddp), DistributedDataParallel(nn.Sequential(model))):
        assert isinstance(wrapped, nn.Module)
        told = fe.inspect(wrapped).to_dict()
        names = [layer["name"].removeprefix("0.") for layer in told["layers"]]
        assert names == ["up", "sub_module", "lm_head"]
        assert [layer["reason"] for layer in told["layers"]] == [layer["reason"] for layer in plain["layers"]]
        assert told["totals"] == plain["totals"]
        assert len(fe.scaling_state(wrapped)) == 2 * len(ROLES)


def test_a_layers_own_name_is_not_taken_for_a_wrapper():
    """`module` is what DDP calls what it wraps; a model may call a part of its own so, or end a name with it."""
    inner = nn.ModuleDict({"fc": nn.Linear(8, 8), "module": nn.Linear(8, 8)})
    own = nn.ModuleDict({"fc": nn.Linear(8, 8), "module": inner, "sub_module": nn.Sequential(nn.Linear(8, 8))})
    names = ["fc", "module.fc", "module.module", "sub_module.0"]
    model = converted(own, skip=lambda name, _: name == "module.fc")
    assert list(by_name(model)) == names
    assert by_name(model)["module.fc"]["reason"] == "skip() returned True"
    assert set(fe.scaling_state(model)) == {f"{name}.{role}" for name in names if name != "module.fc" for role in ROLES}
    assert list(by_name(nn.Sequential(model))) == [f"0.{name}" for name in names]
    only = converted(nn.ModuleDict({"module": nn.Linear(8, 8)}))
    assert list(by_name(only)) == ["module"]
