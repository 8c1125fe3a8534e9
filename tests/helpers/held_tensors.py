"""A process that holds tensors behind examples/vllm_rollout.py's pipe: the smallest thing that an Engine can drive."""

import os
import sys
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import save

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from vllm_rollout import serve


class Tensors:
    """Those that `update` brought."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def update(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take them, one after another; "refused" is not taken."""
        for name, tensor in pairs:
            if name == "refused":
                raise ValueError(f"no parameter is called {name}")
            self.tensors[name] = tensor

    def held(self) -> bytes:
        """All of them."""
        return save(self.tensors)

    def generate(self, *_: object) -> None:
        """End without an answer."""
        os._exit(7)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), Tensors)
