"""fe.onnx, converted models as ONNX graphs.

torch.export traces the forward in evaluation mode; weights are cast once and become FP8 initializers with their scales;
the engine's operators become QuantizeLinear, DequantizeLinear and Gemm (onnx_operators.py); torch.onnx writes it.
A graph has no state:

    delayed scaling    an input's latest scale is a constant, under which what does not fit saturates; the engine would
                       cast it again.  An input without one is cast under its own amax, as `current` does
    auto               each layer as it has been decided
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from fp8engine import files
from fp8engine._torch import OpOverload
from fp8engine.convert.select import told_by_config
from fp8engine.convert.swap import RECORD
from fp8engine.errors import ConversionError
from fp8engine.export import onnx_operators
from fp8engine.export.layers import never_ran
from fp8engine.numerics.cast import Cast

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

FIRST_OPSET = 21  # of blocks, and of the type of QuantizeLinear's result as an attribute
NAMESPACE = "fp8engine"
RECORDED = "_recorded"  # ends the names of operators that write a slot, whose five fields come last
TRANSLATED = ("quantize", "quantize_given", "matmul", "decode", "norm_quantize", "act_quantize")
PACKAGES = ("onnx", "onnxscript")


def export(
    model: nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    opset: int = FIRST_OPSET,
) -> ONNXProgram:
    """Write the forward of a converted model, or of one that fe.hf.load has read, as ONNX; returns torch's ONNXProgram.

    args, kwargs, dynamic_shapes: as torch.export.export takes them.  Models of transformers run without a KV cache,
        which is no tensor that a graph could return.
    path: of the file; where the weights take more than 2 GB they are in PATH.data beside it.  None: nothing is written.
        An error leaves what was there before.
    opset: ONNX's version of its operators, 21 or later.

    Raises ConversionError for a model in training mode, in BF16, without FP8 layers, or under an `auto` that has
    decided nothing; for a layer that ONNX cannot hold, by name; for an older opset; and without the packages it needs.

    >>> import fp8engine as fe
    >>> layer = fe.Linear(32, 16, recipe="current").eval()
    >>> program = export(layer, (torch.ones(4, 32),))
    >>> sum(node.op_type == "QuantizeLinear" for node in program.model.graph)
    1
    """
    _check(model, opset)
    given: dict[str, Any] = {"kwargs": dict(kwargs or {}), "dynamic_shapes": dynamic_shapes}
    with torch.no_grad(), _without_cache(model):
        graph: Any = torch.export.export(model, args, **given).module(check_guards=False)
        _translate(graph)
        traced: Any = torch.export.export(graph, args, **given)
        try:
            program: Any = torch.onnx.export(traced, dynamo=True, opset_version=opset, verbose=False)
        except torch.onnx.OnnxExporterError as error:
            raise ConversionError(
                "onnx.export: torch's exporter cannot translate this model, in FP8 or not (it knows no experts): "
                f"{error.__cause__ or error}"
            ) from error
    if path is not None:
        files.write_by(path, program.save)
    return program


def _check(model: nn.Module, opset: int) -> None:
    """Raise ConversionError for what can be known before the model is traced."""
    ConversionError.unless(model, nn.Module, "onnx.export takes an nn.Module")
    if absent := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConversionError(f"onnx.export needs {' and '.join(absent)}: pip install 'fp8engine[onnx]'")
    if opset < FIRST_OPSET:
        raise ConversionError(f"onnx.export: opset {opset} has no FP8 blocks: use opset={FIRST_OPSET} or later")
    if model.training:
        raise ConversionError("onnx.export: the model is in training mode, and ONNX holds inference: call model.eval()")
    if bf16 := next((name for name, p in model.named_parameters() if p.dtype == torch.bfloat16), None):
        raise ConversionError(
            f"onnx.export: {bf16} is in BF16, for which onnxruntime on a CPU has no Mul: call model.float(), which "
            "leaves FP8 weights as they are, or model.half(), or load it by fe.hf.load(..., dtype=torch.float32)"
        )
    if (record := getattr(model, RECORD, None)) is not None:
        never_ran(record)


@contextlib.contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Within it, the configs of transformers' models say use_cache=False."""
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if told_by_config(m, "use_cache")}
    with contextlib.ExitStack() as stack:
        for config in configs.values():
            config.use_cache = False
            stack.callback(setattr, config, "use_cache", True)
        yield


def _translate(graph: fx.GraphModule) -> None:
    """Replace the engine's operators by the functions of onnx_operators.py, and casts of weights by their results."""
    nodes = [n for n in graph.graph.nodes if isinstance(n.target, OpOverload) and n.target.namespace == NAMESPACE]
    if not nodes:
        raise ConversionError(
            "onnx.export: the model runs no FP8 layer: call fe.convert first, or use torch.onnx.export"
        )
    in_bits = [n for n in graph.graph.nodes if n.target is torch.ops.aten.view.dtype]
    for bits in (n for n in in_bits if n.args[1] is torch.float8_e8m0fnu):
        for scale in list(bits.users):  # the numbers of MX scales, which are stored as bytes, or a check of their dtype
            if scale.users:
                made = _buffer(graph, scale, _sources(bits)[0], "numbers", _constant(graph, scale))
                scale.replace_all_uses_with(made)
            graph.graph.erase_node(scale)
    for node in nodes:
        full = node.target._schema.name.split("::")[1]
        name = full.removesuffix(RECORDED)
        if name == "count_again":  # counters of the report, which have no result
            graph.graph.erase_node(node)
            continue
        if name not in TRANSLATED:
            raise ConversionError(
                f"onnx.export: {_layer(node)} runs {name}, which has no translation into ONNX: leave that layer in 16 "
                "bits (overrides of fe.convert)"
            )
        if name == "quantize" and _is_weight(node):
            _fold(graph, node)
            continue
        if full.endswith(RECORDED):
            *given, live, _, index, _, _ = node.args
            node.args = tuple(given)
            cast = Cast.parse(given[1]) if name == "quantize" else None
            s = float(_constant(graph, live)[1, index]) if cast is not None and cast.delayed else 0.0
            if s > 0:
                name, node.args = "predicted", (*node.args, s)
        node.target = getattr(onnx_operators, name)
    if constant := sum(node.target is onnx_operators.predicted for node in nodes):
        warnings.warn(
            f"onnx.export: {constant} inputs under delayed scaling keep their latest scale as a constant of the graph, "
            "under which larger values saturate; convert with recipe 'current' for scales of each input",
            stacklevel=3,
        )
    graph.graph.eliminate_dead_code()
    used = {n.target for n in graph.graph.nodes if n.op == "get_attr"}
    for name, _ in list(graph.named_parameters(remove_duplicate=False)):
        if name not in used:
            parent, _, last = name.rpartition(".")
            delattr(graph.get_submodule(parent), last)
    graph.recompile()


def _layer(node: fx.Node) -> str:
    stack: list[str] = [name for name, _ in node.meta.get("nn_module_stack", {}).values()]
    return stack[-1] if stack and stack[-1] else "the model"


def _is_weight(node: fx.Node) -> bool:
    """Whether the codes of this cast are the second operand of a matmul."""
    codes = [user for user in node.users if user.args[1] == 0]
    return any(matmul.args[1] is each for each in codes for matmul in each.users if len(matmul.args) > 1)


def _constant(graph: fx.GraphModule, node: Any) -> Any:
    """The value of an argument that is computed from parameters alone; tables are copied, as casts write into them."""
    if not isinstance(node, fx.Node):
        return node
    if node.op == "get_attr":
        return attrgetter(str(node.target))(graph).detach().clone()
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: _constant(graph, each))
    return typing.cast(Callable, node.target)(*args, **kwargs)


def _sources(node: fx.Node) -> list[fx.Node]:
    """The inputs and parameters from which a node is computed, each once."""
    found, seen, waiting = [], set(), [node]
    while waiting:
        if (each := waiting.pop()) not in seen:
            seen.add(each)
            found += [] if each.all_input_nodes else [each]
            waiting += each.all_input_nodes
    return found


def _fold(graph: fx.GraphModule, node: fx.Node) -> None:
    """Cast a weight now, or a transpose of one; codes and scale become buffers beside it."""
    sources = _sources(typing.cast(fx.Node, node.args[0]))
    if any(source.op == "placeholder" for source in sources):
        raise ConversionError(
            f"onnx.export: {_layer(node)} multiplies by a weight that its input changes (fe.smooth), so the graph "
            "would keep it in 16 or 32 bits; leave that layer in 16 bits (overrides of fe.convert)"
        )
    for index, (suffix, tensor) in enumerate(zip(("codes", "scale"), _constant(graph, node), strict=True)):
        made = _buffer(graph, node, sources[0], suffix, tensor)
        for user in [user for user in node.users if user.args[1] == index]:
            user.replace_all_uses_with(made)


def _buffer(graph: fx.GraphModule, node: fx.Node, source: fx.Node, suffix: str, tensor: torch.Tensor) -> fx.Node:
    """A tensor as a buffer beside the parameter `source`, and the node, before another, that reads it."""
    parent, _, name = str(source.target).rpartition(".")
    graph.get_submodule(parent).register_buffer(f"{name}_{suffix}", tensor)
    with graph.graph.inserting_before(node):
        return graph.graph.get_attr(".".join(filter(None, (parent, f"{name}_{suffix}"))))
