"""Parts of fused layers: linear layers with their numerics, a norm with its parameters, memory options.

A producer (norm, activation) stores its result once, in the form that its consumers read; where they agree on no such
form it stores 16 bits, and each consumer casts for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fp8engine.autograd.call import Call
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.operands import Either, take_over
from fp8engine.errors import UnknownName
from fp8engine.ops import casts, library
from fp8engine.ops.library import in_backward
from fp8engine.ops.reference import How, Norm, Operand, Slot, Store
from fp8engine.ops.reference.cast_transpose import IN_16_BITS
from fp8engine.scaling.operands import Kept

STORES = ("16 bits", "fp8")
# For values that are read again elementwise: E4M3's 3 bits of mantissa, and a row's scale for a token's outliers.
ROWS = How(torch.float8_e4m3fn, 1, -1, power_of_2=True)
Make = Callable[[Store], tuple]


class Layer(NamedTuple):
    """A linear layer: weight [N, K], bias [N] or None, and the numerics of the module that holds them."""

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None
    numerics: Numerics


class Part(Layer):
    """This rank's part of a layer that ranks divide."""


class NormOf(NamedTuple):
    """A norm and its parameters: gamma [K] (None: ones; zero-centred where `norm` says so), beta [K] (None: zeros)."""

    norm: Norm
    weight_K: torch.Tensor | None
    bias_K: torch.Tensor | None = None


class Memory(NamedTuple):
    """Memory options of a fused layer: what it keeps for its backward.

    recompute_norm: the normalised input (FP8) is not kept; the norm runs again in backward, from its own input.
    recompute_activation: the activation's output (FP8) is not kept; it runs again in backward, from its own input.
    store: "16 bits", or "fp8": the inputs of norms and activations are kept in FP8 too, E4M3 with a scale per row.

    Where nothing before the layer takes a gradient, the norm's input is not kept, and nothing is recomputed.
    """

    recompute_norm: bool = False
    recompute_activation: bool = False
    store: str = "16 bits"


KEEP = Memory()


class Spec(NamedTuple):
    """Arguments of one call of a fused layer beside its tensors.  out: the result's dtype.  record: as for `Call`."""

    numerics: tuple[Numerics, ...]
    norm: Norm | None
    memory: Memory
    out: torch.dtype
    record: bool
    kind: str = ""  # of the activation


def check_memory(memory: Memory) -> None:
    """Raise UnknownName for another store."""
    if memory.store not in STORES:
        raise UnknownName("store", memory.store, STORES)


def keep(x_MK: torch.Tensor, memory: Memory) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(data, scale or None) of x, kept for an elementwise backward."""
    if memory.store == "16 bits":
        return x_MK, None
    q = casts.quantize(x_MK, ROWS)
    return q.data, q.scale


def kept(data: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, from what `keep` gave."""
    if scale is None:
        return data
    # A power of two times 4 bits is exact in BF16 and FP32; FP16 has no room for every scale.
    wide = torch.float32 if dtype == torch.float16 else dtype
    return (casts.decode(data, wide) * scale.to(wide)).to(dtype)


def produced(calls: Sequence[Call], make: Make) -> tuple[list[tuple[Either, Either | None]], list]:
    """Each call's (X for forward, X for wgrad) of one result, and what else its producer returned.

    make: the producer; takes a Store, returns (y, its codes, those of its transpose, ...).
    """
    stores = [call.store() for call in calls]
    if (to := _one_store(calls, stores)) is None:
        made, _, _, *others = make(IN_16_BITS)
        return [
            call.cast_input(made, made_so_far) for call, made_so_far in zip(calls, made_together(calls), strict=True)
        ], others
    sample_made(calls, "input", make)
    _, q, q_t, *others = make(to)
    for store in stores[1:]:
        if store is not None:
            count_again(to.slot, store.slot, q.data.numel())
    saved = next((call.stored(q, q_t)[1] for call in calls if call.needs_w), None)
    return [(q, saved if call.needs_w else None) for call in calls], others


def sample_made(calls: Sequence[Call], role: str, make: Make) -> None:
    """In a step that samples tensors, make what will be stored in FP8 in 16 bits too, and sample that."""
    if any(call.numerics.state.samples is not None for call in calls):
        made, *_ = make(IN_16_BITS)
        for call in calls:
            call.observe(role, made)


def recomputed(calls: Sequence[Call], make: Make) -> list[Either | None]:
    """Each call's X for wgrad of a result that backward computes again: bit for bit the first one, not counted."""
    to = _one_store(calls, [call.store(again=True) for call in calls])
    made, q, q_t, *_ = make(to or IN_16_BITS)
    return [
        None if not call.needs_w else call.cast_again(made, so_far) if to is None else call.stored(q, q_t)[1]
        for call, so_far in zip(calls, made_together(calls), strict=True)
    ]


def tensors_of(operand: Either | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(data, scale) of an operand, as `Call.to_save` gives them; its other fields are kept by the call."""
    return (operand.data, operand.scale) if isinstance(operand, Operand) else (operand, None)


def _one_store(calls: Sequence[Call], stores: Sequence[Store | None]) -> Store | None:
    """The Store that serves every call; None where they differ, or a recipe wants 16 bits."""
    to, state = stores[0], calls[0].numerics.state
    for call, store in zip(calls, stores, strict=True):
        if to is None or store is None or store.how != to.how or call.numerics.state is not state:
            return None
    if len({call.transposes_input for call in calls if call.needs_w}) > 1 or to is None:
        return None
    return to._replace(transposed=any(store is not None and store.transposed for store in stores))


def made_together(calls: Sequence[Call]) -> list[Kept]:
    """For each call, where it finds casts of the others that share its scaling state; in a compiled graph, of none."""
    if torch.compiler.is_compiling():
        return [{} for _ in calls]
    by_state: dict[int, Kept] = {}
    return [by_state.setdefault(id(call.numerics.state), {}) for call in calls]


def count_again(source: Slot | None, slot: Slot | None, size: int) -> None:
    """Copy the amax of this layer's input from another layer's slot that holds it already."""
    if source is None or slot is None:
        return
    if torch.compiler.is_compiling():
        torch.ops.fp8engine.count_again.default(source[0], *slot[:2], slot.record, size)
    else:
        take_over(source, slot, size)


def _count_again_of(source, live, counts, record: bool, size: int) -> None:
    """Of columns, as graphs have them."""
    take_over(Slot(source, counts, 0), Slot(live, counts, 0, record, not in_backward()), size)


library.define(
    "count_again(Tensor source, Tensor live, Tensor counts, bool record, SymInt size) -> ()",
    _count_again_of,
    lambda *arguments: None,
    effect=True,
)
