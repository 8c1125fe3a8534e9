"""Layers whose weights transformers merges when it saves a model: they stay in 16 bits, and the folder is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import fp8engine as fe
from fp8engine.export.hf import Fp8EngineConfig, export, iter_fp8, load
from fp8engine.export.layers import MERGED

SIZE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}


def dinov2() -> Any:
    return hf.Dinov2Model(hf.Dinov2Config(**SIZE, image_size=8, use_swiglu_ffn=True)).eval()


def radio() -> Any:
    return hf.RadioModel(hf.RadioConfig(**SIZE, image_size=8, max_img_size=16)).eval()


# The model, the layers that it merges, and the name in the files.
MODELS = pytest.mark.parametrize(
    ("make", "merged", "name"),
    [
        (dinov2, ("mlp.gate_proj", "mlp.up_proj"), "encoder.layer.0.mlp.weights_in.weight"),
        (radio, tuple(f"attention.{name}_proj" for name in "qkv"), "radio_model.model.blocks.0.attn.qkv.weight"),
    ],
)


def values(model: Any) -> list[torch.Tensor]:
    """Its tensors for one image."""
    torch.manual_seed(5)
    with torch.no_grad():
        return [value for value in model(torch.randn(1, 3, 8, 8)).values() if isinstance(value, torch.Tensor)]


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(values(one), values(other), strict=True))


@pytest.mark.parametrize("layout", ["auto", "fp8engine"])
@MODELS
def test_an_export_is_read_and_computes_what_was_told(
    tmp_path: Path, make: Callable, merged: tuple[str, ...], name: str, layout: str
):
    model = make()
    report = export(model, tmp_path / "out", "rowwise", layout=layout)
    left = {row["name"]: row["reason"] for row in report.left if row["reason"] == MERGED}
    assert left.keys() == {f"encoder.layer.0.{one}" for one in merged}
    assert any("refuses" in note for note in report.notes) == (layout == "auto")
    held, served = load_file(tmp_path / "out" / "model.safetensors"), load(tmp_path / "out", type(model))
    assert held[name].dtype == torch.float32
    assert {row["reason"] for row in fe.inspect(served).layers if row["name"] in left} == {MERGED}
    if layout == "fp8engine" or make is radio:  # transformers 5.23 itself refuses DINOv2's in compressed-tensors
        theirs = type(model).from_pretrained(tmp_path / "out").eval()
        assert layout == "auto" or equal(theirs, served)
    fe.convert(model, "rowwise")
    pairs = dict(iter_fp8(model, layout=layout))
    assert pairs.keys() == held.keys()
    assert all(torch.equal(pairs[key].float(), held[key].float()) for key in held)
    fe.convert(model, "rowwise", skip=lambda name, _: name in left)
    assert equal(served, model)


@MODELS
def test_a_plain_folder_is_loaded_into_fp8(tmp_path: Path, make: Callable, merged: tuple[str, ...], name: str):
    model = make()
    model.save_pretrained(tmp_path / "plain")
    back = type(model).from_pretrained(tmp_path / "plain", quantization_config=Fp8EngineConfig("rowwise")).eval()
    left = {row["name"] for row in fe.inspect(back).layers if row["reason"] == MERGED}
    assert left == {f"encoder.layer.0.{one}" for one in merged}
    back.save_pretrained(tmp_path / "again")
    assert name in load_file(tmp_path / "again" / "model.safetensors")
    assert equal(load(tmp_path / "again", type(model)), back)
    plain = type(model).from_pretrained(tmp_path / "plain")  # knows itself what it was read through
    export(plain, tmp_path / "out", "rowwise")
    assert equal(load(tmp_path / "out", type(model)), back)
    fe.convert(model, "rowwise", skip=lambda name, _: name in left)
    assert equal(back, model)
    export(fe.revert(back), tmp_path / "reverted", "rowwise")
