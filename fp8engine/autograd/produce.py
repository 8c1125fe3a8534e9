"""Producers: a norm and an activation, whose result in 16 bits takes along the FP8 codes that a layer reads.

    y, rows = norm(x)     y = act(x)     y = act(gate) * up      computed in FP32, rounded to x's dtype
    y.fp8[cast] = quantize(y, cast)                              bit for bit, the slot's counters too

The codes are those that a layer has read of the result before (`Producer.reader`), or that its module knows it will
read.  Where casts run by kernels, they are written in the launches that write y; elsewhere the first layer that reads y
casts it.  Either way the others that read y find them: scaling/operands.py says when.

Saved for backward, for x [M, K] of e bytes an element:

    norm                x, its statistics (4 M bytes, of LayerNorm 8 M), gamma      y is not kept
    activation          x, or gate and up                                           y is not kept
    store="fp8"         M K + 4 M instead of e M K, for each of these
    recompute           what the producer has saved serves the layer that reads y too, which keeps no codes of y

Source of casting in the norm and the activation: NVIDIA's Hopper whitepaper, "transformer engine" (DESIGN, 1 and 7).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fp8engine import _torch
from fp8engine._torch import made_in_graph
from fp8engine.autograd.linear import in_shape_of
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.operands import graphs_run_on, matrix
from fp8engine.autograd.refusals import check_gradient, saved_by
from fp8engine.errors import UnknownName
from fp8engine.numerics.cast import Cast
from fp8engine.ops import casts, norm_act
from fp8engine.ops.library import in_backward, keepable
from fp8engine.ops.reference import Norm, RowStatistics, Store, column_sums
from fp8engine.ops.reference.cast_transpose import IN_16_BITS
from fp8engine.ops.reference.norm_quantize import KINDS
from fp8engine.ops.tensor import Float8Tensor
from fp8engine.scaling.operands import Again, Operands, Producer, carries, unchanged
from fp8engine.scaling.written import here

STORES = ("16 bits", "fp8")
# For values that are read again elementwise: E4M3's 3 bits of mantissa, and a row's scale for a token's outliers.
ROWS = Cast.parse("e4m3 1x-1 p2")


class NormOf(NamedTuple):
    """A norm and its parameters: gamma [K] (None: ones; zero-centred where `norm` says so), beta [K] (None: zeros)."""

    norm: Norm
    weight_K: torch.Tensor | None
    bias_K: torch.Tensor | None = None


class Target(NamedTuple):
    """What is written beside a producer's result: codes as `to` says.  compiling: whether a graph is traced."""

    producer: Producer
    to: Store
    compiling: bool


@dataclass(frozen=True)
class Memory:
    """Memory options of a module: what its norm and its activation keep for backward.

    recompute_norm, recompute_activation: the layer that reads the result keeps no codes of it; the norm, or the
    activation, runs again in backward, from its own input.
    store: "16 bits", or "fp8": the inputs of norm and activation are kept in FP8 too, E4M3 with a scale per row.
    Raises UnknownName for another store.
    """

    recompute_norm: bool = False
    recompute_activation: bool = False
    store: str = "16 bits"

    def __post_init__(self):
        if self.store not in STORES:
            raise UnknownName("store", self.store, STORES)


KEEP = Memory()
FROM_RESULT = ("relu",)  # its gradient, and itself, are those of its result: which is kept, as torch does; x may change


def norm(
    x: torch.Tensor, of: NormOf, producer: Producer, memory: Memory = KEEP, reader: Numerics | None = None
) -> torch.Tensor:
    """norm(x), x [..., K], in x's dtype, with codes for the layer that reads it.

    reader: the layer that is known to read it; None: the one that has.
    Raises UnknownName for a norm, ShapeError and UnsupportedDtype for gamma or beta, GradientError for the
    gradient of a gradient.

    >>> from fp8engine.ops.reference import Norm
    >>> norm(torch.tensor([[2.0, -2.0]]), NormOf(Norm("rms", eps=0.0), None), Producer())
    tensor([[ 1., -1.]])
    """
    (which, gamma_K, beta_K), x = of, _in_16_bits(x)
    grad = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in (x, gamma_K, beta_K))
    if grad and not torch.compiler.is_compiling() and x.is_inference():  # autograd saves no such tensor
        x = x.clone()
    target = target_of(producer, x, reader)
    with torch.no_grad():
        x_MK = matrix(x)
        y_MK, q, q_t, rows = norm_act.norm_quantize(x_MK, gamma_K, beta_K, which, target.to)
        kept, scale = keep(x_MK, memory) if grad else (None, None)
    if not grad:
        return attach(_own(x, y_MK), target, (q, q_t))
    y = _Norm.apply(x, gamma_K, beta_K, y_MK, rows.rstd_M, rows.mean_M, kept, scale, which, producer.name)
    again = None
    if memory.recompute_norm:
        given = (_detached(x) if kept is None else kept, scale, _detached(gamma_K), _detached(beta_K))
        again = Again(_norm_again, (which, x.dtype), given)
    return attach(y, target, (q, q_t), again)


def activation(
    x: torch.Tensor,
    kind: str,
    producer: Producer,
    memory: Memory = KEEP,
    up: torch.Tensor | None = None,
    reader: Numerics | None = None,
) -> torch.Tensor:
    """act(x), x [..., K], in x's dtype, with codes for the layer that reads it; of a gated kind [..., K / 2].

    kind: a name of ops/reference/activations.py's table.  up: of a gated kind; x is then the gate alone.
    reader: as of `norm`.
    Raises UnknownName for a kind, ShapeError for widths that do not fit, UnsupportedDtype, GradientError.

    >>> activation(torch.tensor([[2.0, -2.0]]), "relu", Producer())
    tensor([[2., 0.]])
    """
    x, up = _in_16_bits(x), None if up is None else _in_16_bits(up)
    grad = torch.is_grad_enabled() and (x.requires_grad or (up is not None and up.requires_grad))
    target = target_of(producer, x, reader)
    with torch.no_grad():
        x_MK, up_MN = matrix(x), None if up is None else matrix(up)
        y_MN, q, q_t = norm_act.act_quantize(x_MK, kind, target.to, up_MN)
        kept, scale = keep(x_MK, memory) if grad else (None, None)
        kept_up, scale_up = keep(up_MN, memory) if grad and up_MN is not None else (None, None)
    if not grad:
        return attach(_own(x, y_MN), target, (q, q_t))
    back = None
    if up is None and not target.compiling:
        back = producer.back = producer.back or Producer()
    y = _Activation.apply(x, up, y_MN, kept, scale, kept_up, scale_up, (kind, back, producer.name))
    again = None
    if memory.recompute_activation:
        of_up = None if up is None else _detached(up) if kept_up is None else kept_up
        of = y if kind in FROM_RESULT else x
        given = (_detached(of) if kept is None else kept, scale, of_up, scale_up)
        again = Again(_activation_again, (kind, x.dtype), given)
    return attach(y, target, (q, q_t), again)


def norm_in_16_bits(x: torch.Tensor, norm: NormOf) -> torch.Tensor:
    """The norm as torch computes it, in x's dtype; through FP32 where its parameters have another."""
    (kind, eps, zero_centered), weight_K, bias_K = norm
    if kind not in KINDS:
        raise UnknownName("norm", kind, KINDS)
    given = [parameter for parameter in (weight_K, bias_K) if parameter is not None]
    wide = zero_centered or any(parameter.dtype != x.dtype for parameter in given)
    values = x.float() if wide else x
    weight_K, bias_K = (p.float() if wide and p is not None else p for p in (weight_K, bias_K))
    if zero_centered and weight_K is not None:
        weight_K = weight_K + 1
    if kind == "layer":
        n = torch.nn.functional.layer_norm(values, x.shape[-1:], weight_K, bias_K, eps)
    else:
        n = torch.nn.functional.rms_norm(values, x.shape[-1:], weight_K, eps)
        n = n if bias_K is None else n + bias_K
    return n.to(x.dtype)


def target_of(producer: Producer, x: torch.Tensor, reader: Numerics | None = None) -> Target:
    """What to write beside what is made of x.  x: for its device, and for what it is.  reader: if it is known."""
    compiling = torch.compiler.is_compiling()
    return Target(producer, codes_for(producer, x, reader, compiling), compiling)


def codes_for(producer: Producer, x: torch.Tensor, reader: Numerics | None, compiling: bool) -> Store:
    """The codes to write beside what is made of x."""
    known, reader = reader is not None, reader or producer.reader
    if reader is None or producer.unread >= producer.MOST_UNREAD or (compiling and here() is None):
        return IN_16_BITS
    if compiling and not (known or reader.state.watched):  # its step may begin behind this place of the graph
        return IN_16_BITS
    if not compiling:
        if not keepable(x) or casts.choose(x.device) == "reference":  # then the layer casts: nothing is saved here
            return IN_16_BITS
        reader.state.enter()  # a step that begins here may change the reader's recipe
    recipe, first = reader.recipe, reader.recipe.forward[0]
    if not first.is_fp8 or reader.feature is not None:
        return IN_16_BITS
    record = torch.is_grad_enabled() or (not compiling and in_backward())
    transposes = producer.transposed if not compiling else graphs_run_on(x.device) is not None
    return Store(first, transposes and record and recipe.input_serves_both, reader.slot("input", record))


def codes_of_gradient(producer: Producer | None, dy: torch.Tensor) -> Store:
    """The codes to write beside the gradient that an activation gives back: of both directions, or none."""
    if producer is None or (reader := producer.reader) is None or producer.unread >= producer.MOST_UNREAD:
        return IN_16_BITS
    if not keepable(dy) or casts.choose(dy.device) == "reference":
        return IN_16_BITS
    recipe = reader.recipe
    if not (producer.transposed and recipe.dgrad[0].is_fp8 and recipe.grad_serves_both):
        return IN_16_BITS
    return Store(recipe.dgrad[0], True, reader.slot("grad_output", True))


def attach(y: torch.Tensor, target: Target, codes: tuple, again: Again | None = None) -> torch.Tensor:
    """y with its operands.  codes: what was made as the target says."""
    producer, to, compiling = target
    place = here() if compiling else None
    if place is None and (compiling or not carries(y)):
        return y
    found = Operands()
    found.producer, found.place, found.again = producer, place, again
    if to.cast is not None and to.slot is not None:
        for key, q in zip((to.cast.text, to.cast.text_of_transpose), codes, strict=True):
            if q is not None:
                found[key] = (q, to.slot)
        if not compiling:
            found.seen = unchanged(y)
            producer.unread += 1
    if compiling:
        made_in_graph("y")
    y.fp8 = found  # pyright: ignore[reportAttributeAccessIssue]
    return y


def keep(x_MK: torch.Tensor, memory: Memory) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(codes, scale) of x for an elementwise backward; None: x itself is kept."""
    if memory.store == "16 bits":
        return None, None
    q = casts.quantize(x_MK, ROWS)
    return q.data, q.scale


def kept(data: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, from what `keep` gave, or from x."""
    if scale is None:
        return matrix(data)
    # A power of two times 4 bits is exact in BF16 and FP32; FP16 has no room for every scale.
    wide = torch.float32 if dtype == torch.float16 else dtype
    return (casts.decode(data, wide) * scale.to(wide)).to(dtype)


def _in_16_bits(x: torch.Tensor) -> torch.Tensor:
    return x.dequantize() if isinstance(x, Float8Tensor) else x


def _detached(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.detach()


def _norm_again(of: tuple, given: Any) -> torch.Tensor:
    (which, dtype), (data, scale, gamma_K, beta_K) = of, given
    return norm_act.norm_quantize(kept(data, scale, dtype), gamma_K, beta_K, which)[0]


def _activation_again(of: tuple, given: Any) -> torch.Tensor:
    (kind, dtype), (data, scale, up, scale_up) = of, given
    up_MN = None if up is None else kept(up, scale_up, dtype)
    return norm_act.act_quantize(kept(data, scale, dtype), kind, IN_16_BITS, up_MN)[0]


class _Norm(torch.autograd.Function):
    """The norm, computed outside: an effect inside of a Function with other results would run twice in a graph."""

    @staticmethod
    def forward(ctx, *given):
        x, gamma_K, beta_K, y_MK, rstd_M, mean_M, codes, scale, which, name = given
        ctx.save_for_backward(x if codes is None else codes, scale, gamma_K, rstd_M, mean_M)
        ctx.which, ctx.dtype, ctx.name = which, x.dtype, name
        ctx.beta_dtype = None if beta_K is None else beta_K.dtype
        return _own(x, y_MK)

    @staticmethod
    def backward(ctx, dy):
        check_gradient("a norm", dy)
        data, scale, gamma_K, rstd_M, mean_M = saved_by(ctx, ctx.name)
        dy_MK, rows = matrix(dy), RowStatistics(rstd_M, mean_M)
        found = norm_act.norm_quantize_backward(dy_MK, kept(data, scale, ctx.dtype), gamma_K, rows, ctx.which)
        dbeta_K = None
        if ctx.beta_dtype is not None:  # RMSNorm has no beta of its own
            dbeta_K = (column_sums(dy_MK) if found.dbias_K is None else found.dbias_K).to(ctx.beta_dtype)
        return found.dx_MK.view(dy.shape), found.dweight_K, dbeta_K, *[None] * 7


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *given):
        x, up, y_MN, codes, scale, codes_up, scale_up, (kind, back, name) = given
        y = _own(x, y_MN)
        of = y if kind in FROM_RESULT else x
        ctx.save_for_backward(of if codes is None else codes, scale, up if codes_up is None else codes_up, scale_up)
        ctx.kind, ctx.back, ctx.dtype, ctx.shape, ctx.name = kind, back, x.dtype, x.shape, name
        return y

    @staticmethod
    def backward(ctx, dy):
        check_gradient("an activation", dy)
        data, scale, up, scale_up = saved_by(ctx, ctx.name)
        up_MN = None if up is None else kept(up, scale_up, ctx.dtype)
        to = codes_of_gradient(ctx.back, dy)
        found = norm_act.act_quantize_backward(matrix(dy), kept(data, scale, ctx.dtype), ctx.kind, to, up_MN)
        dx, dup = found.dx_MK.view(ctx.shape), None if found.dup_MN is None else found.dup_MN.view(ctx.shape)
        if ctx.back is not None and keepable(dx) and casts.choose(dx.device) != "reference":
            attach(dx, Target(ctx.back, to, False), (found.q, found.q_t))
            if to.cast is not None:
                vars(dx)["fp8"]["sums"] = found.dbias_K
        return dx, dup, *[None] * 6


def _own(x: torch.Tensor, y_MN: torch.Tensor) -> torch.Tensor:
    """y in x's shape, as a tensor of its own in the same memory, and no view.

    A Function that was given y returns no input; Dynamo sets attributes of no element of an operation's tuple.
    """
    return in_shape_of(x, y_MN) if x.dim() != 2 else _torch.unsafe_view(y_MN, list(y_MN.shape))
