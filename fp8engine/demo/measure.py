"""Looking at a model in training without disturbing it: what it keeps for backward, and what it would write."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fp8engine.demo.model import loss_of
from fp8engine.demo.trainer import Trainer

PROMPT = b"The "
TEMPERATURE = 0.7
LENGTH = 200  # bytes of a sample


def activation_bytes(trainer: Trainer) -> int:
    """Bytes of activations that one step keeps for its backward.

    Counted where autograd saves them, each storage once, at the run's batch and at twice that; the difference is what
    belongs to a batch: parameters and autocast's 16-bit copies of them fall out.  The model's copy does the work, so
    its counters and scales stand still.
    """
    model, config = copy.deepcopy(trainer.model), trainer.config
    once, twice = (
        trainer.text.batch(trainer.seed, 0, batch, config.shape.context) for batch in (config.batch, 2 * config.batch)
    )
    return _saved(trainer, model, twice) - _saved(trainer, model, once)


def _saved(trainer: Trainer, model: nn.Module, ids: torch.Tensor) -> int:
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that its own graph holds would keep the graph for ever

    watching = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with watching, trainer.precision.step(), trainer.precision.forward():
        loss = loss_of(model, ids.to(trainer.device))  # held: a freed address could be taken again
    total = sum(sizes.values())
    del loss
    return total


@torch.no_grad()
def sample(trainer: Trainer) -> str:
    """Text that the model writes after PROMPT, the same for the same weights."""
    generator = torch.Generator().manual_seed(trainer.seed)
    written = list(PROMPT)
    for _ in range(LENGTH):
        ids = torch.tensor([written[-trainer.config.shape.context :]], device=trainer.device)
        with trainer.precision.step(), trainer.precision.forward():
            logits = trainer.model(ids)[0, -1].float().cpu()
        chances = torch.softmax(logits / TEMPERATURE, 0).nan_to_num(0.0) + 1e-9  # a diverged model writes noise
        written.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(written).decode("utf-8", errors="replace")
