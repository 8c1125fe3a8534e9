"""fe.convert: what a converted model keeps, which layers it takes, and what it says of those it leaves."""

import copy
import warnings
from typing import Any

import pytest
import torch
from support import Net, converted, numerics_of, same, state_of, tables, train
from torch import nn
from torch.nn.utils import parametrizations, prune

import fp8engine as fe
from fp8engine.nn.linear import Float8Module
from fp8engine.numerics.recipe import RECIPES, resolve

EVERY_RECIPE = list(RECIPES)


def recipes_of(model: nn.Module) -> dict[str, str]:
    """Layer -> recipe, of the converted ones."""
    return {name: m.numerics.recipe.name for name, m in model.named_modules() if isinstance(m, Float8Module)}


def reasons(model: nn.Module) -> dict[str, str]:
    """Layer -> why it was left alone."""
    return {row["name"]: row["reason"] for row in fe.inspect(model).layers if row["recipe"] == "none"}


@pytest.mark.parametrize("recipe", EVERY_RECIPE)
def test_modules_parameters_and_hooks_stay_the_very_ones(recipe: str):
    model, seen = Net(), []
    modules, parameters = list(model.modules()), list(model.parameters())
    linear: Any = model.blocks[0].up
    linear.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    linear.register_forward_hook(lambda m, args, y: seen.append("post"))
    linear.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    linear.weight.register_post_accumulate_grad_hook(lambda p: seen.append("gradient"))
    linear.my_mark = "kept"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert converted(model, recipe, overrides={"blocks.0.up": "current"}) is model
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert isinstance(linear, nn.Linear)
    assert isinstance(linear, fe.Linear)
    assert linear.my_mark == "kept"
    before = linear.weight.detach().clone()
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
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
def test_converting_in_training_moves_no_vector_of_spectral_norm(head: str | None, recipe: str, example_inputs):
    model = Spectral().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    converted(model, recipe, example_inputs=example_inputs, overrides={"head": head} if head else {})
    why = next(layer["reason"] for layer in fe.inspect(model).layers if layer["name"] == "head")
    left = {None: "output head", "bf16": "ParametrizedLinear", "fp32": "overrides: fp32, which it computes in"}
    assert why.startswith(left[head])
    fe.revert(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", EVERY_RECIPE)
def test_checkpoints_go_both_ways(recipe: str, dtype):
    plain, other = Net().to(dtype), Net().to(dtype)
    model = converted(copy.deepcopy(other), recipe, overrides={"blocks.0.up": "current"})
    model(torch.randn(4, 32).to(dtype))
    assert [(k, v.shape, v.dtype) for k, v in model.state_dict().items()] == [
        (k, v.shape, v.dtype) for k, v in plain.state_dict().items()
    ]
    model.load_state_dict(plain.state_dict(), strict=True)
    assert same(list(model.parameters()), list(plain.parameters()))
    plain.load_state_dict(converted(other, recipe, overrides={"blocks.0.up": "current"}).state_dict(), strict=True)
    assert same(list(other.parameters()), list(plain.parameters()))
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]


def test_training_mode_and_requires_grad_stay():
    model = Net().eval()
    model.blocks[0].requires_grad_(False)
    converted(model)
    assert not any(m.training for m in model.modules())
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in copy.deepcopy(model).parameters()]
    assert not any(p.requires_grad for p in model.blocks[0].parameters())


def test_one_state_for_the_whole_model_and_columns_in_order():
    model = converted(Net(), "delayed")
    assert tables(model)[0].shape == (16, 3 * 6)
    assert [numerics_of(m).layer for m in model.modules() if hasattr(m, "numerics")] == list(range(6))
    assert [name for name, _ in state_of(model).layers] == list(recipes_of(model))


def test_default_recipe_is_auto():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fe.errors.EmulationWarning)
        fe.convert(model := Net(16))
    assert set(recipes_of(model).values()) == {"auto"}


def test_a_recipe_by_value():
    recipe = fe.delayed(history=3, margin=1)
    assert all(m.numerics.recipe is recipe for m in converted(Net(16), recipe).modules() if hasattr(m, "numerics"))


def test_overrides_by_glob_and_the_last_match_wins():
    model = converted(
        Net(16), "delayed", overrides={"*.up": "rowwise", "blocks.0.*": fe.blockwise(), "*.0.gate": "bf16"}
    )
    assert recipes_of(model) == {
        "blocks.0.up": "blockwise",
        "blocks.0.gate": "bf16",
        "blocks.0.down": "blockwise",
        "blocks.1.up": "rowwise",
        "blocks.1.gate": "delayed",
        "blocks.1.down": "delayed",
    }
    model(torch.randn(4, 16)).sum().backward()


def test_an_override_to_the_dtype_it_has_is_left_alone_and_says_so():
    model = converted(Net(16), overrides={"blocks.1.*": "fp32"})
    assert set(recipes_of(model)) == {"blocks.0.up", "blocks.0.gate", "blocks.0.down"}
    assert set(reasons(model).values()) == {"overrides: fp32, which it computes in already"}


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

    def skip(name: str, module: nn.Module) -> bool:
        asked.append((name, type(module)))
        return name == "body"

    model = converted(Headed(), skip=skip)
    assert ("lm_head", nn.Linear) in asked
    assert "lm_head" in recipes_of(model)
    assert reasons(model) == {"body": "skip() returned True"}


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 1)), "it has no linear layers"),
        (lambda: nn.Sequential(nn.Linear(2, 2)).double(), "0: its weight is torch.float64"),
        (lambda: nn.ModuleDict({"lm_head": nn.Linear(2, 2)}), "lm_head: output head"),
    ],
)
def test_nothing_to_convert_is_an_error(build, why: str):
    with pytest.raises(fe.errors.ConversionError, match=f"nothing to convert in .*: {why}"):
        fe.convert(build())


def test_skip_and_overrides_of_a_wrong_type_are_refused_with_the_right_way():
    with pytest.raises(fe.errors.ConversionError, match=r"skip is a list; it takes a function .*overrides=\{"):
        fe.convert(nn.Sequential(nn.Linear(8, 8)), "current", skip=["0"])  # type: ignore[arg-type]
    with pytest.raises(fe.errors.ConversionError, match=r"overrides is a list; it takes a dict"):
        fe.convert(nn.Sequential(nn.Linear(8, 8)), "current", overrides=[("0", "bf16")])  # type: ignore[arg-type]


def test_skip_of_everything_is_an_error():
    with pytest.raises(fe.errors.ConversionError, match=r"blocks\.0\.up: skip\(\) returned True; "):
        fe.convert(Net(16), skip=lambda name, module: True)


class Own(nn.Linear):
    """Code of its own: swapping the class would drop it."""

    def forward(self, input):
        return super().forward(input) * 2


class OnlyInit(nn.Linear):
    """A subclass that changes no behaviour."""

    def __init__(self, width):
        super().__init__(width, width)


def test_what_cannot_be_swapped_is_left_with_the_reason():
    pruned = nn.Linear(8, 8)
    prune.l1_unstructured(pruned, "weight", amount=0.5)
    model = nn.ModuleDict(
        {
            "own": Own(8, 8),
            "normed": parametrizations.weight_norm(nn.Linear(8, 8)),
            "pruned": pruned,
            "wide": nn.Linear(8, 8).double(),
            "bilinear": nn.Bilinear(8, 8, 8),
            "init": OnlyInit(8),
            "plain": nn.Linear(8, 8),
        }
    )
    converted(model)
    assert set(recipes_of(model)) == {"init", "plain"}
    why = reasons(model)
    assert why["own"] == "Own is a subclass of nn.Linear with code of its own"
    assert "ParametrizedLinear" in why["normed"]
    assert why["pruned"] == "its weight is computed (weight_norm, pruning or a parametrization)"
    assert why["wide"].startswith("its weight is torch.float64")
    assert type(model["own"]) is Own
    x = torch.randn(3, 8)
    for name in ("own", "normed", "pruned"):
        assert model[name](x).shape == (3, 8)
    with pytest.raises(fe.errors.StrictError, match=r"5 layers cannot be converted: own \(Own is a subclass"):
        fe.convert(copy.deepcopy(model_before_conversion()), strict=True)


def model_before_conversion() -> nn.Module:
    return nn.ModuleDict({name: Own(8, 8) for name in ("own", "b", "c", "d", "e")} | {"plain": nn.Linear(8, 8)})


def test_multihead_attention_reads_its_projection_directly_and_is_reported_so():
    model = converted(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    model(torch.randn(2, 5, 16)).sum().backward()
    rows = {row["name"]: row for row in fe.inspect(model).layers}
    assert reasons(model) == {
        "self_attn.in_proj_weight": "nn.MultiheadAttention multiplies by this weight itself: it is no layer of its own",
        "self_attn.out_proj": "MultiheadAttention reads its weight and never calls it",
    }
    assert rows["linear1"]["ran"]


def test_a_layer_that_example_inputs_do_not_call_is_left_alone():
    model = nn.ModuleDict({"called": nn.Linear(16, 16), "uncalled": nn.Linear(16, 16)})
    model.forward = lambda x: model["called"](x)  # type: ignore[method-assign]
    assert reasons(converted(model, example_inputs=torch.randn(2, 16))) == {
        "uncalled": "its forward was not called on example_inputs"
    }


def test_a_run_on_example_inputs_draws_none_of_the_callers_random_numbers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            return self.layer(x + torch.randn(16))

    model, drawn = Model(), torch.get_rng_state()
    converted(model, "rowwise", example_inputs=torch.randn(2, 16, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), drawn)


def test_one_module_under_two_names_is_converted_once():
    shared = nn.Linear(8, 8)
    model = converted(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU())}))
    assert model["a"] is model["b"][0]
    assert tables(model)[1].shape == (2, 3)
    assert [row["name"] for row in fe.inspect(model).layers] == ["a"]


def test_tied_weights_of_two_linears_stay_tied():
    model: Any = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    converted(model)
    assert model[2].weight is model[0].weight
    model(torch.randn(4, 8)).sum().backward()
    with torch.no_grad():
        model[0].weight.zero_()
    assert not model[2](torch.randn(4, 8)).any(), "both see a change to it"


def test_a_model_that_is_a_linear():
    layer = nn.Linear(32, 32)
    x = torch.randn(8, 32)
    want = layer(x)
    assert converted(layer, "delayed") is layer
    assert isinstance(layer, fe.Linear)
    assert (layer(x) - want).norm() < 0.06 * want.norm()
    assert set(fe.scaling_state(layer)) == {"input", "weight", "grad_output"}
    losses = train(layer)
    assert losses[-1] < losses[0]
    assert converted(nn.Linear(4, 4), overrides={"*": "rowwise"}).numerics.recipe == resolve("rowwise")


def test_a_bare_sequential_and_what_print_shows():
    model = converted(nn.Sequential(nn.Linear(8, 4), nn.ReLU()))
    shown = "Linear(in_features=8, out_features=4, bias=True, recipe=current (E4M3xE4M3, grad E5M2))"
    assert repr(model[0]) == shown
    assert shown in repr(model)
    rowwise = fe.Linear(8, 4, bias=False, recipe="rowwise")
    assert "bias=False, recipe=rowwise (E4M3xE4M3, grad E4M3)" in repr(rowwise)


def test_apply_children_and_replacement_still_work():
    model = converted(Net(16))
    model.apply(lambda m: nn.init.zeros_(m.weight) if isinstance(m, nn.Linear) else None)
    x = torch.randn(4, 16)
    assert torch.equal(model.blocks[0].up(x), model.blocks[0].up.bias.expand(4, 32)), "seen by the next forward"
    model.blocks[1] = nn.Identity()
    model(x).sum().backward()
