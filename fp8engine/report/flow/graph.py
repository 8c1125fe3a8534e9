"""Graph of a recording: layers, their consumers and producers, and the edges between them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Consumer:
    """A node of the graph: something that reads a tensor, or made it.

    kind: "matmul", "softmax" (attention), "norm", "residual", "activation", "loss", "output" (it leaves the model) or
    "unknown"; of what made an input also "attention", "embedding" and "input".
    name: of the module that does it ("model.layers.0.mlp.act_fn"), or of the function ("aten.add", "attention").
    where: the module in whose forward that happens, "" for the model itself.
    """

    kind: str
    name: str
    where: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Layer:
    """One linear layer: the consumers of its output, the producers of its input, layers with the very same input.

    calls: how often it ran in the recorded forward; the consumers are those of all calls.
    """

    consumers: tuple[Consumer, ...] = ()
    producer: tuple[Consumer, ...] = ()
    shares_input_with: tuple[str, ...] = ()
    calls: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its consumers, each once."""
        return tuple(dict.fromkeys(consumer.kind for consumer in self.consumers))


@dataclass(frozen=True)
class Graph:
    """Data flow of a model, without the forms in which `Flow` shows it.

    layers: by name, in the order in which they first ran, those that never ran last.
    nodes, edges: the graph: layers (kind "matmul") and all else that made or read a tensor, in the order in which they
    ran; an edge (i, j) says that node j reads what node i made.
    """

    layers: dict[str, Layer]
    nodes: tuple[Consumer, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
