"""fe.TransformerLayer, attention and MLP between norms and residuals; norms and activation write FP8 codes.

    pre               y = x + D(A(n1(x)))            z = y + D(M(n2(y)))
    post              y = n1(x + D(A(x)))            z = n2(y + D(M(y)))
    parallel          z = x + D(A(n1(x))) + D(M(n2(x)))          parallel shared: n2 is n1

A: attention, M: MLP, D: dropout.  A decoder's layer has cross attention C between the two: y + D(C(nc(y), context)), or
post, nc(y + D(C(y, context))).  The children are ordinary modules, named as a Llama block's, whose state_dict loads;
forward calls them, but for the norms, which are computed with their parameters: hooks of the norms do not run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fp8engine.autograd import Memory
from fp8engine.autograd.attention import Cache
from fp8engine.autograd.packed import Packed
from fp8engine.autograd.produce import KEEP
from fp8engine.errors import ShapeError, UnknownName
from fp8engine.nn.attention import PROJECTIONS, Attention, Heads, with_bias
from fp8engine.nn.layernorm_linear import make_norm, norm_of, share_state
from fp8engine.nn.layernorm_mlp import RECOMPUTE
from fp8engine.nn.linear import Linear
from fp8engine.nn.produce import activated, begin_in_graph, normed, sharing
from fp8engine.numerics.names import RecipeName
from fp8engine.numerics.recipe import Recipe, resolve
from fp8engine.ops.reference import Norm
from fp8engine.ops.reference.activations import ACTIVATIONS
from fp8engine.scaling.operands import Producer

PLACEMENTS = ("pre", "post", "parallel", "parallel shared")


class MLP(nn.Module):
    """The MLP's layers: gate_proj (of a gated activation), up_proj, down_proj."""

    def __init__(self, hidden: int, intermediate: int, activation: str, biased: Collection[str], **common: Any):
        super().__init__()
        self.activation = activation
        self.gated = ACTIVATIONS[activation].gated
        if self.gated:
            self.gate_proj = Linear(hidden, intermediate, "gate_proj" in biased, **common)
        self.up_proj = Linear(hidden, intermediate, "up_proj" in biased, **common)
        self.down_proj = Linear(intermediate, hidden, "down_proj" in biased, **common)
        self.memory, self.producer = KEEP, Producer(f"mlp's {activation}")

    @property
    def reader(self) -> nn.Module:
        """The layer that reads the input first."""
        return self.gate_proj if self.gated else self.up_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden], normed already."""
        first, up = (self.gate_proj(x), self.up_proj(x)) if self.gated else (self.up_proj(x), None)
        return self.down_proj(activated(first, self.activation, self.down_proj, self.producer, self.memory, up))

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


class TransformerLayer(nn.Module):
    """A transformer's block in FP8, with the memory options of fe.LayerNormMLP.

    hidden, intermediate: features of input and output, and of the MLP between.  heads: a number, or an fe.Heads
    (grouped queries, rotary positions, causal, window, dropout of the softmax).
    activation: relu, srelu, gelu, gelu_tanh, qgelu, silu, or gated: reglu, sreglu, geglu, geglu_tanh, qgeglu,
        swiglu, glu, clamped_swiglu (formulas: ops/reference/activations.py).
    bias: of all linear layers, or the names of those that have one: ("q_proj", "k_proj", "v_proj") is Qwen2's.
    placement: of the norms, "pre", "post", "parallel" or "parallel shared" (one norm for both).
    dropout: of what is added to the residual, in training; or a pair, after attention and after the MLP.
    recompute: what runs again in backward instead of being kept: "norm", "activation", True for both.
    store: "16 bits", or "fp8": the inputs of norms and activation are kept in FP8 (E4M3, a scale per row).
    context_size: width of the context that cross attention reads: a decoder's layer, pre or post; None: no such layer.
        Its heads are those of `heads`, without an order (causal, window, theta).
    recipe, norm, eps, zero_centered, device, dtype: as of fe.LayerNormLinear.

    Children: self_attn.{q,k,v,o}_proj; mlp.{gate,up,down}_proj; input_layernorm and post_attention_layernorm, or for
    post-norm, which has none before attention, post_attention_layernorm and post_feedforward_layernorm; of a decoder's
    layer cross_attn.{q,k,v,o}_proj and cross_attn_layernorm.
    Raises UnknownName for a recipe, norm, activation, placement, recompute, store or name in bias; ShapeError for heads
    that do not divide hidden; for an input as fe.Linear does.

    >>> heads = Heads(4, of_keys=2, theta=1e4, causal=True)
    >>> layer = TransformerLayer(32, 112, heads, "swiglu", bias=False, recipe="current", norm="rms")
    >>> layer(torch.randn(2, 6, 32)).shape
    torch.Size([2, 6, 32])
    >>> [name for name, _ in layer.named_parameters()][-3:]
    ['mlp.down_proj.weight', 'input_layernorm.weight', 'post_attention_layernorm.weight']
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        heads: Heads | int,
        activation: str = "gelu",
        bias: bool | Collection[str] = True,
        *,
        recipe: Recipe | RecipeName,
        norm: str = "layer",
        eps: float = 1e-5,
        zero_centered: bool = False,
        placement: str = "pre",
        dropout: float | tuple[float, float] = 0.0,
        recompute: bool | str = False,
        store: str = "16 bits",
        context_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        recipe = resolve(recipe)
        for kind, name, known in (
            ("activation", activation, ACTIVATIONS),
            ("placement", placement, PLACEMENTS),
            ("recompute", recompute, RECOMPUTE),
        ):
            if name not in known:
                raise UnknownName(kind, name, [str(each) for each in known])
        self.placement = placement
        self.dropout = dropout if isinstance(dropout, tuple) else (dropout, dropout)
        self.memory = Memory(*RECOMPUTE[recompute], store)
        feeding = ("gate_proj", "up_proj", "down_proj") if ACTIVATIONS[activation].gated else ("up_proj", "down_proj")
        biased = with_bias(bias, (*PROJECTIONS, *feeding))
        common = {"recipe": recipe, "device": device, "dtype": dtype}
        projecting = [name for name in biased if name in PROJECTIONS]
        self.self_attn = Attention(hidden, heads, projecting, **common)
        self.mlp = MLP(hidden, intermediate, activation, biased, **common)
        for name in self.norms():
            self.add_module(name, make_norm(hidden, Norm(norm, eps, zero_centered), device, dtype))
        layers = [(f"self_attn.{name}", getattr(self.self_attn, name)) for name in PROJECTIONS]
        if context_size is not None:
            if placement not in ("pre", "post"):
                raise UnknownName("placement of a layer with cross attention", placement, ["pre", "post"])
            order = {"causal": False, "window": None, "theta": None}
            across = replace(self.self_attn.heads, **order, context_size=context_size)
            self.cross_attn = Attention(hidden, across, projecting, **common)
            self.cross_attn_layernorm = make_norm(hidden, Norm(norm, eps, zero_centered), device, dtype)
            layers += [(f"cross_attn.{name}", getattr(self.cross_attn, name)) for name in PROJECTIONS]
        self.mlp.memory = self.memory
        self.producers = {name: Producer(name) for name in (*self.norms(), "cross_attn_layernorm")}
        share_state([*layers, *((f"mlp.{name}", getattr(self.mlp, name)) for name in feeding)], recipe, begins=True)

    def norms(self) -> tuple[str, ...]:
        """Names of the norms, attention's first."""
        if self.placement == "post":
            return ("post_attention_layernorm", "post_feedforward_layernorm")
        return ("input_layernorm", "post_attention_layernorm")[: 1 if self.placement == "parallel shared" else 2]

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | Packed | None = None,
        positions: torch.Tensor | None = None,
        cache: Cache | None = None,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | Packed | None = None,
    ) -> torch.Tensor:
        """x [batch, T, hidden] -> [batch, T, hidden]; [T, hidden] of packed sequences, whose mask is a Packed.

        mask, positions, cache: as fe.Attention takes them.
        context, context_mask: what cross attention reads, [batch, S, context_size], and its mask.
        Raises ShapeError where there is one of context, or its mask, and cross attention without the other.
        """
        cross = getattr(self, "cross_attn", None)
        if (context is None) != (cross is None) or (cross is None and context_mask is not None):
            has = (
                "no cross attention: make it with context_size" if cross is None else "cross attention, which reads one"
            )
            what = "context is missing" if cross else "a context or its mask is given"
            raise ShapeError(f"TransformerLayer: {what}, and the layer has {has}")
        begin_in_graph(self.mlp.down_proj)
        with sharing(self.mlp.down_proj):
            run = self._post_norm if self.placement == "post" else self._pre_norm
            return run(x, (mask, positions, cache), (context_mask, None, cache, context))

    def _post_norm(self, x: torch.Tensor, seen: tuple, crossed: tuple) -> torch.Tensor:
        """seen, crossed: what attention and cross attention take beside x."""
        cross, (first, second) = getattr(self, "cross_attn", None), self.norms()
        after = self.mlp.reader
        y = self._norm(x + self._drop(self.self_attn(x, *seen), 0), first, after if cross is None else cross.q_proj)
        if cross is not None:
            y = self._norm(y + self._drop(cross(y, *crossed), 0), "cross_attn_layernorm", after)
        return self._norm(y + self._drop(self.mlp(y), 1), second, None)

    def _pre_norm(self, x: torch.Tensor, seen: tuple, crossed: tuple) -> torch.Tensor:
        """As `_post_norm`; also of parallel attention and MLP."""
        cross, (first, *second) = getattr(self, "cross_attn", None), self.norms()
        before = self.mlp.reader
        n = self._norm(x, first, self.self_attn.q_proj)
        attended = self._drop(self.self_attn(n, *seen), 0)
        if self.placement == "parallel shared":
            return x + attended + self._drop(self.mlp(n), 1)
        if self.placement == "parallel":
            return x + attended + self._drop(self.mlp(self._norm(x, second[0], before)), 1)
        x = x + attended
        if cross is not None:
            x = x + self._drop(cross(self._norm(x, "cross_attn_layernorm", cross.q_proj), *crossed), 0)
        return x + self._drop(self.mlp(self._norm(x, second[0], before)), 1)

    def _drop(self, x: torch.Tensor, where: int) -> torch.Tensor:
        return F.dropout(x, self.dropout[where], self.training)

    def _norm(self, x: torch.Tensor, name: str, reader: nn.Module | None) -> torch.Tensor:
        """One of the norms.  reader: the layer that reads it first; None: another module's."""
        like = reader or self.mlp.reader
        return normed(x, norm_of(getattr(self, name)), like, self.producers[name], self.memory, reader is not None)

    def extra_repr(self) -> str:
        return f"placement={self.placement}, dropout={self.dropout}"
