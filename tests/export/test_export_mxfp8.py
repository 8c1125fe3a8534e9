"""Exports of `mxfp8`: what compressed-tensors calls mxfp8-quantized, whose scales are bytes (E8M0)."""

from typing import Any

import pytest
import tiny_models
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP8
from exports import answers_alike, bits, quantization, read_by_transformers, served
from safetensors.torch import load_file

import fp8engine as fe
from fp8engine.errors import ConversionError, StateError
from fp8engine.export.hf import load
from fp8engine.export.layout import parse

LAYER = "model.layers.0."
Q, DOWN = f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.down_proj"


def test_codes_are_those_of_training_and_scales_their_exponents(exported, ids):
    model: Any = tiny_models.llama().eval()
    with torch.no_grad():
        model.get_submodule(Q).weight[:, :16] *= 2.0**-30
        model.get_submodule(Q).weight[3] = 0.0
    folder = exported("mxfp8", model)
    held, back = load_file(folder / "model.safetensors"), load(folder)
    for name, layer in served(back).items():
        want = fe.quantize(model.get_submodule(name).weight.detach(), fe.mxfp8().weight)
        codes, exponents = held[f"{name}.weight"], held[f"{name}.weight_scale"]
        assert exponents.dtype == torch.uint8
        assert torch.equal(2.0 ** (exponents.double() - 127), want.scale.double())
        assert torch.equal(layer.scale, want.scale)
        assert torch.equal(bits(codes), bits(want.data))
        assert torch.equal(bits(layer.weight), bits(codes))
    fe.convert(model, "mxfp8")
    assert answers_alike(back, model, ids)
    assert {name: tensor.dtype for name, tensor in fe.hf.iter_fp8(model)} == {n: t.dtype for n, t in held.items()}


def test_the_config_is_compressed_tensors_own_and_its_reader_finds_the_same_weights(exported):
    folder = exported("mxfp8")
    config = quantization(folder)
    theirs = QuantizationConfig.model_validate({k: v for k, v in config.items() if k != "fp8engine"})
    (group,) = theirs.config_groups.values()
    assert group == QuantizationScheme(targets=["Linear"], **{k: without_zero_points(v) for k, v in MXFP8.items()})
    assert (config["format"], config["ignore"]) == ("mxfp8-quantized", ["lm_head"])
    layers = served(load(folder))
    theirs = read_by_transformers(folder, torch.bfloat16)  # which holds codes * 2^n
    assert all(torch.equal(theirs[f"{name}.weight"], layer.dequantize()) for name, layer in layers.items())


def without_zero_points(arguments: Any) -> Any:
    """A symmetric cast has none; compressed-tensors names their dtype all the same, and writes it nowhere."""
    return arguments.model_copy(update={"zp_dtype": None})


def test_a_weight_of_no_whole_blocks_gets_a_scale_per_row_beside_the_others(exported, ids):
    model: Any = tiny_models.llama(intermediate_size=48).eval()
    folder = exported("mxfp8", model)
    config = quantization(folder)
    assert (config["format"], [group["format"] for group in config["config_groups"].values()]) == (
        "mixed-precision",
        ["mxfp8-quantized", "float-quantized"],
    )
    layers = served(load(folder))
    assert (layers[Q].scale.shape, layers[DOWN].scale.shape) == ((32, 1), (32, 1))
    assert (layers[Q].numerics.recipe.name, layers[DOWN].numerics.recipe.name) == ("mxfp8", "rowwise")
    theirs = read_by_transformers(folder, torch.bfloat16)  # which holds codes * 2^n
    assert all(torch.equal(theirs[f"{name}.weight"], layer.dequantize()) for name, layer in layers.items())


def test_a_file_of_somebody_else_is_read_under_mxfp8(exported, damage, ids):
    folder = exported("mxfp8")
    before = load(folder)
    damage(folder, config=lambda config: config.pop("fp8engine"))
    assert parse(quantization(folder)).recipe == fe.mxfp8()
    assert answers_alike(load(folder), before, ids)
    damage(folder, tensors=lambda held: held[f"{Q}.weight_scale"].fill_(255))
    with pytest.raises(StateError, match=rf"{Q}: weight_scale holds NaN"):
        load(folder)
    damage(folder, config=lambda config: config["config_groups"]["group_0"]["weights"].update(group_size=16))
    with pytest.raises(StateError, match="strategy of the weights is 'group'"):
        load(folder)


def test_what_does_not_hold_bytes_says_what_does(exported, ids):
    with pytest.raises(ConversionError, match=r"'fp8' has no scales per 1x32 block .*: 'compressed-tensors' has"):
        exported("mxfp8", layout="fp8")
    model: Any = tiny_models.gpt2().eval()
    folder = exported("mxfp8", model, layout="fp8engine")  # and Conv1D
    assert load_file(folder / "model.safetensors")["transformer.h.0.mlp.c_fc.weight_scale_inv"].dtype == torch.uint8
    back = load(folder)
    fe.convert(model, "mxfp8")
    assert answers_alike(back, model, ids)


@pytest.mark.parametrize("layout", ["auto", "fp8engine"])
def test_a_running_server_takes_the_bytes(exported, ids, layout: str):
    model: Any = fe.convert(tiny_models.llama().eval(), "mxfp8", fuse=False)
    server = load(exported(None, model, layout=layout))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
        held = server.state_dict()
        for name, tensor in fe.hf.iter_fp8(model, layout=layout):
            held[name].copy_(tensor)
    assert answers_alike(server, model, ids)


def test_numbers_that_an_export_of_ours_held_are_read(exported, damage, ids):
    folder, name = exported("mxfp8", layout="fp8engine"), f"{Q}.weight_scale_inv"
    before = load(folder)
    damage(folder, tensors=lambda held: held.update({name: 2.0 ** (held[name].float() - 127)}))
    back = load(folder)
    assert back.get_submodule(Q).weight_scale_inv.dtype == torch.float32
    assert answers_alike(back, before, ids)
