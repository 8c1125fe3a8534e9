"""Check of every op of a pass, forward and backward, for the one that makes the first NaN or Inf.

    an op creates NaN:  no input holds NaN, its output does
    an op creates Inf:  no input holds Inf and none is among its arguments, its output does

So an op that passes on what it was given is never named, nor is a mask: masked_fill(mask, -inf), where(mask, -inf, x),
full(-inf) and the log of zeros and ones, while it is -Inf, put in an Inf on purpose, and what adds a mask has an Inf
among its inputs.  Whether what an op created did any harm is seen in the modules' outputs (locate.py): log(0) behind a
`where` does none.

Forward, a TorchDispatchMode sees the ops that really run: casts of autocast, the parts of a fused function.  Backward,
each node of the autograd graph gets a hook that sees the gradients going in and out, in whichever thread runs it; a
node belongs to the innermost module that was running when its sequence number was given out.  The host waits for the
device at each op: this is for one pass, or for mode="ops".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fp8engine._torch import TorchDispatchMode
from fp8engine.amp.overflow.reading import Known, Reading, largest, read_now
from fp8engine.amp.overflow.trace import Call, Trace
from fp8engine.amp.tensors import FLOATS, readable, tensors

TAGGED = "fp8engine.amp"
UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_")
OVERWRITES = ("copy_", "fill_", "zero_")  # what was in their first argument does not matter
PASSED_BY_WEIGHTS = tuple(
    f"{name}Backward0" for name in ("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "Expand", "Unsqueeze")
)
ENOUGH = 8  # creations kept of one call of a module: the first is the one that is reported


class OpMode(TorchDispatchMode):
    """While it is on, every op of the forward is checked, and what creates NaN or Inf goes to the trace."""

    def __init__(self, trace: Trace):
        super().__init__()
        self._trace = trace
        self._known = Known()
        self._kept: Counter[Call | None] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self._trace.thread.quiet:
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        operands = list(tensors((args, kwargs)))
        given = [x for x in operands if readable(x) is not None]
        if name in OVERWRITES:
            given = given[1:]
        before = [self._known.find(x) or self._read(x) for x in given]
        output = func(*args, **kwargs)
        if name not in UNWRITTEN:
            call = self._trace.current()
            inf_given = any(isinstance(x, float) and not math.isfinite(x) for x in (*args, *kwargs.values()))
            for tensor in tensors(output):
                after = self._read(tensor)
                made = creates(before, inf_given, after)
                log_of_mask = made == "-Inf" and name in ("log", "log_") and _zeros_and_ones(given)
                if inf_given and after.inf:
                    self._trace.add("mask", after, call)
                elif made is not None and self._kept[call] < ENOUGH:
                    self._kept[call] += 1
                    codes = any(x.dtype.is_floating_point and x.dtype not in FLOATS for x in operands)
                    amax = math.nan if codes else largest(before)  # beside FP8 codes only their scales are read
                    cast = self._cast(given, after) if name == "_to_copy" else {}
                    told = {"operand": "output", "op": name, "input_amax": amax} | cast
                    self._trace.add("log" if log_of_mask else "op", after, call, made=told)
        return output

    def _read(self, tensor: torch.Tensor) -> Reading:
        reading = read_now(tensor)
        if not tensor.is_inference():  # it counts no versions, so a kept reading may be old
            self._known.keep(tensor, reading)
        return reading

    def _cast(self, given: list[torch.Tensor], after: Reading) -> dict[str, Any]:
        """What a cast is called, and the parameter that it cast."""
        names = self._trace.parameters
        weight = next((names[id(x)] for x in given if isinstance(x, nn.Parameter) and id(x) in names), None)
        op = f"cast to {str(after.dtype).removeprefix('torch.')}"
        return {"operand": "weight" if weight else "output", "op": op, "parameter": weight}


def creates(before: Sequence[Reading], inf_given: bool, after: Reading) -> str | None:
    """What an op made that it was not given: "NaN", "Inf", "-Inf" or None.  inf_given: Inf is among its arguments."""
    inf_passed_on = inf_given or not all(reading.finite for reading in before)
    passed_on = any(reading.holds == "NaN" for reading in before) if after.holds == "NaN" else inf_passed_on
    return None if passed_on else after.holds or None


def _zeros_and_ones(given: list[torch.Tensor]) -> bool:
    return all(bool(((x == 0) | (x == 1)).all() and (x == 1).any()) for x in given)


# Nodes of the autograd graph are asked by their type: what an autograd Function stores on its ctx, `ctx.name` say, is
# an attribute of the node and hides the method of that name.


def _is_end(node: Any) -> bool:
    """Whether a node only accumulates the gradient of a leaf."""
    return hasattr(type(node), "variable")


def watch_nodes(call: Call, output: Any, trace: Trace) -> None:
    """Hook the nodes of the autograd graph that this call made, and that no call inside it has taken yet."""
    pending: list[Any] = [x.grad_fn for x in tensors(output, objects=True)]
    seen: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node in seen or _is_end(node) or type(node)._sequence_nr(node) < call.sequence:
            continue
        seen.add(node)
        after = [following for following, _ in node.next_functions]
        pending += after
        if node.metadata.get(TAGGED) is not trace:
            node.metadata[TAGGED] = trace
            names = [_parameter(following, trace.parameters) for following in after]
            type(node).register_hook(node, _node_hook(type(node).name(node), names, call, trace))


def _parameter(node: Any, names: dict[int, str]) -> str | None:
    """The parameter that a gradient goes to through casts and views alone."""
    while node is not None and not _is_end(node):
        node = node.next_functions[0][0] if type(node).name(node) in PASSED_BY_WEIGHTS else None
    return None if node is None else names.get(id(node.variable))


def _node_hook(op: str, names: list[str | None], call: Call, trace: Trace) -> Callable[..., None]:
    def check(gradients: tuple, given: tuple) -> None:
        if trace.closed:
            return
        before = [read_now(g) for g in given if g is not None]
        made = [(name, read_now(g)) for name, g in zip(names, gradients, strict=False) if g is not None]
        bad = next((reading for reading in before if not reading.finite), None)
        if bad is not None and all(after.finite for _, after in made):
            trace.add("hidden", bad, call)
        for name, after in made:
            if creates(before, False, after) is not None:
                operand = "grad_weight" if name else "grad_input"
                told = {"operand": operand, "op": op, "input_amax": largest(before), "parameter": name}
                trace.add("node", after, call, made=told)

    return check
