"""Places in a graph that is being traced, and the search for writes in place since one of them.

Under torch.compile a tensor has no version that Python can branch on.  But Dynamo runs a function marked as constant
while it traces, and that function can read the nodes traced so far.  Any write in place between the two places counts,
to whatever tensor; so does a higher-order operator, whose body is another graph.
"""

from __future__ import annotations

import itertools
from typing import Any

from fp8engine import _torch

NUMBERS = itertools.count()


# Of a graph that is being traced: its own number, and how many nodes it has there, "3 17".  As text, because torch
# 2.11's Dynamo makes a symbol of a number that is another one in the next trace.
Place = str


def here() -> Place | None:
    """The place at which Dynamo is now; None where torch.export traces without it."""
    if (graph := _torch.traced_graph()) is None:
        return None
    return f"{vars(graph).setdefault('_fp8engine_number', next(NUMBERS))} {len(graph.nodes)}"


def unwritten(since: Place) -> bool:
    """Whether this is the graph of that place, and no node traced since writes in place; Dynamo alone calls it."""
    graph, (number, nodes) = _torch.traced_graph(), map(int, since.split())
    if vars(graph).get("_fp8engine_number") != number:
        return False
    return not any(_writes(node) for node in list(graph.nodes)[nodes:])


_torch.constant_in_graphs(_torch.made_in_graph)
_torch.constant_in_graphs(here)
_torch.constant_in_graphs(unwritten)


def _writes(node: Any) -> bool:
    """Whether a node of torch.fx may write in place a value that was there before it."""
    target = node.target
    if node.op == "call_method":
        return _named_in_place(target)
    if node.op != "call_function":
        return False
    if isinstance(target, _torch.HigherOrderOperator):
        return target is not _torch.function_in_graph
    # torch.nn.functional.relu(x, True) is a node like any other
    named = dict(zip(target.__code__.co_varnames, node.args, strict=False)) if hasattr(target, "__code__") else {}
    if any((named | node.kwargs).get(word) not in (None, False) for word in ("out", "inplace")):
        return True
    schema = getattr(target, "_schema", None) or getattr(getattr(target, "default", None), "_schema", None)
    if schema is not None:
        return any(given.alias_info is not None and given.alias_info.is_write for given in schema.arguments)
    return _named_in_place(getattr(target, "__name__", ""))


def _named_in_place(name: str) -> bool:
    """Whether a function or a method of that name writes: add_, iadd, __iadd__; not Python's operator.and_."""
    return (name.endswith("_") and not name.endswith("__") and name not in WORDS) or name.strip("_") in IN_PLACE


WORDS = ("and_", "or_", "not_", "is_")  # of Python, which the module `operator` spells so
IN_PLACE = (
    *("iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow"),
    *("iand", "ior", "ixor", "ilshift", "irshift", "setitem", "delitem"),
)
