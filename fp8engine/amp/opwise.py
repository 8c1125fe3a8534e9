"""Which op made the first NaN or Inf: every op of one pass looked at, forward and backward.

    an op creates NaN:  no input holds NaN, its output does
    an op creates Inf:  no input holds Inf and none is among its arguments, its output does

So an op that hands on what it was given is never named, nor a mask: masked_fill(mask, -inf), where(mask, -inf, x),
full(-inf) and the log of zeros and ones put in an Inf that was asked for, and what adds a mask has an Inf among its
inputs.  Whether what an op created did any harm is for the modules' outputs to tell (verdict.py): log(0) behind a
`where` does none.

Forward, a TorchDispatchMode sees the ops that really run: casts of autocast, the parts of a fused function.  Backward,
each node of the autograd graph gets a hook that sees the gradients going in and out, in whichever thread runs it; a
node belongs to the innermost module that was running when its sequence number was given out.  All of this waits for the
device at each op: it is for one pass, or for mode="ops".
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8engine._torch import TorchDispatchMode
from fp8engine.amp.events import Call, Creation
from fp8engine.amp.readings import Reading, read, readable, tensors

if TYPE_CHECKING:
    from fp8engine.amp.watch import Recorder

TAGGED = "fp8engine.amp"
UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_")
OVERWRITES = ("copy_", "fill_", "zero_")  # what was in their first argument does not matter
PASSED_BY_WEIGHTS = tuple(
    f"{name}Backward0" for name in ("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "Expand", "Unsqueeze")
)
ENOUGH = 64  # creations kept of one pass: the first is what is asked for


class OpMode(TorchDispatchMode):
    """While it is on, every op is looked at, and what creates NaN or Inf is told to the recorder."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder
        self._known: dict[int, tuple[weakref.ref, int, Reading]] = {}
        self._told = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(self._recorder.quiet, "depth", 0):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        given = [x for x in tensors((args, kwargs)) if readable(x) is not None]
        if name in OVERWRITES:
            given = given[1:]
        before = [self._look(x) for x in given]
        output = func(*args, **kwargs)
        if name not in UNWRITTEN and self._told < ENOUGH:
            asked = any(isinstance(x, float) and not math.isfinite(x) for x in (*args, *kwargs.values()))
            for made in tensors(output):
                self._judge(name, (given, before, asked), self._look(made, fresh=True))
        return output

    def _look(self, tensor: torch.Tensor, fresh: bool = False) -> Reading:
        held = self._known.get(id(tensor))
        if not fresh and held and held[0]() is tensor and held[1] == tensor._version:
            return held[2]
        reading = _now(read(tensor))
        if not tensor.is_inference():  # it counts no versions, so what was seen may be old
            self._known[id(tensor)] = weakref.ref(tensor), tensor._version, reading
        return reading

    def _judge(self, name: str, source: tuple[list[torch.Tensor], list[Reading], bool], made: Reading) -> None:
        given, before, asked = source
        what = creates(before, asked, made)
        if (asked and made.inf) or (what == "-Inf" and name in ("log", "log_") and _zeros_and_ones(given)):
            self._recorder.asked()
            what = what if what == "NaN" else None
        if what is None:
            return
        self._told += 1
        parameters = self._recorder.parameters
        weight = next((parameters[id(x)] for x in given if isinstance(x, nn.Parameter) and id(x) in parameters), None)
        call = self._recorder.current()
        cast = name == "_to_copy"
        self._recorder.created(
            Creation(
                layer=call.name if call else "",
                op=f"cast to {str(made.dtype).removeprefix('torch.')}" if cast else name,
                made=what,
                amax=amax(before),
                dtype=made.dtype,
                operand="weight" if cast and weight else "output",
                parameter=weight,
                call=call,
            )
        )


def creates(before: Iterable[Reading], asked: bool, after: Reading) -> str | None:
    """What an op made that it was not given: "NaN", "Inf", "-Inf", or None.  asked: an Inf is among its arguments."""
    before = list(before)
    if after.nan:
        return None if any(reading.nan for reading in before) else "NaN"
    if not after.inf or asked or any(reading.nan or reading.inf for reading in before):
        return None
    return "Inf" if after.high == math.inf else "-Inf"


def amax(readings: Iterable[Reading]) -> float:
    """The largest finite magnitude among readings."""
    return max((r.amax for r in readings if r.taken and r.finite), default=math.nan)


def _now(reading: Reading) -> Reading:
    if reading.taken:
        reading.low, reading.high = reading.low.item(), reading.high.item()
    return reading


def _zeros_and_ones(given: list[torch.Tensor]) -> bool:
    return all(bool(((x == 0) | (x == 1)).all()) for x in given)


def tag(call: Call, output: Any, recorder: Recorder) -> None:
    """Hook the nodes of the autograd graph that this call made, and that no call inside it has taken yet."""
    pending = [x.grad_fn for x in tensors(output) if x.grad_fn is not None]
    seen: set[Any] = set()
    while pending:
        node: Any = pending.pop()
        if node in seen or hasattr(node, "variable") or node._sequence_nr() < call.sequence:
            continue
        seen.add(node)
        pending += [after for after, _ in node.next_functions if after is not None]
        if node.metadata.get(TAGGED) is not recorder:
            node.metadata[TAGGED] = recorder
            names = [_parameter(after, recorder.parameters) for after, _ in node.next_functions]
            node.register_hook(_node_hook(node.name(), names, call, recorder))


def _parameter(node: Any, names: dict[int, str]) -> str | None:
    """The parameter that a gradient goes to through casts and views alone."""
    for _ in range(8):  # more than any layer puts between a weight and its matmul
        if node is None:
            return None
        if hasattr(node, "variable"):
            return names.get(id(node.variable))
        if node.name() not in PASSED_BY_WEIGHTS:
            return None
        node = node.next_functions[0][0]
    return None


def _node_hook(op: str, names: list[str | None], call: Call, recorder: Recorder) -> Callable[..., None]:
    def look(gradients: tuple, given: tuple) -> None:
        if recorder.closed:
            return
        before = [_now(read(g)) for g in given if g is not None]
        for name, gradient in zip(names, gradients, strict=False):
            after = _now(read(gradient)) if gradient is not None else Reading()
            made = creates(before, False, after)
            if made is None:
                continue
            operand = "grad_weight" if name else "grad_input"
            recorder.created(
                Creation(call.name, op, made, amax(before), after.dtype, operand, name, backward=True, call=call)
            )

    return look
