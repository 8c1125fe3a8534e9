"""Arithmetic of `make serve-check`: rows with their verdicts, gaps of log-probabilities, codes and weights in vLLM.

Nothing here needs vLLM or lm-eval: tests/bench/test_serve_rows.py runs it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

# Layers that vLLM runs as one matmul, and their parts in checkpoints.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def row(what: str, value: Any, target: str, met: bool | None, **more: Any) -> dict:
    """A row of the table.  met: None where no target is set."""
    return {"what": what, "value": value, "target": target, "met": met} | more


def line(row: Mapping[str, Any]) -> str:
    """A row as a line for a terminal."""
    value = f"{row['value']:.4g}" if isinstance(row["value"], float) else row["value"]
    word = {True: "met", False: "MISSED", None: ""}[row["met"]]
    return f"{word:7} {row['what']}: {value}  {row['target']}"


def exit_code(rows: Sequence[Mapping[str, Any]]) -> int:
    """1 where a target is missed."""
    return int(any(row["met"] is False for row in rows))


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    """How far two programs' log-probabilities of the same tokens are apart.

    mean, p99, largest: of |log p - log q|.  probability: mean |p - q|, verl's rollout_probs_diff_mean.  ratio: mean of
    exp |log p - log q|, NeMo RL's multiplicative error (docs.nvidia.com/nemo/rl, "Adding New Models").
    """
    apart = (ours - theirs).abs().flatten()
    return {
        "mean": apart.mean().item(),
        "p99": apart.quantile(0.99).item(),
        "largest": apart.max().item(),
        "probability": (ours.exp() - theirs.exp()).abs().mean().item(),
        "ratio": apart.exp().mean().item(),
    }


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """(mean of the differences ours - theirs, its standard error)."""
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    return statistics.fmean(apart), statistics.stdev(apart) / math.sqrt(len(apart))


def in_16_bits(pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """What an FP32 trainer sends to a server in BF16: codes and their scales as they are, all else in BF16."""
    for name, tensor in pairs:
        yield name, tensor if tensor.dtype == torch.float8_e4m3fn or name.endswith("_scale") else tensor.bfloat16()


def fp8_layers(held: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """By vLLM's name of each layer that it holds in FP8: the checkpoint's names of the layers that it is made of."""
    found = {}
    for name, tensor in held.items():
        if tensor.dtype == torch.float8_e4m3fn:
            parent, layer, _ = name.rsplit(".", 2)
            found[f"{parent}.{layer}"] = [f"{parent}.{part}" for part in FUSED.get(layer, (layer,))]
    return found


def codes_that_differ(sent: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> int:
    """Codes and scales per row of vLLM's layers that are not those that were sent; ValueError where one is not held."""
    differ, layers = 0, fp8_layers(held)
    for name, parts in layers.items():
        codes_NK = torch.cat([sent[f"{part}.weight"] for part in parts])
        scale_N1 = torch.cat([sent[f"{part}.weight_scale"] for part in parts])
        theirs_NK = held[f"{name}.weight"].t().contiguous()
        differ += int((codes_NK.view(torch.uint8) != theirs_NK.view(torch.uint8)).sum())
        differ += int((scale_N1 != held[f"{name}.weight_scale"]).sum())
    codes = sum(tensor.dtype == torch.float8_e4m3fn for tensor in sent.values())
    if (compared := sum(map(len, layers.values()))) != codes:
        raise ValueError(f"{codes} layers were sent in FP8, and vLLM holds {compared}")
    return differ


def least_sqnr(state: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> float:
    """The least SQNR in dB of a weight as vLLM holds it, scales per tensor, to the model's own."""
    least = float("inf")
    for name, parts in fp8_layers(held).items():
        found = (held[f"{name}.weight"].double() * held[f"{name}.weight_scale"].double()).t()
        wanted = [state[f"{part}.weight"].double() for part in parts]
        for w, q in zip(wanted, found.split([len(w) for w in wanted]), strict=True):
            least = min(least, 10 * torch.log10(w.square().sum() / (q - w).square().sum()).item())
    return least
