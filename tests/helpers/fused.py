"""What the tests of fused layers share: the same computation in pieces, each of which is tested by itself.

`NormAlone` and `ActAlone` are the reference's: results in x's dtype, which a Linear that reads them casts for itself.
"""

import copy
from typing import Any

import torch
from activations import exact
from support import state_of, tables
from torch import nn

import fp8engine as fe
from fp8engine.autograd import Memory, NormOf
from fp8engine.nn.layernorm_linear import share_state
from fp8engine.nn.produce import activated, normed
from fp8engine.numerics.recipe import Recipe, resolve
from fp8engine.ops import reference
from fp8engine.ops.reference import Norm, RowStatistics
from fp8engine.ops.reference.cast_transpose import IN_16_BITS
from fp8engine.scaling.operands import Producer

NORMS = [Norm("rms", 1e-6), Norm("rms", 1e-3, True), Norm("layer", 1e-5), Norm("layer", 1e-3, True)]
MEMORIES = [Memory(), Memory(True, True), Memory(store="fp8"), Memory(True, True, "fp8")]
EXACT = [memory for memory in MEMORIES if memory.store != "fp8"]  # what changes no bit


class NormAlone(torch.autograd.Function):
    """The reference's norm; its gradient comes in x's dtype, as dgrad gives it."""

    @staticmethod
    def forward(ctx, x, gamma_K, beta_K, norm: Norm):
        n, _, _, rows = reference.norm_quantize(x, gamma_K, beta_K, norm)
        ctx.save_for_backward(x, gamma_K, *rows)
        ctx.norm = norm
        return n

    @staticmethod
    def backward(ctx, dn):
        x, gamma_K, *rows = ctx.saved_tensors
        found: Any = reference.norm_quantize_backward(dn.to(x.dtype), x, gamma_K, RowStatistics(*rows), ctx.norm)
        return found.dx_MK, found.dweight_K, found.dbias_K, None


class ActAlone(torch.autograd.Function):
    """The reference's activation; up: of a gated kind, where it is a tensor of its own."""

    @staticmethod
    def forward(ctx, y, up, kind: str):
        ctx.save_for_backward(y, up)
        ctx.kind = kind
        return reference.act_quantize(y, kind, IN_16_BITS, up)[0]

    @staticmethod
    def backward(ctx, da):
        y, up = ctx.saved_tensors
        found = reference.act_quantize_backward(da, y, ctx.kind, IN_16_BITS, up)
        return found.dx_MK, found.dup_MN, None


class Model(nn.Module):
    """A norm and linear layers that read it; with an activation, the last reads that.  call: what forward does."""

    def __init__(self, recipe: str | Recipe, norm: Norm | None, shapes, dtype=torch.float32, bias=True, kind=""):
        super().__init__()
        k = shapes[0][0]
        self.which: Any = norm
        self.kind, self.memory = kind, Memory()
        self.of_norm, self.of_act = Producer("norm"), Producer(kind)
        self.gamma: Any = None
        self.beta: Any = None
        if norm is not None:
            self.gamma = nn.Parameter((torch.rand(k) + 0.5 - float(norm.zero_centered)).to(dtype))
            self.beta = nn.Parameter((0.3 * torch.randn(k)).to(dtype)) if norm.kind == "layer" else None
        self.layers: Any = nn.ModuleList(fe.Linear(*shape, bias=bias, recipe=recipe, dtype=dtype) for shape in shapes)
        share_state([(f"layers.{i}", layer) for i, layer in enumerate(self.layers)], resolve(recipe))
        self.call = fused

    def forward(self, x):
        return self.call(self, x)


def norm_of(model: Model) -> NormOf | None:
    return None if model.which is None else NormOf(model.which, model.gamma, model.beta)


def fused(model: Model, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Through producers, which know the first layer that reads each result, as in modules of ours."""
    of, memory, layers = norm_of(model), model.memory, list(model.layers)
    n = x if of is None else normed(x, of, layers[0], model.of_norm, memory)
    if not model.kind:
        return tuple(layer(n) for layer in layers)
    *firsts, last = layers
    y, up = [*(layer(n) for layer in firsts), None][:2]
    return (last(activated(y, model.kind, last, model.of_act, memory, up)),)


def apart(model: Model, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same in pieces."""
    n: Any = x if model.which is None else NormAlone.apply(x, model.gamma, model.beta, model.which)
    if not model.kind:
        return tuple(layer(n) for layer in model.layers)
    *firsts, last = model.layers
    y, up = [*(layer(n) for layer in firsts), None][:2]
    return (last(ActAlone.apply(y, up, model.kind)),)


def in_float64(model: Model, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same without a recipe, of a model in FP64, by torch's own functions."""
    n, norm = x, model.which
    if norm is not None:
        gamma: Any = model.gamma + 1 if norm.zero_centered else model.gamma
        if norm.kind == "layer":
            n = nn.functional.layer_norm(x, x.shape[-1:], gamma, model.beta, norm.eps)
        else:
            n = nn.functional.rms_norm(x, x.shape[-1:], gamma, norm.eps)
    made = [nn.functional.linear(n, layer.weight, layer.bias) for layer in model.layers[: -1 if model.kind else None]]
    if not model.kind:
        return tuple(made)
    a = exact(torch.cat(made, dim=-1), model.kind)
    return (nn.functional.linear(a, model.layers[-1].weight, model.layers[-1].bias),)


def like(model: Model, call, memory: Memory = MEMORIES[0]) -> Model:
    """A copy with a state of its own that computes through `call`."""
    other = copy.deepcopy(model)
    other.call, other.memory = call, memory
    return other


def with_root(model: Model) -> Model:
    """As `fe.convert` leaves a model: its forward, not its first layer's, begins a step."""
    model._forward_pre_hooks.clear()
    for layer in model.layers:
        layer.numerics.standalone = False
    state_of(model).watch(model)
    return model


def step(model: Model, x: torch.Tensor, dys) -> dict[str, torch.Tensor]:
    """Results and gradients by name, of one forward and backward."""
    model.zero_grad()
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    ys = model(leaf)
    torch.autograd.backward(ys, [dy.to(y.dtype) for y, dy in zip(ys, dys, strict=True)])
    found = {f"y{i}": y.detach() for i, y in enumerate(ys)}
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found if leaf.grad is None else found | {"dx": leaf.grad}


def train(model: Model, x: torch.Tensor, dys) -> dict[str, torch.Tensor]:
    """A `step`, after which the weights move."""
    found = step(model, x, dys)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)
    return found


def batches(rows, k: int, widths, dtype=torch.float32):
    """(x, dys) of a few steps, larger from step to step, so that delayed scaling has something to get wrong."""
    for i, m in enumerate(rows):
        x = (torch.randn(m, k) * 1.7**i + 0.2).to(dtype).requires_grad_()
        yield x, [(torch.randn(m, n) * 3.0**i).to(dtype) for n in widths]


def assert_equal(found: dict, wanted: dict, but: tuple[str, ...] = ()) -> None:
    """Bit for bit, by name."""
    assert found.keys() == wanted.keys()
    differ = [name for name in wanted if name not in but and not torch.equal(found[name], wanted[name])]
    assert not differ, differ


def assert_same_tables(one: nn.Module, other: nn.Module) -> None:
    for name, a, b in zip(("history", "live", "counts"), tables(one), tables(other), strict=True):
        assert torch.equal(a, b), f"{name}:\n{a}\n{b}"


def assert_as_apart(model: Model, rows, memory: Memory = MEMORIES[0], root: bool = False) -> tuple[Model, Model]:
    """Over a few steps, of so many rows each, the fused model computes, records and counts what its pieces do.

    root: of a model that shares the cast of what several layers read.  Returns (fused, in pieces).
    """
    one, other = like(model, model.call, memory), like(model, apart)
    for each in (one, other) if root else ():
        with_root(each)
    k, widths = model.layers[0].in_features, [layer.out_features for layer in model.layers]
    for x, dys in batches(rows, k, widths[-1:] if model.kind else widths, model.layers[0].weight.dtype):
        assert_equal(train(one, x, dys), train(other, x, dys))
        assert_same_tables(one, other)
    return one, other
