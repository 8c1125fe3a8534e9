"""Table of the kinds of operations and modules, by name.

    view_like values moved, masked, cast or scaled; the result keeps its input's origins
    add, mul  may be a residual, a gate, a bias, a mask, a rotary position: depends on what the operands are
    matmul    of a parameter: a linear layer; of two activations: attention
    reduce    statistics of a norm, a loss, or a pooling: depends on their consumers
    unary     elementwise and not linear
    ignore    reads the values (is there a NaN?) but returns none of them

Operations are torch's aten ones, as a dispatch mode sees them; a name that no row has is searched (flash_attn's, say).
"""

from __future__ import annotations

import functools
import re

import torch
from torch import nn

# Group -> the names of its operations, without those that their schema calls views and those that _SEARCHED finds.
_GROUPS = {
    "view_like": """
        clone copy _to_copy _unsafe_view resize lift cat stack index index_select gather take masked_select
        slice_scatter select_scatter diagonal_scatter scatter scatter_add scatter_reduce index_put
        _index_put_impl _unsafe_index index_add index_copy index_fill masked_scatter roll flip repeat
        repeat_interleave masked_fill where tril triu neg im2col col2im pixel_shuffle pixel_unshuffle nan_to_num
        clamp complex polar conj_physical _conj_physical channel_shuffle split_copy view_copy
        split_with_sizes_copy unfold_copy detach reshape""",
    "unary": """
        sigmoid tanh hardswish hardsigmoid hardtanh elu celu selu mish softplus softshrink hardshrink threshold
        log_sigmoid_forward glu exp exp2 expm1 log log1p log2 pow square erf sqrt rsqrt reciprocal abs sin cos
        maximum minimum fmax fmin clamp_min clamp_max sign round floor sinh cosh atan""",
    "reduce": "mean sum var var_mean std std_mean amax amin max min norm linalg_vector_norm logsumexp prod nansum",
    "matmul": """
        mm addmm bmm baddbmm mv addmv dot _grouped_mm _scaled_mm _scaled_mm_v2 _scaled_grouped_mm addbmm
        _addmm_activation _int_mm""",
    "ignore": """
        isnan isinf isfinite all any equal allclose is_nonzero _local_scalar_dense _assert_async
        _assert_tensor_metadata empty_like zeros_like ones_like full_like rand_like randn_like new_empty
        new_zeros new_ones new_full new_empty_strided size numel sym_size record_stream set bernoulli random""",
    "reset": "fill zero normal uniform",
    "add": "add sub rsub lerp",
    "mul": "mul div",
    "softmax": "_softmax _safe_softmax softmax special_softmax",
    "log_softmax": "_log_softmax log_softmax",
    "embedding": "embedding embedding_bag _embedding_bag _embedding_bag_forward_only",
    "convolution": "convolution _convolution cudnn_convolution mkldnn_convolution conv1d conv2d conv3d",
}
_EXACT = {name: group for group, names in _GROUPS.items() for name in names.split()}
# The first that is found in a name decides.
_SEARCHED = (
    ("loss|cross_entropy|kl_div", "loss"),
    ("attention|attn", "attention"),
    ("norm", "norm"),
    ("rotary|rope|quantize|cast_transpose|transpose_experts|upsample|_pad|dropout", "view_like"),
    ("swiglu|geglu|gelu|silu|relu", "unary"),
    ("matmul|linear|gemm|grouped_rows|grouped_sums", "matmul"),
)
OVERWRITES = frozenset(("fill", "zero", "normal", "uniform", "copy", "resize", "set"))  # in place; others read it too


@functools.cache
def group_of(func: object) -> tuple[str, str]:
    """(group, name) of an operation; group "unknown" where no row fits, "view" where the result shares its memory.

    >>> group_of(torch.ops.aten.add_.Tensor), group_of(torch.ops.aten.transpose.int)
    (('add', 'aten.add'), ('view', 'aten.transpose'))
    >>> group_of(torch.ops.aten._scaled_dot_product_flash_attention.default)[0], group_of(torch.ops.aten.cumsum.default)
    ('attention', ('unknown', 'aten.cumsum'))
    """
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator, such as flex_attention
        base, shown = str(func), str(func)
    else:
        space, _, base = schema.name.partition("::")
        base = base.rstrip("_") if not base.startswith("__") else base.strip("_")
        shown = f"{space}.{base}"
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return "view", shown
    if base in _EXACT:
        return _EXACT[base], shown
    base = base.lower()
    return next((group for pattern, group in _SEARCHED if re.search(pattern, base)), "unknown"), shown


def is_layer(module: nn.Module) -> bool:
    """Whether the module multiplies by a weight of its own: what `fe.convert` could convert, or has converted.

    >>> is_layer(nn.Linear(2, 2)), is_layer(nn.GELU())
    (True, False)
    """
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, torch.Tensor) and weight.dim() > 1
    if isinstance(module, nn.Linear) or (is_matrix and "Conv1D" in {kind.__name__ for kind in type(module).__mro__}):
        return True  # transformers' Conv1D; torch's own is Conv1d
    named = "Linear" in type(module).__name__ and weight is not None
    return named and not any(is_layer(child) for child in module.children())


def kind_of(module: nn.Module) -> str | None:
    """Kind of a module that is followed as a whole: "layer", "norm", "activation"; "fused": a norm and linear layers.

    >>> kind_of(nn.LayerNorm(2)), kind_of(nn.GELU()), kind_of(nn.Softmax(-1)), kind_of(nn.MultiheadAttention(2, 1))
    ('norm', 'activation', None, None)
    """
    if is_layer(module):
        return "layer"
    of = vars(type(module)).get("plain", type(module))  # under a class that fe.convert has mixed
    here, name = of.__module__, of.__name__
    if here.startswith("fp8engine.nn") and name in ("LayerNormLinear", "LayerNormMLP"):
        return "fused"
    if next(module.children(), None) is not None:
        return None
    if "Norm" in name and all(parameter.dim() < 2 for parameter in module.parameters(recurse=False)):
        return "norm"
    if here == "torch.nn.modules.activation" and "Softmax" not in name and "Attention" not in name:
        return "activation"
    return "activation" if here == "transformers.activations" else None
