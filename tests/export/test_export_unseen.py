"""Exports of models whose class has rules for merged weights, though the model has no such weights."""

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
