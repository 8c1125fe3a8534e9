"""A tiny model, its export, and a way to damage one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fp8engine.export.hf import export

WEIGHTS = "model.safetensors"


def pytest_itemcollected(item: pytest.Item) -> None:
    """What runs here without FP8 Tensor Cores is emulated, and need not say so."""
    item.add_marker(pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning"))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bars; no two threads that load a tensor each."""
    import transformers

    transformers.logging.disable_progress_bar()


@pytest.fixture
def exported(tmp_path: Path) -> Callable[..., Path]:
    """Export a tiny Llama (or another model); returns the folder."""

    def make(recipe: str | None = "current", model: nn.Module | None = None, **options: Any) -> Path:
        made = tiny_models.llama_of_blocks if recipe == "blockwise" else tiny_models.llama
        export(made().eval() if model is None else model, tmp_path / "out", recipe, **options)
        return tmp_path / "out"

    return make


@pytest.fixture
def damage() -> Callable[..., None]:
    """Change an export: `tensors` edits what the file holds, `config` the quantization_config, both in place."""

    def change(folder: Path, tensors: Callable[[dict], Any] | None = None, config: Callable[[dict], Any] | None = None):
        if tensors is not None:
            held = load_file(folder / WEIGHTS)
            tensors(held)
            save_file(held, folder / WEIGHTS, metadata={"format": "pt"})
        if config is not None:
            written = json.loads((folder / "config.json").read_text())
            config(written["quantization_config"])
            (folder / "config.json").write_text(json.dumps(written))

    return change


@pytest.fixture
def ids() -> torch.Tensor:
    """Token ids."""
    return tiny_models.tokens()
