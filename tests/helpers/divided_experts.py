"""Experts divided over ranks, and the same in one process that holds all experts and all ranks' rows."""

from typing import Any

import torch
from ranks import gradients
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import fp8engine as fe

E, K, H = 8, 129, 333
EVERYTHING = ("input", "output", "grad_output", "grad_input")
# What a rank has for each expert, by name of the case; ranks take rows in turn.  Expert 1 never has a row.
CASES = {
    "uneven": [[5, 0, 30, 9, 1, 0, 17, 2], [0, 0, 3, 40, 0, 11, 0, 6]],
    "a rank without rows": [[5, 0, 30, 9, 1, 0, 17, 2], [0] * E],
    "all rows to rank 0": [[5, 0, 0, 0, 0, 0, 0, 0], [12, 0, 0, 0, 0, 0, 0, 0]],
    "no rows": [[0] * E, [0] * E],
}


class Experts(nn.Module):
    """A mixture's experts as a user of fe.GroupedLinear writes them."""

    def __init__(self, recipe: str | fe.Recipe, dtype: torch.dtype = torch.float32, seed: int = 0, experts: int = E):
        super().__init__()
        torch.manual_seed(seed)
        self.up = fe.GroupedLinear(experts, K, H, recipe=recipe, dtype=dtype)
        self.down = fe.GroupedLinear(experts, H, K, bias=False, recipe=recipe, dtype=dtype)
        with torch.no_grad():
            for layer in (self.up, self.down):
                layer.weight[:, 0, 0] = 0.5  # alike for every expert: part of them has the scale of all

    def forward(self, x: torch.Tensor, sizes) -> torch.Tensor:
        return self.down(nn.functional.silu(self.up(x, sizes)), sizes)


def given(rank: int, case: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(x, dy, sizes) of a rank."""
    sizes = CASES[case][rank % 2]
    x, dy = torch.randn(2, sum(sizes), K, generator=torch.Generator().manual_seed(rank + 1)).to(dtype)
    return x, dy, sizes


def step(model: Any, x: torch.Tensor, dy: torch.Tensor, sizes) -> dict[str, Any]:
    """y, dx and the gradients of a step."""
    x = x.clone().requires_grad_()
    y = model(x, sizes)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, **gradients(model)}


def alone(recipe: str | fe.Recipe, ranks: int, case: str, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """What one process computes from all ranks' rows, expert by expert in the order of ranks; y and dx by rank."""
    parts = [given(rank, case, dtype) for rank in range(ranks)]
    by_expert = [[t.split(sizes) for t in (x, dy)] for x, dy, sizes in parts]
    x, dy = (torch.cat([p[i][e] for e in range(E) for p in by_expert]) for i in (0, 1))
    found = step(Experts(recipe, dtype), x, dy, [sum(p[2][e] for p in parts) for e in range(E)])
    lengths = [p[2][e] for e in range(E) for p in parts]
    pieces = {name: found[name].split(lengths) for name in ("y", "dx")}
    return [found | {name: torch.cat(pieces[name][rank::ranks]) for name in pieces} for rank in range(ranks)]


def divided(mesh, model: nn.Module, fp8=None) -> Any:
    return parallelize_module(model, mesh, fe.distributed.ExpertParallel(fp8=fp8))
