"""fe.LayerNormMLP, a norm, two linear layers and the activation between them, which write codes for one another."""

from __future__ import annotations

import torch
from torch import nn

from fp8engine.autograd import Memory
from fp8engine.errors import UnknownName
from fp8engine.nn.layernorm_linear import UNTIL_SHARED, make_norm, norm_of, share_state
from fp8engine.nn.linear import Linear
from fp8engine.nn.produce import activated, begin_in_graph, normed
from fp8engine.numerics.names import RecipeName
from fp8engine.numerics.recipe import Recipe, resolve
from fp8engine.ops.reference import Norm
from fp8engine.ops.reference.activations import ACTIVATIONS
from fp8engine.scaling.operands import Producer

RECOMPUTE = {False: (False, False), True: (True, True), "norm": (True, False), "activation": (False, True)}


class LayerNormMLP(nn.Module):
    """A transformer's MLP in FP8: norm and activation are written once, in the format that their matmul reads.

    hidden, intermediate: features of input and output, and between the two layers.  bias: of both layers.
    activation: relu, srelu, gelu, gelu_tanh, qgelu, silu, or gated: reglu, sreglu, geglu, geglu_tanh, qgeglu,
        swiglu, glu, clamped_swiglu (formulas: ops/reference/activations.py).
    recompute: what runs again in backward instead of being kept: "norm", "activation", True for both.
    store: "16 bits", or "fp8": the inputs of norm and activation are kept in FP8 (E4M3, a scale per row).
    recipe, norm, eps, zero_centered, device, dtype, input and output: as of fe.LayerNormLinear.
    Children: `norm`; `up`, or for a gated activation `gate_up` (2 * intermediate rows, the gate's first); `down`.
    Raises UnknownName for a recipe, norm, activation, recompute or store; for an input as fe.Linear does.

    >>> mlp = LayerNormMLP(32, 64, "swiglu", bias=False, recipe="delayed", norm="rms")
    >>> mlp(torch.ones(2, 4, 32)).shape, {name: list(p.shape) for name, p in mlp.state_dict().items()}
    (torch.Size([2, 4, 32]), {'norm.weight': [32], 'gate_up.weight': [128, 32], 'down.weight': [32, 64]})
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        activation: str = "gelu",
        bias: bool = True,
        *,
        recipe: Recipe | RecipeName,
        norm: str = "layer",
        eps: float = 1e-5,
        zero_centered: bool = False,
        recompute: bool | str = False,
        store: str = "16 bits",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        recipe = resolve(recipe)
        if activation not in ACTIVATIONS:
            raise UnknownName("activation", activation, ACTIVATIONS)
        if recompute not in RECOMPUTE:
            raise UnknownName("recompute", recompute, [str(name) for name in RECOMPUTE])
        self.activation = activation
        self.memory = Memory(*RECOMPUTE[recompute], store)
        self.norm = make_norm(hidden, Norm(norm, eps, zero_centered), device, dtype)
        gated = ACTIVATIONS[activation].gated
        self.first = "gate_up" if gated else "up"
        first = Linear(hidden, intermediate * (1 + gated), bias, recipe=UNTIL_SHARED, device=device, dtype=dtype)
        self.add_module(self.first, first)
        self.down = Linear(intermediate, hidden, bias, recipe=UNTIL_SHARED, device=device, dtype=dtype)
        self.producers = Producer("norm"), Producer(activation)
        share_state([(self.first, first), ("down", self.down)], recipe, begins=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin_in_graph(self.down)
        first, (of_norm, of_activation) = getattr(self, self.first), self.producers
        y = first(normed(x, norm_of(self.norm), first, of_norm, self.memory))
        return self.down(activated(y, self.activation, self.down, of_activation, self.memory))

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
