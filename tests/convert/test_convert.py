"""fe.convert: what a converted model keeps, which layers it takes, and what it says of those it leaves."""

import warnings
from typing import Any

import pytest
import torch
from support import Net, converted, numerics_of, tables, train
from torch import nn
from torch.nn.utils import parametrizations, prune

import fp8engine as fe
from fp8engine.nn.linear import Float8Module
from fp8engine.numerics.recipe import RECIPES, resolve


def recipes_of(model: nn.Module) -> dict[str, str]:
    """Layer -> recipe, of the converted ones."""
    return {name: m.numerics.recipe.name for name, m in model.named_modules() if isinstance(m, Float8Module)}


def reasons(model: nn.Module) -> dict[str, str]:
    """Layer -> why it was left alone."""
    return {row["name"]: row["reason"] for row in fe.inspect(model).layers if row["recipe"] == "none"}


def kept(model: nn.Module) -> list:
    """Modules, parameters and names that converting leaves, and the modes of both."""
    modules, parameters = list(model.modules()), list(model.parameters())
    names = [*model.state_dict(), *(name for name, _ in model.named_buffers())]
    modes = [m.training for m in modules] + [p.requires_grad for p in parameters]
    return [*map(id, modules), *map(id, parameters), *names, *modes]


@pytest.mark.parametrize("recipe", RECIPES)
def test_modules_parameters_modes_and_hooks_stay_the_very_ones(recipe: str):
    model, seen = Net(), []
    model.blocks[1].eval().requires_grad_(False)
    linear: Any = model.blocks[0].up
    linear.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    linear.register_forward_hook(lambda m, args, y: seen.append("post"))
    linear.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    linear.weight.register_post_accumulate_grad_hook(lambda p: seen.append("gradient"))
    linear.my_mark = "kept"
    optimizer, wanted, before = torch.optim.SGD(model.parameters(), lr=0.1), kept(model), linear.weight.detach().clone()
    assert converted(model, recipe, overrides={"blocks.0.up": "current"}) is model
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    assert kept(model) == wanted
    assert (isinstance(linear, nn.Linear), isinstance(linear, fe.Linear), linear.my_mark) == (True, True, "kept")
    assert sorted(seen) == ["backward", "gradient", "post", "pre"]
    assert not torch.equal(linear.weight, before), "the optimizer made before steps what is trained now"


class Spectral(nn.Module):
    """An embedding, a convolution and a head, each with a power iteration at every read of its weight in training."""

    def __init__(self):
        super().__init__()
        self.embed = parametrizations.spectral_norm(nn.Embedding(16, 32))
        self.mix = parametrizations.spectral_norm(nn.Conv1d(32, 32, 1))
        self.up = nn.Linear(32, 32)
        self.head = parametrizations.spectral_norm(nn.Linear(32, 16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [batch, T]."""
        return self.head(self.up(self.mix(self.embed(ids).mT).mT))


@pytest.mark.parametrize("example_inputs", [None, (torch.arange(16)[None],)], ids=["alone", "with example_inputs"])
@pytest.mark.parametrize("recipe", ["current", "auto"])
@pytest.mark.parametrize("head", [None, "bf16", "fp32"])
def test_converting_in_training_moves_no_vectors_of_spectral_norm(head: str | None, recipe: str, example_inputs):
    model = Spectral().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    converted(model, recipe, example_inputs=example_inputs, overrides={"head": head} if head else {})
    why = next(layer["reason"] for layer in fe.inspect(model).layers if layer["name"] == "head")
    left = {None: "output head", "bf16": "its weight is computed", "fp32": "overrides: fp32, which it computes in"}
    assert why.startswith(left[head])
    fe.revert(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_recipes_by_value_and_by_glob_where_the_last_match_wins():
    recipe, overrides = fe.delayed(history=3), {"*.up": "rowwise", "blocks.0.*": fe.blockwise(), "*.0.gate": "bf16"}
    model = converted(Net(16), recipe, overrides={**overrides, "*.1.down": "fp32"})
    found = [recipes_of(model).get(f"blocks.{i}.{name}") for i in (0, 1) for name in ("up", "gate", "down")]
    assert found == ["blockwise", "bf16", "blockwise", "rowwise", "delayed", None]
    assert numerics_of(model.blocks[1].gate).recipe is recipe
    assert reasons(model) == {"blocks.1.down": "overrides: fp32, which it computes in already"}
    model(torch.randn(4, 16)).sum().backward()


def test_a_pattern_that_matches_nothing_names_near_layers_and_changes_nothing():
    model = Net(16)
    with pytest.raises(fe.errors.UnknownName, match=r"'blocks\.0\.upp'; did you mean 'blocks\.0\.up'"):
        fe.convert(model, overrides={"blocks.0.up": "bf16", "blocks.0.upp": "bf16"})
    with pytest.raises(fe.errors.UnknownName, match="unknown recipe 'curent'; did you mean 'current'"):
        fe.convert(model, overrides={"blocks.0.up": "curent"})
    assert recipes_of(model) == {}
    assert all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))


class Headed(nn.Module):
    """Layers with the names of heads and adapters, and a head tied to an embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Linear(8, 8)
        self.lm_head, self.classifier, self.score = (nn.Linear(8, 16) for _ in range(3))
        self.tied = nn.Linear(8, 16, bias=False)
        self.tied.weight = self.embed.weight
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2)})

    def forward(self, ids):
        return self.tied(self.body(self.embed(ids)))


def test_heads_and_adapters_are_left_unless_named():
    model = converted(Headed())
    assert set(recipes_of(model)) == {"body"}
    why = reasons(model)
    assert all(why[name].startswith("output head:") for name in ("lm_head", "classifier", "score", "tied"))
    assert why["lora_A.default"].startswith("adapter:")
    model = converted(Headed(), overrides={"tied": "rowwise", "lora_A.*": "current"})
    assert recipes_of(model) == {"body": "current", "tied": "rowwise", "lora_A.default": "current"}
    assert model.tied.weight is model.embed.weight
    model(torch.arange(6)).sum().backward()
    assert model.embed.weight.grad is not None


def test_skip_replaces_the_default_filter():
    asked = []
    model = converted(Headed(), skip=lambda name, module: (asked.append((name, type(module))), name == "body")[1])
    assert ("lm_head", nn.Linear) in asked
    assert "lm_head" in recipes_of(model)
    assert reasons(model) == {"body": "skip() returned True"}


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no module": ({}, {}, r"takes an nn\.Module, not dict"),
    "no layers": (nn.Sequential(nn.Conv2d(1, 1, 1)), {}, "nothing to convert in .*: it has no linear layers"),
    "float64": (nn.Sequential(nn.Linear(2, 2)).double(), {}, "nothing to .*: 0: its weight is torch.float64"),
    "a head": (nn.ModuleDict({"lm_head": nn.Linear(2, 2)}), {}, "nothing to convert in .*: lm_head: output head"),
    "all skipped": (Net(16), {"skip": lambda *_: True}, r"nothing to .*: blocks\.0\.up: skip\(\) returned True; "),
    "a list for skip": (Net(16), {"skip": ["0"]}, r"skip is a list; it takes a function .*overrides=\{"),
    "a number in overrides": (Net(16), {"overrides": {0: "bf16"}}, "a glob over layers' names, not int"),
    "a word for fuse": (Net(16), {"fuse": "no"}, "fuse takes True, False or None, not str"),
    "a list for overrides": (Net(16), {"overrides": [("0", "bf16")]}, "overrides is a list; it takes a dict"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_with_the_right_way(case: str):
    model, options, why = REFUSED[case]
    with pytest.raises(fe.errors.ConversionError, match=why):
        fe.convert(model, "current", **options)


class Own(nn.Linear):
    """Code of its own: swapping the class would drop it."""

    def forward(self, input):
        return super().forward(input) * 2


class OnlyInit(nn.Linear):
    """A subclass that changes no behaviour."""

    def __init__(self):
        super().__init__(8, 8)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_cannot_be_swapped_is_left_with_the_reason():
    linear = lambda: nn.Linear(8, 8)  # noqa: E731 - several uses
    model: Any = nn.ModuleDict({"own": Own(8, 8), "init": OnlyInit(), "plain": linear(), "wide": linear().double()})
    model["bilinear"], model["normed"] = nn.Bilinear(8, 8, 8), parametrizations.weight_norm(linear())
    model["pruned"] = prune.l1_unstructured(linear(), "weight", amount=0.5)
    model["taken"], model["sparse"] = linear(), linear()
    model["taken"].weight = None
    model["sparse"].weight = nn.Parameter(torch.eye(8).to_sparse_csr(), requires_grad=False)
    converted(model)
    assert set(recipes_of(model)) == {"init", "plain"}
    why = reasons(model)
    assert why["own"] == "Own is a subclass of nn.Linear with code of its own"
    assert why["normed"] == why["pruned"] == "its weight is computed (weight_norm, pruning or a parametrization)"
    assert why["taken"] == why["pruned"]
    assert why["wide"].startswith("its weight is torch.float64")
    assert why["sparse"].startswith("its weight is torch.float32, torch.sparse_csr")
    assert type(model["own"]) is Own
    for name in ("own", "normed", "pruned", "sparse"):
        assert model[name](torch.randn(3, 8)).shape == (3, 8)
    blocked = nn.ModuleDict({"own": Own(8, 8), "plain": linear(), "other": Own(8, 8)})
    with pytest.raises(fe.errors.StrictError, match=r"2 layers cannot be converted: own \(Own is a subclass"):
        fe.convert(blocked, strict=True)


@pytest.mark.parametrize("category", [fe.errors.EmulationWarning, fe.errors.FusionWarning])
def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(category):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", category)
        with pytest.raises(category):
            fe.convert(model, "rowwise", fuse=True)
    assert [type(part) for part in model] == [nn.Linear, nn.Tanh, nn.Linear]


def test_one_module_under_two_names_is_converted_once():
    shared = nn.Linear(8, 8)
    model = converted(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU())}))
    assert model["a"] is model["b"][0]
    assert tables(model)[1].shape == (2, 4)
    assert [row["name"] for row in fe.inspect(model).layers] == ["a"]


def test_a_model_that_is_a_linear():
    layer, x = nn.Linear(32, 32), torch.randn(8, 32)
    want = layer(x)
    assert converted(layer, "delayed") is layer
    assert isinstance(layer, fe.Linear)
    assert (layer(x) - want).norm() < 0.06 * want.norm()
    assert set(fe.scaling_state(layer)) == {"input", "weight", "grad_output"}
    first, *_, last = train(layer)
    assert last < first
    layer = converted(nn.Linear(8, 4), overrides={"*": "rowwise"})
    assert layer.numerics.recipe == resolve("rowwise")
    shown = "Linear(in_features=8, out_features=4, bias=True, recipe=rowwise (E4M3xE4M3, grad E4M3))"
    assert repr(layer) == shown
    assert shown in repr(nn.Sequential(layer))
