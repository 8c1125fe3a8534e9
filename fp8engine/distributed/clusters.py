"""Predicted time of a training step on named clusters, from bytes sent and FLOPs; nothing here is measured on one.

    t(collective) = max(sent / nvlink, sent / (g · nic) where the group spans nodes)       g cards of it in a node
    t(compute)    = Σ layers 6 M N K / (R · speedup)  +  other FLOPs / R
    t(step)       = max(t(compute), Σ t(collective))

    sent    bytes that a rank sends in a ring (traffic.py); NCCL makes a ring for each network adapter, and each ring
            leaves a node once, so that each of the g adapters carries sent / g
    nvlink  bytes/s that a card sends to cards of its node; nic: to other nodes
    R       16-bit matmuls of 8192^3 on an H200, measured; speedup: of FP8 on an H100, predicted (ops/cost.py)

Left out, all of which make a step longer: norms, activations and the optimizer, latency, and the first gather and the
last reduction, which nothing hides.  Compute without them is short, so the batch from which communication is predicted
to hide is larger than the true one.  Sources: NVIDIA's H100 data sheet (NVLink 900 GB/s in both directions together),
the DGX H100 user guide (8 x 400 Gb/s), Google Cloud's A3 Mega machine type (8 x 200 Gb/s for cards).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fp8engine.numerics.recipe import Recipe
from fp8engine.ops.cost import speedup

RATE = 790e12  # R, FLOP/s
MEMORY = {"H100": 80e9, "H200": 141e9}  # bytes of a card, of NVIDIA's data sheets


@dataclass(frozen=True)
class Cluster:
    """Nodes of cards: how many in a node, and bytes/s that a card sends to its node and to other nodes."""

    name: str
    cards: int
    nvlink: float
    nic: float
    rate: float = RATE

    def seconds(self, sent: float, ranks: int, apart: int = 1) -> float:
        """Predicted time of collectives in which each of `ranks` sends so many bytes.

        apart: distance of two neighbours of the group; with tensor parallelism over 8, one card of each node.

        >>> CLUSTERS[0].seconds(45e9, ranks=8), CLUSTERS[0].seconds(45e9, ranks=16), CLUSTERS[0].seconds(45e9, 16, 8)
        (0.1, 0.1125, 0.9)
        """
        here = max(self.cards // apart, 1)
        across = sent / (here * self.nic) if ranks > here else 0.0
        return max(sent / self.nvlink if here > 1 else 0.0, across)


CLUSTERS = (
    Cluster("dgx-h100", 8, 450e9, 50e9),
    Cluster("a3-mega", 8, 450e9, 25e9),
)


@dataclass(frozen=True)
class Work:
    """FLOPs of a rank's step.

    layers: (N, K, how many) of the linear layers under the recipe.  flops: of all layers, in 16 bits.
    matmuls: of a layer in a step; one more where its forward is computed again.
    """

    tokens: int
    layers: tuple[tuple[int, int, int], ...]
    flops: float
    recipe: Recipe
    matmuls: int = 3

    def seconds(self, rate: float, fp8: bool) -> float:
        """Predicted time of the matmuls and casts."""
        if not fp8:
            return self.flops / rate
        spared = (
            2 * self.matmuls * self.tokens * n * k * count * (1 - 1 / speedup(self.recipe, self.tokens, n, k))
            for n, k, count in self.layers
        )
        return (self.flops - sum(spared)) / rate


def predict(cluster: Cluster, work: Work, fp8: bool, sent: Iterable[tuple[float, int, int]]) -> dict[str, float]:
    """Predicted seconds of a step, and from how many tokens a card communication hides.

    sent: (bytes, ranks, apart) of collectives, as `Cluster.seconds` takes them.

    >>> from fp8engine.numerics.recipe import rowwise
    >>> work = Work(8192, ((4096, 4096, 32),), 6 * 8192 * 4096 * 4096 * 32, rowwise())
    >>> predict(CLUSTERS[0], work, False, [(40e9, 1024, 1)])["communication"]
    0.1
    """
    compute = work.seconds(cluster.rate, fp8)
    communication = sum(cluster.seconds(*each) for each in sent)
    return {
        "compute": compute,
        "communication": communication,
        "step": max(compute, communication),
        "hidden_from_tokens": math.ceil(work.tokens * communication / compute) if compute else 0,
    }
