"""fe.hf.iter_fp8: the tensors of an export, the codes of a forward, one layer at a time, and what it refuses."""

import copy
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from support import converted

import fp8engine as fe
from fp8engine.autograd import products
from fp8engine.errors import ConversionError, StateError, UnknownName
from fp8engine.export.hf import export, iter_fp8

RECIPES: list[Any] = ["current", "rowwise", "blockwise", "auto"]
RECIPES.append(pytest.param(fe.rowwise(power_of_2=False), id="rowwise_exact"))
BLOCKS = ("blockwise", "auto")  # their models have whole blocks


def trained(model: Any, recipe: Any, **options: Any) -> Any:
    """A model after two steps; under auto one whose o_proj needs a scale per row, so that its layers differ."""
    torch.manual_seed(0)
    if recipe == "auto":
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight[::2] *= 1e-6
    converted(model, fe.auto(interval=1) if recipe == "auto" else recipe, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5 if recipe == "auto" else 2):
        tiny_models.loss_of(model, tiny_models.tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def scale_of(tensors: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    """Its scale, which has one of two names."""
    (found,) = (tensors[name] for name in (f"{layer}.weight_scale", f"{layer}.weight_scale_inv") if name in tensors)
    return found


def llama_for(recipe: Any) -> Any:
    return tiny_models.llama_of_blocks() if recipe in BLOCKS else tiny_models.llama()


def bits(tensor: torch.Tensor) -> tuple:
    """dtype, shape and bytes: equal for equal tensors only, whatever their numbers."""
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).tolist()


def same_as_export(model: Any, folder: Path, layout: str = "auto") -> dict[str, torch.Tensor]:
    """What iter_fp8 gives, once it is known to be what export writes, each name once."""
    pairs = list(iter_fp8(model, layout=layout))
    export(model, folder, layout=layout)
    written = load_file(folder / "model.safetensors")
    assert sorted(name for name, _ in pairs) == sorted(written)
    tensors = dict(pairs)
    assert [name for name in written if bits(written[name]) != bits(tensors[name])] == []
    return tensors


@pytest.mark.parametrize("layout", ["auto", "fp8engine"])
@pytest.mark.parametrize("recipe", [*RECIPES, "delayed"])
def test_it_gives_what_export_writes(tmp_path: Path, recipe: Any, layout: str):
    model = trained(llama_for(recipe), recipe)
    tensors = same_as_export(model, tmp_path / "out", layout)
    codes = [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(codes) == (7 if recipe in BLOCKS else 14)
    own = model.state_dict()
    others = {name: tensor for name, tensor in tensors.items() if name in own and name not in codes}
    assert all(tensor.data_ptr() == own[name].data_ptr() for name, tensor in others.items()), "the model's own memory"
    assert not any(tensor.requires_grad for tensor in tensors.values())
    if recipe == "auto":
        shapes = {scale_of(tensors, name.removesuffix(".weight")).dim() for name in codes}
        assert len(shapes) > 1, "the model must make auto choose by layer"


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (lambda: tiny_models.llama(tie_word_embeddings=True), "auto"),
        (tiny_models.mixtral, "auto"),  # published with its experts one by one
        (tiny_models.gpt2, "fp8engine"),  # Conv1D, its codes stored [K, N], and a tied head
        (tiny_models.bert, "auto"),  # a buffer, biases
    ],
    ids=["tied", "mixtral", "gpt2", "bert"],
)
def test_names_ties_and_left_layers_are_those_of_export(tmp_path: Path, make: Callable, layout: str):
    skip = {"skip": lambda name, _: name.endswith(("1.mlp.up_proj", "lm_head", "classifier"))}
    model = trained(make().to(torch.bfloat16), "rowwise", **skip)
    tensors = same_as_export(model, tmp_path / "out", layout)
    assert torch.float8_e4m3fn in {tensor.dtype for tensor in tensors.values()}
    if make is tiny_models.mixtral:
        assert "model.layers.0.block_sparse_moe.experts.1.w1.weight" in tensors
        assert "model.layers.0.mlp.experts.gate_up_proj" not in tensors


def forward_weights(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The weight operand, as (values on the FP8 grid in FP32, scale), that each layer's forward multiplies."""
    seen, product = {}, products.product

    def watched(use, a, b, bias, out, matmul):
        if matmul == "forward":
            seen[use.numerics.name] = (b.data.float(), b.scale)
        return product(use, a, b, bias, out, matmul)

    with monkeypatch.context() as patch:
        patch.setattr(products, "product", watched)
        tiny_models.loss_of(model, tiny_models.tokens()).backward()
    return seen


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_code_differs_from_those_that_the_forward_multiplied(monkeypatch: pytest.MonkeyPatch, recipe: Any):
    model = trained(llama_for(recipe), recipe)
    if recipe == "auto":  # its next forward begins a step, which may decide anew
        model.eval()
    seen = forward_weights(model, monkeypatch)
    tensors = dict(iter_fp8(model, layout="fp8engine"))
    assert len(seen) == (7 if recipe in BLOCKS else 14)
    for name, (values, scale) in seen.items():
        codes = tensors[f"{name}.weight"]
        assert int((codes.float().view(torch.int32) != values.view(torch.int32)).sum()) == 0
        assert scale_of(tensors, name).flatten().tolist() == scale.flatten().tolist()


def test_one_layers_copies_are_held_at_a_time():
    """Of what a consumer lets go, only the layer that is handed out lives; gate and up, under one scale, are one."""
    model = trained(tiny_models.llama(), "current")
    made: list[weakref.ref] = []
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    most, total = 0, 0
    for _, tensor in iter_fp8(model):
        if tensor.data_ptr() not in own:
            made.append(weakref.ref(tensor))
            total += tensor.nbytes
        del tensor
        alive = [held for ref in made if (held := ref()) is not None]
        most = max(most, sum(held.nbytes for held in alive))
        del alive
    assert len(made) == 2 * 14
    assert total == 14 * 4 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)
    assert most == 2 * 64 * 32 + 2 * 4  # gate and up


@pytest.mark.parametrize("layout", ["auto", "fp8engine"])
def test_smoothing_is_left_out_and_said_by_name(tmp_path: Path, layout: str):
    """The tensors are those of a model that never had it; once a call, not once a layer."""
    plain = converted(tiny_models.llama(), "current")
    model = fe.smooth(copy.deepcopy(plain), "model.layers.1.*")
    assert not any("smooth" in note for note in export(plain, tmp_path / "plain", layout=layout).notes)
    report = export(model, tmp_path / "smooth", layout=layout)
    (note,) = (note for note in report.notes if "smooth" in note)
    assert "no layout holds: the inputs of model.layers.1.mlp.down_proj have" in note
    with pytest.warns(UserWarning, match="^iter_fp8: fe.smooth is left out") as said:
        tensors = dict(iter_fp8(model, layout=layout))
    assert [str(each.message) for each in said] == [f"iter_fp8: {note}"]
    wanted = load_file(tmp_path / "plain" / "model.safetensors")
    assert {name: bits(t) for name, t in tensors.items()} == {name: bits(t) for name, t in wanted.items()}


def test_what_is_refused_is_refused_before_the_first_pair():
    rowwise, part = (converted(tiny_models.llama(), "rowwise"), tiny_models.llama())
    with pytest.raises(ConversionError, match=r"iter_fp8: LlamaForCausalLM is not converted.*fe\.convert"):
        iter_fp8(part)
    fe.convert(part.get_submodule("model.layers.0"))
    for model, layout, error, why in (
        (part, "auto", ConversionError, "converted by themselves"),
        (converted(torch.nn.Sequential(torch.nn.Linear(32, 32)), "current"), "auto", ConversionError, "not Sequential"),
        (converted(tiny_models.llama(), "auto"), "auto", ConversionError, "has decided nothing yet for its 14 layers"),
        (rowwise, "fp8", ConversionError, "no scales per row"),
        (rowwise, "fp8engin", UnknownName, "did you mean 'fp8engine'"),
    ):
        with pytest.raises(error, match=why):
            iter_fp8(model, layout=layout)


def test_a_weight_that_is_not_finite_ends_it_there():
    model = converted(tiny_models.llama(), "rowwise")
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = float("nan")
    pairs = iter_fp8(model)
    before = list(itertools.takewhile(lambda pair: pair[0] != "model.layers.1.mlp.gate_proj.weight_scale", pairs))
    assert any(name == "model.layers.1.self_attn.o_proj.weight_scale" for name, _ in before)
    with pytest.raises(StateError, match=r"layers\.1\.mlp\.up_proj\.weight holds 1 values"):
        next(pairs)
