"""fe.onnx, converted models as ONNX graphs.

The forward in evaluation mode is exported: torch.export traces it, weights are cast once and become FP8 initializers
with their scales, the engine's operators become QuantizeLinear, DequantizeLinear and Gemm (onnx_operators.py), and
torch.onnx writes the graph.  ONNX has no state and no random numbers, so nothing of training is in it:

    delayed scaling     the scale of the latest step is a constant; what does not fit saturates, and is not cast again
    auto                each layer as it was decided
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from fp8engine._torch import OpOverload
from fp8engine.errors import ConversionError
from fp8engine.export import onnx_operators
from fp8engine.ops.library import OPERATORS
from fp8engine.ops.reference import How

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

FIRST_OPSET = 21  # blocks, and the type of QuantizeLinear's result as an attribute
NAMESPACE = "fp8engine"
RECORDED = "_recorded"  # of operators that write a slot: its five fields come last
TRANSLATED = ("quantize", "quantize_given", "matmul", "decode", "norm_quantize", "act_quantize")


def export(
    model: nn.Module,
    args: tuple[Any, ...],
    path: str | Path | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    opset: int = FIRST_OPSET,
) -> ONNXProgram:
    """Write a converted model, or one that fe.hf.load has read, as an ONNX file; returns torch's ONNXProgram.

    args, kwargs, dynamic_shapes: as torch.export.export takes them.
    path: of the file; weights of more than 2 GB go into a second one beside it.  None: nothing is written.
    opset: ONNX's version of operators, 21 or later.

    Raises ConversionError for a model in training mode, without FP8 layers or with one that ONNX cannot hold, for an
    older opset, and where the packages are missing (pip install 'fp8engine[onnx]').
    """
    if opset < FIRST_OPSET:
        raise ConversionError(f"onnx.export: opset {opset} has no FP8 blocks; use opset={FIRST_OPSET} or later")
    if model.training:
        raise ConversionError("onnx.export: the model is in training mode, and ONNX holds inference: model.eval()")
    given: dict[str, Any] = {"kwargs": dict(kwargs or {}), "dynamic_shapes": dynamic_shapes}
    with torch.no_grad():
        graph = torch.export.export(model, args, **given).module(check_guards=False)
        translate(graph)
        program = torch.onnx.export(graph, args, dynamo=True, opset_version=opset, verbose=False, **given)
    assert program is not None
    if path is not None:
        program.save(path)
    return program


def translate(graph: fx.GraphModule) -> None:
    found = False
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if node.target.namespace != NAMESPACE:
            continue
        found = True
        name = node.target._schema.name.split("::")[1].removesuffix(RECORDED)
        if name not in TRANSLATED:
            raise ConversionError(f"onnx.export: {_layer(node)} runs {name}")
        recorded = node.target._schema.name.endswith(RECORDED)
        if name == "quantize" and (x := _constant(graph, node.args[0])) is not None:
            _fold(graph, node, x)
            continue
        if recorded:
            *args, live, counts, index, record, count = node.args
            how = How.parse(args[-1]) if name == "quantize" else None
            node.args = tuple(args)
        node.target = getattr(onnx_operators, name)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _layer(node):
    return [name for name, _ in node.meta.get("nn_module_stack", {}).values()][-1]


def _constant(graph, node):
    if node.op == "get_attr":
        return operator.attrgetter(node.target)(graph)
    return None


def _fold(graph, node, x):
    args = [operator.attrgetter(a.target)(graph).clone() if isinstance(a, fx.Node) else a for a in node.args[1:]]
    codes, scale = node.target(x.detach(), *args)
    parent, _, name = node.args[0].target.rpartition(".")
    owner = graph.get_submodule(parent)
    for i, (suffix, value) in enumerate((("codes", codes), ("scale", scale))):
        owner.register_buffer(f"{name}_{suffix}", value)
        with graph.graph.inserting_before(node):
            made = graph.graph.get_attr(f"{parent}.{name}_{suffix}")
        for user in list(node.users):
            if user.args[1] == i:
                user.replace_all_uses_with(made)
