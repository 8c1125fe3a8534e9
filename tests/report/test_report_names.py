"""Layers keep the names they had before DDP or torch.compile wrapped the model, and none is taken for a wrapper's."""

from typing import Any

import pytest
import torch
from support import converted
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8engine as fe
from fp8engine.scaling.table import ROLES


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
