"""fe.convert against wrappers, a second call, strict=True and example inputs: convert first, or nothing is touched."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import Net, converted, same, tables, train
from torch import nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

import fp8engine as fe
from fp8engine.convert.swap import plan
from fp8engine.ops import device, triton_backend


def classes(model: nn.Module) -> list[type]:
    return [type(m) for m in model.modules()]


def fully_sharded(model: Any) -> Any:
    return fsdp.fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))


def compiled(model: Any, part: str = "") -> nn.Module:
    model.get_submodule(part).compile()
    return model


WRAPPED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "DDP": (DistributedDataParallel, "the model is under DistributedDataParallel already: convert first"),
    "DDP inside": (lambda model: nn.Sequential(DistributedDataParallel(model)), "its part '0' is under Distributed"),
    "fully_shard": (fully_sharded, "the model is under fully_shard already: convert first, then wrap"),
    "DataParallel": (nn.DataParallel, "the model is under nn.DataParallel already"),
    "torch.compile": (torch.compile, "the model is under torch.compile already"),
    "compile()": (compiled, "the model is under torch.compile already: convert first, then compile"),
    "compile() inside": (lambda model: compiled(model, "blocks.1"), r"its part 'blocks\.1' is under torch.compile"),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_wrapped_model_is_refused_and_left_as_it_was(wrapper: str):
    wrap, why = WRAPPED[wrapper]
    model = wrap(Net(16))
    before = classes(model)
    with pytest.raises(fe.errors.ConversionError, match=why):
        fe.convert(model)
    assert classes(model) == before
    assert not any(hasattr(m, "_fp8engine") for m in model.modules() if type(m) is Net)


def test_twice():
    model, x = Net(16), torch.randn(4, 16)
    fresh: Any = converted(copy.deepcopy(model), "rowwise")
    parameters = dict(model.named_parameters())
    converted(model)(x).sum().backward()
    converted(model, "rowwise")
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert torch.equal(model(x), fresh(x))
    assert same(tables(model), tables(fresh))
    outer: Any = converted(nn.Sequential(model, nn.Linear(4, 4)), "blockwise")
    assert {row["recipe"] for row in fe.inspect(outer).layers} == {"blockwise"}
    fe.revert(outer)
    assert torch.equal(outer[0](x), fe.revert(fresh)(x))


def test_an_error_leaves_the_earlier_conversion():
    model, x, hooked = Net(16), torch.randn(4, 16), []
    handle = model.register_forward_hook(lambda *_: hooked.append(1))
    converted(model, "delayed")(x).sum().backward()
    before, hooks = tables(model), list(model._forward_pre_hooks.items())
    for recipe, overrides in (("rowwize", None), ("rowwise", {"nowhere.*": "bf16"})):
        with pytest.raises(fe.errors.UnknownName):
            fe.convert(model, recipe, overrides=overrides)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        fe.convert(model, "auto", example_inputs=torch.randn(4, 3))
    assert same(tables(model), before)
    assert list(model._forward_pre_hooks.items()) == hooks
    assert {row["recipe"] for row in fe.inspect(model).layers} == {"delayed"}
    again = copy.deepcopy(model)
    assert torch.equal(model(x), again(x))
    hooked.clear()
    handle.remove()
    model(x)
    assert hooked == [], "the handle of a hook lost its dict"


def test_a_part_converted_by_hand_stays_as_it_is():
    model = converted(nn.Sequential(nn.Linear(8, 8), fe.Linear(8, 8, recipe="rowwise")))
    assert [m.numerics.recipe.name for m in model] == ["current", "rowwise"]
    model(torch.randn(4, 8)).sum().backward()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("wrap", "recipe"),
    [(DistributedDataParallel, "current"), (DistributedDataParallel, "delayed"), (fully_sharded, "current")],
)
def test_wrapped_after_convert_it_trains_as_without_and_keeps_names(wrap: Callable, recipe: str):
    base = Net()
    plain, inner = converted(copy.deepcopy(base), recipe), converted(copy.deepcopy(base), recipe)
    wrapped = wrap(inner)
    assert train(wrapped) == train(plain)
    assert same(tables(inner), tables(plain))
    assert list(fe.scaling_state(wrapped)) == list(fe.scaling_state(plain))
    assert [row["name"] for row in fe.inspect(wrapped).layers] == [row["name"] for row in fe.inspect(plain).layers]
    fe.load_scaling_state_dict(plain, fe.scaling_state_dict(wrapped))


@pytest.mark.parametrize(("options", "recipe"), [({}, "auto"), ({"recipe": "mxfp8"}, "mxfp8")])
def test_emulation_is_said_once_and_refused_under_strict(options: dict, recipe: str):
    model = Net()
    why = r"no FP8 Tensor Cores .*6 layers would be emulated, 'blocks\.0\.up'"
    with pytest.raises(fe.errors.StrictError, match=why):
        fe.convert(model, **options, strict=True)
    assert classes(model) == classes(Net())
    with pytest.warns(fe.errors.EmulationWarning, match="no FP8 Tensor Cores.*: 6 layers compute with") as said:
        fe.convert(model, **options)
    assert [each.filename for each in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model)
    for row in fe.inspect(model).layers:
        assert (row["recipe"], row["emulated"], row["fp8_share"]) == (recipe, True, 1.0)
        if recipe == "mxfp8":
            assert {row[role]["cast"] for role in ("input", "weight", "grad_output")} == {str(fe.mxfp8().input)}


def test_strict_takes_what_runs_as_asked_and_needs_triton_for_scales_along_k(monkeypatch: pytest.MonkeyPatch):
    model: Any = fe.convert(Net(16), "bf16", strict=True)  # a warning is an error
    assert model.blocks[0].up.numerics.recipe.name == "bf16"
    monkeypatch.setattr(device, "has_fp8", lambda where: where.type == "meta")  # where nothing is computed
    with torch.device("meta"):
        fe.convert(Net(16), strict=True)
        fe.convert(Net(16), "blockwise", strict=True)  # by Triton's kernels
        monkeypatch.setattr(triton_backend, "installed", lambda: None)
        fe.convert(Net(16), "rowwise", strict=True)
        with pytest.raises(fe.errors.StrictError, match=r"need Triton's kernels: pip install 'triton>=3\.6,<3\.10'"):
            fe.convert(Net(16), "blockwise", strict=True)
        with pytest.warns(fe.errors.EmulationWarning, match="need Triton's kernels"):
            fe.convert(Net(16), "blockwise")


class Half(nn.Module):
    """Uses one of its two layers; draws a number, counts its calls, and asks for a keyword."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout()
        self.modes = []

    def forward(self, x, *, scale: float = 1.0):
        self.modes.append((self.training, torch.is_grad_enabled()))
        return self.drop(self.used(x * scale + torch.randn(())))


@pytest.mark.parametrize(
    "inputs", [torch.randn(2, 8), (torch.randn(2, 8),), [torch.randn(2, 8)], {"x": torch.randn(2, 8), "scale": 2.0}]
)
def test_example_inputs_find_the_layers_that_are_not_called(inputs):
    model = Half()
    model.drop.eval()
    random = torch.get_rng_state()
    converted(model, example_inputs=inputs)
    assert model.modes == [(False, False)], "in eval mode, without gradients"
    assert (model.training, model.drop.training) == (True, False), "each part is back in its mode"
    assert torch.equal(torch.get_rng_state(), random)
    rows = {row["name"]: row for row in fe.inspect(model).layers}
    assert rows["unused"]["reason"] == "its forward was not called on example_inputs"
    assert (rows["used"]["recipe"], rows["unused"]["recipe"]) == ("current", "none")
    assert int(fe.scaling_state(model)["used.input"].calls) == 0, "that forward ran before"


def test_a_failing_example_leaves_the_model_as_it_was():
    model = Half()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fe.convert(model, example_inputs=torch.randn(2, 9))
    assert classes(model) == classes(Half())
    assert all(m.training and not m._forward_pre_hooks for m in model.modules())
    converted(model)


def test_example_inputs_that_reach_nothing_are_an_error_and_strict_counts_what_they_did_not_reach_as_left():
    class Nothing(Half):
        def forward(self, x):
            return x

    with pytest.raises(fe.errors.ConversionError, match="used: its forward was not called on example_inputs"):
        fe.convert(Nothing(), example_inputs=torch.randn(2, 8))
    with pytest.raises(fe.errors.StrictError, match="1 layers would be emulated, 'used'"):
        fe.convert(Half(), example_inputs=torch.randn(2, 8), strict=True)


def test_the_plan_is_what_convert_does_and_changes_nothing():
    model = Half()
    found = [
        (d.name, d.recipe and d.recipe.name, d.shape) for d in plan(model, "rowwise", overrides={"unused": "fp32"})
    ]
    assert found == [("used", "rowwise", (8, 8)), ("unused", None, (8, 8))]
    assert classes(model) == classes(Half())
