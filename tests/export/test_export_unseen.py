"""Exports of models whose class has rules for merged weights, though the model has no such weights, and of models or
parts with a config of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from fp8engine.export import hf as ours

SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def test_a_dinov2_without_swiglu_is_exported_with_a_note_that_transformers_refuses_it(tmp_path: Path):
    torch.manual_seed(0)
    model = hf.Dinov2Model(hf.Dinov2Config(**SIZE)).eval()
    report = ours.export(model, tmp_path / "out", "rowwise")
    assert any("refuses" in note and "`load` reads them" in note for note in report.notes)
    with pytest.raises(ValueError, match="you can only have one to many"):  # transformers 5.23; if it reads, no note
        hf.Dinov2Model.from_pretrained(tmp_path / "out")
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        want, found = model(x).last_hidden_state, ours.load(tmp_path / "out", hf.Dinov2Model)(x).last_hidden_state
    assert 0 < (found - want).norm() < 0.2 * want.norm()
    own = ours.export(model, tmp_path / "own", "rowwise", layout="fp8engine")
    assert not any("refuses" in note for note in own.notes)


def test_a_tower_is_loaded_from_the_export_of_a_model_of_two(tmp_path: Path):
    """from_pretrained of a tower's class takes the tower's part of config.json, and so does load(kind=)."""
    torch.manual_seed(0)
    towers: dict[str, Any] = {
        "text_config": {**SIZE, "vocab_size": 64, "intermediate_size": 64},
        "vision_config": {**SIZE, "intermediate_size": 64},
    }
    model: Any = hf.CLIPModel(hf.CLIPConfig(**towers, projection_dim=32)).eval()
    ours.export(model, tmp_path / "out", "rowwise")
    given = torch.randint(3, 60, (2, 5)), torch.randn(2, 3, 8, 8)
    served = ours.load(tmp_path / "out", hf.CLIPModel)
    want = served.text_model(given[0]), served.vision_model(given[1])
    for kind, x, y in zip((hf.CLIPTextModel, hf.CLIPVisionModel), given, want, strict=True):
        part = ours.load(tmp_path / "out", kind)
        assert type(part.config) is kind.config_class
        assert sum(p.dtype == torch.float8_e4m3fn for p in part.parameters()) == 6
        with torch.no_grad():
            assert torch.equal(part(x).last_hidden_state, y.last_hidden_state)


def test_a_class_whose_config_auto_does_not_know_is_loaded(tmp_path: Path):
    """Bark's parts are models of types that transformers registers with none of its Auto classes."""
    torch.manual_seed(0)
    kind: Any = hf.BarkSemanticModel
    size: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "hidden_size": 32, "block_size": 32}
    model = kind(kind.config_class(**size, input_vocab_size=64, output_vocab_size=64)).eval()
    ours.export(model, tmp_path / "out", "rowwise")
    ids = torch.randint(3, 60, (2, 5))
    with torch.no_grad():
        want, found = model(ids).logits, ours.load(tmp_path / "out", kind)(ids).logits
    assert (found - want).norm() < 0.1 * want.norm()  # E4M3 keeps 2^-4 of a value, in two casts of four layers
