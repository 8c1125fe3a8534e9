"""Errors for tensors, transforms and tracers that an FP8 layer cannot compute with, with the layer's name.

    a weight of another tensor class   torchao's quantize_ after fe.convert, DTensor
    an input that is a DTensor         parallelize_module
    forward-mode AD                    torch.autograd.forward_ad, torch.func.jvp, jacfwd, hessian
    torch.func's other transforms      grad, vjp, vmap, jacrev
    a batch of gradients               vmap of a backward pass, autograd.grad(is_grads_batched=True)
    compiled autograd                  of a forward that is compiled too; of one in eager code it works
    torch.jit.trace                    and torch.onnx.export(dynamo=False), which calls it

Layers in 16 bits take all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8engine import _torch
from fp8engine.autograd.gathered import GatheredWeight
from fp8engine.errors import Fp8EngineError, GradientError, ParallelError, ScriptError, UnsupportedDtype
from fp8engine.ops.library import PLAIN
from fp8engine.ops.tensor import Float8Tensor
from fp8engine.scaling.whole_graph import check_limit

INPUTS = (*PLAIN, Float8Tensor)
WEIGHTS = (*PLAIN, GatheredWeight)
TRANSFORMS = "torch.func's transforms (grad, vjp, vmap, jvp)"
BATCH = "several gradients at once (vmap of a backward pass, is_grads_batched=True, jacobian(vectorize=True))"


def check_classes(x: torch.Tensor, weight_NK: torch.Tensor, name: str) -> None:
    """Raise ParallelError for a DTensor, UnsupportedDtype for a weight that wraps other tensors."""
    if type(x) not in INPUTS and _torch.is_dtensor(x):
        raise _sharded(name, "input")
    if type(weight_NK) not in WEIGHTS and hasattr(weight_NK, "__tensor_flatten__"):
        if _torch.is_dtensor(weight_NK):
            raise _sharded(name, "weight")
        raise UnsupportedDtype(
            f"{name}: its weight became a {type(weight_NK).__name__} after fe.convert (quantize_ of torchao?), and FP8 "
            "casts take plain tensors: call quantize_ before fe.convert, which then leaves the layer as it is"
        )


def check_caller(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, name: str) -> None:
    """Raise ScriptError inside torch.jit.trace, GradientError inside a transform of torch.func and for a dual tensor.

    Not for code under torch.compile.
    """
    if _torch.transforms_active():
        raise no_transform(name, TRANSFORMS)
    if _torch.tracing():
        raise no_script(name, "torch.jit.trace")
    if _torch.forward_ad._current_level >= 0 and any(
        t is not None and _torch.forward_ad.unpack_dual(t).tangent is not None for t in (x, weight_NK, bias_N)
    ):
        raise no_transform(name, "forward-mode AD (forward_ad, jvp, jacfwd, hessian)")


def check_graph(numerics: Any) -> None:
    """Raise GradientError in a graph that torch.compile traces in a transform, or with compiled autograd for backward.

    numerics: of the layer.  Its name is read where it is told alone: torch 2.11's Dynamo makes a graph for each name
    that it is given, and equal blocks would be no longer one.

    Of what such a graph saves, torch 2.13's compiled autograd forgets the tensors that effects alone read, and ends in
    an IndexError.  What `auto` asks of such a graph is checked as well (`check_limit`).
    """
    check_limit(numerics.state)
    if _torch.transforms_traced():
        raise no_transform(numerics.name, TRANSFORMS)
    if _torch.compiled_autograd():
        raise GradientError(
            f"{numerics.name}: compiled autograd takes no compiled FP8 layer: set "
            "torch._dynamo.config.compiled_autograd to False, or compile the backward pass alone and not the model"
        )


def no_transform(name: str, what: str) -> GradientError:
    """The error that a layer does not take a way of differentiating."""
    return GradientError(f"{name}: an FP8 layer does not take {what}: {_in_16_bits(name)}")


def not_one_gradient(name: str) -> GradientError:
    """The error that a layer's backward gives one gradient, which has none of its own."""
    if torch.is_grad_enabled():
        return no_transform(name, "create_graph=True: its gradient has no gradient of its own")
    return no_transform(name, BATCH)


def batched(dy: torch.Tensor) -> bool:
    """Whether a backward pass is given several gradients at once."""
    return _torch.batched_by_autograd(dy) or _torch.transforms_active()


def check_gradient(what: str, dy: torch.Tensor) -> None:
    """Raise GradientError in a backward pass whose gradients are to have gradients, or that is given several at once.

    what: a norm or an activation.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or batched(dy)):
        return
    why = "has no gradient of its own (create_graph=True)" if torch.is_grad_enabled() else f"does not take {BATCH}"
    raise GradientError(
        f"the gradient of {what} that can write FP8 codes {why}, whether the layer that reads it is in FP8 or not: "
        "fe.convert(..., fuse=False) leaves a model's own norms, activations and MLPs as they are"
    )


def saved_by(ctx: Any, name: str) -> tuple:
    """The saved tensors of a norm or an activation.  Raises GradientError where code behind it wrote into one of them.

    A norm that computes in FP32 keeps a copy of x in 32 bits, which no such code reaches; ours keeps x.
    """
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise GradientError(
            f"{name}: a tensor that its backward needs was written in place after it ran: write into a new tensor "
            "(x = x + h), or leave a model's own norms, activations and MLPs as they are, which may keep copies: "
            f"fe.convert(..., fuse=False). torch says: {error}"
        ) from error


def no_script(name: str, what: str) -> ScriptError:
    """The error that a layer has no TorchScript."""
    return ScriptError(
        f"{name}: {what} takes no converted layer, whose operators write the model's scaling state: use torch.compile "
        "or torch.export, or make TorchScript of the model before fe.convert"
    )


def _sharded(name: str, what: str) -> Fp8EngineError:
    return ParallelError(
        f"{name}: its {what} is a DTensor; torch's ColwiseParallel and RowwiseParallel divide no FP8 layer: name "
        "fe.distributed.Colwise or Rowwise in the plan of parallelize_module or of fe.distributed.tensor_parallel. A "
        "weight sharded by fully_shard is taken only after that has gathered it, in a call of the module that "
        f"fully_shard was given. Or {_in_16_bits(name)}"
    )


def _in_16_bits(name: str) -> str:
    return (
        f"leave the layer in 16 bits: fe.convert(..., overrides={{{name!r}: 'bf16'}}), or recipe='bf16' when it is made"
    )
