"""Gradients reduced in FP8: bytes, error of one gradient, and what it does to the loss of the demo's GPT on real text.

error    of a gradient of all parameters after one backward, against the sum in FP32, in dB
loss     trained with and without, from the same weights on the same batches: relative difference of the mean loss
         over the last half of the steps, mean and standard error over seeds and windows of WINDOW steps
"""

import math
import statistics

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.demo.config import Config, read
from fp8engine.demo.model import GPT, loss_of
from fp8engine.distributed.gradients import Fp8ReduceScatter
from fp8engine.distributed.traffic import Traffic

RANKS = (2, 4)
SEEDS, STEPS, WINDOW = (0, 1, 2), 60, 10
GRADIENTS = ("reduce-scatter", "all-to-all", "all-reduce")  # collectives that carry nothing else under FSDP2


def model_of(kind: str, seed: int) -> torch.nn.Module:
    """The demo's smallest GPT.  kind: fsdp or ddp, each with " bf16" or " fp8" behind it or in FP32."""
    torch.manual_seed(seed)
    model: torch.nn.Module = GPT(Config(size="tiny").shape)
    if kind.startswith("ddp"):
        model = DistributedDataParallel(model)
    else:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if kind.endswith("bf16") else None)
        for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues] - a ModuleList
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return fe.distributed.fp8_gradients(model) if kind.endswith("fp8") else model


def one_gradient(rank: int, ranks: int) -> dict:
    """(gradient of all parameters, bytes that reduced it) of each kind, on text that differs by rank."""
    config = Config(size="tiny")
    ids = read(None, config.shape.context).batch(rank, 0, config.batch, config.shape.context)
    found = {}
    for kind in ("fsdp", "fsdp bf16", "fsdp fp8", "ddp", "ddp fp8"):
        model = model_of(kind, 0)
        with Traffic() as traffic:
            loss_of(model, ids).backward()
        kinds = (*GRADIENTS, "all-gather") if kind.startswith("ddp") else GRADIENTS
        parts = [p.grad for p in model.parameters()]
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parts]  # pyright: ignore
        found[kind] = torch.cat([p.flatten() for p in whole]), traffic.total(*kinds)  # pyright: ignore
    return found | {"independent": independent(rank, ranks)}


def independent(rank: int, ranks: int) -> float:
    """dB of a reduce-scatter of normal numbers that have nothing in common between ranks: the least there is."""
    x = torch.randn(ranks << 16, generator=torch.Generator().manual_seed(rank))
    wanted, found = torch.empty(2, 1 << 16)
    torch.distributed.reduce_scatter_tensor(wanted, x.clone())
    Fp8ReduceScatter()(found, x, torch.distributed.group.WORLD, torch.distributed.ReduceOp.SUM)
    return decibels(wanted, found)


def losses(rank: int, ranks: int, seeds: tuple[int, ...], steps: int, kinds: tuple[str, ...]) -> dict:
    """This rank's training losses by (kind, seed), one for each step."""
    config = Config(size="tiny", steps=steps)
    text, found = read(None, config.shape.context), {}
    for seed in seeds:
        for kind in ("ddp", *kinds):
            model, curve = model_of(kind, seed), []
            optimizer = torch.optim.AdamW(model.parameters(), lr=config.peak, betas=(0.9, 0.95), weight_decay=0.1)
            for step in range(steps):
                for group in optimizer.param_groups:
                    group["lr"] = config.lr_at(step)
                loss = loss_of(model, text.batch(seed, ranks * step + rank, config.batch, config.shape.context))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                curve.append(loss.item())
            found[kind, seed] = curve
    return found


def difference(found: list[dict], kind: str, seeds: tuple[int, ...], steps: int) -> tuple[float, float, int]:
    """(mean, standard error, number) of the relative differences of windows in the second half of the training.

    Windows of one run follow each other, so that a difference lasts over several: the error is that over seeds where it
    is larger.
    """
    of_seeds = []
    for seed in seeds:
        mean = {
            k: [statistics.mean(step) for step in zip(*(r[k, seed] for r in found), strict=True)] for k in ("ddp", kind)
        }
        starts = range(steps // 2, steps, WINDOW)
        windows = {k: [statistics.mean(curve[s : s + WINDOW]) for s in starts] for k, curve in mean.items()}
        of_seeds.append([b / a - 1 for a, b in zip(windows["ddp"], windows[kind], strict=True)])
    every = [d for row in of_seeds for d in row]
    errors = [statistics.stdev(xs) / math.sqrt(len(xs)) for xs in (every, [statistics.mean(row) for row in of_seeds])]
    return statistics.mean(every), max(errors), len(every)


def decibels(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Signal to noise, 10 log10(sum wanted^2 / sum (found - wanted)^2)."""
    return 10 * math.log10(wanted.double().square().sum() / (found.double() - wanted.double()).square().sum())


def rows() -> list[dict]:
    """The part's rows, as benchmarks/distributed/__main__.py writes them."""
    table = []
    for ranks in RANKS:
        found = run(one_gradient, ranks)[0]
        error = f"{found['independent']:.1f} dB"
        table.append(_row(ranks, "reduce-scatter", 0.5039, error, "normal numbers, independent between ranks"))
        bf16 = {"fsdp": found["fsdp"][1] / 2, "ddp": found["ddp"][1] / 2}
        for kind in ("fsdp bf16", "fsdp fp8", "ddp fp8"):
            way = kind.split()[0]
            error = decibels(found[way][0], found[kind][0])
            table.append(
                _row(ranks, kind, found[kind][1] / bf16[way], f"{error:.1f} dB", "one gradient of the demo's GPT")
            )
    kinds = ("fsdp fp8", "ddp fp8")
    found = run(losses, 2, SEEDS, STEPS, kinds)
    for kind in kinds:
        mean, error, count = difference(found, kind, SEEDS, STEPS)
        text = f"loss {100 * mean:+.3f} % ± {100 * error:.3f} %"
        table.append(_row(2, kind, None, text, f"{STEPS} steps, {len(SEEDS)} seeds, {count} windows of {WINDOW} steps"))
    return table


def _row(ranks: int, option: str, share: float | None, error: str, note: str) -> dict:
    return {
        "part": "gradients",
        "recipe": "fp32",
        "ranks": ranks,
        "option": option,
        "equal": None,
        "against": "gradients reduced in FP32",
        "bytes_share": None if share is None else round(share, 4),
        "error": error,
        "note": note,
    }


if __name__ == "__main__":
    for row in rows():
        print(row)
