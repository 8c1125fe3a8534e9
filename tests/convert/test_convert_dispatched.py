"""fe.convert of a model that Accelerate has dispatched: its wrappers stay, and our forward runs under them."""

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import tiny_models as tiny
import torch
from accelerate import hooks
from support import Net, converted, same
from torch import nn

import fp8engine as fe
from fp8engine.convert import placement
from fp8engine.convert.placement import device_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
CPU = torch.device("cpu")
LAYERS = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "gate", "down")]


def net() -> nn.Module:
    torch.manual_seed(1)
    return Net(16)


def dispatched(model: nn.Module, where: str, folder: Path) -> nn.Module:
    """The model as Accelerate hands it out; "cpu" and "disk" keep the weights there, and a meta tensor in the layer."""
    if where == "device_map":
        return accelerate.dispatch_model(model, {"blocks.0": "cpu", "blocks.1": "cpu"}, force_hooks=True)
    if where == "part on disk":
        return accelerate.dispatch_model(model, {"blocks.0": "cpu", "blocks.1": "disk"}, offload_dir=folder)
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=CPU)
    else:
        accelerate.disk_offload(model, folder, execution_device=CPU)
    return model


WHERE = ["device_map", "part on disk", "cpu", "disk"]


def output(model: nn.Module) -> list[torch.Tensor]:
    """Result and gradients of a backward pass; of parameters only where they have any (Accelerate frees the rest)."""
    x = torch.linspace(-2, 2, 64).view(4, 16).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("order", ["dispatch first", "convert first"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise", "auto"])
def test_it_computes_what_the_converted_model_computes(recipe: str, where: str, order: str, tmp_path: Path):
    want = output(converted(net(), recipe))
    if order == "dispatch first":
        model = converted(dispatched(net(), where, tmp_path), recipe)
        report = fe.inspect(model)  # before it has run
        assert report.totals["never_ran"] == 6
        assert "6 never ran" in str(report)
        assert {slot.scale.device.type for slot in fe.scaling_state(model).values()} == {"cpu"}
    else:
        model = dispatched(converted(net(), recipe), where, tmp_path)
    found = output(model)
    assert same(found[:2], want[:2]), "result and the input's gradient, bit for bit"
    if where == "device_map":
        assert same(found, want), "nothing is kept elsewhere: every parameter's gradient too"
    report = fe.inspect(model)
    told = [(row["name"], row["ran"], "never ran" in row["reason"]) for row in report.layers]
    assert told == [(name, True, False) for name in LAYERS]
    assert report.totals["fp8_flops_share"] == 1.0
    assert all("_hf_hook" in vars(m) for m in model.modules() if isinstance(m, nn.Linear)), "Accelerate's stays"


def test_hooks_can_be_removed_afterwards_and_fp8_stays(tmp_path: Path):
    want = output(converted(net()))
    model = converted(dispatched(net(), "cpu", tmp_path))
    hooks.remove_hook_from_submodules(model)
    assert not any("_hf_hook" in vars(m) or "_old_forward" in vars(m) for m in model.modules())
    assert all(p.device.type == "cpu" for p in model.parameters()), "Accelerate has put the weights back"
    assert same(output(model), want)
    plain = accelerate.cpu_offload(net(), execution_device=CPU)
    hooks.remove_hook_from_submodules(plain)  # leaves the plain forward on every layer
    assert all("forward" in vars(m) for m in plain.modules() if isinstance(m, nn.Linear))
    assert same(output(converted(plain)), want)


def test_a_copy_runs_its_own_layers():
    model = converted(dispatched(net(), "device_map", Path()))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert same(output(twin), output(converted(net())))


class Double(hooks.ModelHook):
    """A hook that has nothing to do with devices, of somebody's own."""

    def post_forward(self, module, output):
        return 2 * output


def test_hooks_of_other_kinds_stay_too():
    model: Any = net()
    hooks.add_hook_to_module(model.blocks[1].down, hooks.SequentialHook(Double(), Double()))
    x, seen = torch.randn(4, 16), []
    for each in (net(), model):
        converted(each).get_submodule("blocks.1.down").register_forward_hook(lambda m, args, y: seen.append(y))
        each(x)
    assert torch.equal(seen[1], 4 * seen[0])


def test_a_forward_that_cannot_be_replaced_is_left_with_the_reason():
    model = net()
    layer: Any = model.get_submodule("blocks.0.up")
    before = layer.forward
    layer.forward = lambda x: before(x) + 1
    row = fe.inspect(converted(copy.deepcopy(model))).layers[0]
    why = "its forward is replaced on the instance, and does not say what it replaces"
    assert (row["name"], row["reason"], row["recipe"]) == ("blocks.0.up", why, "none")
    with pytest.raises(fe.errors.StrictError, match=rf"blocks\.0\.up \({why}"):
        fe.convert(model, strict=True)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return converted(net(), "delayed")


def test_a_model_converted_on_the_meta_device_and_loaded_afterwards(tmp_path: Path):
    want, assigned = output(converted(net(), "delayed")), on_meta()
    report = fe.inspect(assigned)
    assert report.totals["never_ran"] == 6
    assert [row["input"]["scale"] for row in report.layers] == [None] * 6
    assert {slot.scale.device.type for slot in fe.scaling_state(assigned).values()} == {"cpu"}
    assigned.load_state_dict(net().state_dict(), assign=True)
    emptied = on_meta().to_empty(device="cpu")
    emptied.load_state_dict(net().state_dict())
    torch.save(net().state_dict(), tmp_path / "net.bin")
    loaded = accelerate.load_checkpoint_and_dispatch(on_meta(), str(tmp_path / "net.bin"), {"": "cpu"})
    for model in (assigned, emptied, loaded):
        assert same(output(model), want)
        assert fe.inspect(model).totals["never_ran"] == 0


def test_a_model_converted_on_the_meta_device_and_loaded_to_two_devices(monkeypatch):
    model: Any = on_meta()
    model.load_state_dict(net().state_dict(), assign=True)
    places = {id(model.blocks[1].down): torch.device("cuda:1")}
    monkeypatch.setattr(placement, "device_of", lambda module, name: places.get(id(module), torch.device("cuda:0")))
    message = r"now on cuda:0 \(blocks\.1\.gate\) and cuda:1 \(blocks\.1\.down\), .* dispatch the model first"
    with pytest.raises(fe.errors.ParallelError, match=message):
        model(torch.randn(4, 16))


def test_layers_are_where_accelerate_will_move_their_weights():
    """Offloaded to meta, run on a card: emulation, states and reports are the card's matter, not the meta device's."""
    layer: Any = nn.Linear(4, 4, device="meta")
    assert device_of(layer) == torch.device("meta")
    for where in ("cuda:1", torch.device("cuda:1")):
        layer._hf_hook = hooks.SequentialHook(hooks.ModelHook(), hooks.AlignDevicesHook(execution_device=where))
        assert device_of(layer) == torch.device("cuda:1")


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.mixtral, tiny.llama], ids=lambda f: f.__name__)
def test_families_offloaded_and_fused(make):
    """Conv1D and experts change their classes too; norms and activations read what accelerate has moved to them."""
    plain = make().eval()
    model, ids = converted(accelerate.cpu_offload(copy.deepcopy(plain), CPU)), tiny.tokens()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, converted(plain)(ids).logits)
    report = fe.inspect(model)
    assert report.totals["never_ran"] == 0
    assert any("norm" in row["fused"] or "ln_1" in row["fused"] for row in report.layers)
