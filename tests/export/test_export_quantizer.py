"""Fp8EngineConfig under transformers' own from_pretrained: 16-bit weights straight into FP8, and everything around."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from exports import answers_alike, bits, quantization, served
from safetensors.torch import load_file, save_file
from torch import nn

import fp8engine as fe
from fp8engine.errors import BackendError, ConversionError, FrozenWarning, StateError, UnknownName
from fp8engine.export.hf import Fp8EngineConfig, export, load
from fp8engine.numerics.recipe import resolve

RECIPES = ("current", "delayed", "rowwise", "rowwise_gw_hp", "blockwise")
Auto: Any = transformers.AutoModelForCausalLM


@pytest.fixture
def saved(tmp_path: Path):
    """A tiny BF16 model and its plain folder."""

    def make(model: Any = None) -> tuple[Any, Path]:
        model = (tiny_models.llama() if model is None else model).to(torch.bfloat16)
        model.save_pretrained(tmp_path / "plain")
        # Read back: model.to(bfloat16) has rounded rotary frequencies too, which from_pretrained keeps in FP32.
        return type(model).from_pretrained(tmp_path / "plain", dtype=torch.bfloat16), tmp_path / "plain"

    return make


@pytest.mark.parametrize("recipe", RECIPES)
def test_plain_weights_become_fp8(saved, ids, recipe):
    model, folder = saved()
    back = Auto.from_pretrained(folder, quantization_config=Fp8EngineConfig(recipe), dtype=torch.bfloat16)
    layers = served(back)
    assert len(layers) == 14
    for name, layer in layers.items():
        want = fe.quantize(
            model.get_submodule(name).weight.detach(), replace(resolve(recipe).weight, scaling="current")
        )
        assert torch.equal(bits(layer.weight), bits(want.data))
        assert torch.equal(layer.scale, want.scale.reshape(layer.scale.shape))
        assert not layer.weight.requires_grad
    fe.convert(model, recipe, fuse=False)  # fused norms are not rounded to 16 bits in between
    assert answers_alike(back, model, ids)
    generated = back.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, model.generate(ids, max_new_tokens=4, do_sample=False))


def test_layers_that_are_tied_to_one_another_stay_in_16_bits(tmp_path: Path, ids):
    """Zamba2's: transformers ties them after it has read the weights, one of them alone would hold codes."""
    model: Any = tiny_models.zamba2().eval()
    model.save_pretrained(tmp_path / "plain")
    back = type(model).from_pretrained(tmp_path / "plain", quantization_config=Fp8EngineConfig("rowwise"))
    tied = {name.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for name in pair}
    linear = {
        name: module for name, module in back.model.named_modules(prefix="model") if isinstance(module, nn.Linear)
    }
    twins = {name: module for name, module in linear.items() if name in tied}
    assert len(twins) >= 2
    assert {module.weight.dtype for module in twins.values()} == {torch.float32}
    reasons = {row["name"]: row["reason"] for row in fe.inspect(back).layers}
    assert {reasons[name] for name in twins} == {"its weight is shared with another module"}
    export(model, tmp_path / "exported", "rowwise")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(back(ids).logits, load(tmp_path / "exported", dtype=torch.float32)(ids).logits)
    back.dequantize()
    assert len({id(module.weight) for module in twins.values()}) < len(twins)


@pytest.mark.parametrize("recipe", ["current", "rowwise", "blockwise"])
def test_save_pretrained_keeps_every_bit(saved, tmp_path: Path, ids, recipe):
    _, folder = saved()
    first = Auto.from_pretrained(folder, quantization_config=Fp8EngineConfig(recipe), dtype=torch.bfloat16)
    first.save_pretrained(tmp_path / "again")
    config = quantization(tmp_path / "again")
    assert (config["quant_method"], config["modules_to_not_convert"]) == ("fp8engine", ["lm_head"])
    for back in (Auto.from_pretrained(tmp_path / "again"), load(tmp_path / "again")):
        assert set(back.state_dict()) == set(first.state_dict())
        for name, tensor in first.state_dict().items():
            other = back.state_dict()[name]
            assert other.dtype == tensor.dtype, name
            assert torch.equal(other.float(), tensor.float()), name
        assert answers_alike(back, first, ids)


@pytest.mark.parametrize("family", ["gpt2", "bert", "albert", "mixtral"])
def test_families(saved, ids, family):
    model, folder = saved(getattr(tiny_models, family)())
    kind = type(model)
    back = kind.from_pretrained(folder, quantization_config=Fp8EngineConfig("rowwise"), dtype=torch.bfloat16)
    fe.convert(model, "rowwise", fuse=False, overrides={"*.experts.*": "bf16"} if family == "mixtral" else None)
    assert answers_alike(back, model, ids)
    left = {row["name"]: row["reason"] for row in fe.inspect(back).layers if row["recipe"] == "none"}
    assert left
    assert all("not converted" not in reason for reason in left.values())


@pytest.mark.parametrize("made", ["export", "Fp8EngineConfig", "frozen"])
def test_a_model_whose_first_parameter_is_a_linear_layers_has_its_dtype_and_is_saved_with_it(made: str, tmp_path: Path):
    """A model's `dtype` is that of its first parameter: of codes it would be FP8, in config.json too."""
    torch.manual_seed(0)
    size: Any = {"context_length": 32, "patch_length": 8, "patch_stride": 8, "num_input_channels": 2, "d_model": 32}
    kind, series = transformers.PatchTSMixerForPrediction, torch.randn(2, 32, 2)
    model: Any = kind(transformers.PatchTSMixerConfig(**size, num_layers=2, prediction_length=8)).eval()
    model.save_pretrained(tmp_path / "plain")
    frozen = "1 frozen layers keep .*patcher.*PatchTSMixerForPrediction has the dtype"
    if made == "export":
        fe.hf.export(model, tmp_path / "codes", "rowwise")
        model = load(tmp_path / "codes")
    elif made == "Fp8EngineConfig":
        model = kind.from_pretrained(tmp_path / "plain", quantization_config=Fp8EngineConfig("rowwise"))
    else:
        with pytest.warns(FrozenWarning, match=frozen):
            fe.convert(model.requires_grad_(False), "rowwise", frozen="fp8")
    assert model.dtype == torch.float32
    assert len(served(model)) == sum(isinstance(module, nn.Linear) for module in model.modules()) - 2, "it and the head"
    model.save_pretrained(tmp_path / "again")
    for back in (kind.from_pretrained(tmp_path / "again"), load(tmp_path / "again")):
        assert back.dtype == back.config.dtype == torch.float32
        held = back.state_dict()
        assert held.keys() == model.state_dict().keys()
        assert all(torch.equal(held[key].float(), tensor.float()) for key, tensor in model.state_dict().items())
        # Of a frozen model the first layer multiplies in FP8, and its own weight is saved.
        assert made == "frozen" or torch.equal(back(series).prediction_outputs, model(series).prediction_outputs)


def test_what_is_left_and_why(saved):
    _, folder = saved()
    config = Fp8EngineConfig("current", ["*.down_proj"])
    back = Auto.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    rows = {row["name"]: row for row in fe.inspect(back).layers}
    assert rows["model.layers.0.mlp.down_proj"]["reason"] == "modules_to_not_convert"
    assert "head" in rows["lm_head"]["reason"]
    assert rows["model.layers.0.mlp.up_proj"]["kind"] == "ServedLinear"
    assert back.model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    with pytest.raises(UnknownName, match=r"did you mean 'model\.layers\.0\.mlp\.down_proj'"):
        Auto.from_pretrained(folder, quantization_config=Fp8EngineConfig("current", ["model.layers.0.mlp.down_prj"]))
    with pytest.raises(ConversionError, match="nothing to load into FP8"):
        Auto.from_pretrained(folder, quantization_config=Fp8EngineConfig("current", ["*"]))


def test_weights_that_are_not_in_the_files_are_no_fp8(saved, tmp_path: Path):
    _, folder = saved()
    held = load_file(folder / "model.safetensors")
    del held["model.layers.0.mlp.up_proj.weight"]
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    back = Auto.from_pretrained(folder, quantization_config=Fp8EngineConfig())
    rows = {row["name"]: row["reason"] for row in fe.inspect(back).layers}
    assert rows["model.layers.0.mlp.up_proj"] == "its weight is not in the checkpoint"


def test_configs_that_cannot_be():
    with pytest.raises(UnknownName, match="did you mean 'blockwise'"):
        Fp8EngineConfig("blokwise")
    with pytest.raises(ConversionError, match="name an FP8 recipe"):
        Fp8EngineConfig("bf16")
    with pytest.raises(UnknownName, match="did you mean 'dynamic'"):
        Fp8EngineConfig("current", activation_scheme="dynamik")
    with pytest.raises(UnknownName, match="quant_method of Fp8EngineConfig"):
        Fp8EngineConfig("current", quant_method="fp8")
    again: Any = Fp8EngineConfig.from_dict(Fp8EngineConfig(fe.blockwise(64), ["a"]).to_dict())
    assert (again.recipe, again.modules_to_not_convert) == (fe.blockwise(64), ["a"])


def test_places_and_files_that_cannot_be(saved, tmp_path: Path):
    model, folder = saved()
    with pytest.raises(BackendError, match="on disk"):
        Auto.from_pretrained(folder, quantization_config=Fp8EngineConfig(), device_map={"": "disk"})
    static = Fp8EngineConfig(activation_scheme="static")
    with pytest.raises(ConversionError, match="needs input scales"):
        Auto.from_pretrained(folder, quantization_config=static)
    with pytest.raises(ConversionError, match="loads from safetensors files"):
        type(model).from_pretrained(
            None, config=model.config, state_dict=model.state_dict(), quantization_config=Fp8EngineConfig()
        )
    held = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    held[name] = held[name].to(torch.float8_e4m3fn)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StateError, match=f"{name} is FP8 already, and config.json has no quantization_config"):
        Auto.from_pretrained(folder, quantization_config=Fp8EngineConfig())
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(StateError, match="read from safetensors files"):
        Auto.from_pretrained(folder, quantization_config=Fp8EngineConfig())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(saved, value):
    model: Any = tiny_models.llama()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = value
    _, folder = saved(model)
    with pytest.raises((StateError, RuntimeError)):  # transformers gathers what goes wrong, and raises its own
        Auto.from_pretrained(folder, quantization_config=Fp8EngineConfig())


def test_weights_that_are_codes_take_no_training(saved, ids):
    _, folder = saved()
    model = Auto.from_pretrained(folder, quantization_config=Fp8EngineConfig(), dtype=torch.bfloat16)
    model(ids, labels=ids).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if "_proj" not in name}
    with pytest.raises(ValueError, match=r"fine-tun|train"):
        transformers.Trainer(model, transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[]))
    with pytest.raises(ConversionError, match="stores FP8 codes"):
        fe.convert(model)
