"""What an export holds, as its tests look at it: its config, its served layers, what they and other readers answer."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from fp8engine.nn.serving import Served


def quantization(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def served(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Served)}


def answers_alike(one: Any, other: Any, ids: torch.Tensor) -> bool:
    """Whether both models give the same logits, bit for bit."""
    with torch.no_grad():
        return torch.equal(one(ids).logits, other(ids).logits)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of FP8 codes, which compare NaN and zeros of both signs too."""
    return tensor.view(torch.uint8)


def read_by_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The state_dict that transformers and compressed-tensors make of an export, dequantised."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))  # compressed-tensors dequantises in the first forward
    return {name: tensor.float() for name, tensor in model.state_dict().items()}
