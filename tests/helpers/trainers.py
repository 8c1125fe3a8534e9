"""A tiny Llama and lines of random tokens for Trainer, Accelerate and Lightning, on the CPU and without output."""

from typing import Any

import lightning
import torch
from hf_families import FAMILIES, VOCABULARY
from support import converted
from torch.utils.data import Dataset

TRAINER: dict[str, Any] = {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
LIGHTNING: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
LIGHTNING |= {"enable_checkpointing": False, "accelerator": "cpu"}


class Lines(Dataset):
    """Lines of random tokens, each its own labels."""

    def __init__(self, count: int):
        self.ids = torch.randint(3, VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def llama(recipe: Any) -> Any:
    torch.manual_seed(0)
    return converted(FAMILIES["llama"].build(), recipe)


class Module(lightning.LightningModule):
    """The Llama."""

    def __init__(self, recipe: str):
        super().__init__()
        self.model = llama(recipe)

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
