"""fp8engine: FP8 training for PyTorch transformers, with a report of what ran in which format and why.

>>> import warnings, torch, fp8engine as fe
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
>>> with warnings.catch_warnings():
...     warnings.simplefilter("ignore", fe.errors.EmulationWarning)
...     _ = fe.convert(model, "current")
>>> model(torch.randn(8, 64)).square().mean().backward()
>>> fe.inspect(model).totals["fp8_flops_share"]
1.0
"""

from typing import TYPE_CHECKING

from fp8engine.environment import starts_command_line

# The command line begins without the engine, and imports it when a command runs (cli/shared.py): help comes at once.
if TYPE_CHECKING or not starts_command_line():
    from fp8engine import amp, distributed, errors
    from fp8engine.convert import convert, revert, smooth
    from fp8engine.export import hf, onnx
    from fp8engine.nn import (
        Attention,
        GroupedLinear,
        Heads,
        LayerNormLinear,
        LayerNormMLP,
        Linear,
        TransformerLayer,
        weights_changed,
    )
    from fp8engine.numerics.cast import Cast, PerBlock, PerRow, PerTensor
    from fp8engine.numerics.formats import BF16, E4M3, E5M2, FP16, FP32, Format
    from fp8engine.numerics.recipe import (
        Recipe,
        auto,
        blockwise,
        current,
        delayed,
        high_precision,
        mxfp8,
        rowwise,
        rowwise_gw_hp,
    )
    from fp8engine.ops.backends import backend
    from fp8engine.ops.tensor import Float8Tensor, matmul, quantize
    from fp8engine.report import flow
    from fp8engine.report.budget import keep_budget, keep_budget_in_training
    from fp8engine.report.collect import inspect
    from fp8engine.report.state import load_scaling_state_dict, scaling_state, scaling_state_dict
    from fp8engine.report.table import Report

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "E4M3",
    "E5M2",
    "FP16",
    "FP32",
    "Attention",
    "Cast",
    "Float8Tensor",
    "Format",
    "GroupedLinear",
    "Heads",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "PerBlock",
    "PerRow",
    "PerTensor",
    "Recipe",
    "Report",
    "TransformerLayer",
    "amp",
    "auto",
    "backend",
    "blockwise",
    "convert",
    "current",
    "delayed",
    "distributed",
    "errors",
    "flow",
    "hf",
    "high_precision",
    "inspect",
    "keep_budget",
    "keep_budget_in_training",
    "load_scaling_state_dict",
    "matmul",
    "mxfp8",
    "onnx",
    "quantize",
    "revert",
    "rowwise",
    "rowwise_gw_hp",
    "scaling_state",
    "scaling_state_dict",
    "smooth",
    "weights_changed",
]
