"""Tensor parallelism, measured on gloo: gradients against one process, and bytes against a gather in BF16.

`rows()` runs a gated MLP of 256 - 512 - 256 features in BF16 over 2 and 4 ranks under every recipe, tokens divided
(sequence parallel) or whole, and a training of tensor parallel by 2 times fe.distributed.fsdp by 2.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.distributed.traffic import Traffic

OPTIONS = {2: ("sequence parallel", "tokens whole"), 4: ("sequence parallel",)}
RECIPES = ("current", "delayed", "rowwise", "rowwise_gw_hp", "blockwise", "auto")
BATCH, T, WIDTH, WIDE = 2, 64, 256, 512
LAYOUTS = {"sequence parallel": Shard(1), "tokens whole": Replicate()}
EXACT = 1e-5  # dW: no rank divides its sums, whose order in FP32 alone may differ


class GatedMLP(nn.Module):
    """gate, up and down of a Llama."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, WIDE, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDE, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def rows() -> list[dict]:
    """A row for each recipe, number of ranks and layout of the tokens."""
    found = []
    alone = {recipe: _step(_model(recipe), *_data()) for recipe in (*RECIPES, None)}
    for ranks in OPTIONS:
        measured = run(_work, ranks)[0]
        for (recipe, option), (ours, traffic) in measured.items():
            if recipe is not None:
                bf16 = measured[None, option][1]
                found.append(_row((recipe, option, ranks), ours, alone, _gathered(traffic), _gathered(bf16)))
    return [*found, *_with_fsdp()]


def _row(case: tuple, ours: dict, alone: dict, sent: int, torchs: int) -> dict:
    """sent: bytes of the all-gathers.  torchs: of those of torch's own styles in BF16."""
    recipe, option, ranks = case
    bf16_bytes = 2 * (ranks - 1) * BATCH * T // ranks * WIDTH * 2  # x and dy once each
    reference, bf16 = alone[recipe], alone[None]
    dw = max(_error(ours[name], reference[name]) for name in ours if name.startswith("d"))
    far, as_far = (_sqnr(which["y"], bf16["y"]) for which in (ours, reference))
    return {
        "part": "tensor parallel",
        "recipe": recipe,
        "ranks": ranks,
        "option": option,
        "equal": dw <= EXACT,
        "against": f"dW of one process, within {EXACT:g}",
        "bytes_share": round(sent / bf16_bytes, 4) if sent else None,
        "error": f"dW {dw:.0e}; y {far:.2f} dB of BF16's, one process {as_far:.2f} dB",
        "note": f"{sent / torchs:.3f} of torch's styles, which gather x twice" if sent else "nothing is gathered",
    }


def _with_fsdp() -> list[dict]:
    found = []
    for recipe, (plain, codes) in run(_two_dimensions, 4)[0].items():
        found.append(
            {
                "part": "tensor parallel",
                "recipe": recipe,
                "ranks": 4,
                "option": "TP 2 x fe.distributed.fsdp 2",
                "equal": plain == codes,
                "against": "losses of TP 2 x fully_shard 2, weights gathered in BF16",
                "bytes_share": None,
                "error": f"last loss {codes[-1]:.5f}, {plain[-1]:.5f}",
                "note": "3 steps of SGD",
            }
        )
    return found


def _model(recipe: str | None) -> nn.Module:
    torch.manual_seed(0)
    model = GatedMLP().bfloat16()
    if recipe is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # emulated
            fe.convert(model, recipe)
    return model


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH, T, WIDTH).bfloat16(), torch.randn(BATCH, T, WIDTH).bfloat16()


def _step(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict:
    y = model(x)
    y.backward(dy)
    return {"y": y.detach(), **{f"d{name}": p.grad for name, p in model.named_parameters()}}


def _divide(model: nn.Module, mesh, tokens, fp8: bool) -> Any:
    column, row = (fe.distributed.Colwise, fe.distributed.Rowwise) if fp8 else (ColwiseParallel, RowwiseParallel)
    plan: dict[str, Any] = {name: column(input_layouts=tokens) for name in ("gate", "up")} | {
        "down": row(output_layouts=tokens)
    }
    return fe.distributed.tensor_parallel(model, mesh, plan) if fp8 else parallelize_module(model, mesh, plan)


def _work(rank: int, ranks: int) -> dict:
    found = {}
    mesh = init_device_mesh("cpu", (ranks,))
    for option in OPTIONS[ranks]:
        tokens = LAYOUTS[option]
        for recipe in (*RECIPES, None):
            model = _divide(_model(recipe), mesh, tokens, recipe is not None)
            x, dy = (t.chunk(ranks, 1)[rank].contiguous() if tokens == Shard(1) else t for t in _data())
            with Traffic() as traffic:
                ours = _step(model, x, dy)
            ours["y"] = DTensor.from_local(ours["y"], mesh, [tokens], run_check=False)
            found[recipe, option] = ({name: t.full_tensor() for name, t in ours.items()}, traffic.to_dict())
    return found


def _two_dimensions(rank: int, ranks: int) -> dict:
    from torch.distributed.fsdp import fully_shard

    found = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for recipe in ("current", "rowwise"):
        losses = []
        for codes in (False, True):
            model = _divide(_model(recipe), mesh["tp"], Shard(1), True)
            if codes:
                fe.distributed.fsdp(model, mesh=mesh["dp"], blocks=[model.gate, model.up, model.down])
            else:
                for layer in (model.gate, model.up, model.down, model):
                    fully_shard(layer, mesh=mesh["dp"])
            for module in model.modules():
                if hasattr(module, "set_force_sum_reduction_for_comms"):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
            losses.append(_train(model, mesh))
        found[recipe] = tuple(losses)
    return found


def _train(model: nn.Module, mesh) -> list[float]:
    x, target = (t.chunk(2)[mesh.get_local_rank("dp")].chunk(2, 1)[mesh.get_local_rank("tp")] for t in _data())
    optimizer, losses = torch.optim.SGD(model.parameters(), 1.0), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x.contiguous()) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _gathered(traffic: dict) -> int:
    return sum(each["bytes"] for kind, each in traffic.items() if kind.startswith("all-gather"))


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def _sqnr(a: torch.Tensor, b: torch.Tensor) -> float:
    return -20 * math.log10(_error(a, b))


if __name__ == "__main__":
    for row in rows():
        print(row)
