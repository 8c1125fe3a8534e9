"""What `fe.amp.find_overflow` costs in its default mode: a training step of ViT blocks, watched and not, in turns.

    python benchmarks/overflow.py [--turns 12]

A watched step is the second one inside the block: the first reads what the passes before it left.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from common import interleaved, machine, save, timed
from torch import nn

import fp8engine as fe

# Width, layers, batch, tokens, dtype of autocast (None: FP32): steps of some 600, 400, 200 and 60 ms.
CASES = (
    (384, 6, 4, 196, None),
    (384, 6, 4, 196, torch.bfloat16),
    (192, 6, 16, 64, None),
    (192, 6, 4, 64, None),
)


def steps(width: int, layers: int, batch: int, tokens: int, dtype: torch.dtype | None) -> dict[str, Callable]:
    """Two calls that time a step: plain and watched."""
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True) for _ in range(layers)]
    network, x = nn.Sequential(*blocks), torch.randn(batch, tokens, width)
    optimizer = torch.optim.SGD(network.parameters(), 1e-6)

    def step() -> None:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = network(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def watched() -> float:
        with fe.amp.find_overflow(network):
            step()
            return timed(step)

    return {"plain": lambda: timed(step), "watched": watched}


def main() -> None:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        found = interleaved(steps(*case), turns, warmup=1)
        plain, watched = (found[name]["median"] for name in ("plain", "watched"))
        width, layers, batch, tokens, dtype = case
        name = f"{layers} blocks of {width}, {batch} x {tokens} tokens, {dtype or torch.float32}"
        print(f"{name:56s} {plain * 1e3:7.1f} ms, watched {watched * 1e3:7.1f} ms: {watched / plain - 1:+.1%}")
        rows.append({"name": name, "seconds": found, "overhead": watched / plain - 1})
    print(f"written to {save('overflow', {'machine': machine(), 'rows': rows})}")


if __name__ == "__main__":
    main()
