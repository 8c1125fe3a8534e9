"""fe.revert: the modules of a converted model are plain again, in place, with the weights that they have now."""

import copy
from typing import Any

import peft
import pytest
import tiny_models as tiny
import torch
import transformers as hf
from support import Net, converted, pickled, same, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations as P
from transformers.pytorch_utils import Conv1D

import fp8engine as fe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def encoder() -> nn.Module:
    """torch's own, which fe.convert keeps from its fast path."""
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    )


MODELS: dict[str, Any] = {"net": lambda: Net(16), "encoder": encoder}
MODELS |= {make.__name__: make for make in (tiny.gpt2, tiny.mixtral, tiny.llama)}


def call(name: str, model: Any) -> torch.Tensor:
    torch.manual_seed(5)
    if name == "net":
        return model(torch.randn(4, 16))
    return model(torch.randn(2, 6, 32)) if name == "encoder" else model(tiny.tokens()).logits


def shape(model: nn.Module) -> list[tuple]:
    """What revert has to give back: of each module its class, its attributes' names and its hooks."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
    return [(type(m), sorted(vars(m)), *(len(getattr(m, name)) for name in hooks)) for m in model.modules()]


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::fp8engine.errors.FusionWarning")
def test_a_model_is_what_it_was(name: str, fuse: bool):
    model = MODELS[name]().eval()
    hook = next(iter(model.children())).register_forward_hook(lambda *args: None)
    want, plain, parameters = call(name, model), shape(model), list(model.parameters())
    converted(model, "rowwise", fuse=fuse)
    assert not torch.equal(call(name, model), want), "FP8 ran"
    assert fe.revert(model) is model
    assert shape(model) == plain
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert torch.equal(call(name, model), want)
    hook.remove()


COPIED: Any = pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy, pickled])


@COPIED
def test_before_the_first_forward_and_from_a_copy(copied: Any):
    assert shape(fe.revert(copied(converted(Net(16))))) == shape(Net(16))


def falcon() -> Any:
    """Its layers add the bias to a rounded product, and are of a subclass of nn.Linear."""
    torch.manual_seed(0)
    config = hf.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, bias=True)
    model: Any = hf.FalconForCausalLM(config).eval().bfloat16()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


@COPIED
def test_a_subclass_of_linear_comes_back_with_its_code(copied: Any):
    model = falcon()
    want, plain = call("falcon", model), shape(model)
    for _ in range(2):  # another recipe reverts first
        converted(model, "rowwise")
    model = fe.revert(copied(model))
    assert shape(model) == plain
    assert torch.equal(call("falcon", model), want)


def test_a_subclass_of_linear_comes_back_under_an_adapter_from_codes_and_from_a_folder(tmp_path):
    kinds = [type(module) for module in falcon().modules()]
    targets = ["query_key_value", "dense_h_to_4h"]
    adapted = peft.get_peft_model(converted(falcon(), "rowwise"), peft.LoraConfig(r=4, target_modules=targets))
    merged: Any = fe.revert(adapted).merge_and_unload()
    assert [type(module) for module in merged.modules()] == kinds
    frozen = falcon().requires_grad_(False)
    assert any("Served" in type(module).__name__ for module in converted(frozen, "rowwise", frozen="fp8").modules())
    assert [type(module) for module in fe.revert(frozen).modules()] == kinds
    fe.hf.export(falcon(), tmp_path / "out", "rowwise")
    assert [type(module) for module in fe.revert(fe.hf.load(tmp_path / "out")).modules()] == kinds


def test_a_layer_that_took_the_place_of_another_keeps_its_own_class():
    model: Any = converted(nn.Sequential(Conv1D(16, 16), nn.Linear(16, 16)))
    del model[0]
    assert type(fe.revert(model)[0]) is nn.Linear
    model = converted(nn.Sequential(nn.Linear(16, 16), Conv1D(16, 16)))
    model[0] = model[1]
    assert type(fe.revert(model)[0]) is Conv1D


def test_it_keeps_what_training_changed_and_is_converted_again_as_a_fresh_model():
    model = converted(Net(16), fe.auto(interval=2))
    train(model, width=16)
    other = Net(16)
    other.load_state_dict(model.state_dict())
    fe.revert(model)
    x = torch.randn(8, 16)
    assert torch.equal(model(x), other(x))
    assert torch.equal(converted(model, "delayed")(x), converted(other, "delayed")(x))


def test_parts_that_were_converted_by_themselves_and_layers_made_by_hand():
    made = fe.Linear(16, 16, recipe="current")
    model = nn.Sequential(converted(Net(16)), nn.Linear(16, 16), made, converted(Net(16)))
    fe.revert(model)
    assert shape(model[0]) == shape(model[3]) == shape(Net(16))
    assert type(model[2]) is fe.Linear
    mixed: Any = fe.revert(converted(nn.Sequential(nn.Linear(16, 16), fe.Linear(16, 16, recipe="current"))))
    assert [type(part) for part in mixed] == [nn.Linear, fe.Linear]
    assert mixed(torch.randn(2, 16)).shape == (2, 16)


@pytest.mark.parametrize("frozen", [None, "fp8"])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_part_that_was_copied_after_conversion_follows_the_rest(copied: Any, frozen: str | None):
    """As depth up-scaling and peft's modules_to_save copy; a copy has a scaling state of its own."""
    made = fe.Linear(32, 32, recipe="current")

    def grown(model: Any, made: Any) -> Any:
        model.transformer.h.append(copied(model.transformer.h[0]))
        model.transformer.h[2].made = copied(made)
        return model.requires_grad_(False)

    kinds = [type(module) for module in grown(falcon(), made).modules()]
    model = grown(converted(falcon().requires_grad_(False), "rowwise", frozen=frozen), made)
    if not frozen:
        again = converted(copied(model), "delayed")
        assert {row["recipe"] for row in fe.inspect(again).layers} == {"delayed", "current", "none"}
        assert len(fe.scaling_state(again).states) == 2, "one, and that of the layer made by hand"
    assert [type(module) for module in fe.revert(model).modules()] == kinds


@pytest.mark.parametrize("undo", [fe.revert, lambda model: converted(model, "current")])
@pytest.mark.parametrize("put", [P.weight_norm, P.spectral_norm, P.orthogonal])
def test_a_layer_that_was_parametrized_after_conversion_stays_so(put: Any, undo: Any):
    model: Any = converted(nn.Sequential(nn.Linear(16, 16), nn.GELU(), Named()))
    for layer in (model[0], model[2]):
        put(layer)
    x = torch.randn(4, 16)
    model[0](x).sum().backward()
    want = model.eval()[0].weight  # in training, spectral_norm's weight moves at every read
    undo(nn.Sequential(model, nn.Linear(16, 16)))
    assert not isinstance(model[0], fe.Linear)
    assert same([model[0].weight], [want])
    assert same([model[0](x)], [nn.functional.linear(x, want, model[0].bias)])
    for layer, kind in ((model[0], nn.Linear), (model[2], Named)):
        nn.utils.parametrize.remove_parametrizations(layer, "weight")
        assert type(layer) is kind


@pytest.mark.usefixtures("group")
def test_refusals():
    model, compiled = converted(Net(16)), converted(Net(16))
    compiled.compile()
    cases: Any = (
        (Net(16), "revert: Net is not converted: give the model that fe.convert was given"),
        (model.blocks, "revert: ModuleList is not converted"),
        (DistributedDataParallel(model), "revert: the model is under DistributedDataParallel: revert what it wraps"),
        (torch.compile(model), "revert: the model is under torch.compile"),
        (compiled, "revert: the model is under torch.compile"),
        (3, "revert takes an nn.Module, not int"),
    )
    for wrong, why in cases:
        with pytest.raises(fe.errors.ConversionError, match=why):
            fe.revert(wrong)
    assert fe.inspect(model).totals["converted"] > 0


class Named(nn.Linear):
    """A user's subclass with attributes of its own, under names that conversions use elsewhere."""

    def __init__(self):
        super().__init__(32, 32)
        self.parts, self.recognised = ["mine"], "mine"


def test_attributes_of_the_user_stay():
    model: Any = fe.revert(converted(nn.Sequential(Named())))
    assert type(model[0]) is Named
    assert (model[0].parts, model[0].recognised) == (["mine"], "mine")


def test_after_a_first_forward_that_was_interrupted():
    class Interrupted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.made = nn.Linear(16, 16), fe.Linear(16, 16, recipe="current")
            self.pressed = False

        def forward(self, x):
            if self.pressed:
                raise KeyboardInterrupt
            return self.layer(x)

    model: Any = converted(Interrupted())
    model.pressed = True
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(2, 16))
    assert type(model.layer) is not fe.Linear, "watched"
    fe.revert(model)
    assert (type(model.layer), type(model.made)) == (nn.Linear, fe.Linear)
    assert sorted(vars(model.layer)) == sorted(vars(nn.Linear(1, 1)))
    assert model.made(torch.randn(2, 16)).shape == (2, 16)
