"""Weight gradients added in FP32 to `weight.main_grad`, where Megatron-LM keeps them, instead of given to autograd.

    main_grad += dY^T X       by the wgrad matmul itself where it can (ops/matmul.py, `accumulate`), in FP32

A dw in 16 bits is neither written nor read again, and several microbatches are summed in FP32.  autograd is given what
Megatron-LM's and TransformerEngine's layers give it: None; or, where the weight has the attribute
`grad_added_to_main_grad` (Megatron's DDP sets it, and waits for a gradient), that attribute becomes True and the
gradient is a tensor of no meaning, zeros where the weight asks for them (`zero_out_wgrad`).  A weight whose attribute
`overwrite_main_grad` is true has its main_grad written, not added to.  The bias's gradient goes to autograd as ever.
Sources of the contract: TransformerEngine, pytorch/module/linear.py; Megatron-LM, core/distributed/
distributed_data_parallel.py.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8engine import _torch
from fp8engine.errors import GradientError
from fp8engine.ops import matmul
from fp8engine.ops.reference import Operand

SWITCH = "fe.fuse_wgrad_accumulation"


def leave_graph() -> None:
    """End the graph that torch.compile traces: its backward would read no attributes of parameters.

    With fullgraph=True torch raises, with these words.
    """
    _torch.graph_break(f"{SWITCH} adds to weight.main_grad, which no graph holds: these layers run in eager code")


def main_grad_of(weight: Any, name: str) -> torch.Tensor:
    """The weight's main_grad.  Raises GradientError, naming the layer, where there is none, or none that fits."""
    found = getattr(weight, "main_grad", None)
    if not isinstance(found, torch.Tensor):
        raise GradientError(
            f"{name}: {SWITCH} adds its weight's gradient to weight.main_grad, and this weight, a "
            f"{type(weight).__name__}, has none: give every weight an FP32 tensor of its shape as main_grad (as "
            f"Megatron-LM's DDP does), or switch the layer off with {SWITCH}(layer, False)"
        )
    if found.shape != weight.shape or found.dtype != torch.float32 or found.device != weight.device:
        raise GradientError(
            f"{name}: weight.main_grad is {list(found.shape)}, {found.dtype}, on {found.device}; {SWITCH} adds to FP32 "
            f"of the weight's shape {list(weight.shape)} and device {weight.device}: make it that"
        )
    return found


def accumulate(a: Any, b: Any, weight: Any, name: str, precision: str) -> torch.Tensor | None:
    """Add a @ b.T to the weight's main_grad; what autograd is given as the weight's gradient.

    a [N, M], b [K, M]: in FP8, or both tensors of 16 or 32 bits.
    """
    into_NK = begun(weight, name)
    if isinstance(a, Operand):
        matmul.accumulate(a, b, into_NK, precision)
    else:
        into_NK.add_(matmul.matmul_fp16(a, b.to(a.dtype), None, torch.float32))
    return finished(weight)


class AddedToMainGrad(torch.autograd.Function):
    """The weight itself; its gradient, of a layer without FP8, is added to main_grad as autograd made it."""

    @staticmethod
    def forward(ctx, weight, name: str):
        main_grad_of(weight, name)
        ctx.weight, ctx.name = weight, name
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, dw):
        begun(ctx.weight, ctx.name).add_(dw)
        return finished(ctx.weight), None


def begun(weight: Any, name: str) -> torch.Tensor:
    """The weight's main_grad, to be added to."""
    found = main_grad_of(weight, name)
    return found.zero_() if getattr(weight, "overwrite_main_grad", False) else found


def finished(weight: Any) -> torch.Tensor | None:
    """What autograd is given as the weight's gradient, once main_grad has it."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
