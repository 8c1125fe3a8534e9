"""Experts divided over ranks: bytes of rows on the wire, and results against one process that holds all the experts.

A mixture's two layers in BF16, SIZES rows of K numbers on each rank, chosen unevenly, one expert without any.
"""

import math

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.distributed.traffic import Traffic

EXPERTS, TOKENS, K, H = 8, 512, 256, 512
EVERYTHING = ("input", "output", "grad_output", "grad_input")
OPTIONS = {
    "default": None,
    "16 bits": (),
    "dispatch in FP8": ("input",),
    "dispatch and combine in FP8": ("input", "output"),
    "all four transfers in FP8": EVERYTHING,
}
RUNS = [("rowwise", option) for option in OPTIONS]
RUNS += [(recipe, "default") for recipe in ("blockwise", "current", "delayed", "rowwise_gw_hp", "bf16")]


class Experts(nn.Module):
    """Two layers for each expert and an activation between them."""

    def __init__(self, recipe: str):
        super().__init__()
        torch.manual_seed(0)
        options = {"bias": False, "recipe": recipe, "dtype": torch.bfloat16}
        self.up, self.down = fe.GroupedLinear(EXPERTS, K, H, **options), fe.GroupedLinear(EXPERTS, H, K, **options)

    def forward(self, x: torch.Tensor, sizes) -> torch.Tensor:
        return self.down(nn.functional.silu(self.up(x, sizes)), sizes)


def given(rank: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(x, dy, rows of each expert) of a rank."""
    generator = torch.Generator().manual_seed(rank)
    likely = torch.rand(EXPERTS, generator=generator) ** 2
    likely[1] = 0
    sizes = torch.multinomial(likely, TOKENS, replacement=True, generator=generator).bincount(minlength=EXPERTS)
    x, dy = torch.randn(2, TOKENS, K, generator=generator).bfloat16()
    return x, dy, sizes.tolist()


def step(model, x: torch.Tensor, dy: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """(y, dx, dw of the first layer)."""
    x = x.requires_grad_()
    y = model(x, sizes)
    y.backward(dy)
    return y.detach(), x.grad, model.up.weight.grad  # pyright: ignore[reportReturnType]


def alone(recipe: str, rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
    """The same from one process with the rows of all ranks; y and dx of this rank's."""
    parts = [given(other) for other in range(ranks)]
    by_expert = [[t.split(sizes) for t in (x, dy)] for x, dy, sizes in parts]
    x, dy = (torch.cat([p[i][e] for e in range(EXPERTS) for p in by_expert]) for i in (0, 1))
    lengths = [p[2][e] for e in range(EXPERTS) for p in parts]
    y, dx, dw = step(Experts(recipe), x, dy, [sum(p[2][e] for p in parts) for e in range(EXPERTS)])
    return *(torch.cat(t.split(lengths)[rank::ranks]) for t in (y, dx)), dw


def work(rank: int, ranks: int) -> dict:
    """By run: (found, wanted, bytes of rows), found and wanted being y, dx, dw."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    found = {}
    for recipe, option in RUNS:
        style = fe.distributed.ExpertParallel(fp8=OPTIONS[option])
        with Traffic() as traffic:
            y, dx, dw = step(parallelize_module(Experts(recipe), mesh, style), *given(rank))
        rows = sum(size for (kind, dtype), size in traffic.bytes.items() if kind == "all-to-all" and dtype != "int64")
        found[recipe, option] = (y, dx, dw.full_tensor()), alone(recipe, rank, ranks), rows  # pyright: ignore
    return found


def decibels(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Signal to noise; inf where both are equal."""
    noise = (found.double() - wanted.double()).square().sum().item()
    return 10 * math.log10(wanted.double().square().sum().item() / noise) if noise else math.inf


def rows() -> list[dict]:
    """The part's rows, as benchmarks/distributed/__main__.py writes them."""
    table = []
    for ranks in (2, 4):
        found = run(work, ranks)
        for recipe, option in RUNS:
            errors = {}
            for i, name in enumerate(("y", "dx", "dw")):
                errors[name] = min(decibels(mine[recipe, option][1][i], mine[recipe, option][0][i]) for mine in found)
            sent = sum(mine[recipe, option][2] for mine in found)
            at_16_bits = sum(mine["rowwise", "16 bits"][2] for mine in found)
            table.append(
                {
                    "part": "experts",
                    "recipe": recipe,
                    "ranks": ranks,
                    "option": option,
                    "equal": errors["y"] == errors["dx"] == math.inf,
                    "against": "y and dx of one process with all experts and rows",
                    "bytes_share": round(sent / at_16_bits, 4),
                    "error": ", ".join(f"{name} {dB:.1f} dB" for name, dB in errors.items() if dB < math.inf),
                    "note": "bytes of x, y, dy and dx together",
                }
            )
    return table


if __name__ == "__main__":
    for row in rows():
        print(row)
